"""Waits for what another thread does."""

import time


def eventually(condition):
    """Returns once a condition holds; fails after half a minute."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
