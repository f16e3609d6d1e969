"""Output that cannot be written: a run trains on, says so once in its journal; a command ends."""

import errno
import io
import json
import os
import sys

import pytest

import jaxtrain as jt
from jaxtrain import cli
from jaxtrain.host import output, signals
from jaxtrain.run.observe import journal
from tests.run.test_loop import make_experiment


@pytest.fixture
def unread(request, monkeypatch):
    """Makes a stream of this process one that nobody reads, a pipe or the end of a terminal, or one
    that has no room."""
    monkeypatch.setattr(output, "lost", {})
    opened = []

    def make(name, pair):
        near, far = pair()
        os.close(near)
        opened.append(os.fdopen(far, "w"))
        monkeypatch.setattr(sys, name, opened[-1])

    yield make
    for stream in opened:
        stream.close()


def full_disk():
    return os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        (os.pipe, "Broken pipe"),
        pytest.param(
            full_disk,
            "No space left on device",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux"),
        ),
    ],
)
def test_a_run_whose_output_cannot_be_written_trains_and_saves_and_tells_its_journal_once(
    tmp_path, unread, monkeypatch, pair, why
):
    monkeypatch.setattr(journal, "BEAT_SECONDS", 0.01)
    run = tmp_path / "run"
    unread("stdout", pair)
    unread("stderr", pair)
    jt.fit(make_experiment(4), jt.RunOptions(run_dir=str(run), save_every=2, log_every=1))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2", "4"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = [(x["stream"], x["why"]) for x in events if x["event"] == "output lost"]
    assert told == [("standard output", why)]
    assert events[-1]["ended"] == "done"


class OnceFull(io.RawIOBase):
    """A file on a disk that has room from the second write on."""

    written = b""

    def writable(self):
        return True

    def write(self, data):
        self.tries = getattr(self, "tries", 0) + 1
        if self.tries == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += bytes(data)
        return len(data)


def test_what_is_printed_is_written_once_a_full_disk_has_room_again(monkeypatch):
    monkeypatch.setattr(output, "lost", {})
    raw = OnceFull()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw)))
    with output.lasting():
        print("first", flush=True)
        print("second", flush=True)
    assert raw.written.splitlines()[-1] == b"second"


def test_a_terminal_that_has_hung_up_ends_nothing(unread):
    unread("stderr", os.openpty)
    with output.lasting():
        print("to nobody", file=sys.stderr, flush=True)
        print("again", file=sys.stderr, flush=True)
    assert output.lost == {"standard error": "Input/output error"}


def test_a_signal_is_heeded_though_nobody_reads_what_is_said_of_it():
    read, write = os.pipe()
    os.close(read)
    kept = os.dup(2)
    os.dup2(write, 2)
    try:
        signals.say("SIGTERM")
        with pytest.raises(BrokenPipeError):  # as it was for what has just been said
            os.write(2, b"SIGTERM")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(write)


def test_a_command_whose_output_nobody_reads_ends_without_a_word(unread, capfd):
    unread("stdout", os.pipe)
    with pytest.raises(SystemExit, match="141"):
        cli.main(["--help"])
    assert capfd.readouterr().err == ""
