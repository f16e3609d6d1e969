"""Hooks and writers of the user's own, and the run that a hook ends on purpose."""

import dataclasses
import json
import threading

import pytest
from etils import epath

import jaxtrain as jt
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.hooks.stopping import stopped_before
from tests.run.survive.test_preemption import eventually, peer_groups, signalled
from tests.run.test_loop import lines, make_experiment


class Recording(jt.Hook):
    """Remembers what it is told; stops where asked to."""

    def __init__(self, stop_at=None, answer="the budget is spent"):
        self.steps, self.metrics, self.means, self.written = [], [], {}, []
        self.stop_at, self.answer, self.closed = stop_at, answer, 0

    def on_step(self, step, state):
        self.steps.append((step, int(state.step), sorted(self.means)))

    def on_metrics(self, step, metrics):
        self.metrics.append((step, metrics["loss"]))

    def on_evaluation(self, step, means):
        self.means[step] = means["loss"]

    def stops(self, step):
        return self.answer if step == self.stop_at else False

    def write(self, step, values):
        self.written.append((step, dict(values)))

    def close(self):
        self.closed += 1


def test_hooks_and_writers_of_ones_own_are_told_what_the_logs_are(tmp_path):
    plug = Recording()
    options = jt.RunOptions(run_dir=str(tmp_path), log_every=1, eval_every=2)
    jt.fit(make_experiment(4), options, hooks=[plug], writers=[plug])
    assert plug.steps == [(1, 1, []), (2, 2, [2]), (3, 3, [2]), (4, 4, [2, 4])]
    logged = lines(tmp_path)
    trained = [(x["step"], x["train/loss"]) for x in logged if "train/loss" in x]
    assert plug.metrics == trained
    assert plug.means == {x["step"]: x["eval/loss"] for x in logged if "eval/loss" in x}
    written = [{"step": step} | values for step, values in plug.written]
    stamp = {"time", "attempt", "host", "process"}
    assert written == [{k: v for k, v in x.items() if k not in stamp} for x in logged]
    assert plug.closed == 1


@pytest.mark.slow
def test_a_run_stopped_on_purpose_is_whole_and_goes_on_only_when_asked(tmp_path, capsys):
    concluded = []
    experiment = make_experiment(
        best_mode="max",  # the best is an earlier one, which nobody has asked to conclude from
        conclude=lambda state, means: concluded.append(int(state.step)) or [],
    )
    options = jt.RunOptions(
        run_dir=str(tmp_path / "run"), auto_resume=True, eval_every=2, save_every=2
    )
    early = jt.fit(experiment, options, hooks=[Recording(stop_at=5)])
    assert (early.stopped, int(early.state.step)) == ("the budget is spent", 5)
    assert (early.best.step, concluded) == (2, [5])
    assert early.evaluation["loss"] > 0
    printed = capsys.readouterr().out
    assert "stopped on purpose after step 5 of 12: the budget is spent" in printed
    assert "JSONL log" in printed
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.metrics()["eval/loss"] == early.evaluation["loss"]
    # However often it is started again, nothing is trained.
    again = jt.fit(experiment, options)
    sentence = "run was stopped on purpose after step 5 (the budget is spent) and is trained no"
    assert sentence in capsys.readouterr().out
    assert again.stopped == "the budget is spent"
    assert again.evaluation == early.evaluation
    assert digest(again.state) == digest(early.state)
    # Asked to, it is the run that nobody stopped.
    asked = dataclasses.replace(options, accept_changes=("stopped",))
    whole = jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path / "whole")))
    assert digest(jt.fit(experiment, asked).state) == digest(whole.state)
    assert not (tmp_path / "run" / "stopped.json").exists()


def test_a_signal_in_the_evaluation_of_a_run_stopped_on_purpose_leaves_that_for_later(tmp_path):
    experiment = make_experiment()
    asked = []

    def evaluated(sharding):
        if not asked:
            asked.append(signalled(at=1).data.train_batches(0, sharding))
            with asked[0] as stream:
                next(stream)  # sends it
        yield from experiment.data.eval_batches[""](sharding)

    watched = experiment.with_(eval_batches=evaluated)
    options = jt.RunOptions(run_dir=str(tmp_path), auto_resume=True)
    with pytest.raises(jt.Preempted) as stop:
        jt.fit(watched, options, hooks=[Recording(stop_at=3, answer=True)])
    assert stop.value.step == 3
    resumed = jt.fit(watched, options)
    assert (resumed.stopped, int(resumed.state.step)) == ("Recording asked for it", 3)
    assert resumed.evaluation


