"""Gradients are reduced once per step, and the numbers are those of one device."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.build import choose_gather, make_abstract_state
from jaxtrain.compare.parity import worst
from jaxtrain.decisions import Kind, Why
from jaxtrain.engines.reduction import kept_by_gathering
from jaxtrain.host.chips import chip_of
from jaxtrain.ops.numerics import drop
from jaxtrain.planning.hlo import read_program
from jaxtrain.state import local_bytes
from tests import problems
from tests.problems import record_gradients

ROWS, MICROBATCHES, TOLERANCE = 32, 4, 1e-5
LAYERS, WIDTH, HIDDEN = 4, 16, 32
QUICK = {"xla_backend_optimization_level": 0}
RULES = [
    ("up$", ("layers", "embed", "mlp")),
    ("down$", ("layers", "mlp", "embed")),
    ("gain$", (None,)),
]


def init(rng):
    up, down = jax.random.split(rng)
    blocks = {
        "up": 0.3 * jax.random.normal(up, (LAYERS, WIDTH, HIDDEN)),
        "down": 0.2 * jax.random.normal(down, (LAYERS, HIDDEN, WIDTH)),
    }
    return {"blocks": blocks, "gain": jnp.ones(WIDTH)}


def block(layer, x, batch, rng):
    return drop(x + jnp.tanh(x @ layer["up"]) @ layer["down"], 0.3, rng)


def head_loss(params, x, batch):
    """A sum over rows, with a metric of each reduction that its parts may have."""
    error = jnp.square(x * params["gain"] - batch["y"]).sum(-1)
    metrics = {"largest": jt.Max(error.max()), "rows": jt.Sum(jnp.float32(error.size))}
    metrics["load"] = (batch["mask"] @ jnp.abs(x), jnp.full(WIDTH, batch["mask"].sum()))
    total = (error * batch["mask"]).sum() + 0.1 * jnp.square(x).sum()  # rows of no weight too
    return jt.WeightedLoss(total, batch["mask"].sum(), metrics)


STAGES = jt.Stages(lambda params, batch, rng: batch["x"], block, head_loss, row_wise=True)
masked = jt.loss_from_stages(STAGES)


@functools.cache
def rows():
    r = np.random.default_rng(0)
    x, y = r.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    weights = r.random(ROWS) - 0.3  # of either sign
    return {"x": x, "y": y, "mask": (r.random(ROWS) < 0.6).astype(np.float32) * weights}


def chain():
    adam = jt.make_optimizer("adamw", 1e-2, clip_norm=0.5, weight_decay=0.1, eps=1e-4)
    return optax.chain(record_gradients(), adam)


def train(loss_fn, mesh=None, *, stack=jt.Stack(), zero=0, policy=None, **options):  # noqa: B008
    """One step; returns the compiled step and, on the host, all that came of it.

    On a mesh with an axis ``pipe`` it is a pipeline of STAGES, and ``loss_fn`` is not called.
    """
    rules = None if mesh is None else jt.Rules(RULES, stacked=stack)
    start = {"mesh": mesh, "rules": rules, "zero": zero, "policy": policy}
    state = jt.init_state(lambda rng: stack.cut(init(rng)), chain(), jax.random.key(0), **start)
    options |= {"gradient_shardings": jt.gradient_shardings(state, zero=zero), "policy": policy}
    if mesh is not None and mesh.shape["pipe"] > 1:
        stages = dataclasses.replace(STAGES, stacked=stack)
        engine = jt.pipeline(stages, mesh=mesh, microbatches=MICROBATCHES, **options)
        step = jt.build_update(engine, chain(), policy=policy)
    else:
        step = jt.build_train_step(loss_fn, chain(), **{"accumulate": MICROBATCHES} | options)
    step = jt.compile_step(step, state, rows(), mesh=mesh, rules=rules, compiler_options=QUICK)
    state, metrics = step(state, rows())
    found = {"gradients": state.opt_state[0], "optimizer state": state.opt_state[1]}
    return step, jax.device_get(found | {"parameters": state.params, "metrics": metrics})


def agree(found, expected, tolerance=TOLERANCE):
    problems.assert_agree(found, expected, tolerance)


def batch_collectives(step, mesh):
    """(kind, axes) to executions and bytes of those along the batch's axes, but for scalars."""
    found = {}
    for c in read_program(step.compiled.as_text(), mesh).collectives:
        if {"data", "fsdp"} & set(c.axes) and c.payload > 64:
            times, payload = found.get((c.kind, c.axes), (set(), 0))
            found[c.kind, c.axes] = times | {c.executions}, payload + c.executions * c.payload
    found = {key: (frozenset(times), size) for key, (times, size) in found.items()}
    return found


