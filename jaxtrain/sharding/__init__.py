"""Places arrays on a mesh: rules, stacks of layers, collectives, host memory."""
