"""What a resumed run has otherwise: found, told apart, and refused where it would break the run."""

import dataclasses
import functools
import json
import os
import pty
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from experiments import gpt, vision
from jaxtrain.layout import Effect
from jaxtrain.run import options
from jaxtrain.run.loop import RunOptions
from jaxtrain.run.main import parse, run_to_resume
from jaxtrain.run.provenance import (
    MICROBATCHES,
    check,
    check_accepted,
    commit,
    compare,
    flags_of,
    from_plain,
    make_record,
    nested,
    read_record,
    table,
)
from tests import problems
from tests.run.test_loop import make_experiment

MAY_CHANGE = gpt.outline(gpt.Config()).metadata.may_change


def record(config=None, **provenance):
    config = config or gpt.Config()
    own = {"text": "a", "seedless": 1, "versions": {"jax": "0.10.2"}}
    own |= {"code": {"module": "a"}} | provenance
    return {"flags": json.loads(json.dumps(flags_of(config))), "provenance": own}


def changed(**flags):
    return dataclasses.replace(gpt.Config(), **problems.with_layout(flags))


def test_the_flag_that_changes_the_number_of_microbatches_tells_of_it():
    none = dict.fromkeys(("microbatches", *MICROBATCHES))
    then = record(microbatches=1)
    piped = changed(mesh={"pipe": 2})
    for config, name in ((changed(accumulate=2), "accumulate"), (piped, "mesh.pipe")):
        for may_change, meaning in ((MAY_CHANGE, Effect.ROUNDED), (MAY_CHANGE | none, None)):
            (change,) = compare(then, record(config, microbatches=2), may_change)
            assert (change.name, change.meaning) == (name, meaning)
    # As where --mesh.pipe -1 takes what is left of other devices.
    (change,) = compare(then, record(microbatches=2), MAY_CHANGE | none)
    assert (change.name, change.meaning) == ("microbatches", None)


def test_an_axis_pipe_that_takes_what_is_left_is_a_pipeline():
    flags = "data=2,pipe=-1,accumulate=3,pipeline.microbatches=4,pipeline.virtual=2"
    layout = jt.Layout.parse(f"{flags},pipeline.schedule=interleaved")
    found = make_record(make_experiment(layout=layout), jt.make_mesh(**layout.mesh.sizes))
    assert found["provenance"]["microbatches"] == 4
    assert gpt.outline(changed(layout=layout, layers=8)).stack == jt.Stack(virtual=2)


