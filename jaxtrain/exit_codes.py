"""Exit statuses of a run that other programs act on."""

PREEMPTED = 75
"""The run was told to stop, has saved a checkpoint, and can be resumed."""
