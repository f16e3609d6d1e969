"""Rows read by other processes: the same batches, and a worker that is killed is said."""

import os
import signal
import sys

import numpy as np
import pytest

from jaxtrain.data import Batches, WorkerRows
from jaxtrain.host import exit_codes
from jaxtrain.host.storage import StorageError
from jaxtrain.run.refusal import refuse


class CodecError(Exception):
    """Cannot be unpickled: that calls it with one argument, as many libraries' errors."""

    def __init__(self, codec, code):
        super().__init__(f"{codec} says {code}")


class Squares:
    """Rows of n squared, read in whatever process asks; the last kills it."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 39:
            os.kill(os.getpid(), signal.SIGKILL)
        if index < 0:
            raise CodecError("jpeg", -2)
        return {"x": np.full(2, index**2), "process": np.array(os.getpid())}


@pytest.fixture(scope="module")
def rows():
    rows = WorkerRows(Squares(), 1)  # which starts in half the time of two
    yield rows
    rows._pool.shutdown()


def test_the_batches_are_the_source_s_own(rows):
    ours = Batches(rows, global_batch=8, seed=0, shuffle=False)
    theirs = Batches(Squares(), global_batch=8, seed=0, shuffle=False)
    seen = set()
    for step in range(4):
        batch = ours.batch(step)
        assert (batch["x"] == theirs.batch(step)["x"]).all()
        seen |= set(batch["process"].tolist())
    assert os.getpid() not in seen
    with pytest.raises(ValueError, match="`workers` is 0; give at least 1"):
        WorkerRows(Squares(), 0)


def test_a_signal_to_the_run_s_group_is_none_to_its_workers(rows):
    # A launcher, `timeout` or Ctrl-C tells all of the group; the run reads on until it has saved.
    (worker,) = {int(row["process"]) for row in rows.__getitems__([0, 1])}
    assert os.getpgid(worker) != os.getpgid(0)


def test_an_error_that_cannot_be_sent_is_said_and_the_workers_live(rows):
    with pytest.raises(RuntimeError, match="CodecError: jpeg says -2"):
        rows.__getitems__([-1])
    assert rows.__getitems__([2])[0]["x"].tolist() == [4, 4]


def test_a_killed_worker_is_said_and_the_run_may_be_started_again(rows):
    batches = Batches(rows, global_batch=8, seed=0, shuffle=False)
    killed = r"^a process that reads rows was killed, .* start the run again"
    with batches.stream(4) as stream, pytest.raises(StorageError, match=killed) as raised:
        next(stream)
    assert refuse(raised.value).code in exit_codes.RESTARTABLE


class Unreadable(Squares):
    """Ends whatever process unpickles it."""

    def __reduce__(self):
        return sys.exit, (3,)


def test_a_worker_that_ends_by_itself_is_no_reason_to_start_again():
    with pytest.raises(RuntimeError, match="has ended by itself"):
        WorkerRows(Unreadable(), 1).__getitems__([0])
