"""The command ``jaxtrain noise``: the gradient noise scale of a run, and what it says of its batch.

The estimates are those of McCandlish et al. 2018 (https://arxiv.org/abs/1812.06162), appendix A.1.
:func:`estimate` says what the weight of a batch means for them.

Shapes: K microbatches.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from scipy import stats

from jaxtrain import build
from jaxtrain.compile import compile_step
from jaxtrain.engines.plain import plain, run_engine, trainable
from jaxtrain.experiment import Experiment
from jaxtrain.host import distributed, quiet
from jaxtrain.host.least import check_least
from jaxtrain.landscape.command import keep, reader_of, step_of
from jaxtrain.optim import frozen_of
from jaxtrain.run.provenance import read_record
from jaxtrain.run.replay import load_run
from jaxtrain.sharding.row_keys import row_count
from jaxtrain.state import TrainState
from jaxtrain.step import build_engine
from jaxtrain.tree import PyTree

# The part of all intervals that hold the true noise scale.
CONFIDENCE = 0.9


@dataclasses.dataclass(frozen=True)
class NoiseOptions:
    """Measures the gradient noise scale of a run: the batch size above which a larger batch saves
    few steps.

    Results are printed, and kept in landscape.json in the run's folder. All other flags go to the
    experiment, in place of those of the run: --global-batch is the size of a microbatch.
    """

    run: tyro.conf.Positional[str]
    """The run's folder."""
    module: str | None = None
    """The run's experiment, such as experiments.gpt. The run's folder names it too, but no code is
    run because a file says so."""
    step: int | None = None
    """Which checkpoint; all when left out."""
    microbatches: int = 64
    """Training batches that follow the checkpoint, to take gradients of; more of them make the
    interval narrower."""


class Noise(NamedTuple):
    """Estimates of |G|^2, of tr(S), of their ratio, and the ends of its interval."""

    signal: float
    trace: float
    scale: float
    low: float
    high: float


def run_noise(options: NoiseOptions, rest: list[str]) -> int:
    """Prints the noise scale at every checkpoint, and writes it down."""
    check_least(options, microbatches=3)
    distributed.initialize()
    experiment = load_run(options.run, options.module, flags=rest)
    _check(experiment, options.microbatches)
    last = step_of(options.run, options.step)
    steps = reader_of(options.run).steps() if options.step is None else [last]
    quiet.start()
    data, rows = experiment.data, row_count(experiment.data.batch)
    batch = read_record(options.run)["flags"].get("global_batch", rows)
    record = {"batch": batch, "rows": rows, "microbatches": options.microbatches}
    record |= {"item": data.item, "items_per_row": data.items_per_step / rows}
    firsts = {step: step * batch // rows for step in steps}
    found = measure(experiment, options.run, firsts, options.microbatches)
    record["checkpoints"] = [{"step": step} | noise._asdict() for step, noise in found.items()]
    keep(options.run, "noise", record, describe(record))
    return 0


def measure(
    experiment: Experiment, run: str, firsts: Mapping[int, int], microbatches: int
) -> dict[int, Noise]:
    """Estimates the noise of one row's gradient at checkpoints of a run, from the first batch that
    each is mapped to.

    Gradients are in float32, of the weights that the run evaluates (averages where it keeps any),
    with dropout as in training, before anything clips them. The batches are gone through twice, so
    that devices hold two gradients, however many batches there are.
    """
    experiment = build.all_on_devices(experiment)  # where gradients are added up
    mesh, laid, found = build.make_experiment_mesh(experiment), experiment.laid, {}
    abstract = build.make_abstract_state(experiment, mesh)
    given = {"has_model_state": laid.has_model_state, "gather": laid.gather, "engine": plain}
    given |= {"policy": "f32", "accumulate": experiment.layout.accumulate}
    engine, still = (
        build_engine(laid.loss_fn, **given),
        frozen_of(abstract),
    )

    def probe(at: TrainState, batch: PyTree) -> tuple[TrainState, tuple[jax.Array, ...]]:
        rng = jax.random.fold_in(jax.random.key(experiment.seed), at.step)
        sums = run_engine(engine, at.params, at.model_state, batch, rng, None, frozen=still)
        (mean, total), weight = at.opt_state, sums.loss.weight
        part = jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))
        away = jax.tree.map(lambda g, m: g * part - m, sums.grads, mean)
        total = jax.tree.map(jnp.add, total, sums.grads)
        at = dataclasses.replace(at, step=at.step + 1, opt_state=(mean, total))
        pairs = (away, away), (away, mean), (mean, mean)
        return at, (weight, *(optax.tree.vdot(a, b) for a, b in pairs))

    shapes, _ = trainable(abstract.params, still)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)  # noqa: E731
    zeros = jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))
    options, compiled = {"mesh": mesh} | experiment.compiled_with, None
    places = build.stream_shardings(experiment, mesh)
    for step, first in firsts.items():
        at, mean = build.restore_evaluated(experiment, abstract, reader_of(run), step), zeros()
        with experiment.train_batches(first, places) as stream:
            batches = list(itertools.islice(stream, microbatches))
        for _ in range(2):  # away from 0, for the mean, and then away from the mean
            number, told = jax.device_put(jnp.int32(first), abstract.step.sharding), []
            at = dataclasses.replace(at, step=number, opt_state=(mean, zeros()))
            compiled = compiled or compile_step(probe, at, batches[0], **options)
            for batch in batches:
                at, numbers = compiled(at, batch)
                told.append(jax.device_get(numbers))
            weight_K, away_K, along_K, signal_K = np.array(told, np.float64).T
            mean = optax.tree.scale(1 / max(weight_K.sum(), 1.0), at.opt_state[1])
        noise = estimate(weight_K, away_K, along_K, signal_K[0])
        per_row = row_count(batches[0]) / weight_K.mean()
        found[step] = Noise(noise.signal, *(x * per_row for x in noise[1:]))
    return found


