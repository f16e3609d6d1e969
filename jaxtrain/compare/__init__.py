"""Variants of an experiment against each other: time, memory and loss."""
