"""Waits for what another thread does."""

import time


def eventually(condition, *, seconds=60):
    """Returns once a condition holds; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