@pytest.mark.parametrize(
    ("now", "name", "meaning"),
    [
        (record(changed(seed=1)), "seed", None),
        (record(changed(global_batch=32)), "global-batch", None),
        (record(changed(precision="bf16")), "precision", None),
        (record(changed(steps=700)), "steps", None),
        (
            record(changed(optimizer=options.OptimizerOptions(name="lion"))),
            "optimizer.name",
            None,
        ),
        (record(changed(mesh={"fsdp": 2})), "mesh.fsdp", Effect.ROUNDED),
        (record(changed(accumulate=2)), "accumulate", Effect.ROUNDED),
        (record(changed(run=RunOptions(log_every=1))), "log-every", Effect.SAME),
        (record(changed(data="elsewhere")), "data", Effect.SAME),  # while the text is the same
        (record(text="b"), "text", None),
        (record(versions={"jax": "0.11"}), "jax", Effect.ROUNDED),
        (record(code={"module": "a-dirty"}), "code.module", Effect.CODE),
        (record(code={}), "code.module", Effect.CODE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_change_has_its_meaning(now, name, meaning):
    (change,) = compare(record(), now, MAY_CHANGE)
    assert (change.name, change.meaning) == (name, meaning)
    if meaning is None:
        with pytest.raises(ValueError, match=rf"the run in r had {name} .*`accept_changes` {name}"):
            check([change], (), run_dir="r")
    for accepted in ([f"--{name}"], [name.replace("-", "_")], ["all"]):
        check([change], accepted, run_dir="r")


def test_one_accepted_change_accepts_no_other():
    changes = compare(record(), record(changed(seed=1, global_batch=32)), MAY_CHANGE)
    with pytest.raises(ValueError, match=r"the run in r had global-batch 16 \(now 32\): leave"):
        check(changes, ["seed"], run_dir="r")


def test_a_name_to_accept_that_no_run_has_is_refused_with_the_nearest():
    then, now = record(fields="a"), record(changed(seed=1))
    check_accepted(
        ["seed", "--fields", "jax", "mesh.fsdp", "log_every", "stopped", "all"], then, now
    )
    with pytest.raises(ValueError, match=r"`accept_changes` has 'sede', .*: try 'seed'"):
        check_accepted(["sede"], then, now)


def test_what_is_of_a_start_is_no_change_and_more_steps_are_none_at_a_constant_rate():
    start = RunOptions(run_dir="x", resume=True, accept_changes=("seed",))
    process = options.ProcessOptions(process_id=1, coordinator="a:1", processes=2)
    assert compare(record(), record(changed(run=start, distributed=process)), MAY_CHANGE) == []
    constant = options.OptimizerOptions(schedule="constant", warmup_steps=1)
    now = changed(optimizer=constant, steps=700)
    (change,) = compare(
        record(changed(optimizer=constant)), record(now), gpt.outline(now).metadata.may_change
    )
    assert (change.name, change.meaning) == ("steps", Effect.SAME)


def test_an_experiment_without_a_table_of_its_own_may_change_nothing_but_how_it_reports():
    now = record(changed(accumulate=2, run=RunOptions(keep=9)))
    meanings = {c.name: c.meaning for c in compare(record(), now, {})}
    assert meanings == {"accumulate": None, "keep": Effect.SAME}


def test_flags_of_another_version_and_what_older_runs_lack_are_shown_or_left_out():
    old = record()
    old["flags"] |= {"gone": 3, "gone_and_left_out": None}
    for name in ("z_loss", "seed"):
        del old["flags"][name]
    del old["flags"]["run"]["alerts"]
    del old["provenance"]["text"]
    seed = record()["flags"]["seed"]
    found = {c.name: (c.then, c.now) for c in compare(old, record(), MAY_CHANGE)}
    assert found == {"gone": (3, "(none)"), "seed": ("(none)", seed)}
    given = {c.name: c.now for c in compare(old, record(changed(z_loss=0.5)), MAY_CHANGE)}
    assert given == {"gone": "(none)", "seed": seed, "z-loss": 0.5}
    assert compare({}, record(), {}) == []


def test_the_code_of_a_run_is_the_commit_of_the_files_that_git_has(tmp_path, monkeypatch):
    def git(*words):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", tmp_path, *names, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    own, other = tmp_path / "own.py", tmp_path / "other.py"
    own.write_text("a = 1")
    other.write_text("b = 1")
    git("init")
    assert commit(str(own)) is None  # no commit yet
    git("add", "own.py")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "tagged")
    module = types.ModuleType("own")
    module.__file__ = str(own)
    monkeypatch.setitem(sys.modules, "own", module)
    experiment = make_experiment(config={"module": "own"})
    found = make_record(experiment, jt.make_mesh(data=-1))["provenance"]["code"]
    assert found["module"] == git("rev-parse", "HEAD")[:12]
    assert commit(str(other)) is None  # it is of no commit
    own.write_text("a = 2")
    assert commit(str(own)) == found["module"] + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert "code" not in make_record(experiment, jt.make_mesh(data=-1))["provenance"]


def test_shares_may_change_from_a_step_on_that_is_still_to_come():
    phases = {"0": "a 1/2, b 1/2", "10": "a 1"}
    mixed = record(shares=phases)
    for now, step, name, meaning in (
        (record(shares=phases | {"20": "a 1/4, c 3/4"}), 20, "shares.20", Effect.LATER),
        (record(shares=phases | {"20": "a 1/4, c 3/4"}), 21, "shares.20", None),
        (record(shares={"0": phases["0"]}), 9, "shares.10", Effect.LATER),
        (record(shares={"0": phases["0"]}), 11, "shares.10", None),
        (record(shares=phases | {"10": "b 1"}), 11, "shares.10", None),
        (record(shares=phases | {"0": "b 1"}), 1, "shares.0", None),
    ):
        (change,) = compare(mixed, now, MAY_CHANGE, step=step)
        assert (change.name, change.meaning) == (name, meaning)
    # Runs of earlier versions have the steps in the names of their fingerprints.
    earlier = record(**{f"shares.{step}": text for step, text in phases.items()})
    assert compare(earlier, mixed, MAY_CHANGE, step=11) == []
    for step, meaning in ((9, Effect.LATER), (11, None)):
        (change,) = compare(earlier, record(shares={"0": phases["0"]}), MAY_CHANGE, step=step)
        assert (change.name, change.meaning) == ("shares.10", meaning)
    # A text alone, and the same as one of several.
    alone = record(), record(shares={"0": "a 1"})
    for then, now in (alone, alone[::-1]):
        assert [c.meaning for c in compare(then, now, MAY_CHANGE, step=1)] == [None]


def test_the_table_is_four_columns():
    changes = compare(record(), record(changed(seed=1, accumulate=2)), MAY_CHANGE)
    assert table(changes, title="changed:") == [
        "changed:",
        "              then  now  the steps to come",
        "  seed        0     1    accepted: those of another run",
        "  accumulate  1     2    the same mathematics, other bits",
        "",
    ]


def write_run(path, config, **more):
    path.mkdir(parents=True)
    content = record(config) | {"module": "experiments.gpt"} | more
    (path / "config.json").write_text(json.dumps(content))
    (path / "log.jsonl").write_text("")
    return content


def test_a_resumed_run_has_its_own_flags_and_those_that_are_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = options.ProcessOptions(process_id=0, coordinator="a:1", processes=2)
    run = RunOptions(overwrite=True, keep=9, run_dir="elsewhere")
    begun = changed(seed=7, layers=3, run=run, distributed=process, data="texts")
    content = write_run(tmp_path / "runs" / "gpt-2", begun)
    write_run(tmp_path / "runs" / "gpt-1", gpt.Config())
    write_run(tmp_path / "runs" / "vision-9", vision.Config(), module="experiments.vision")
    write_run(tmp_path / "runs" / "gpt-10" / "inner", gpt.Config())  # no run itself
    for typed in (["--resume"], ["--auto-resume", "--run-dir", "runs/gpt-2"]):
        default = run_to_resume(gpt.Config, typed)
        config = parse(gpt.Config, [*typed, "--layers", "4"], default=default)
        assert config == dataclasses.replace(
            begun,
            layers=4,
            distributed=options.ProcessOptions(),
            run=RunOptions(
                run_dir="runs/gpt-2",
                keep=9,
                resume="--resume" in typed,
                auto_resume="--auto-resume" in typed,
            ),
        )
    # What it went on with last counts.
    later = {"from_step": 5, "changes": {}, "record": content | record(changed(seed=8))}
    (tmp_path / "runs" / "gpt-2" / "changes.jsonl").write_text(json.dumps(later) + "\n")
    assert run_to_resume(gpt.Config, ["--resume"]).seed == 8
    assert read_record("runs/gpt-2", before_step=5)["flags"]["seed"] == 7
    assert read_record("runs/gpt-2", before_step=6)["flags"]["seed"] == 8
    assert run_to_resume(gpt.Config, []) is None
    assert run_to_resume(gpt.Config, ["--auto-resume", "--run-dir", "new"]) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"steps": "many"}, "Config takes no steps 'many'"),
        ({"steps": True}, "Config takes no steps True"),
        ({"optimizer": {"name": "evil"}}, "OptimizerOptions takes no name 'evil'"),
        ({"mesh": 3}, "Layout takes no mesh 3"),
        ({"run": {"log_every": 0}}, "`log_every` is 0"),
    ],
)
def test_stored_flags_that_cannot_be_are_refused_by_name(flags, words):
    with pytest.raises(ValueError, match=words):
        from_plain(gpt.Config, nested(gpt.Config, flags))


