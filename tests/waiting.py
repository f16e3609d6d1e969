"""Waits for what another thread does."""

import time


def eventually(condition):
    """Returns once a condition holds; fails after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
