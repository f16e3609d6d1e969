"""Differentially private training: its flags, what they do to an experiment, and its epsilon.

The guarantee is of the parameters after every step, together, for data sets that differ by one row.
It is accounted for by privacy loss distributions (Google's dp-accounting) of Gaussian noise on a
sum over rows that are drawn with probability q in every step; with noise that is correlated over b
steps, with probability q b in a b-th of the steps (Choquette-Choo et al. 2023,
https://arxiv.org/abs/2306.08153).
"""

import dataclasses
import functools
import math
from typing import Any

from jaxtrain.engines.plain import plain
from jaxtrain.engines.private import DRAWN, MEND, private
from jaxtrain.host import extras
from jaxtrain.methods.method import Method

# Privacy losses are rounded up to multiples of it.
_INTERVAL = 2e-4


@dataclasses.dataclass(frozen=True)
class Private:
    """Differentially private training (DP-SGD; with bands, DP-FTRL)."""

    clip: float | None = None
    """Largest norm of the gradient of an example, which is a row; left out, training is not
    private."""
    noise: float | None = None
    """Standard deviation of the noise on a step's sum of gradients, in units of private.clip."""
    epsilon: float | None = None
    """Epsilon after the last step, for which the noise is solved, in place of private.noise."""
    delta: float = 1e-5
    """Delta of the guarantee, at most 1 over the number of training rows."""
    bands: int = 1
    """Number of steps over which noise is correlated and within which no row is drawn twice
    (DP-FTRL); 1 draws it anew in every step (DP-SGD)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = f"private.{field.name}", getattr(self, field.name)
            if value is not None and not (value > 0 or (value == 0 and field.name == "noise")):
                raise ValueError(f"`{name}` is {value}: give a number above 0")
            if value != field.default and self.clip is None:
                raise ValueError(
                    f"`{name}` is {value} and no gradient is clipped: give `private.clip` too"
                )
        if self.clip is not None and (self.noise is None) == (self.epsilon is None):
            raise ValueError(
                f"`private.noise` is {self.noise} and `private.epsilon` {self.epsilon}: give one "
                "of them, which says how much noise there is"
            )


@functools.cache
def _loss_of_a_step(rate: float, noise: float) -> Any:
    name = "dp_accounting.pld.privacy_loss_distribution"
    package = extras.load("epsilon is computed by dp-accounting", "private", name)
    made = package.pld.privacy_loss_distribution.from_gaussian_mechanism
    return made(noise, sampling_prob=rate, value_discretization_interval=_INTERVAL)


def epsilon_after(
    steps: int, *, rate: float, noise: float, delta: float = 1e-5, bands: int = 1
) -> float:
    """Returns epsilon of so many steps, an upper bound.

    Args:
      steps: at least 0.
      rate: share of all rows that a step draws on average.
      noise: in units of the clip; without any, epsilon is infinite.
      delta, bands: as for :class:`Private`.

    Raises:
      ImportError: the extra ``private`` is not installed.
    """
    if steps == 0 or noise == 0:
        return math.inf if steps else 0.0
    one = _loss_of_a_step(rate * bands, noise)
    return one.self_compose(-(-steps // bands)).get_epsilon_for_delta(delta)


def noise_for(epsilon: float, steps: int, **given: Any) -> float:
    """Returns the least noise, to 1e-4 of it, with which ``steps`` steps have at most ``epsilon``;
    ``given`` are ``rate``, ``delta`` and ``bands`` of :func:`epsilon_after`."""
    enough = lambda noise: epsilon_after(steps, noise=noise, **given) <= epsilon  # noqa: E731
    high = 1.0
    while not enough(high):
        high *= 2
    while enough(high / 2):
        high /= 2
    low = high / 2
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def private_training(
    experiment: Any, given: Private, *, rows: int, examples: int, nonce: int = 0
) -> Any:
    """Returns a :class:`jaxtrain.Experiment` whose gradients are private, with its epsilon in the
    header, in the logs (``privacy/epsilon``) and in the last lines.

    Args:
      experiment: with batches of :class:`jaxtrain.data.PoissonBatches`.
      given: the flags, with a clip.
      rows: of the training data.
      examples: the number of rows that a step draws on average.
      nonce: as for :func:`jaxtrain.engines.private.private`.

    Raises:
      ValueError: something would break the guarantee.
      ImportError: the extra ``private`` is not installed.
    """
    check_private(experiment)
    if experiment.task.engine is not plain:
        raise ValueError(
            f"`private.clip` is given and experiment {experiment.name!r} has a gradient engine of "
            "its own: leave one of them out"
        )
    if given.delta * rows > 1:
        raise ValueError(
            f"`private.delta` is {given.delta} and there are {rows:,} rows: to publish one of them "
            "would be private; give at most 1 over their number"
        )
    steps, metadata, counts = experiment.steps, experiment.metadata, experiment.data.counts
    known = {"rate": examples / rows, "delta": given.delta, "bands": given.bands}
    noise = noise_for(given.epsilon, steps, **known) if given.noise is None else given.noise
    after = functools.partial(epsilon_after, noise=noise, **known)
    told = f"epsilon {after(steps):.3f} at delta {given.delta:g} after {steps:,} steps"
    how = f"{told}, for a row more or less of {rows:,}, {examples} of which a step draws; clip "
    how += f"{given.clip:g}, noise {noise:.4g}; no secret to those who know the seed"
    engine = private(given.clip, noise, examples, bands=given.bands, nonce=nonce)
    return experiment.with_(
        engine=dataclasses.replace(engine, check=check_private),
        counts=lambda step: (counts(step) if counts else {}) | {"privacy/epsilon": after(step)},
        facts={**metadata.facts, "privacy": how},
        conclude=lambda *end: [*(metadata.conclude(*end) if metadata.conclude else ()), told],
    )


def check_private(experiment: Any) -> None:
    """Raises ValueError where an experiment would break the guarantee of its gradients."""
    batch = experiment.data.batch
    broken = {
        f"model state (BatchNorm), which is of several examples; {MEND}": (
            experiment.task.has_model_state
        ),
        f"a loss scale, which leaves out steps as their examples have it; {MEND}": (
            experiment.policy.loss_scale is not None
        ),
        "a method around its steps, which alone are accounted for; leave it out": (
            experiment.method != Method()
        ),
        "batches that are not drawn by Poisson sampling; make them of one source by "
        "config.batches_of": not (isinstance(batch, dict) and DRAWN in batch),
        "`gather` 'layer', where gradients of examples need whole weights; leave it out": (
            experiment.layout.gather == "layer"
        ),
    }
    for why in (why for why, holds in broken.items() if holds):
        raise ValueError(f"`private.clip` is given and experiment {experiment.name!r} has {why}")