def report_of(step):
    (reduced,) = step.findings[Kind.REDUCTION]
    return str(reduced)


@functools.cache
def one_device(policy=None):
    """Of a whole batch: what is dropped does not depend on microbatches either."""
    return train(masked, policy=policy, accumulate=1)[1]


SLOW = pytest.mark.slow
MIXED = [SLOW, pytest.mark.filterwarnings("ignore::jaxtrain.precision.PrecisionWarning")]
PIPED = {"pipe": 2, "data": 2, "fsdp": 2}
INTERLEAVED = {"schedule": "interleaved", "stack": jt.Stack(virtual=2)}


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
        (PIPED, {"schedule": "1f1b"}),
        ({"data": 4, "fsdp": 2}, {"zero": 2}),
        pytest.param(PIPED, {"schedule": "gpipe", "remat": "none"}, marks=SLOW),
        pytest.param(PIPED, INTERLEAVED, marks=SLOW),
        pytest.param({"pipe": 2, "fsdp": 2, "tensor": 2}, INTERLEAVED, marks=SLOW),
        pytest.param({"pipe": 2, "fsdp": 4}, {"remat": "none"}, marks=SLOW),
        pytest.param({"data": 4, "tensor": 2}, {}, marks=SLOW),
        pytest.param({"data": 2, "fsdp": 4}, {"zero": 3}, marks=SLOW),
        pytest.param({"data": 4, "fsdp": 2}, {"policy": jt.Policy.fp16(64.0)}, marks=MIXED),
    ],
    ids=str,
)
def test_weights_are_gathered_and_gradients_reduced_once_per_step(axes, options):
    mesh = jt.make_mesh(**axes)
    step, found = train(masked, mesh, gather="step", **options)
    expected = one_device(options.get("policy"))
    # The same masks, too. In float16 a product over fewer rows is rounded sooner.
    agree(found, expected, 1e-3 if options.get("policy") else TOLERANCE)
    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    split = 2 * LAYERS * WIDTH * HIDDEN // mesh.shape["tensor"] // mesh.shape["pipe"] * 4
    narrow = split // 2 if options.get("policy") else split
    sums = batch_collectives(step, mesh)
    assert {times for times, _ in sums.values()} == {frozenset({1})}
    kinds = {(kind, axes): size for (kind, axes), (_, size) in sums.items()}
    if fsdp > 1 and not options.get("zero"):
        # What fsdp splits is gathered and scattered whole; a part of it is then left for data.
        assert kinds.pop(("all-gather", ("fsdp",))) == narrow
        assert kinds.pop(("reduce-scatter", ("fsdp",))) == split
    if data > 1 and not options.get("zero"):
        assert split // fsdp <= kinds.pop(("all-reduce", ("data",))) < split // fsdp + 512
        # With the gain go the loss and its metrics.
        assert sum(kinds.values()) < 512
    assert report_of(step).startswith("once per step over ")
    assert ("gathered once" in report_of(step)) == (fsdp > 1)


@pytest.mark.parametrize(("scale", "skipped"), [(2.0**18, 0), (2.0**19, 1)])
def test_what_overflows_in_float16_does_not_depend_on_the_devices(scale, skipped):
    @jt.row_wise
    def loss_fn(params, batch, rng):
        y = batch["x"].astype(params["w"].dtype) * params["w"]  # whose cotangent is scale / rows
        return jt.WeightedLoss(y.astype(jnp.float32).sum(), jnp.float32(len(y)))

    policy, optimizer, batch = jt.Policy.fp16(scale), optax.sgd(0.1), {"x": np.full(8, 0.01, "f")}
    for mesh in (None, jt.make_mesh(data=8)):
        given = {"mesh": mesh, "policy": policy}
        state = jt.init_state(
            lambda rng: {"w": jnp.ones(())}, optimizer, rng=jax.random.key(0), **given
        )
        step = jt.build_train_step(loss_fn, optimizer, policy=policy, gather="step")
        _, metrics = jt.compile_step(step, state, batch, mesh=mesh)(state, batch)
        assert int(metrics["skipped"]) == skipped


