"""Experiments to which something happens in the middle of a run."""

import contextlib
import itertools


def during(experiment, actions):
    """The experiment, which does something as its loop asks for the batch of a step.

    Args:
      experiment: whose batches are handed on.
      actions: what to call, by step.
    """

    @contextlib.contextmanager
    def batches(start, sharding):
        def acting():
            for step in itertools.count(start + 1):
                actions.get(step, lambda: None)()
                yield next(stream)

        with experiment.data.train_batches(start, sharding) as stream:
            yield acting()

    return experiment.with_(train_batches=batches)