def test_another_optimizer_in_code_is_another_run():
    mesh = jt.make_mesh(data=-1)
    table_C = np.array([0.1, 0.2])

    def now(optimizer, *, versions=None, **flags):
        experiment = make_experiment().with_(optimizer=optimizer)
        plain_record = json.loads(json.dumps(make_record(experiment, mesh)))
        plain_record["provenance"]["versions"] |= versions or {}
        return plain_record | {"flags": {"seed": 0, "steps": 12} | flags}

    def names(*records):
        return [(c.name, c.meaning) for c in compare(*records, {})]

    cosine = functools.partial(optax.adam, optax.cosine_decay_schedule(0.1, 10))
    then = now(cosine())
    assert names(then, now(cosine())) == []
    assert names(then, now(lambda stack: optax.chain(cosine()))) == []
    for other in (
        optax.adam(optax.cosine_decay_schedule(0.1, 11)),
        optax.adam(0.1),
        cosine(b2=0.99),
        optax.chain(optax.clip(1.0), cosine()),
    ):
        changes = compare(then, now(other), {})
        assert [(c.name, c.meaning) for c in changes] == [("optimizer", None)]
        with pytest.raises(ValueError, match=r"the run in r had optimizer .* `accept_changes` opt"):
            check(changes, (), run_dir="r")
        check(changes, ["optimizer"], run_dir="r")
    # A constant within a jitted function is no part of the program's text.
    rate_of = lambda table_C: jax.jit(lambda count: jnp.asarray(table_C)[count])  # noqa: E731
    assert names(*(now(optax.sgd(rate_of(k * table_C))) for k in (1, 2))) == [("optimizer", None)]
    # A flag tells of it, a record of an older version lacks it, and another JAX traces otherwise.
    assert names(then, now(optax.adam(0.1), steps=9)) == [("steps", None)]
    older = json.loads(json.dumps(then))
    del older["provenance"]["optimizer"]
    assert names(older, now(optax.adam(0.1))) == []
    other = now(optax.adam(0.1), versions={"jax": "9.0"})
    assert names(then, other) == [("jax", Effect.ROUNDED), ("optimizer", Effect.UNCOMPARED)]


@pytest.mark.slow
def test_an_optimizer_has_the_same_digest_in_a_terminal(tmp_path):
    """JAX colours the text of a program if the standard output is a terminal."""
    (tmp_path / "program.py").write_text(
        "import sys, jax, optax\n"
        "from jaxtrain.jaxprs import digest\n"
        "program = jax.make_jaxpr(optax.sgd(0.1).update)(1.0, optax.sgd(0.1).init(1.0))\n"
        "print(digest(program), sys.stdout.isatty(), file=sys.stderr)\n"
    )
    command = [sys.executable, str(tmp_path / "program.py")]
    main, terminal = pty.openpty()
    printed = [
        subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=True)
        for stdout in (subprocess.DEVNULL, terminal)
    ]
    os.close(main), os.close(terminal)
    words = [result.stderr.split()[-2:] for result in printed]
    assert [is_terminal for _, is_terminal in words] == ["False", "True"]
    assert words[0][0] == words[1][0]