def test_what_splits_no_weight_is_reduced_once_whoever_gathers():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    step, found = train(masked, mesh)
    agree(found, one_device())
    whole = (2 * LAYERS * WIDTH * HIDDEN // 4 + WIDTH) * 4
    over_data = {k: x for k, x in batch_collectives(step, mesh).items() if "data" in k[1]}
    (((kind, axes), (times, size)),) = over_data.items()
    assert (kind, axes, times) == ("all-reduce", ("data",), {1})
    assert whole <= size < whole + 4 * WIDTH * 4
    assert report_of(step).startswith("once per step over data; over fsdp in each of 4 microbatch")


NETWORK = [
    # Weights are split over fsdp, inside each half: what crosses are sums of a half of a half.
    ({"data": 4, "fsdp": 2, "dcn_data": 2}, {"gather": "step"}),
    pytest.param({"data": 4, "tensor": 2, "dcn_data": 2}, {}, marks=SLOW),
    pytest.param({"data": 2, "fsdp": 4, "dcn_fsdp": 2}, {"gather": "step"}, marks=SLOW),
    pytest.param({"fsdp": 8, "dcn_fsdp": 4}, {"gather": "step"}, marks=SLOW),
    pytest.param(
        {"data": 4, "fsdp": 2, "dcn_data": 2, "dcn_fsdp": 2}, {"gather": "step"}, marks=SLOW
    ),
    pytest.param({"data": 8, "dcn_data": 2}, {"zero": 3, "gather": "step"}, marks=SLOW),
    pytest.param({"pipe": 2, "data": 4, "dcn_data": 2}, {"gather": "step"}, marks=SLOW),
    pytest.param({"pipe": 2, "fsdp": 4, "dcn_pipe": 2}, {"gather": "step"}, marks=SLOW),
    pytest.param({"pipe": 2, "data": 2, "fsdp": 2, "dcn_pipe": 2, "dcn_data": 2}, {}, marks=SLOW),
    pytest.param({"pipe": 2, "data": 4, "dcn_pipe": 2}, INTERLEAVED, marks=SLOW),
]


@pytest.mark.parametrize(("axes", "options"), NETWORK, ids=str)
def test_gradients_are_reduced_inside_first_and_cross_the_slow_network_in_shares(
    axes, options, monkeypatch
):
    sizes = {axis: size for axis, size in axes.items() if not axis.startswith("dcn")}
    parts = {axis: axes.get(f"dcn_{axis}", 1) for axis in ("pipe", "data", "fsdp")}
    each = 8 // math.prod(parts.values())
    monkeypatch.setattr("jaxtrain.sharding.mesh.host_of", lambda device: device.id // each)
    mesh = jt.make_mesh(**axes)
    step, found = train(masked, mesh, **options)
    agree(found, one_device())
    crossing = collections.Counter()
    for c in read_program(step.compiled.as_text(), mesh).collectives:
        if c.islands > 1 and c.payload > 64:
            crossing[c.kind, c.axes] += c.executions * c.payload
    # By definition: gradients of up and down that one device has, in float32.
    split = 2 * LAYERS * WIDTH * HIDDEN // sizes.get("tensor", 1) // sizes.get("pipe", 1) * 4
    across_pipe = {key: crossing.pop(key) for key in list(crossing) if "pipe" in key[1]}
    assert (sum(across_pipe.values()) > 512) == (parts["pipe"] > 1)
    scattered = "data" if options.get("zero") else "fsdp"
    if parts[scattered] > 1 and (scattered == "fsdp" or options.get("zero")):
        inside = sizes[scattered] // parts[scattered]
        # Each brings its piece across once, and what it sums is the share of the fast part.
        assert crossing.pop(("all-gather", (scattered,))) == split // inside
        assert crossing.pop(("reduce-scatter", (scattered,))) == split // inside
    if parts["data"] > 1 and not options.get("zero"):
        share = split // sizes.get("fsdp", 1) // (sizes["data"] // parts["data"])
        assert share <= crossing.pop(("all-reduce", ("data",))) < share + 256
    assert sum(crossing.values()) < 512
    taken = ("data", "fsdp") if "gather" in options else ("data",)
    slow, all_of = (math.prod(x.get(axis, 1) for axis in taken) for x in (parts, sizes))
    assert ("on fast links first" in report_of(step)) == (all_of > slow > 1)


def contrastive(params, batch, rng):
    """No sum over rows: each is told from all others."""
    x = batch["x"] + jnp.tanh(batch["x"] @ params["blocks"]["up"][0]) @ params["blocks"]["down"][0]
    scores = jax.nn.log_softmax(x @ batch["y"].T / WIDTH).diagonal()
    return jt.WeightedLoss(-(scores * batch["mask"]).sum(), batch["mask"].sum())


@jt.row_wise
def drawn_whole(params, batch, rng):
    loss = masked(params, batch, rng)
    noise = jax.random.normal(rng, batch["x"].shape) @ params["gain"]
    return dataclasses.replace(loss, total=loss.total + 0.1 * (noise * batch["mask"]).sum())


@jt.row_wise
def with_the_last(params, batch, rng):
    loss = masked(params, batch, rng)
    metrics = {"last": jt.Last(jnp.abs(batch["x"]).sum())}
    return dataclasses.replace(loss, metrics=metrics)


@jt.row_wise
def drawn_with_split_keys(params, batch, rng):
    keys = jax.random.split(rng, len(batch["x"]))
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
    return masked(params, dict(batch) | {"x": batch["x"] + noise}, None)


@jt.row_wise
def dropped_in_vmap(params, batch, rng):
    x = jax.vmap(lambda row: drop(row, 0.5, rng))(batch["x"])
    return masked(params, dict(batch) | {"x": x}, None)


WHOLE = {
    dropped_in_vmap: "draws numbers otherwise than by jaxtrain.ops.numerics.drop",
    drawn_with_split_keys: "draws numbers otherwise than by jaxtrain.ops.numerics.drop",
    contrastive: "not declared a sum over rows",
    drawn_whole: "draws numbers otherwise than by jaxtrain.ops.numerics.drop",
    with_the_last: "metric 'last' is the last of all parts",
}


@pytest.mark.parametrize(
    "loss_fn",
    [
        contrastive,
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (drawn_whole, drawn_with_split_keys, dropped_in_vmap, with_the_last)
        ),
    ],
    ids=lambda loss: loss.__name__,
)
def test_what_is_no_sum_over_rows_is_left_whole_and_said_to_be(loss_fn):
    mesh = jt.make_mesh(data=4, fsdp=2)
    step, found = train(loss_fn, mesh, gather="step")
    assert report_of(step).startswith("in every microbatch, for ")
    assert WHOLE[loss_fn] in report_of(step)
    agree(found, train(loss_fn)[1])


def test_a_false_declaration_is_found_by_parity():
    given = {"rules": RULES, "layouts": ["data=8"], "accumulate": 2, "steps": 1}
    jt.parity(init, contrastive, rows(), **given)
    with pytest.raises(AssertionError, match="loss"):
        jt.parity(init, jt.row_wise(contrastive), rows(), **given)


@pytest.mark.slow
def test_a_batch_leaf_that_holds_no_rows_stays_whole():
    @jt.row_wise
    def loss_fn(params, batch, rng):
        batch = dict(batch)
        batch["mask"] *= batch.pop("of_class")[batch.pop("label")]
        return masked(params, batch, None)

    batch = dict(rows()) | {"of_class": np.arange(8, dtype="f4"), "label": np.arange(ROWS) % 8}
    jt.parity(init, loss_fn, batch, rules=RULES, layouts=["data=4,fsdp=2"], gather="step", steps=1)


def test_a_scalar_is_no_sum_over_rows():
    with pytest.raises(ValueError, match="returned a scalar, which weighs 1 however many rows"):
        jt.row_wise(lambda params, batch, rng: batch.sum())(None, jnp.ones(3), None)


def test_when_weights_are_gathered_is_chosen_by_memory_with_a_reason(monkeypatch):
    mesh, chip = jt.make_mesh(data=2, fsdp=4), chip_of("NVIDIA H100 80GB HBM3")

    def choice(**given):
        layout = jt.Layout(accumulate=given.pop("accumulate", 4), gather=given.pop("when", None))
        given = {"layout": layout, "gather": "model", "policy": "bf16", "loss_fn": masked} | given
        given |= {"optimizer": chain(), "batch": rows(), "rules": jt.Rules(RULES)}
        own = jt.Experiment.of(name="toy", init_fn=init, train_batches=None, steps=1, **given)
        state = make_abstract_state(own, mesh)
        return choose_gather(own, state, mesh, jt.gradient_shardings(state))

    state = jt.abstract_state(init, chain(), mesh=mesh, rules=RULES)
    split = 2 * LAYERS * WIDTH * HIDDEN
    more = kept_by_gathering(state.params, jt.gradient_shardings(state), jnp.bfloat16)
    assert more == split * 2 + (split - split // 4) * 4
    assert choice() == ("model", Why.UNKNOWN_MEMORY(kind="cpu"))
    for memory, *expected in ((2, "step", Why.ROOM), (1.9, "model", Why.NO_ROOM)):
        size = int(memory * (more + local_bytes(state)))
        own = dataclasses.replace(chip, memory_bytes=size)
        monkeypatch.setattr("jaxtrain.build.chip_of", lambda kind, own=own: own)
        sizes = {"kept_bytes": more + local_bytes(state), "memory_bytes": size}
        assert choice() == (expected[0], expected[1](**sizes))
    assert choice(accumulate=1) == ("model", Why.ONE_MICROBATCH())
    assert str(choice(when="step")) == "once per step: as asked for"
    assert choice(gather=None) == (None, None)
    with pytest.raises(ValueError, match=r"cannot be gathered once per step .*not declared a sum"):
        choice(when="step", loss_fn=contrastive)
    with pytest.raises(
        ValueError, match=r"`gather` is 'layer' and the model of experiment 'toy' does"
    ):
        choice(when="layer", gather=None)


def test_a_leaf_that_has_no_rows_is_not_cut():
    @jt.row_wise
    def loss_fn(params, batch, rng):
        error = jnp.square(batch["x"] * params["gain"] - batch["shift"].sum(0)).sum(-1)
        return jt.WeightedLoss(error.sum(), jnp.float32(len(error)))

    batch = {"x": rows()["x"], "shift": rows()["y"]}
    rules = jt.Rules(batch=[("^shift$", (None, None))])

    def trained(mesh):
        given = {"mesh": mesh, "rules": rules}
        state = jt.init_state(lambda rng: {"gain": jnp.ones(WIDTH)}, optax.sgd(1e-3), rng, **given)
        step = jt.build_train_step(loss_fn, optax.sgd(1e-3), gather="step")
        new, metrics = jt.compile_step(step, state, batch, **given)(state, batch)
        return jax.device_get((new.params, metrics["loss"]))

    rng = jax.random.key(0)
    mesh = jt.make_mesh(data=8)
    assert worst(trained(mesh), trained(None))[0] <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["model", "step"])
@pytest.mark.parametrize("gathers", [False, True])
def test_stages_may_look_up_and_read_weights_of_their_own_however_these_are_split(gather, gathers):
    """A table and a head that only one stage reads, split over fsdp and tensor."""
    own = (lambda p, name: jt.gather(p[name], name)) if gathers else lambda p, name: p[name]

    def more(rng):
        keys = jax.random.split(rng, 3)
        shapes = {"table": (WIDTH, WIDTH), "pre": (WIDTH, WIDTH), "head": (WIDTH, HIDDEN)}
        return init(rng) | {
            name: 0.3 * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def embed(params, batch, rng):
        x = batch["x"] + own(params, "table")[batch["word"]]
        return jt.constrain(x + jnp.tanh(x @ own(params, "pre")), "batch", None)

    def score(params, x, batch):
        log_p = jax.nn.log_softmax(x @ own(params, "head"))
        nll = -jnp.take_along_axis(log_p, batch["word"][:, None], 1)[:, 0]
        return jt.WeightedLoss((nll * batch["mask"]).sum(), batch["mask"].sum())

    rules = [
        ("table$", ("vocab", "embed")),
        ("pre$", ("mlp", "embed")),
        ("head$", ("embed", "vocab")),
    ]
    stages = jt.Stages(embed, block, score, row_wise=True)
    batch = dict(rows()) | {"word": np.arange(ROWS) * 7 % WIDTH}
    given = {"rules": [*RULES, *rules], "layouts": ["pipe=2,fsdp=2,tensor=2"], "stages": stages}
    loss_fn = jt.loss_from_stages(stages)
    jt.parity(more, loss_fn, batch, gather=gather, accumulate=4, steps=1, **given)
