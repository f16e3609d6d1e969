"""Exit statuses of a run that other programs act on."""

PREEMPTED = 75
"""The run was told to stop, has saved a checkpoint, and can be resumed."""
HUNG = 76
"""No step ended for too long."""
PEER_LOST = 77
"""Another process of the run has died."""

RESTARTABLE = frozenset({PREEMPTED, HUNG, PEER_LOST})
"""After these, starting again goes on from the last checkpoint."""
