"""Optimizers and learning-rate schedules by name, as plain optax transformations."""

from jaxtrain.optim import rules as rules
from jaxtrain.optim import schedules as schedules
from jaxtrain.optim.accumulation import accumulate as accumulate
from jaxtrain.optim.averages import averaged as averaged
from jaxtrain.optim.averages import ema as ema
from jaxtrain.optim.chains import OPTIMIZERS as OPTIMIZERS
from jaxtrain.optim.chains import freezing as freezing
from jaxtrain.optim.chains import frozen as frozen
from jaxtrain.optim.chains import frozen_of as frozen_of
from jaxtrain.optim.chains import make_optimizer as make_optimizer
from jaxtrain.optim.layerwise import per_layer as per_layer
from jaxtrain.optim.masks import by_path as by_path
from jaxtrain.optim.masks import decay_mask as decay_mask
from jaxtrain.optim.masks import hidden_matrices as hidden_matrices
from jaxtrain.optim.masks import stacked_axes as stacked_axes
from jaxtrain.optim.rate import LearningRateState as LearningRateState
from jaxtrain.optim.rate import current_learning_rate as current_learning_rate
from jaxtrain.optim.rate import scale_by_learning_rate as scale_by_learning_rate
from jaxtrain.optim.reports import reports as reports
from jaxtrain.optim.rows import by_rows as by_rows
from jaxtrain.optim.schedules import make_schedule as make_schedule
from jaxtrain.optim.spikes import skip_spikes as skip_spikes
from jaxtrain.optim.watching import watch as watch
