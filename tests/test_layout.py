"""A layout as text, as flags and as a change of a run."""

import dataclasses
import importlib
import json
import typing

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtrain as jt
from experiments import gpt, t5
from jaxtrain.layout import Effect, MeshShape, PipelineLayout
from jaxtrain.run.provenance import flags_of, from_plain, nested
from tests import commands


def values(kind):
    """Strategies by the types of fields."""
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(1, 64)
    arms = [arm for arm in typing.get_args(kind) if arm is not type(None)]
    return st.none() | values(arms[0])


def layouts():
    def of(kind, **given):
        hints = typing.get_type_hints(kind)
        fields = {
            f.name: values(hints[f.name]) for f in dataclasses.fields(kind) if f.name not in given
        }
        return st.builds(kind, **fields, **given)

    # No other numbers go with offloaded state.
    alone = {"steps_per_call": st.just(1), "exact": st.just(0)}
    return of(jt.Layout, mesh=of(MeshShape), pipeline=of(PipelineLayout), **alone)


@settings(max_examples=10, deadline=None)
@given(layouts())
def test_every_layout_comes_back_from_its_text_its_flags_and_its_record(layout):
    assert jt.Layout.parse(str(layout)) == layout
    assert tyro.cli(jt.Config, args=layout.flags()).layout == layout
    for kind in (gpt.Config, t5.Config):
        config = kind(layout=layout)
        kept = json.loads(json.dumps(flags_of(config)))
        assert "layout" not in kept
        assert kept["zero"] == layout.zero
        assert from_plain(kind, nested(kind, kept)) == config


@settings(max_examples=20, deadline=None)
@given(layouts(), layouts())
def test_a_layout_is_another_with_its_changes(one, other):
    assert one.with_(other.changes(one)) == other
    assert jt.Layout.parse(other.text(one), one) == other


def test_what_a_text_leaves_out_is_the_bases_but_for_the_mesh():
    base = jt.Layout.parse("data=2,tensor=4,zero=3,remat=full,pipeline.schedule=gpipe")
    found = jt.Layout.parse("data=8", base)
    assert str(found) == "data=8,remat=full,pipeline.schedule=gpipe"
    assert str(jt.Layout()) == "data=-1"
    assert jt.Layout.parse("data=2,exact=8").flags() == ["--mesh.data=2", "--exact=8"]
    assert jt.Layout.parse("data=4,context=2").mesh.sizes["context"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=x", "layout 'data=x' has data=x: give a whole number"),
        ("dato=2", "layout 'dato=2' is not known, for 'dato': write sizes of the mesh axes"),
        ("zero=7", "zero=7: give one of 0, 1, 2, 3"),
        ("pipeline.balance=1", "pipeline.balance=1: give true or false"),
        ("data=2,offload_optimizer=true,steps_per_call=2", "`steps_per_call` is 2 with `offload"),
    ],
)
def test_what_is_no_layout_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        jt.Layout.parse(text)


def test_every_field_may_change_when_a_run_is_resumed():
    meanings = gpt.outline(gpt.Config()).metadata.may_change
    for path in jt.Layout().values():
        assert meanings[path] == (Effect.SAME if path == "offload_optimizer" else Effect.ROUNDED)


OWN = """
import dataclasses
import typing

import jax
import numpy as np
import tyro

import jaxtrain as jt
from jaxtrain.engines.plain import plain
from tests import problems


@dataclasses.dataclass(frozen=True)
class Layout(jt.Layout):
    doubled: bool = False
    \"\"\"Sum gradients in two halves.\"\"\"


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    layout: typing.Annotated[Layout, tyro.conf.arg(name="")] = Layout()
    steps: int = 4


def doubled(loss_fn):
    def engine(*given):
        sums = plain(loss_fn)(*given)
        halves = jax.tree.map(lambda g: 0.25 * g + 0.75 * g, sums.grads)
        return dataclasses.replace(sums, grads=halves)

    return engine


def build(config):
    rows = problems.make_batch(0, 64)
    return config.experiment(
        "own",
        init_fn=problems.init,
        loss_fn=problems.loss_fn,
        optimizer=jt.make_optimizer("adamw", 1e-2, eps=1e-4),
        engine=doubled if config.layout.doubled else plain,
        **config.batches_of([{name: x[i] for name, x in rows.items()} for i in range(64)]),
    )
"""


def test_a_field_that_a_layout_gains_is_known_wherever_layouts_are(tmp_path, monkeypatch, capsys):
    """A throw-away switch, of a subclass of the layout and one engine, and no more."""
    (tmp_path / "own_layout.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("own_layout")
    with pytest.raises(SystemExit):
        jt.main(module.Config, module.build, ["--help"])
    assert "--doubled" in capsys.readouterr().out
    jt.main(module.Config, module.build, ["--run-dir", "run", "--doubled"])
    assert "doubled=true" in capsys.readouterr().out
    resumed = ["--run-dir", "run", "--resume", "--no-doubled", "--steps", "6"]
    jt.main(module.Config, module.build, [*resumed, "--accept-changes", "steps"])
    (row,) = [x for x in capsys.readouterr().out.splitlines() if x.split()[:1] == ["doubled"]]
    assert row.split(maxsplit=3) == ["doubled", "True", "False", Effect.ROUNDED.value]
    layout = "data=4,doubled=true"
    status, out, _ = commands.run(capsys, "parity", "own_layout", "--layout", layout)
    assert (status, "1 of 1 meshes agree" in out, layout in out) == (0, True, True)
    flags = ["--target", "cpu:8", "--doubled"]
    status, out, _ = commands.run(capsys, "plan", "own_layout", *flags)
    assert (status, "layout doubled=true" in out) == (0, True)
    flags = ["--target", "v5e:2x2", "--search", "--compile-best", "0", "--json", "--doubled"]
    status, out, _ = commands.run(capsys, "plan", "own_layout", *flags)
    assert (status, {row["doubled"] for row in json.loads(out)["rows"]}) == (0, {True})
