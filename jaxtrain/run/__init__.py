"""A run around the train step: the loop, its folder, checkpoints, logs, and what interrupts it."""
