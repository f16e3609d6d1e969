"""Several steps in one call: the same run, in every respect that a user sees."""

import dataclasses

import chex
import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxtrain as jt
from experiments import gpt
from jaxtrain.build import call_end, call_lengths
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.main import parse
from jaxtrain.run.replay import replay
from jaxtrain.run.survive.preemption import Preempted
from tests.run.survive.test_preemption import signalled
from tests.run.test_loop import lines, make_experiment
from tests.workers import poisoned


def losses(run_dir):
    return {line["step"]: line["train/loss"] for line in lines(run_dir) if "train/loss" in line}


def run(folder, *, steps_per_call, log_every=1, **changes):
    experiment = make_experiment(steps_per_call=steps_per_call, **changes)
    return jt.fit(experiment, jt.RunOptions(run_dir=str(folder), log_every=log_every)).state


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 12))
def test_calls_cover_every_step_once_and_end_at_multiples(start, steps, steps_per_call):
    ends, done = [], start
    while done < steps:
        ends.append(call_end(done, steps, steps_per_call))
        assert 0 < ends[-1] - done <= steps_per_call
        done = ends[-1]
    assert all(end % steps_per_call == 0 for end in ends[:-1])
    assert done == max(start, steps)
    lengths = {end - begin for begin, end in zip([start, *ends], ends, strict=False)}
    assert call_lengths(start, steps, steps_per_call) == sorted(lengths, reverse=True)


def test_a_run_of_many_steps_per_call_is_the_run_of_single_steps(tmp_path):
    single = run(tmp_path / "1", steps_per_call=1)
    # 12 steps are three calls of 4; or two of 5 and one of 2.
    four, five = (run(tmp_path / str(k), steps_per_call=k) for k in (4, 5))
    # A loop's body is compiled apart from straight code, and may round otherwise.
    for many in (four, five):
        assert int(many.step) == 12
        chex.assert_trees_all_close(many.params, single.params, rtol=1e-5, atol=1e-7)
        chex.assert_trees_all_close(many.opt_state, single.opt_state, rtol=1e-5, atol=1e-7)
    assert digest(four) == digest(five)
    expected = losses(tmp_path / "1")
    assert sorted(expected) == list(range(1, 13))
    for k in (4, 5):
        assert losses(tmp_path / str(k)) == pytest.approx(expected, rel=1e-6)
    # All metrics of a call come at once, and its time is theirs together.
    logged = [x for x in lines(tmp_path / "4") if "train/loss" in x]
    timed = {x["step"]: x.get("time/step_seconds") for x in logged}
    assert timed[4] is None
    assert [len({timed[step] for step in range(end - 3, end + 1)}) for end in (8, 12)] == [1, 1]
    assert timed[8] != timed[12]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [6, 8])
def test_a_run_resumed_inside_or_between_calls_has_the_same_bits(tmp_path, stop):
    whole = run(tmp_path / "whole", steps_per_call=4)
    run(tmp_path / "parts", steps_per_call=4, steps=stop)
    experiment = make_experiment(steps_per_call=4)
    again = jt.RunOptions(run_dir=str(tmp_path / "parts"), resume=True, log_every=1)
    assert digest(jt.fit(experiment, again).state) == digest(whole)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_checkpoint_between_calls_goes_on_with_another_number_of_steps(tmp_path):
    whole = run(tmp_path / "whole", steps_per_call=3)
    run(tmp_path / "parts", steps_per_call=6, steps=6)
    experiment = make_experiment(steps_per_call=3)
    again = jt.RunOptions(run_dir=str(tmp_path / "parts"), resume=True)
    assert digest(jt.fit(experiment, again).state) == digest(whole)


