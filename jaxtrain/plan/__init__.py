"""Ahead-of-time planning: the real compilers say what a step needs, before there is a chip."""

from jaxtrain.plan.chips import CHIPS, Chip
from jaxtrain.plan.targets import Target, parse_target

__all__ = ["CHIPS", "Chip", "Target", "parse_target"]
