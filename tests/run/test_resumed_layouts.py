"""A run that continues with another value of a field of its layout: the same mathematics."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain.build import make_abstract_state, make_experiment_mesh
from jaxtrain.layout import Effect
from jaxtrain.run.main import parse

FLAGS = "--layers 4 --width 16 --heads 2 --seq-len 16 --steps 4 --global-batch 32 --log-every 1"
FLAGS += " --held-out-bytes 2000 --sample-tokens 0 --save-every 2 --keep 9 --optimizer.schedule"
FLAGS += " constant --optimizer.warmup-steps 1"
PIPE = "pipe=2,data=4,pipeline.microbatches=2"

# Field to a layout that the run begins with, and what it goes on with.
CHANGED = {
    "mesh.data": ("data=8", "data=4,fsdp=2"),
    "mesh.fsdp": ("data=8", "fsdp=8"),
    "mesh.tensor": ("data=8", "data=4,tensor=2"),
    "mesh.pipe": ("data=8", PIPE),
    "mesh.context": ("data=8", "data=4,context=2"),
    "exchange": ("data=4,context=2", "data=4,context=2,exchange=ring"),
    "mesh.dcn_data": ("data=8", "data=8,dcn_data=2"),
    "mesh.dcn_fsdp": ("fsdp=8", "fsdp=8,dcn_fsdp=2"),
    "mesh.dcn_pipe": (PIPE, f"{PIPE},dcn_pipe=2"),
    "zero": ("data=8", "data=8,zero=2"),
    "accumulate": ("data=8", "data=8,accumulate=2"),
    "gather": ("fsdp=8", "fsdp=8,gather=step"),
    "remat": ("data=8", "data=8,remat=full"),
    "scan_unroll": ("data=8", "data=8,scan_unroll=2"),
    "attention": ("data=8", "data=8,attention=xla"),
    "sequence_parallel": ("data=4,tensor=2", "data=4,tensor=2,sequence_parallel=false"),
    "pipeline.schedule": (PIPE, f"{PIPE},pipeline.schedule=gpipe"),
    "pipeline.microbatches": (PIPE, "pipe=2,data=4,pipeline.microbatches=4"),
    "pipeline.virtual": (PIPE, f"{PIPE},pipeline.schedule=interleaved,pipeline.virtual=2"),
    "pipeline.remat": (PIPE, f"{PIPE},pipeline.remat=none"),
    "pipeline.balance": (PIPE, f"{PIPE},pipeline.balance=true"),
    "steps_per_call": ("data=8", "data=8,steps_per_call=2"),
    "offload_optimizer": ("data=8", "data=8,offload_optimizer=true"),
    "offload_parameters": ("data=8,remat=full", "data=8,remat=full,offload_parameters=true"),
    "hide_communication": ("data=8", "data=8,hide_communication=false"),
    "deterministic": ("data=8", "data=8,deterministic=true"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Trains whole runs by their layout, one each."""
    path, texts = (tmp_path_factory.mktemp(name) for name in ("runs", "texts"))
    for i in range(4):
        text = " ".join(f"stage {i} bubble {i * n % 7} mesh {n} loss" for n in range(200))
        (texts / f"{i}.txt").write_text(text)

    @functools.cache
    def run(layout):
        folder = path / layout
        flags = ["--data", str(texts), "--run-dir", str(folder), *jt.Layout.parse(layout).flags()]
        jt.main(gpt.Config, gpt.build, [*FLAGS.split(), *flags])
        return folder

    return run


def last(folder):
    """What the last step of a run has logged."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    found = {name: x for line in lines if line["step"] == 4 for name, x in line.items()}
    return {name: found[f"train/{name}"] for name in ("loss", "grad_norm", "param_norm")}


def test_every_field_that_has_a_flag_is_changed():
    # Of other models, which is the last test; and what a run keeps to its end.
    alone = {"mesh.expert", "dispatch", "exact"}
    assert CHANGED.keys() | alone == jt.Layout().values().keys()


@pytest.mark.slow
@pytest.mark.parametrize("field", CHANGED)
def test_a_run_goes_on_with_another_value(field, begun, tmp_path, capsys):
    before, after = CHANGED[field]
    whole = begun(before)
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    capsys.readouterr()
    changed = jt.Layout.parse(after).flags(jt.Layout.parse(before))
    jt.main(gpt.Config, gpt.build, ["--run-dir", str(tmp_path / "run"), "--resume", *changed])
    meant = Effect.SAME if field == "offload_optimizer" else Effect.ROUNDED
    rows = [x for x in capsys.readouterr().out.splitlines() if x.endswith(meant.value)]
    assert field.replace("_", "-") in [row.split()[0] for row in rows]
    assert last(tmp_path / "run") == pytest.approx(last(whole), rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("data=4,expert=2", "context=2,expert=4"),
        ("data=2,context=2,expert=2", "context=4,expert=2,exchange=ring,dispatch=exchange"),
    ],
)
def test_a_mixture_of_experts_goes_on_with_other_degrees(before, after, texts, tmp_path):
    """Its parameters and moments end as those of the run that was not stopped."""
    flags = [*FLAGS.split(), "--model", "tiny-moe", "--layers", "2", "--data", str(texts)]
    states = []
    for name, layout in (("whole", before), ("stopped", after)):
        run = ["--run-dir", str(tmp_path / name)]
        if name == "stopped":
            shutil.copytree(tmp_path / "whole", tmp_path / name)
            shutil.rmtree(tmp_path / name / "checkpoints/4")
            changed = jt.Layout.parse(layout).flags(jt.Layout.parse(before))
            jt.main(gpt.Config, gpt.build, [*run, "--resume", *changed])
        else:
            jt.main(gpt.Config, gpt.build, [*flags, *run, *jt.Layout.parse(layout).flags()])
        given = [*flags, *run, *jt.Layout.parse(layout).flags()]
        experiment = gpt.build(parse(gpt.Config, given))
        abstract = make_abstract_state(experiment, make_experiment_mesh(experiment))
        with jt.Checkpointer(tmp_path / name / "checkpoints") as checkpoints:
            state = checkpoints.restore(abstract, step=4)
        states.append(jax.device_get((state.params, state.opt_state)))
    for wanted, found in zip(*map(jax.tree.leaves, states), strict=True):
        wanted, found = np.asarray(wanted, np.float64), np.asarray(found, np.float64)
        assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
    assert last(tmp_path / "stopped") == pytest.approx(last(tmp_path / "whole"), rel=1e-5)
