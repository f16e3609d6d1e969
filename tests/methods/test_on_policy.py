"""A step of PPO is its definition in NumPy and float64, on any mesh."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from experiments import actors, ppo
from jaxtrain import build
from jaxtrain.engines.plain import plain
from jaxtrain.methods.environments import ENVIRONMENTS, Environment
from jaxtrain.methods.on_policy import (
    OnPolicy,
    clipped_loss,
    log_prob,
    on_policy,
    sample,
    v_trace,
)
from jaxtrain.tree import named_leaves

E, T = 4, 12
# An episode ends at 3, or is cut off after 4 steps; actions go from a place by 0 or 1.
WALK = Environment(
    "walk",
    reset=lambda rng: jax.random.uniform(rng, (1,), minval=-1, maxval=1),
    observe=lambda state: jnp.concatenate([state, state**2]),
    step=lambda state, action: (state + action, 2 - state[0], state[0] + action > 1.5),
    limit=4,
    actions=2,
    scale=0.5,
)


def linear(params, observation):
    value = observation @ params["critic"]
    return observation @ params["actor"] + params["bias"], value


def drawn(rng=None, actions=2):
    r = np.random.default_rng(0)
    normal = lambda *shape: r.normal(size=shape).astype(np.float32)  # noqa: E731
    return {"actor": normal(2, actions), "bias": normal(actions), "critic": normal(2)}


def experiment(how, environment=WALK, **more):
    made = jt.Experiment.of(
        name="walk",
        init_fn=lambda rng: jax.tree.map(jnp.asarray, drawn()),
        loss_fn=clipped_loss(environment, linear, how),
        batch={"actor": jax.ShapeDtypeStruct((E,), jnp.int32)},
        train_batches=None,
        optimizer=jt.make_optimizer("sgd", 0.1),
        steps=3,
        **more,
    )
    return on_policy(made, environment, linear, how)


def estimated(played, value, after, discount, trace, ratio=None):
    """Advantages and targets by V-trace, a loop in float64."""
    gains, targets = np.zeros_like(value, np.float64), np.zeros_like(value, np.float64)
    ratio = np.ones_like(gains) if ratio is None else ratio
    for e in range(value.shape[0]):
        above = 0.0  # of the target over the value, a step later
        for t in reversed(range(value.shape[1])):
            beyond = 0.0 if played["terminated"][e, t] else after[e, t]
            above = 0.0 if played["over"][e, t] else above
            gains[e, t] = played["reward"][e, t] + discount * (beyond + trace * above) - value[e, t]
            above = min(1.0, ratio[e, t]) * gains[e, t]
            targets[e, t] = value[e, t] + above
    return gains, targets


def test_advantages_and_targets_are_a_loop_over_steps():
    r = np.random.default_rng(1)
    played = {"reward": r.normal(size=(E, T)), "over": r.random((E, T)) < 0.3}
    played["terminated"] = played["over"] & (r.random((E, T)) < 0.5)
    value, after = r.normal(size=(2, E, T))
    ratio = np.exp(r.normal(size=(E, T)))
    assert (played["over"] & ~played["terminated"]).any()
    narrow = jax.tree.map(lambda x: x if x.dtype == bool else np.float32(x), played)
    for ratios in (ratio, np.ones((E, T))):
        given = narrow, *map(np.float32, (ratios, value, after))
        found = v_trace(*jax.tree.map(jnp.asarray, given), discount=0.9, trace=0.8)
        expected = estimated(played, value, after, 0.9, 0.8, ratios)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(expected[0], expected[1] - value, rtol=1e-12)  # of equal policies


def defined(params, batch, how, discrete):
    """The loss of PPO of one batch in NumPy and float64."""
    seen, done = batch["observation"], batch["action"]
    head = seen @ params["actor"] + params["bias"]
    if discrete:
        shares = np.exp(head) / np.exp(head).sum(-1, keepdims=True)
        log = np.log(np.take_along_axis(shares, done[..., None], -1)[..., 0])
        entropy = -(shares * np.log(shares)).sum(-1)
    else:
        mean, std = head[..., 0], np.exp(head[..., 1])
        log = np.log(np.exp(-((done - mean) ** 2) / (2 * std**2)) / np.sqrt(2 * np.pi * std**2))
        entropy = 0.5 * np.log(2 * np.pi * np.e * std**2)
    ratio = np.exp(log - batch["log_prob"])
    near = np.clip(ratio, 1 - how.clip, 1 + how.clip)
    gain = np.minimum(ratio * batch["advantage"], near * batch["advantage"])
    error = (seen @ params["critic"] - batch["target"]) ** 2
    return (how.critic * error - gain - how.entropy * entropy).mean()


@pytest.mark.parametrize("name", ["cartpole", "pendulum"])
def test_the_loss_and_its_gradient_are_their_definition(name):
    environment, how = ENVIRONMENTS[name], OnPolicy(entropy=0.1)
    discrete, r = environment.actions > 0, np.random.default_rng(2)
    batch = {"observation": r.normal(size=(E, T, 2)), "action": r.normal(size=(E, T))}
    if discrete:
        batch["action"] = r.integers(0, 2, (E, T))
    batch |= {"advantage": r.normal(size=(E, T)), "target": r.normal(size=(E, T))}
    params = jax.tree.map(np.float64, drawn())
    head = batch["observation"] @ params["actor"] + params["bias"]
    logs, _ = log_prob(environment, jnp.float32(head), jnp.asarray(batch["action"]))
    # Some ratios are beyond either end of the clip.
    batch["log_prob"] = np.asarray(logs) + r.normal(size=(E, T)) * 0.3
    narrow = jax.tree.map(lambda x: x.astype("f" if x.dtype.kind == "f" else "i"), batch)
    loss = clipped_loss(environment, linear, how)
    sums = plain(lambda p, s, b, rng: (loss(p, b, rng), s))(
        jax.tree.map(jnp.float32, params), None, narrow, None, None
    )
    means = sums.loss.means()
    np.testing.assert_allclose(means["loss"], defined(params, batch, how, discrete), rtol=2e-6)
    assert 0.1 < means["clipped"] < 0.9
    for leaf, x in params.items():
        for place in np.ndindex(x.shape):
            sides = []
            for change in (1e-6, -1e-6):
                moved = params | {leaf: x.copy()}
                moved[leaf][place] += change
                sides.append(defined(moved, batch, how, discrete))
            slope = (sides[0] - sides[1]) / 2e-6
            found = sums.grads[leaf][place] / sums.loss.weight
            np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-6)


def test_a_rollout_goes_on_through_ends_and_values_what_is_cut_off(monkeypatch):
    """What the train step is given is what a loop over actors makes of the actions taken."""
    how = OnPolicy(steps=T, epochs=1, minibatches=1, discount=0.9, trace=0.8)
    monkeypatch.setattr(jax.random, "permutation", lambda key, n: jnp.arange(n))
    made, params = experiment(how), jax.tree.map(np.float64, drawn())
    mesh = build.make_experiment_mesh(made, jax.devices()[:1])
    before = build.make_state(made, mesh)
    told = lambda state, batch: (state, batch | {"loss": 7.0, "weight": 1.0, "skipped": 0})  # noqa: E731
    after, found = jax.jit(made.method.step(told))(before, {"actor": jnp.arange(E)})
    seen, done = np.float64(found["observation"]), np.asarray(found["action"])
    value, over = seen @ params["critic"], np.zeros((E, T), bool)
    next_value, ended, reward = np.zeros((E, T)), np.zeros((E, T), bool), np.zeros((E, T))
    got, starts, actors = [], [], after.method["actors"]
    for e in range(E):
        place, age, total, last = float(before.method["actors"]["state"][e, 0]), 0, 0.0, None
        for t in range(T):
            np.testing.assert_allclose(seen[e, t], [place, place**2], rtol=1e-5, atol=1e-6)
            reward[e, t], place, age = 2 - place, place + done[e, t], age + 1
            next_value[e, t] = np.array([place, place**2]) @ params["critic"]
            ended[e, t] = place > 1.5
            over[e, t] = ended[e, t] or age == 4
            total += reward[e, t]
            if over[e, t]:
                last, total, age = total, 0.0, 0
                place = seen[e, t + 1, 0] if t + 1 < T else float(actors["state"][e, 0])
                assert -1 <= place <= 1
                starts.append(place)
        got.append(total if last is None else last)
        np.testing.assert_allclose(actors["state"][e, 0], place, rtol=1e-5)
        np.testing.assert_allclose(actors["return"][e], total, rtol=1e-5)
        assert actors["age"][e] == age
    assert len(set(starts)) == len(starts) > E  # Each actor draws by itself.
    assert after.rng == before.rng
    assert after.step == 1
    assert ended.any()
    assert (over & ~ended).any()
    played = {"reward": 0.5 * reward, "over": over, "terminated": ended}
    gain, target = estimated(played, value, next_value, 0.9, 0.8)
    np.testing.assert_allclose(found["target"], target, rtol=1e-4, atol=1e-5)
    gain = (gain - gain.mean()) / gain.std()
    np.testing.assert_allclose(found["advantage"], gain, rtol=1e-4, atol=1e-5)
    head = seen @ params["actor"] + params["bias"]
    shares = np.exp(head) / np.exp(head).sum(-1, keepdims=True)
    taken = np.log(np.take_along_axis(shares, done[..., None], -1)[..., 0])
    np.testing.assert_allclose(found["log_prob"], taken, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["return"], np.mean(got), rtol=1e-5)
    assert (found["loss"], found["objective"]) == (-found["return"], 7)


def test_actions_are_drawn_by_their_probabilities():
    keys = jax.random.split(jax.random.key(0), 4000)
    for name, head in (("cartpole", [0.0, 1.0]), ("pendulum", [0.5, 0.7])):
        one = functools.partial(sample, ENVIRONMENTS[name])
        drawn = np.asarray(jax.vmap(one, in_axes=(0, None))(keys, jnp.array(head)))
        mean, std = (1 / (1 + np.exp(-1)), 0.443) if name == "cartpole" else (0.5, np.exp(0.7))
        np.testing.assert_allclose(drawn.mean(), mean, atol=4 * std / 4000**0.5)
        np.testing.assert_allclose(drawn.std(), std, rtol=0.05)


def small(**flags):
    rollout = OnPolicy(steps=16, epochs=2, minibatches=2)
    return ppo.Config(global_batch=8, steps=4, hidden=(8,), episodes=8, rollout=rollout, **flags)


def test_four_devices_compute_what_one_does():
    """Parameters, optimizer state and actors; and one goes on with a copy in the same bits."""
    made, ends = ppo.build(small()), []
    for count in (1, 4):
        mesh = build.make_experiment_mesh(made, jax.devices()[:count])
        state = build.make_state(made, mesh)
        train = build.compile_train(made, state, mesh)
        lies = build.stream_shardings(made, mesh)
        with made.train_batches(0, lies) as batches:
            state, _ = train(state, next(batches))
            copy = jax.device_put(jax.device_get(state), jax.tree.map(lambda x: x.sharding, state))
            state, metrics = train(state, next(batches))
            again, _ = train(copy, next(batches))
        chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(state))
        place = state.method["actors"]["state"].sharding.spec
        assert (place[:1] == ("data",)) == (count == 4)
        parts = {n: getattr(state, n) for n in ("params", "opt_state", "method")}
        ends.append(jax.device_get(parts | {"metrics": metrics}))
    assert state.opt_state  # Moments are compared as well.
    one, four = map(named_leaves, ends)
    for name in one:
        np.testing.assert_allclose(four[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_what_others_play_by_the_same_parameters_is_learned_from_alike():
    """So V-trace is exact where nothing is old; and it is not where something is."""
    config, ends = small(), []
    made = ppo.build(config)
    mesh = build.make_experiment_mesh(made, jax.devices()[:1])
    state = build.make_state(made, mesh)
    key = jax.random.split(jax.random.fold_in(state.rng, 0))[0]
    given = state.params, state.method["actors"], key
    played = {}
    surer = jax.tree.map(lambda x: 30 * x, state.params)
    for name, params in (("new", state.params), ("old", surer)):
        play = jax.jit(functools.partial(actors.play, "cartpole", config.rollout))
        _, played[name] = play(params, *given[1:])
    train = build.compile_train(made, state, mesh)
    ends.append(jax.device_get(train(state, {"actor": jnp.arange(8)})[0].params))
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    made = actors.build(actors.Config(**fields))
    for batch in played.values():
        state = build.make_state(made, mesh)
        train = build.compile_train(made, state, mesh)
        ends.append(jax.device_get(train(state, batch)[0].params))
    chex.assert_trees_all_close(ends[1], ends[0], rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(ends[2], ends[0], rtol=1e-2)


@pytest.mark.slow
def test_members_of_a_population_are_their_runs_alone():
    population = ppo.Population(size=4, vary=("optimizer.learning_rate=1e-3,5e-3",))
    flags, ends = small(population=population), []
    own = dataclasses.replace(flags.optimizer, learning_rate=5e-3)
    alone = dataclasses.replace(flags, seed=1, population=ppo.Population(), optimizer=own)
    for config in (flags, alone):
        made = ppo.build(config)
        mesh = build.make_experiment_mesh(made, jax.devices()[:1])
        state = build.make_state(made, mesh)
        train = build.compile_train(made, state, mesh)
        for _ in range(2):
            state, metrics = train(state, {"actor": jnp.arange(8)})
        ends.append(jax.device_get((state, metrics)))
    (several, told), (one, own) = ends
    number = population.members(0).index({"optimizer.learning_rate": 5e-3, "seed": 1})
    members = jax.tree.map(lambda x: x[number], several.method["members"])
    pairs = zip(named_leaves(members.params).items(), jax.tree.leaves(one.params), strict=True)
    for (name, found), expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(
        members.method["actors"]["state"], one.method["actors"]["state"], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(told["members/return"][number], own["return"], rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rollout": lambda: OnPolicy(steps=10, minibatches=4)}, r"give a divisor of the steps"),
        ({"rollout": lambda: OnPolicy(discount=1.1)}, r"`rollout.discount` is 1.1"),
        ({"local": lambda: jt.methods.local_updates.Local(replicas=2)}, r"has a method of its own"),
        (
            {"rollout": lambda: OnPolicy(minibatches=128), "global_batch": lambda: 1},
            r"each has one step of one actor",
        ),
        ({"hidden": lambda: (64, 0)}, r"`hidden` is \(64, 0\): a layer has at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        ppo.build(ppo.Config(**{name: make() for name, make in flags.items()}))


def test_a_loss_without_its_method_says_so():
    loss = clipped_loss(WALK, linear, OnPolicy())
    with pytest.raises(ValueError, match="the batch has actor and no advantages"):
        jax.eval_shape(loss, drawn(), {"actor": jnp.arange(E)}, None)