def estimate(weight_K: np.ndarray, away_K: np.ndarray, along_K: np.ndarray, signal: float) -> Noise:
    """Estimates the gradient noise scale tr(S) / |G|^2 from K microbatches.

    With the gradients g of microbatches of b and G_B of all B = K b together, |G_b|^2 being the
    mean of |g|^2, the unbiased estimates are

        |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b),   tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B).

    Microbatches may weigh differently, as those with masked tokens do. Sizes are then weights: g is
    a loss's sum over its weight w, G_B is of all sums over all weights, |G_b|^2 is weighted by w, b
    is the mean of w, and S / w is taken for the covariance of g. A unit of weight is a row where
    all weigh the same.

    The interval is Fieller's, of the jackknife's covariance of both estimates: it has no upper end
    where |G|^2 cannot be told from 0.

    Args:
      weight_K: the weights w; those of 0 are left out.
      away_K: |e|^2 of e = g - G_B.
      along_K: <e, G_B>.
      signal: |G_B|^2.

    Returns:
      The estimates. The scale is infinite where that of |G|^2 is not above 0.

    Raises:
      ValueError: fewer than 3 microbatches weigh anything.
    """
    live = weight_K > 0
    w_K, away_K, along_K = weight_K[live], away_K[live], along_K[live]
    K, total = w_K.size, w_K.sum()
    if K < 3:
        raise ValueError(
            f"{K} of {weight_K.size} microbatches have weight: an interval takes at least 3"
        )
    spread = (w_K * away_K).sum()

    def both(signal: Any, spread: Any, count: int, total: Any) -> np.ndarray:
        trace = spread / (count - 1)  # |G_b|^2 - |G_B|^2 is spread / total
        return np.stack([signal - trace / total, trace])

    found_2 = both(signal, spread, K, total)
    rest_K = total - w_K  # of all without one, from which its gradient is left out
    left_K = signal - 2 * w_K * along_K / rest_K + w_K**2 * away_K / rest_K**2
    each_2K = both(left_K, spread - w_K * away_K * total / rest_K, K - 1, rest_K)
    away_2K = each_2K - each_2K.mean(1, keepdims=True)
    cov = (K - 1) / K * away_2K @ away_2K.T * stats.t.ppf(0.5 + CONFIDENCE / 2, K - 1) ** 2
    squared, trace = map(float, found_2)
    # The ends are ratios r at which trace - r squared is so many deviations from 0.
    (a, b), (_, c) = np.outer(found_2, found_2) - cov
    root = math.sqrt(max(b * b - a * c, 0.0))
    low = max(0.0, (b - root) / a) if a and c > 0 else 0.0
    high = max(0.0, (b + root) / a) if squared > 0 and a > 0 else math.inf
    return Noise(squared, trace, trace / squared if squared > 0 else math.inf, low, high)


def describe(record: Mapping[str, Any]) -> list[str]:
    """Says in lines what was measured."""
    lines = [f"the gradient noise of {record['microbatches']} batches of {record['rows']} rows:"]
    head = f"{'checkpoint':>12}{'|G|^2':>11}{'tr(S)':>11}{'scale in rows':>15}"
    lines.append(f"{head}{f'{CONFIDENCE:.0%} interval':>20}{'in ' + record['item']:>12}")
    for found in record["checkpoints"]:
        scale, low, high = (found[name] for name in ("scale", "low", "high"))
        line = f"{found['step']:>12}{found['signal']:>11.4g}{found['trace']:>11.4g}{scale:>15,.4g}"
        line += f"{f'{low:,.3g} to {high:,.3g}':>20}{scale * record['items_per_row']:>12,.4g}"
        lines.append(line)
    return [*lines, advice(record["batch"], scale, low, high)]


def advice(batch: int, scale: float, low: float, high: float) -> str:
    """Says what a noise scale and its interval, in rows, mean for a batch: the steps to a loss go
    as 1 + scale / batch (McCandlish et al. 2018, section 2.2).

    >>> advice(8, 80.0, 60.0, 110.0)
    'The batch of 8 rows is below the noise scale: twice the batch needs 0.55 of the steps.'
    """
    steps = 0.5 if scale == math.inf else (batch + scale / 2) / (batch + scale)
    where = "below" if batch < low else "near" if batch <= high else "above"
    more = ", so that little is gained" if where == "above" else ""
    return (
        f"The batch of {batch:,} rows is {where} the noise scale: twice the batch needs "
        f"{steps:.2f} of the steps{more}."
    )


def _check(experiment: Experiment, microbatches: int) -> None:
    if experiment.method.start is not None:
        raise ValueError(
            f"the method of experiment {experiment.name!r} keeps a state, such as a population's: "
            "there are several gradients; give a run of one training"
        )
    epoch = experiment.data.steps_per_epoch
    if epoch is not None and microbatches > epoch:
        raise ValueError(
            f"`microbatches` is {microbatches}: a pass over the training rows has {float(epoch):g} "
            "batches, and rows that come twice are not independent; give fewer"
        )
