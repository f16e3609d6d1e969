"""Models: Flax NNX modules, and the pure functions that the rest of the package uses."""