@pytest.mark.parametrize(
    ("plugs", "words"),
    [
        ({"hooks": [print]}, r"hooks\[0\] is <built-in function print>: give an instance of a sub"),
        ({"writers": [jt.Hook()]}, r"writers\[0\] is .*: give an object with write\(step, values"),
    ],
)
def test_a_plug_of_another_kind_is_refused(tmp_path, plugs, words):
    with pytest.raises(ValueError, match=words):
        jt.fit(make_experiment(), jt.RunOptions(run_dir=str(tmp_path / "run")), **plugs)
    assert not (tmp_path / "run").exists()


def ask(lines, positions, question="stops"):
    """What processes are answered that ask at these positions, each in a thread of its own."""
    answers = {}

    def one(i):
        answers[i] = getattr(lines[i], question)(positions[i])

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(lines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [answers.get(i, "no answer") for i in range(len(lines))]


def test_processes_agree_on_an_end_and_after_it_on_an_interruption():
    exits = []
    lines, _ = peer_groups(3, exits)
    assert ask(lines, [7, 7, 7]) == [False] * 3
    assert ask(lines[1:2], [8]) == [False]  # it is ahead
    lines[1].want_stop("enough")
    eventually(lambda: [line.reason for line in lines] == ["enough"] * 3)
    assert ask(lines[::2], [8, 8]) == [False] * 2
    assert ask(lines, [9, 9, 9]) == [True] * 3
    # The one that was behind comes to the end, where its own hook asks for it too.
    lines[0].want_stop("enough")
    assert ask(lines[:1], [9]) == [True]
    # The last evaluation belongs to the run; a signal leaves the rest of it out, for all alike.
    assert ask(lines, [9.5, 9.5, 9.5], "interrupts") == [False] * 3
    assert ask(lines[1:2], [9.75], "interrupts") == [False]
    lines[2].want_stop()
    eventually(lambda: all(line.stop_wanted for line in lines))
    assert ask(lines[::2], [9.75] * 2, "interrupts") == [False] * 2
    assert ask(lines, [9.8] * 3, "interrupts") == [True] * 3
    for line in lines:
        line.close()
    assert exits == []


@pytest.mark.parametrize("signalled", [0, 1])
def test_an_interruption_takes_precedence_over_an_end(signalled, monkeypatch):
    lines, _ = peer_groups(2, [])
    handle, held = lines[0]._handle, []
    # The answer of process 1 comes late: an interruption that comes before it is part of the round.
    monkeypatch.setattr(
        lines[0], "_handle", lambda *m: held.append(m) if m[0] and "at" in m[1] else handle(*m)
    )
    assert ask(lines, [4, 4]) == [False, False]
    lines[1].want_stop("enough")
    eventually(lambda: held)
    lines[signalled].want_stop()
    lines[0].want_stop("enough")
    eventually(lambda: lines[0]._reason is None)
    for message in held:
        handle(*message)
    assert ask(lines, [5, 5]) == [True, True]
    assert [line.reason for line in lines] == [None, None]
    assert ask(lines, [5.5, 5.5], "interrupts") == [True, True]
    for line in lines:
        line.close()


def test_a_folder_that_is_overwritten_forgets_that_its_run_was_stopped(tmp_path):
    options = jt.RunOptions(run_dir=str(tmp_path))
    jt.fit(make_experiment(2), options, hooks=[Recording(stop_at=1)])
    assert json.loads((tmp_path / "stopped.json").read_text())["step"] == 1
    jt.fit(make_experiment(1), dataclasses.replace(options, overwrite=True))
    assert not (tmp_path / "stopped.json").exists()


def test_a_stop_that_was_not_saved_does_not_end_the_run_on_its_way_on(tmp_path):
    path = epath.Path(tmp_path)
    (path / "stopped.json").write_text('{"step": 8, "reason": "enough"}')
    assert stopped_before(path, 5, go_on=False) is None  # the newest checkpoint is of step 5
    assert stopped_before(path, 8, go_on=False) is None  # killed later, with one of step 8
