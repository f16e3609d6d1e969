"""Optimizers and learning-rate schedules by name, as plain optax transformations."""

from jaxtrain.optim import rules, schedules
from jaxtrain.optim.accumulation import accumulate
from jaxtrain.optim.averages import averaged, ema
from jaxtrain.optim.chains import OPTIMIZERS, freezing, frozen, make_optimizer
from jaxtrain.optim.layerwise import per_layer
from jaxtrain.optim.masks import by_path, decay_mask, hidden_matrices, stacked_axes
from jaxtrain.optim.rate import LearningRateState, current_learning_rate, scale_by_learning_rate
from jaxtrain.optim.reports import reports
from jaxtrain.optim.schedules import make_schedule
from jaxtrain.optim.spikes import skip_spikes
from jaxtrain.optim.watching import watch

__all__ = [
    "OPTIMIZERS",
    "LearningRateState",
    "accumulate",
    "averaged",
    "by_path",
    "current_learning_rate",
    "decay_mask",
    "ema",
    "freezing",
    "frozen",
    "hidden_matrices",
    "make_optimizer",
    "make_schedule",
    "per_layer",
    "reports",
    "rules",
    "scale_by_learning_rate",
    "schedules",
    "skip_spikes",
    "stacked_axes",
    "watch",
]
