"""Replicas that train by themselves are their definition, on any mesh, and send nothing between
meetings."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import build
from jaxtrain.loss import SUMS
from jaxtrain.methods.federated import Federated, federated
from jaxtrain.methods.local_updates import Local, local_updates
from jaxtrain.methods.meeting import RATES, joined
from jaxtrain.methods.method import Method
from jaxtrain.models import decoder
from jaxtrain.planning.ahead_of_time import explain
from jaxtrain.planning.hlo import read_program
from jaxtrain.planning.meetings import meetings_of
from jaxtrain.planning.targets import parse_target
from jaxtrain.run.options import RunOptions
from jaxtrain.sharding.rules import Rules
from jaxtrain.tree import named_leaves
from tests import problems

FAST = {"xla_backend_optimization_level": 0}
MODEL = decoder.DecoderConfig(
    vocab_size=67, seq_len=8, layers=2, width=16, heads=2, dropout=0.1, bias=False
)
STEPS = 5


def batch(number):
    rng = np.random.default_rng(number)
    rows = {name: rng.integers(0, 67, (16, 8)).astype(np.int32) for name in ("tokens", "targets")}
    return rows | {"mask": (np.arange(8) < rng.integers(1, 9, (16, 1))).astype(np.float32)}


def experiment(rule="adamw", rate=0.01, model=MODEL, **layout):
    own = {"init_fn": functools.partial(decoder.init, model), "stages": decoder.stages(model)}
    own |= {"loss_fn": None, "batch": batch(0), "train_batches": None, "gathers_layers": True}
    own["optimizer"] = lambda stack: jt.make_optimizer(
        rule, rate, clip_norm=1e3, eps=1e-3 if rule == "adamw" else None, stacked=stack.axes
    )
    own["rules"] = Rules(decoder.RULES)
    made = jt.Experiment.of(name="tiny", steps=STEPS, **own)
    return made.with_(**problems.with_layout(layout))


def trained(made, count=1, batches=batch, compiler_options=None):
    mesh = build.make_experiment_mesh(made, jax.devices()[:count])
    state = build.make_state(made, mesh)
    train = build.compile_train(made, state, mesh, compiler_options=compiler_options)
    for step in range(made.steps):
        state, metrics = train(state, batches(step))
    return jax.device_get(state), jax.device_get(metrics), train


def test_what_a_loss_reports_is_of_the_rows_of_all_replicas():
    """The largest, a sum, and a mean of rows of a kind, of which one replica has none."""
    rows = {"x": np.float32([1, 5, 2, 3]), "kind": np.float32([0, 0, 1, 1])}

    def loss_fn(params, batch, rng):
        x, kind = params["w"] * batch["x"], batch["kind"]
        own = {"most": jt.Max(x.max()), "kinds": jt.Sum(kind.sum())}
        own["of_kind"] = (x * kind).sum(), kind.sum()
        return jt.WeightedLoss(x.sum(), len(x), own)

    made = jt.Experiment.of(
        name="tiny",
        steps=1,
        init_fn=lambda rng: {"w": jax.numpy.ones(())},
        loss_fn=loss_fn,
        batch=rows,
        train_batches=None,
        optimizer=jt.make_optimizer("sgd", 0.1),
    )
    clients = federated(made, Federated(per_round=2), local_batch=2)
    for each in (made, local_updates(made, Local(replicas=2)), clients):
        _, metrics, _ = trained(each, batches=lambda step: rows, compiler_options=FAST)
        found = [float(metrics[name]) for name in ("most", "kinds", "of_kind", "loss")]
        assert found == [5.0, 2.0, 2.5, 2.75]


def test_a_replica_whose_rows_do_not_count_has_no_largest_metric():
    weight, most = np.float32([0, 2, 1]), np.float32([9, -3, -2])
    sums = jt.WeightedLoss(np.float32([9, 4, 6]), weight, {"most": jt.Max(most, np.ones(3))})
    told = {"loss": most, "most": most, "weight": weight, "skipped": np.float32([1, 0, 0])}
    found = joined(told | {SUMS: sums})
    assert (found["most"], found["weight"], found["skipped"]) == (-2, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_a_single_replica_has_the_bits_of_the_plain_step(every):
    state, told, _ = trained(experiment())
    found, metrics, _ = trained(local_updates(experiment(), Local(replicas=1, every=every)))
    assert found.method["members"].rng.shape == (1,)
    for part in ("params", "opt_state"):
        ours = named_leaves(jax.tree.map(lambda x: x[0], getattr(found.method["members"], part)))
        for name, x in named_leaves(getattr(state, part)).items():
            assert np.array_equal(x, ours[name]), name
    for name, x in named_leaves(state.params).items():
        assert np.array_equal(x, named_leaves(found.params)[name]), name
    assert metrics == told


def test_every_step_they_are_data_parallel_by_the_weight_of_their_rows():
    model = dataclasses.replace(MODEL, dropout=0.0)
    state, told, _ = trained(experiment("sgd", 0.3, model), compiler_options=FAST)
    local = Local(replicas=8, every=1)
    made = local_updates(experiment("sgd", 0.3, model, mesh={"data": 8}), local)
    found, metrics, _ = trained(made, 8, compiler_options=FAST)
    for name, x in named_leaves(state.params).items():
        mine = named_leaves(found.params)[name]
        np.testing.assert_allclose(mine, x, rtol=0, atol=2e-6 * abs(x).max(), err_msg=name)
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-6)
    assert metrics["weight"] == told["weight"]


def linear(steps=8, **local):
    """Least squares of weighted rows, and an experiment of it."""

    start, rows = problems.weighted_rows(3)
    made = jt.Experiment.of(
        name="linear",
        init_fn=lambda rng: jax.tree.map(jax.numpy.asarray, start),
        loss_fn=problems.least_squares,
        batch=rows(0),
        train_batches=None,
        optimizer=jt.make_optimizer("momentum", 0.05, momentum=0.5),
        steps=steps,
    )
    return start, rows, local_updates(made, Local(**local))


def defined(start, rows, steps, rate, local):
    """Local updates in NumPy and float64, written down anew."""
    R, names, F = local.replicas, ("a", "b"), local.fragments
    anchor = {n: start[n].astype(float) for n in names}
    own = [{n: anchor[n].copy() for n in names} for _ in range(R)]
    inner = [{n: 0.0 * anchor[n] for n in names} for _ in range(R)]
    first = 1e-6 if local.outer == "yogi" else 0.0  # what optax begins its averages with
    outer = {n: [0.0 * anchor[n] + first, 0.0 * anchor[n] + first, 0] for n in names}
    seen, coming, T = np.zeros((R, F)), {}, local.delay
    eta = RATES[local.outer] if local.rate is None else local.rate
    groups = [names] if F == 1 else [("a",), ("b",)]
    due = lambda fragment, step: (step + fragment * local.every // F) % local.every == 0  # noqa: E731

    def mean(fragment):
        share = seen[:, fragment] / seen[:, fragment].sum()
        seen[:, fragment] = 0
        return {
            n: sum(s * each[n] for s, each in zip(share, own, strict=True))
            for n in groups[fragment]
        }

    for step in range(1, steps + 1):
        for fragment in range(F) if T else ():
            if step - 1 > local.after and due(fragment, step - 1):
                coming[fragment] = step - 1 + T, mean(fragment)
        batch = {n: x.astype(float).reshape(R, -1, *x.shape[1:]) for n, x in rows(step - 1).items()}
        for r in range(R):
            x, y, mask = (batch[n][r] for n in ("x", "y", "mask"))
            error = 2 * mask[:, None] * (x @ own[r]["a"] + own[r]["b"] - y) / mask.sum()
            grads = {"a": x.T @ error, "b": error.sum(0)}
            for n in names:
                g = grads[n] + local.proximal * (own[r][n] - anchor[n])
                inner[r][n] = g + 0.5 * inner[r][n]
                own[r][n] = own[r][n] - rate * inner[r][n]
            seen[r] += mask.sum()
        # The matrix is the larger one and in the first fragment, the vector in the last.
        for fragment, group in enumerate(groups):
            met, at_once = [], step <= local.after or step == steps
            if fragment in coming and (at_once or coming[fragment][0] == step):
                met = [(coming.pop(fragment)[1], 0.5)]
            if at_once or (not T and due(fragment, step)):
                met += [(None, 0.0)]
            for means, mix in met:
                means = mean(fragment) if means is None else means
                for n in group:
                    moved, (m, v, t) = anchor[n] - means[n], outer[n]
                    if local.outer == "average":
                        new = means[n]
                    elif local.outer == "sgd":
                        new = anchor[n] - eta * moved
                    elif local.outer == "nesterov":
                        m = moved + local.momentum * m
                        new = anchor[n] - eta * (moved + local.momentum * m)
                    else:
                        t, m = t + 1, 0.9 * m + 0.1 * moved
                        yogi = v - 0.01 * np.sign(v - moved**2) * moved**2
                        v = yogi if local.outer == "yogi" else 0.99 * v + 0.01 * moved**2
                        scale = np.sqrt(v / (1 - 0.99**t)) + 1e-3
                        new = anchor[n] - eta * (m / (1 - 0.9**t)) / scale
                    anchor[n], outer[n] = new, [m, v, t]
                    for each, moments in zip(own, inner, strict=True):
                        each[n] = mix * each[n] + (1 - mix) * new
                        moments[n] *= local.inner == "kept"
    return anchor


@pytest.mark.parametrize(
    "local",
    [
        Local(replicas=4, every=3, outer="nesterov", fragments=2, proximal=0.3, after=1),
        Local(replicas=4, every=3, outer="nesterov", fragments=2, delay=1, after=1),
        pytest.param(Local(replicas=4, every=3, inner="reset"), marks=pytest.mark.slow),
        pytest.param(Local(replicas=4, every=4, delay=3, outer="sgd"), marks=pytest.mark.slow),
        pytest.param(Local(replicas=2, every=3), marks=pytest.mark.slow),
        pytest.param(Local(replicas=4, every=2, outer="adam", rate=0.1), marks=pytest.mark.slow),
        pytest.param(Local(replicas=8, every=5, proximal=1.0), marks=pytest.mark.slow),
        pytest.param(Local(replicas=4, every=2, outer="yogi", rate=0.1), marks=pytest.mark.slow),
        pytest.param(Local(replicas=4, every=2, outer="sgd", rate=0.5), marks=pytest.mark.slow),
    ],
)
def test_they_are_their_definition(local):
    start, rows, made = linear(**vars(local))
    wanted = defined(start, rows, 8, 0.05, local)
    for count in (1, 2):
        laid = made.with_(**problems.with_layout({"mesh": {"data": count}}))
        state, _, _ = trained(laid, count, rows, FAST)
        for name, x in wanted.items():
            np.testing.assert_allclose(state.params[name], x, rtol=2e-5, err_msg=name)


def test_what_is_frozen_is_not_pulled_and_weights_may_be_negative():
    start, rows, made = linear(replicas=4, every=2, proximal=0.5)
    state, told, _ = trained(made.with_(freeze=("^b$",)), 1, rows, FAST)
    assert np.array_equal(state.params["b"], start["b"])
    loss_fn = made.task.loss_fn

    def negative(params, batch, rng):
        loss = loss_fn(params, batch, rng)
        return jt.WeightedLoss(total=-loss.total, weight=-loss.weight)

    mirrored = made.with_(freeze=("^b$",), loss_fn=jt.row_wise(negative))
    found, metrics, _ = trained(mirrored, 1, rows, FAST)
    np.testing.assert_allclose(found.params["a"], state.params["a"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-6)


def test_a_run_is_resumed_with_another_number_of_replicas(tmp_path):
    laid = lambda made, data: made.with_(**problems.with_layout({"mesh": {"data": data}}))  # noqa: E731
    _, rows, four = linear(replicas=4, every=3, outer="nesterov", delay=1)
    before, _, _ = trained(laid(four, 4), 4, rows, FAST)
    with jt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(8, before)
        two = laid(linear(replicas=2, every=3, outer="nesterov", delay=1)[2], 2)
        mesh = build.make_experiment_mesh(two, jax.devices()[:2])
        abstract = build.make_abstract_state(two, mesh)
        shapes = checkpoints.shapes()
        state = build.restore_state(two, abstract, checkpoints.restore, shapes)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, state, abstract))
    members, then = state.method["members"], before.method["members"]
    assert len(members.rng) == 2
    for name, x in named_leaves(before.params).items():
        assert np.array_equal(named_leaves(state.params)[name], x)
        for own in named_leaves(members.params)[name]:
            assert np.array_equal(own, x)
    moments = named_leaves(members.opt_state)
    for name, x in named_leaves(then.opt_state).items():
        assert x.any(), name
        np.testing.assert_allclose(moments[name][1], x.mean(0), rtol=1e-6, err_msg=name)
    for name, x in named_leaves(before.method["outer"]).items():
        assert np.array_equal(named_leaves(state.method["outer"])[name], x), name
    assert then.step[0] == members.step[1] == 8
    assert not state.method["weight"].any()
    train = build.compile_train(two, state, mesh, compiler_options=FAST)
    assert np.isfinite(train(state, rows(8))[1]["loss"])


@pytest.mark.slow
def test_moments_begin_anew_at_meetings_and_the_schedule_goes_on():
    local = Local(replicas=2, every=5, inner="reset")
    state, _, _ = trained(local_updates(experiment(), local), compiler_options=FAST)
    moments = named_leaves(state.method["members"].opt_state)
    counts = {int(x[0]) for name, x in moments.items() if name.endswith("count")}
    assert counts == {0, STEPS}
    assert not any(x.any() for name, x in moments.items() if "/mu/" in name or "/nu/" in name)


def sent(text, groups=r"\S+"):
    """Bytes of the results of collectives of a program: within branches, and outside."""
    found, branches = {True: 0, False: 0}, set()
    for line in text.splitlines():
        if " conditional(" in line:
            branches |= set(re.findall(r"%([\w.-]+)[,}]", line.partition("branch_computations")[2]))
            branches |= set(re.findall(r"(?:true|false)_computation=%([\w.-]+)", line))
    inside = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            inside = line.split()[0].lstrip("%")
        kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
        if match := re.search(rf" = (.*?) (?:{kinds})(?:-start)?\(", line):
            shapes = re.findall(r"[fsu]32\[([\d,]*)\]", match[1])
            size = sum(4 * int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)
            found[inside in branches] += size
    return found


@pytest.mark.slow
def test_nothing_is_sent_between_meetings_and_then_the_parameters_once():
    made = local_updates(
        experiment(mesh={"data": 4}), Local(replicas=4, every=8, outer="nesterov", fragments=2)
    )
    mesh = build.make_experiment_mesh(made, jax.devices()[:4])
    state = build.make_abstract_state(made, mesh)
    text = build.compile_train(made, state, mesh).compiled.as_text()
    size = sum(4 * x.size for x in jax.tree.leaves(state.params))
    found = sent(text)
    assert size <= found[True] <= 1.02 * size + 64
    assert found[False] < 256  # of metrics and weights
    meeting = meetings_of(read_program(text, mesh), parse_target("cpu:4"), 8)
    assert 1.5 * size <= meeting.fast <= 1.53 * size + 8 * 256  # by a ring of four
    plain = experiment(mesh={"data": 4})
    text = build.compile_train(plain, build.make_abstract_state(plain, mesh), mesh)
    assert sent(text.compiled.as_text())[False] > size / 2  # a layer of the loop is counted once
    for name, x in named_leaves(state.method["members"]).items():  # each its own
        assert x.sharding.spec[0] == "data", name


def test_a_meeting_in_8_bits_sends_a_quarter_and_is_near():
    def loss_fn(params, batch, rng):
        y = jax.numpy.tanh(batch["x"] @ params["a"]) @ params["b"]
        return jt.WeightedLoss(total=(y**2).sum(), weight=float(len(y)))

    def rows(number):
        return {"x": np.random.default_rng(number).normal(size=(8, 64)).astype(np.float32)}

    init = lambda rng: dict(zip("ab", jax.random.normal(rng, (2, 64, 64)) / 8, strict=True))  # noqa: E731
    own = {"init_fn": init, "loss_fn": jt.row_wise(loss_fn), "batch": rows(0)}
    own |= {"train_batches": None, "optimizer": jt.make_optimizer("sgd", 0.01)}
    made = jt.Experiment.of(name="wide", steps=2, **own)
    made, found = made.with_(**problems.with_layout({"mesh": {"data": 4}})), {}
    for bits in (8, 32):
        local = Local(replicas=4, every=2, bits=bits)
        state, _, train = trained(local_updates(made, local), 4, rows, FAST)
        mesh = build.make_experiment_mesh(made, jax.devices()[:4])
        start = jax.device_get(build.make_state(made, mesh).params)
        found[bits] = state.params, [c for c in explain(train, mesh).collectives if c.share < 1]
    (ours, in_8), (exact, in_32) = found[8], found[32]
    size = sum(4 * x.size for x in jax.tree.leaves(exact))
    for bits, rows in ((8, in_8), (32, in_32)):  # a ring's all-reduce sends twice what it reduces
        sent = sum(c.sent * c.executions / c.share for c in rows)
        wanted = 2 * 3 / 4 * size * bits / 32
        assert wanted <= sent <= 1.1 * wanted, bits
    for name, x in exact.items():
        off, moved = abs(ours[name] - x).max(), abs(x - start[name]).max()
        assert 1e-4 * moved < off < 0.02 * moved, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 4},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"data": 2, "fsdp": 4},
        {"data": 2, "pipe": 2},
    ],
)
@pytest.mark.parametrize("delay", [0, 1])
def test_the_mesh_changes_nothing(axes, delay):
    local = Local(replicas=4, every=2, outer="nesterov", fragments=2, delay=delay)
    wanted, told, _ = trained(local_updates(experiment("sgd", 0.3), local), compiler_options=FAST)
    count = int(np.prod(list(axes.values())))
    pipeline = {"schedule": "1f1b", "microbatches": 2} if "pipe" in axes else {}
    laid = local_updates(experiment("sgd", 0.3, mesh=axes, pipeline=pipeline), local)
    found, metrics, _ = trained(laid, count, compiler_options=FAST)
    for part in ("params", "method"):
        for name, x in named_leaves(getattr(wanted, part)).items():
            if "rng" in name:
                continue
            mine, atol = named_leaves(getattr(found, part))[name], 1e-5 * abs(x).max()
            atol += 3e-7  # a displacement has the rounding of parameters
            np.testing.assert_allclose(mine, x, rtol=0, atol=atol, err_msg=name)
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "layout", "why"),
    [
        ({"replicas": 3}, {}, "a batch has 16 rows"),
        ({"replicas": 4}, {"zero": 1}, "`zero` is 1"),
        ({"replicas": 4}, {"accumulate": 8}, "a multiple of 32 rows"),
        ({"replicas": 4, "rate": 0.1}, {}, "average, which has no rate"),
        ({"replicas": 4, "every": 2, "fragments": 3}, {}, "`local.fragments` is 3"),
        ({"replicas": 4, "every": 2, "delay": 2}, {}, "`local.delay` is 2"),
        ({"replicas": 4, "inner": "reset", "fragments": 2}, {}, "`local.inner` is reset"),
        ({"replicas": 0}, {}, "replicas"),
        ({"every": 10}, {}, "there are no replicas"),
        ({"replicas": 4, "outer": "sgd", "momentum": 0.5}, {}, "which has none"),
        ({"replicas": 4, "outer": "nesterov", "momentum": 1.5}, {}, "is 1.5: give less than 1"),
    ],
)
def test_what_cannot_be_is_said(given, layout, why):
    with pytest.raises(ValueError, match=why):
        local_updates(experiment(**layout), Local(**given))


def test_what_the_mesh_and_the_experiment_cannot_is_said():
    made = local_updates(experiment(mesh={"data": 8}), Local(replicas=4))
    mesh = build.make_experiment_mesh(made, jax.devices()[:8])
    with pytest.raises(ValueError, match="mesh axis 'data' has size 8"):
        build.compile_train(made, build.make_abstract_state(made, mesh), mesh)
    average = experiment().with_(optimizer=jt.make_optimizer("adamw", 0.1, ema=0.9))
    made = local_updates(average, Local(replicas=4))
    with pytest.raises(ValueError, match="keeps averages"):
        build.make_abstract_state(made, build.make_experiment_mesh(made, jax.devices()[:1]))
    uneven = experiment().with_(batch=batch(0) | {"factors": np.ones(4)})
    with pytest.raises(ValueError, match="have 4 and 16 rows"):
        local_updates(uneven, Local(replicas=4))
    config = jt.Config(
        local=Local(replicas=4), run=RunOptions(eval_every=20, early_stop_patience=2)
    )
    with pytest.raises(ValueError, match="give a multiple of 50"):
        config.experiment("x", init_fn=None, loss_fn=None, batch=None, train_batches=None)
    with pytest.raises(ValueError, match="a method of its own"):
        local_updates(experiment().with_(method=Method(lambda step: step)), Local(replicas=4))
