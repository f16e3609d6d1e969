"""Where a step's time goes: traces of the devices, read without TensorBoard or a browser."""
