"""Profiles of a step's time: traces of the devices, read without TensorBoard or a browser."""
