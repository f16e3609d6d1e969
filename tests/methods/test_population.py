"""Members of a population are their trainings alone, and share what does not train."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain import build, cli, hf
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.low_rank import LoRA, Strengths
from jaxtrain.methods.population import (
    Member,
    Population,
    exploit,
    follow,
    lineage,
    populate,
)
from jaxtrain.models import decoder
from jaxtrain.run import trained
from jaxtrain.run.main import main, parse
from jaxtrain.sharding.rules import Rules
from jaxtrain.tree import named_leaves
from tests import problems
from tests.methods.test_local_updates import sent

FAST = {"xla_backend_optimization_level": 0}
SHAPE = {"vocab_size": 67, "seq_len": 8, "layers": 2, "width": 16, "heads": 2}
MODEL = decoder.DecoderConfig(**SHAPE)
STEPS, P = 3, 3
RATES, RANKS, SEEDS = (0.01, 0.001, 0.003), (4, 3, 2), (0, 5, 5)
BATCH = {name: np.random.default_rng(0).integers(0, 67, (8, 8)) for name in ("tokens", "targets")}
BATCH = {name: x.astype(np.int32) for name, x in BATCH.items()} | {"mask": np.ones((8, 8), "f")}


def optimizer(stack, learning_rate=0.5):
    return jt.make_optimizer("adamw", learning_rate, clip_norm=0.1, eps=1e-4, stacked=stack.axes)


def experiment(lora=LoRA(rank=4), make=optimizer, seed=0):  # noqa: B008
    own = {"init_fn": functools.partial(decoder.init, MODEL), "stages": decoder.stages(MODEL)}
    own |= {"params": lambda: decoder.init(MODEL, jax.random.key(9)), "rules": Rules(decoder.RULES)}
    own |= {"loss_fn": None, "batch": BATCH, "train_batches": None, "optimizer": make}
    made = jt.Experiment.of(name="tiny", steps=STEPS, seed=seed, gathers_layers=True, **own)
    return apply(made, lora)


@functools.cache
def of_all(together="map", axes=()):
    whole = experiment(Strengths(rank=max(RANKS)), follow(optimizer))
    members = [
        Member(experiment(Strengths(rank=rank)).laid.init_fn, seed, {"learning_rate": rate})
        for rank, seed, rate in zip(RANKS, SEEDS, RATES, strict=True)
    ]
    made = populate(whole, members, together=together)
    given = {"mesh": dict(axes), "pipeline": {"microbatches": 4, "schedule": "1f1b"}}
    return made.with_(**problems.with_layout(given))


@functools.cache
def program(together="map", axes=()):
    made = of_all(together, axes)
    count = int(np.prod([n for _, n in axes]))
    mesh = build.make_experiment_mesh(made, jax.devices()[:count])
    state = build.make_state(made, mesh)
    return mesh, state, build.compile_train(made, state, mesh, compiler_options=FAST)


@functools.cache
def populated(together="map", axes=()):
    _, state, train = program(together, axes)
    state = jax.tree.map(lambda x: x.copy(), state)  # which the step is given
    for _ in range(STEPS):
        state, metrics = train(state, BATCH)
    return jax.device_get((state.method["members"], metrics))


@functools.cache
def alone(number):
    made = experiment(
        LoRA(rank=RANKS[number]),
        lambda stack: optimizer(stack, RATES[number]),
        SEEDS[number],
    )
    mesh = build.make_experiment_mesh(made, jax.devices()[:1])
    state = build.make_state(made, mesh)
    train = build.compile_train(made, state, mesh, compiler_options=FAST)
    for _ in range(STEPS):
        state, metrics = train(state, BATCH)
    return jax.device_get((state, metrics))


def check(found, number):
    """Additions, moments and the loss of a member, and zeros behind a smaller rank."""
    members, metrics = found
    state, told = alone(number)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[f"members/{name}"][number], told[name], rtol=1e-5)
    parts = ("params", "opt_state")
    ours, theirs = (
        named_leaves({part: getattr(each, part) for part in parts}) for each in (members, state)
    )
    compared = {name for name in ours if name.endswith(("/a", "/b"))}
    assert len(compared) == 3 * 12  # kernels of six kinds, and their two moments
    for name in compared:
        mine, wanted = ours[name][number], theirs[name]
        place = tuple(map(slice, wanted.shape))
        np.testing.assert_allclose(
            mine[place], wanted, rtol=1e-5, atol=1e-5 * abs(wanted).max(), err_msg=name
        )
        behind = mine.copy()
        behind[place] = 0
        assert not behind.any()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_members_are_their_trainings_alone(number):
    check(populated(), number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(P))
def test_all_at_once_they_are_too(number):
    check(populated("vmap"), number)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [(("data", 2), ("fsdp", 2), ("tensor", 2)), (("pipe", 2), ("data", 2))]
)
def test_on_meshes_and_pipelines_they_are_too(axes):
    for number in range(P):
        check(populated("map", axes), number)


@pytest.mark.slow
def test_whole_models_are_spread_over_data_and_nothing_is_sent_but_metrics():
    def made(count):
        own = {"init_fn": functools.partial(decoder.init, MODEL), "stages": decoder.stages(MODEL)}
        own |= {"loss_fn": None, "batch": BATCH, "train_batches": None, "steps": STEPS}
        own |= {"rules": Rules(decoder.RULES), "optimizer": follow(optimizer)}
        one = jt.Experiment.of(name="tiny", gathers_layers=True, **own)
        rates = (0.001, 0.003, 0.01, 0.03)
        members = [Member(own["init_fn"], i, {"learning_rate": x}) for i, x in enumerate(rates)]
        whole = populate(one, members).with_(**problems.with_layout({"mesh": {"data": count}}))
        mesh = build.make_experiment_mesh(whole, jax.devices()[:count])
        state = build.make_state(whole, mesh)
        train = build.compile_train(whole, state, mesh)
        for _ in range(STEPS):
            state, metrics = train(state, BATCH)
        return state, metrics, train.compiled.as_text()

    (alone, told, _), (spread, metrics, text) = made(1), made(2)
    members, wanted = (named_leaves(each.method["members"]) for each in (spread, alone))
    for name, x in members.items():
        assert x.sharding.spec[0] == "data", name
        if "rng" not in name:
            assert np.array_equal(x, wanted[name]), name
    assert np.array_equal(metrics["members/loss"], told["members/loss"])
    # The first member's parameters, those of the state, come from where it is.
    size = sum(4 * x.size for x in jax.tree.leaves(spread.params))
    assert sent(text)[False] < 2 * size


@pytest.mark.slow
def test_a_member_that_diverges_is_alone_in_it():
    _, state, train = program()
    state = jax.tree.map(lambda x: x.copy(), state)
    rates = state.method["numbers"]["learning_rate"].at[1].set(1e30)
    numbers = state.method["numbers"] | {"learning_rate": rates}
    state = dataclasses.replace(state, method=state.method | {"numbers": numbers})
    for _ in range(STEPS):
        state, metrics = train(state, BATCH)
    members, _ = populated()
    assert state.method["members"].skipped.tolist() == [0, STEPS - 1, 0]
    assert metrics["skipped"] == 0 == state.skipped
    assert np.isfinite(metrics["loss"])
    for name, x in named_leaves(state.method["members"].params).items():
        for number in (0, 2):
            np.testing.assert_array_equal(x[number], named_leaves(members.params)[name][number])


NUMBERS = ("learning_rate", "weight_decay")


@functools.cache
def bred(every=2, axes=()):
    """Eight nets with dropout, whose best quarter is copied every two steps: a program of all, and
    one of any of them alone."""
    x = np.random.default_rng(1).normal(size=(16, 8)).astype("f")
    batch = {"x": x, "y": np.sin(x.sum(1))}

    def init_fn(rng):
        return {"a": jax.random.normal(rng, (8, 16)) / 3, "b": jnp.zeros(16)}

    def loss_fn(params, batch, rng):
        hidden_BH = jnp.tanh(batch["x"] @ params["a"])
        hidden_BH *= jax.random.bernoulli(rng, 0.9, hidden_BH.shape)
        return jnp.square(hidden_BH @ params["b"] - batch["y"]).mean()

    def make(stack, learning_rate=0.5, weight_decay=0.0):
        return jt.make_optimizer("adamw", learning_rate, weight_decay=weight_decay)

    own = {"init_fn": init_fn, "loss_fn": loss_fn, "batch": batch, "train_batches": None}
    one = jt.Experiment.of(name="net", steps=9, seed=3, optimizer=follow(make), **own)
    members = [
        Member(init_fn, i, dict(zip(NUMBERS, (rate, 0.1), strict=True)))
        for i, rate in enumerate(np.geomspace(1e-4, 3, 8))
    ]
    whole = populate(one, members, exploit_every=every)
    whole = whole.with_(**problems.with_layout({"mesh": dict(axes)}))
    made = (whole, populate(one, members[:1]))
    mesh = build.make_experiment_mesh(whole, jax.devices()[: int(np.prod([n for _, n in axes]))])
    meshes = (mesh, build.make_experiment_mesh(one, jax.devices()[:1]))
    states = [*map(build.make_state, made, meshes)]
    return batch, states, [*map(build.compile_train, made, states, meshes)]


def taken(state, train, batch, steps):
    """The state after so many steps, and the metrics of each."""
    state, told = jax.tree.map(lambda x: x.copy(), state), []
    for _ in range(steps):
        state, metrics = train(state, batch)
        told.append(jax.device_get(metrics))
    return state, told


def test_a_members_lineage_trained_alone_ends_in_the_same_bits():
    batch, states, (train, alone) = bred()
    state, told = taken(states[0], train, batch, 9)
    # Before steps 3, 5, 7 and 9 the best two are copied over the worst two.
    parents = [told[i]["members/parent"] for i in (2, 4, 6, 8)]
    for number, parent_P in enumerate(parents):
        losses = sum(told[i]["members/loss"] for i in (2 * number, 2 * number + 1))
        order, wanted = np.argsort(losses, kind="stable"), np.arange(8)
        wanted[order[-2:]] = order[:2]
        assert parent_P.tolist() == wanted.tolist()
    start, end, moved = states[0].method["members"], state.method["members"], 0
    for member in range(8):
        line = lineage(parents, member)
        moved += len(set(line)) > 2
        solo = jax.tree.map(lambda x: x[line[0]][None], start)  # noqa: B023
        for i in range(9):
            place = slice(line[i // 2], line[i // 2] + 1)
            numbers = {n: told[i][f"members/optimizer.{n}"][place] for n in NUMBERS}
            solo = dataclasses.replace(solo, rng=start.rng[place])
            whole = dataclasses.replace(states[1], method={"members": solo, "numbers": numbers})
            solo = alone(jax.tree.map(jnp.copy, whole), batch)[0].method["members"]
        for part in ("params", "opt_state", "step"):
            ours, theirs = getattr(end, part), getattr(solo, part)
            for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_array_equal(x[member], y[0])
    assert moved


def test_copies_keep_their_keys_and_what_is_not_finite_is_not_copied():
    _, states, _ = bred()
    # Sums of two steps but for members that made none, and one that made one.
    sums = jnp.array([3.0, 0, 1, 2, 0, 5, 6, 0])
    steps = jnp.array([2, 0, 1, 2, 0, 2, 2, 0])
    kept = states[0].method | {"losses": jnp.stack([sums, steps], -1)}
    found = jax.jit(exploit)(kept, jax.random.key(0))
    assert found["parent"].tolist() == [0, 1, 2, 3, 2, 5, 6, 3]
    for name, x in kept["numbers"].items():
        factors = found["numbers"][name] / x[found["parent"]]
        copies = np.isclose(factors[np.array([4, 7])][:, None], (0.8, 1.25), rtol=1e-6)
        assert copies.any(1).all()
        assert (np.delete(factors, [4, 7]) == 1).all()
    keys = jax.random.key_data(found["members"].rng)
    assert (keys == jax.random.key_data(kept["members"].rng)).all()
    none = jax.jit(exploit)(kept | {"losses": jnp.zeros((8, 2))}, jax.random.key(0))
    assert none["parent"].tolist() == list(range(8))
    with pytest.raises(ValueError, match="exploit_every` is 2 and there is 1 member"):
        populate(experiment(), [Member(None, 0, {})], exploit_every=2)


@pytest.mark.slow
def test_members_are_copied_the_same_over_a_mesh():
    batch, states, (train, _) = bred()
    alone, told = taken(states[0], train, batch, 5)
    _, states, (train, _) = bred(axes=(("data", 2),))
    spread, found = taken(states[0], train, batch, 5)
    assert [x["members/parent"].tolist() for x in found] == [
        x["members/parent"].tolist() for x in told
    ]
    for (name, x), y in zip(
        named_leaves(spread.method["members"].params).items(),
        jax.tree.leaves(alone.method["members"].params),
        strict=True,
    ):
        assert x.sharding.spec[0] == "data", name
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_the_base_is_there_once():
    _, state, train = program()
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    base = size(decoder.init(MODEL, jax.random.key(0)))
    members = state.method["members"]
    own = size((members.params, members.opt_state, state.method["numbers"], BATCH))
    first = own // P  # of which the parameters have a copy
    memory = train.compiled.memory_analysis()
    assert base < memory.argument_size_in_bytes < 1.2 * base + own + first


def test_flags_of_members():
    vary = ("lora.rank=4,8", "optimizer.learning_rate=1e-4,3e-4")
    members = Population(8, vary).members(3)
    assert len(members) == 8
    first = {"lora.rank": 4, "optimizer.learning_rate": 1e-4, "seed": 3}
    assert members[0] == first
    assert members[1] == first | {"seed": 4}
    spread = Population(vary=("optimizer.learning_rate=log:1e-3:1e-1:3",)).members()
    assert [member["optimizer.learning_rate"] for member in spread] == [0.001, 0.01, 0.1]
    for given, message in (
        ({"size": 3, "vary": vary}, "`population.size` is 3, .* makes 4 members: give a multiple"),
        ({"vary": ("lora.rank",)}, "has 'lora.rank': write each flag once, with its numbers"),
        ({"size": 4, "vary": ("seed=1,2",)}, "makes 2 members: give that"),
        ({"vary": ("lora.rank=log:4:2:2",)}, "or log:1e-4:1e-1:7"),
    ):
        with pytest.raises(ValueError, match=message):
            Population(**given).members()


@pytest.mark.slow
def test_a_run_resumes_says_which_is_best_and_exports_each(tmp_path, capsys):
    model = decoder.DecoderConfig(**SHAPE | {"vocab_size": 257, "seq_len": 32})
    hf.save(tmp_path / "model", model, decoder.init(model, jax.random.key(0)))
    flags = ["--init-from", str(tmp_path / "model"), "--tokenizer", "bytes", "--lora.rank", "2"]
    flags += ["--data", "jaxtrain/compare", "--held-out-bytes", "2000", "--global-batch", "8"]
    flags += ["--optimizer.name", "adamw", "--optimizer.schedule", "constant", "--sample-tokens"]
    flags += ["0", "--optimizer.warmup-steps", "1"]
    vary = ["--population.vary", "lora.rank=2,4", "optimizer.learning_rate=1e-2,1e-3"]
    run, again = str(tmp_path / "run"), str(tmp_path / "again")
    main(gpt.Config, gpt.build, [*flags, *vary, "--steps", "4", "--run-dir", run])
    assert "the best is member" in capsys.readouterr().out
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    losses = next(line["eval/members/loss"] for line in log if "eval/members/loss" in line)
    assert log[-1]["eval/loss"] == min(losses)
    main(gpt.Config, gpt.build, [*flags, *vary, "--steps", "2", "--run-dir", again])
    more = ["--steps", "4", "--run-dir", again, "--resume"]
    main(gpt.Config, gpt.build, [*flags, *vary, *more])
    for number in range(4):
        found, other = (trained.additions(folder, member=number)[1] for folder in (run, again))
        jax.tree.map(np.testing.assert_array_equal, found, other)
    alone = str(tmp_path / "alone")
    own = ["--lora.rank", "2", "--optimizer.learning-rate", "0.001", "--steps", "4"]
    main(gpt.Config, gpt.build, [*flags, *own, "--run-dir", alone])
    ours, theirs = trained.additions(run, member=1)[1], trained.additions(alone)[1]
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)
    _, merged, _ = trained.load(run, member=1)
    _, wanted, _ = trained.load(alone)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), merged, wanted)
    out = tmp_path / "adapter"
    export = ["hf", "export", "--run", run, "--adapter", "--member", "3", "--out", str(out)]
    cli.main(export)
    assert json.loads((out / "adapter_config.json").read_text())["r"] in (4, 12)
    with pytest.raises(ValueError, match="`member` is 4: give one from 0 to 3"):
        trained.load(run, member=4)
    with pytest.raises(ValueError, match="`member` is 0: the run has no population"):
        trained.load(alone, member=0)
    for given, message in (
        (["optimizer.name=1,2"], "has optimizer.name: it is no number that members can have apart"),
        (["optimizer.learning_rate=-1"], r"learning_rate"),
    ):
        with pytest.raises(ValueError, match=message):
            gpt.outline(parse(gpt.Config, [*flags, "--population.vary", *given]))


@pytest.mark.slow
def test_a_run_whose_members_are_copied_resumes_in_the_same_bits(tmp_path, capsys):
    flags = ["--data", "jaxtrain/compare", "--held-out-bytes", "2000", "--global-batch", "8"]
    flags += [
        "--layers",
        "1",
        "--width",
        "16",
        "--heads",
        "2",
        "--seq-len",
        "16",
        "--log-every",
        "2",
    ]
    flags += ["--optimizer.name", "adamw", "--optimizer.warmup-steps", "1", "--sample-tokens", "0"]
    flags += ["--optimizer.schedule", "constant", "--population.exploit-every", "2"]
    flags += ["--population.vary", "optimizer.learning_rate=log:1e-4:1e-1:4"]
    run, again = str(tmp_path / "run"), str(tmp_path / "again")
    main(gpt.Config, gpt.build, [*flags, "--steps", "8", "--run-dir", run])
    said = capsys.readouterr().out
    assert re.search(r"lineage +The best is member \d, which was trained in steps 1 to ", said)
    assert "optimizer.learning_rate at first" in said
    main(gpt.Config, gpt.build, [*flags, "--steps", "5", "--run-dir", again])
    main(gpt.Config, gpt.build, [*flags, "--steps", "8", "--run-dir", again, "--resume"])
    for number in range(4):
        found, other = (trained.load(folder, member=number)[1] for folder in (run, again))
        jax.tree.map(np.testing.assert_array_equal, found, other)
    for more, message in (
        (["--log-every", "3"], "--population.exploit-every is 2 and --log-every 3"),
        (["--population.vary", "optimizer.b1=0.8,0.9"], "has optimizer.b1, which no factor may"),
    ):
        with pytest.raises(ValueError, match=message):
            gpt.outline(parse(gpt.Config, [*flags, *more]))


@pytest.mark.slow
def test_whole_models_are_their_runs_alone(tmp_path, capsys):
    flags = ["--data", "jaxtrain/compare", "--held-out-bytes", "2000", "--global-batch", "8"]
    flags += ["--layers", "1", "--width", "16", "--heads", "2", "--seq-len", "16", "--steps", "4"]
    flags += ["--optimizer.name", "adamw", "--optimizer.warmup-steps", "1", "--sample-tokens", "0"]
    flags += ["--optimizer.freeze", "^embed/"]
    run, alone = str(tmp_path / "run"), str(tmp_path / "alone")
    vary = ["--population.vary", "optimizer.learning_rate=1e-2,1e-3"]
    main(gpt.Config, gpt.build, [*flags, *vary, "--run-dir", run])
    assert "the best is member 0" in capsys.readouterr().out
    own = ["--optimizer.learning-rate", "0.001"]
    main(gpt.Config, gpt.build, [*flags, *own, "--run-dir", alone])
    (_, ours, _), (_, theirs, _) = trained.load(run, member=1), trained.load(alone)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)
    best, other = trained.load(run)[1], trained.load(run, member=0)[1]
    jax.tree.map(np.testing.assert_array_equal, best, other)
    with pytest.raises(ValueError, match=r"has lora\.rank: --lora\.rank is not given"):
        gpt.outline(parse(gpt.Config, ["--population.vary", "lora.rank=2,4"]))
