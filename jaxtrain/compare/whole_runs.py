"""Whole runs that cells of the composition table compare: resumed, in calls of several steps, and
what becomes of their weights."""

import contextlib
import functools
import io
import tempfile
from collections.abc import Callable, Mapping

import jax
import numpy as np

from jaxtrain import hf
from jaxtrain.compare import parity
from jaxtrain.compile import compile_step
from jaxtrain.experiment import Experiment
from jaxtrain.layout import Layout
from jaxtrain.models import exact, generate
from jaxtrain.run import trained
from jaxtrain.run.loop import fit
from jaxtrain.run.options import RunOptions
from jaxtrain.serve.engine import Engine, Request
from jaxtrain.sharding.mesh import make_mesh
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, key_data, map_named, named_leaves

STEPS = 4
NEW_TOKENS = 6
Errors = Mapping[str, tuple[float, str]]
"""The largest error of each part that is compared, and the leaf that has it."""
Check = Callable[[Experiment, Layout], Errors]


def resumed(experiment: Experiment, layout: Layout) -> Errors:
    """Compares a run that is interrupted and resumed with one that is not, to the bit."""
    _, whole = _whole(experiment, layout)
    with tempfile.TemporaryDirectory() as folder:
        _run(experiment, layout, folder, steps=STEPS // 2)
        return _bits(_run(experiment, layout, folder, resume=True), whole)


def in_calls(experiment: Experiment, layout: Layout) -> Errors:
    """Compares a run of several steps per call with one of single steps."""
    _, single = _whole(experiment, layout.with_({"steps_per_call": 1}))
    with tempfile.TemporaryDirectory() as folder:
        found = _run(experiment, layout, folder)
    return {"run": parity.worst(_numbers(found), _numbers(single))}


def generated(experiment: Experiment, layout: Layout) -> Errors:
    """Compares the tokens that a run's model writes on one device and on a mesh."""
    run, _ = _whole(experiment, layout)
    model, params, _ = trained.load(run)
    mesh = make_mesh(fsdp=-1, tensor=layout.mesh.tensor)
    _, placed, _ = trained.load(run, mesh=mesh)
    step = generate.generate_step(model, max_new_tokens=NEW_TOKENS)  # refuses what writes nothing
    asked = np.random.default_rng(0).integers(0, model.vocab_size, (len(jax.devices()), 4))
    asked = generate.prompts(model, asked, max_new_tokens=NEW_TOKENS, temperature=0)
    state = generate.Weights(placed)
    written = compile_step(step, state, asked, mesh=mesh, donate=False)(state, asked)
    return _bits({"tokens": written}, {"tokens": jax.jit(step)(generate.Weights(params), asked)})


def exactly_scored(experiment: Experiment, layout: Layout) -> Errors:
    """Compares the log-probabilities of what a server writes with a trainer's on a mesh, to the
    bit."""
    run, _ = _whole(experiment, layout)
    model, params, _ = trained.load(run)
    exact.check_form(model)
    rows = len(jax.devices())
    asked = np.random.default_rng(0).integers(0, model.vocab_size, (rows, 4)).tolist()
    engine = Engine(model, params, slots=3, exact=True)
    places = {engine.submit(Request(x, NEW_TOKENS, seed=i)): i for i, x in enumerate(asked)}
    told: list[list[float]] = [[] for _ in asked]
    while engine.is_busy:
        for event in engine.step():
            asked[places[event.number]].append(event.token)
            told[places[event.number]].append(event.logprob)
    tokens, mesh = np.array(asked), make_mesh(fsdp=-1)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch["mask"] = np.ones_like(tokens[:, 1:], np.float32)
    params = jax.device_get(params)  # The same weights: merged on a mesh they round differently.
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(exact.log_probs, model))(params, batch)
    return _bits({"log-probabilities": found[:, 3:]}, {"log-probabilities": np.float32(told)})


def exported(experiment: Experiment, layout: Layout) -> Errors:
    """Compares a run's weights with those of the Hugging Face folder that is written of it, to the
    bit."""
    run, _ = _whole(experiment, layout)
    model, params, _ = trained.load(run)
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, model, params, family=trained.stored(run).get("family"))
        found = hf.load(hf.open_weights(folder))
    # What fills the tables up to a multiple takes no part, and is in no file; noise moves it.
    rows = {"embed/tokens": slice(model.vocab_size)}
    held = lambda name, x: x[rows.get(name, ...)]  # noqa: E731
    return _bits(map_named(held, found), map_named(held, params))


# The latest whole run, with what it is of: checks of the same run come one behind the other.
_LATEST: list[tuple[Experiment, Layout, tempfile.TemporaryDirectory, TrainState]] = []


def _whole(experiment: Experiment, layout: Layout) -> tuple[str, TrainState]:
    """The folder of a run from its first step to its last, and its state at the end."""
    if not any(x[0] is experiment and x[1] == layout for x in _LATEST):
        while _LATEST:
            _LATEST.pop()[2].cleanup()
        folder = tempfile.TemporaryDirectory()
        state = _run(experiment, layout, folder.name)
        _LATEST.append((experiment, layout, folder, state))
    ((*_, folder, state),) = _LATEST
    return folder.name, state


def _run(
    experiment: Experiment, layout: Layout, folder: str, *, steps: int = STEPS, resume: bool = False
) -> TrainState:
    """Trains on all devices and returns the state, on the host."""
    others = layout.mesh.devices // layout.mesh.data
    layout = layout.with_({"mesh.data": len(jax.devices()) // others})
    given = RunOptions(run_dir=folder, log_every=2, sample_seconds=0, resume=resume)
    with contextlib.redirect_stdout(io.StringIO()):
        return jax.device_get(fit(experiment.with_(layout=layout, steps=steps), given).state)


def _bits(found: PyTree, expected: PyTree) -> Errors:
    found, expected = _numbers(found), _numbers(expected)
    same = lambda name: np.array_equal(found[name], expected[name], equal_nan=True)  # noqa: E731
    off = [name for name in expected if not same(name)]
    return {"bits": (float(bool(off)), next(iter(off), ""))}


def _numbers(tree: PyTree) -> dict[str, np.ndarray]:
    return {name: np.asarray(key_data(x)) for name, x in named_leaves(tree).items()}
