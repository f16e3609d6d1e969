"""Private runs: rows by Poisson sampling, epsilon as published, refusals by name, an audit."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.data.enclosed import QuestionRows
from jaxtrain.engines.private import DRAWN, private
from jaxtrain.experiment import no_batches
from jaxtrain.methods.local_updates import Local
from jaxtrain.methods.method import Method
from jaxtrain.methods.privacy import Private, epsilon_after, noise_for
from jaxtrain.run.options import OptimizerOptions
from tests import problems, small


def build(**given):
    private = Private(**{"clip": 2.0, "noise": 0.0} | given.pop("private", {}))
    given = {"global_batch": 4, "steps": 6, "seed": 5} | given
    return small.build(small.Config(private=private, **given))


class Rows(list):
    """Rows that say which they are; with an order of its own, also of which pass."""

    def __init__(self, count, anew=False):
        super().__init__({"x": np.float32(n)} for n in range(count))
        if anew:
            self.row_order = None

    def __getitem__(self, index):
        return {"x": np.float32(index)}


def test_rows_are_drawn_one_by_one_as_a_function_of_seed_and_step():
    batches = data.PoissonBatches(Rows(600), examples=30, seed=3, leaf=DRAWN, divisor=8)
    again = data.PoissonBatches(Rows(600), examples=30, seed=3, leaf=DRAWN, divisor=8)
    counts, times = [], np.zeros(600)
    for step in range(400):
        batch = batches.batch(step)
        there = batch[DRAWN] > 0
        assert np.array_equal(batch["x"], np.where(there, batch[DRAWN] - 1, 0))
        assert not there[there.sum() :].any()
        counts.append(there.sum())
        times[batch[DRAWN][there] - 1] += 1
    assert len(batch[DRAWN]) % 8 == 0
    assert stats.binom.sf(len(batch[DRAWN]), 600, 0.05) < 1e-12
    assert np.mean(counts) == pytest.approx(30, abs=0.8)
    assert np.std(counts) == pytest.approx(math.sqrt(30 * 0.95), rel=0.15)
    assert stats.kstest(stats.binom.cdf(times, 400, 0.05), "uniform").statistic < 0.15
    np.testing.assert_array_equal(again.batch(7)[DRAWN], batches.batch(7)[DRAWN])
    other = data.PoissonBatches(Rows(600), examples=30, seed=4, leaf=DRAWN)
    assert not np.array_equal(other.drawn(7), batches.drawn(7))


def test_bands_take_turns_and_augmented_rows_are_drawn_anew():
    batches = data.PoissonBatches(Rows(60, anew=True), examples=5, seed=0, leaf=DRAWN, bands=3)
    for step in range(6):
        batch = batches.batch(step)
        real = batch[DRAWN] > 0
        assert set((batch[DRAWN][real] - 1) % 3) == {step % 3}
        np.testing.assert_array_equal(batch["x"][real], batch[DRAWN][real] - 1 + 60 * step)
    with pytest.raises(ValueError, match=r"25 of 60 rows .* in 3 parts: .* `private.bands`"):
        data.PoissonBatches(Rows(60), examples=25, seed=0, leaf=DRAWN, bands=3)
    corpus = data.tokenize([data.Document("a", bytes(range(97, 122)))], data.ByteTokenizer())
    spans = data.CorruptedSpans(corpus, 12, 6, sentinels=[300, 301], eod=256)
    mixed = data.Augmented(Rows(60), seed=0, mixup=0.2)
    long = object.__new__(QuestionRows)
    long.windows, long.contexts = [(0, 0), (0, 3)], ["text"]
    for source, words in (
        (mixed, r"the data mix rows .Augmented."),
        (dataclasses.replace(mixed, rows=mixed, mixup=0), r"the data mix rows .Augmented."),
        (spans, r"each stretch of text is 4 rows of T5 .CorruptedSpans."),
        (long, "the rows of a long context overlap .QuestionRows."),
    ):
        with pytest.raises(ValueError, match=f"{words}, and private training draws each row"):
            data.PoissonBatches(source, examples=1, seed=0, leaf=DRAWN)


def test_epsilon_is_as_published_and_its_noise_is_found():
    pytest.importorskip("dp_accounting")
    q = 256 / 60_000
    for noise, epochs, published in ((1.3, 15, 0.864), (1.1, 60, 2.382), (0.7, 45, 5.639)):
        steps = epochs * 60_000 // 256
        found = epsilon_after(steps, rate=q, noise=noise)
        assert found == pytest.approx(published, abs=1e-3)
    noise = noise_for(1.0, 400, rate=0.09)
    around = [epsilon_after(400, rate=0.09, noise=x * noise) for x in (1, 0.998)]
    assert around[0] <= 1 < around[1]
    # One step without sampling is the Gaussian mechanism itself (Balle and Wang 2018).
    epsilon = epsilon_after(1, rate=1.0, noise=2.0)
    tail = stats.norm.cdf(0.25 - 2 * epsilon)
    delta = tail - math.exp(epsilon) * stats.norm.cdf(-0.25 - 2 * epsilon)
    assert delta == pytest.approx(1e-5, rel=0.02)
    # Four steps of four parts in turn are one step of all.
    assert epsilon_after(4, rate=0.25, noise=2.0, bands=4) == epsilon
    assert (epsilon_after(0, rate=1, noise=1), epsilon_after(3, rate=1, noise=0)) == (0, math.inf)


class Killed(jt.Hook):
    def __init__(self, at):
        self.at = at

    def on_step(self, step, state):
        if step == self.at:
            raise KeyboardInterrupt


def whole_and_killed(made, folder, *, save_every, killed_at):
    """The parameters at the end of a run, and of one that is killed and resumed, and the epsilons
    in the log of the latter; their folders are `whole` and `killed`."""
    how, ends = {"log_every": 1, "save_every": save_every, "handle_signals": False}, []
    for name in ("whole", "killed"):
        options = functools.partial(jt.RunOptions, run_dir=str(folder / name), **how)
        if name == "killed":
            with pytest.raises(KeyboardInterrupt):
                jt.fit(made, options(), hooks=[Killed(killed_at)])
        ends.append(jt.fit(made, options(resume=name == "killed")).state.params)
    lines = [json.loads(x) for x in (folder / "killed/log.jsonl").read_text().splitlines()]
    return ends, {x["step"]: x["privacy/epsilon"] for x in lines if "privacy/epsilon" in x}


@pytest.mark.slow
def test_a_private_run_says_its_epsilon_and_goes_on_with_the_same_noise(tmp_path, capsys):
    pytest.importorskip("dp_accounting")
    made = build(private={"noise": 1.0}, held_out=False)
    ends, logged = whole_and_killed(made, tmp_path, save_every=3, killed_at=5)
    jax.tree.map(np.testing.assert_array_equal, *ends)
    expected = {n: epsilon_after(n, rate=4 / 32, noise=1.0) for n in range(1, 7)}
    assert logged == pytest.approx(expected)
    told = f"epsilon {expected[6]:.3f} at delta 1e-05 after 6 steps"
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(told) == 5  # at the beginning of three, and at the end of two
    assert told in (tmp_path / "killed/report.html").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"centred": True}, r"has model state \(BatchNorm\)"),
        ({"precision": "fp16"}, "a loss scale, which leaves out steps"),
        (
            {"optimizer": OptimizerOptions(skip_spikes=6.0)},
            "`skip_spikes` is 6.0 and training is",
        ),
        ({"optimizer": OptimizerOptions(plateau_factor=0.5)}, "`plateau_factor` is 0.5"),
        (
            {"run": jt.RunOptions(accept_changes=("all",))},
            "`accept_changes` is .* steps that are made twice differently .*, or begin a new run$",
        ),
        ({"seed": 0}, "`seed` is 0 and training is private: .* a seed that anyone guesses"),
        ({"run": jt.RunOptions(alerts=("loss-spike:stop",))}, "`alerts` is .'loss_spike'. and"),
        ({"gradients": "int8"}, "has another engine"),
        ({"local": Local(replicas=2)}, "a method around its steps"),
        ({"private": {"delta": 0.5}}, "`private.delta` is 0.5 and there are 32 rows"),
    ],
)
def test_what_would_break_the_guarantee_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        build(**given)


def test_batches_of_other_making_and_methods_put_around_later_are_refused_too():
    made = build()
    with pytest.raises(ValueError, match="a method around its steps"):
        made.with_(method=Method(lambda step: lambda state, batch: step(state, batch)))
    with pytest.raises(ValueError, match="has 7 steps, of which 6 are accounted for"):
        made.with_(steps=7)
    routed = lambda rng: {"router": {"bias": jnp.zeros(4)}}  # noqa: E731
    with pytest.raises(ValueError, match="has experts that are balanced by counts"):
        made.with_(init_fn=routed)
    made.with_(init_fn=routed, freeze=("router/bias",))
    own = {"init_fn": problems.init, "loss_fn": problems.loss_fn, "batch": made.data.batch}
    config = small.Config(private=Private(noise=1.0), seed=5)
    outline = config.experiment("own", **own, train_batches=no_batches)
    with pytest.raises(ValueError, match="'own' are not drawn by Poisson sampling"):
        outline.with_(train_batches=made.data.train_batches)
    wrong = [{"epsilon": 1.0}, {"noise": None}, {"clip": -1.0}, {"noise": -1.0}, {"noise": 0.1}]
    wrong += [{"delta": 1e-13}, *({"noise": None, "epsilon": e} for e in (math.inf, math.nan, 51))]
    for given in wrong:
        with pytest.raises(ValueError, match="`private"):
            Private(**{"clip": 2.0, "noise": 1.0} | given)


def test_a_batch_divides_over_three_devices_where_a_global_batch_does():
    made = build(global_batch=12)
    assert made.data.batch[DRAWN].shape[0] % 12 == 0


def lower_bound(right, guesses, confidence=0.95):
    """Epsilon that so many right guesses of in or out show (Steinke et al. 2023, 2305.08846)."""
    grid = np.linspace(0, 10, 1001)
    chance = stats.binom.sf(right - 1, guesses, 1 / (1 + np.exp(-grid)))
    return grid[np.searchsorted(chance > 1 - confidence, True)]


@pytest.mark.parametrize(("noise", "leaks"), [(2.0, False), (0.0, True)])
def test_an_audit_by_canaries_bounds_epsilon_from_below_only_where_there_is_noise(noise, leaks):
    """Canaries are rows that no other row is like: their weights alone tell who was drawn."""
    pytest.importorskip("dp_accounting")
    count, steps, rate = 256, 4, 0.25
    canaries = np.eye(count, dtype=np.float32)
    engine = private(1.0, noise, count * rate)
    state = jt.init_state(lambda rng: jnp.zeros(count), optax.sgd(1.0), jax.random.key(0))
    loss = lambda params, batch, rng: -(batch["x"] @ params).sum()  # noqa: E731
    step = jax.jit(jt.build_train_step(loss, optax.sgd(1.0), engine=engine))
    member = np.random.default_rng(0).random(count) < 0.5
    for number in range(steps):
        drawn = member & (np.random.default_rng(number + 1).random(count) < rate)
        numbers = np.where(drawn, np.arange(count) + 1, 0).astype(np.int32)
        state, _ = step(state, {"x": canaries, DRAWN: numbers})
    score = np.asarray(state.params)
    surest = np.argsort(-np.abs(score - np.median(score)))[:128]
    guess = score > np.median(score) if noise else score > 0
    bound = lower_bound((guess == member)[surest].sum(), len(surest))
    claimed = epsilon_after(steps, rate=rate, noise=2.0)
    assert (bound > claimed) == leaks, (bound, claimed)