def test_evaluations_and_checkpoints_fall_between_calls(tmp_path, capsys):
    given = jt.RunOptions(
        run_dir=str(tmp_path / "run"), log_every=3, eval_every=4, save_every=8, keep=9
    )
    jt.fit(make_experiment(steps=14, steps_per_call=4), given)
    logged = lines(tmp_path / "run")
    assert [x["step"] for x in logged if "eval/loss" in x] == [4, 8, 12, 14]
    assert sorted(losses(tmp_path / "run")) == [3, 6, 9, 12, 14]
    assert Checkpointer(tmp_path / "run" / "checkpoints").steps() == [8, 14]
    assert "4 per call (also compiled for 2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "name"), [({"eval_every": 6}, "eval_every"), ({"save_every": 10}, "save_every")]
)
def test_an_interval_that_ends_inside_a_call_is_refused(tmp_path, change, name):
    given = jt.RunOptions(run_dir=str(tmp_path / "run"), **change)
    (every,) = change.values()
    wanted = f"`{name}` is {every} and `steps_per_call` 4: .* give a multiple of 4"
    with pytest.raises(ValueError, match=wanted):
        jt.fit(make_experiment(steps_per_call=4), given)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="`steps_per_call` is 0: give at least 1"):
        make_experiment(steps_per_call=0)


@pytest.mark.slow
def test_a_signal_stops_between_calls_and_the_run_goes_on_in_the_same_bits(tmp_path):
    given = jt.RunOptions(run_dir=str(tmp_path / "run"))
    with pytest.raises(Preempted) as stop:
        jt.fit(signalled(at=3, steps_per_call=4, eval_batches=None), given)
    assert stop.value.step in (4, 8)
    unseen = make_experiment(eval_batches=None, steps_per_call=4)
    resumed = jt.fit(unseen, dataclasses.replace(given, resume=True)).state
    assert digest(resumed) == digest(run(tmp_path / "whole", steps_per_call=4, eval_batches=None))


@pytest.mark.slow
def test_skipped_steps_are_counted_one_by_one(tmp_path):
    def train(k):
        layout = jt.Layout(accumulate=2, steps_per_call=k)
        config = poisoned.Config(steps=16, poison=(2, 6, 7, 8), layout=layout)
        given = jt.RunOptions(run_dir=str(tmp_path / str(k)), log_every=1, max_consecutive_skips=3)
        with pytest.raises(jt.Diverged) as error:
            jt.fit(poisoned.build(config), given)
        skipped = [x["step"] for x in lines(tmp_path / str(k)) if x.get("train/skipped", 0)]
        return error.value.step, skipped

    assert train(1) == train(4) == (8, [2, 6, 7, 8])


@pytest.mark.slow
def test_a_replay_makes_the_calls_of_the_run(tmp_path):
    layout = jt.Layout(accumulate=2, steps_per_call=4)
    config = poisoned.Config(steps=8, poison_half=(7,), layout=layout)
    jt.fit(poisoned.build(config), jt.RunOptions(run_dir=str(tmp_path), log_every=1))
    examined = replay(tmp_path, 6, module="tests.workers.poisoned")
    assert sum(examined.losses) / len(examined.losses) == pytest.approx(
        losses(tmp_path)[6], rel=0.2
    )
    assert examined.first_not_finite() is None
    assert "microbatch 1" in replay(tmp_path, 7, module="tests.workers.poisoned").first_not_finite()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --accumulate 2 --zero 1",
        "--mesh.pipe 2 --mesh.data 2 --mesh.tensor 2 --pipeline.microbatches 4",
    ],
    ids=["accumulated", "pipelined"],
)
def test_calls_compose_with_meshes_pipelines_and_accumulation(tmp_path, flags):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(4):
        (texts / f"{i}.txt").write_text(" ".join(str(j * (i + 3)) for j in range(300)))
    flags += " --layers 2 --width 16 --heads 2 --seq-len 16 --global-batch 16 --steps 5 --log-every"
    flags += f" 1 --sample-tokens 0 --held-out-bytes 900 --optimizer.name adamw --data {texts}"

    def train(k):
        given = [*flags.split(), "--steps-per-call", str(k), "--run-dir", str(tmp_path / str(k))]
        config = parse(gpt.Config, given)
        return jt.fit(gpt.build(config), config.run).state

    single, many = train(1), train(3)
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    assert jax.tree.map(lambda x: x.sharding, many) == jax.tree.map(lambda x: x.sharding, single)
    chex.assert_trees_all_close(many.params, single.params, rtol=1e-4, atol=1e-5)
