"""Differentially private training: its flags, what they do to an experiment, and its epsilon.

The guarantee is of the parameters after every step, together, for data sets that differ by one row;
of federated rounds, by one client.
It is accounted for by privacy loss distributions (Google's dp-accounting) of Gaussian noise on a
sum over rows that are drawn with probability q in every step; with noise that is correlated over b
steps, with probability q b in a b-th of the steps (Choquette-Choo et al. 2023,
https://arxiv.org/abs/2306.08153).
"""

import dataclasses
import functools
import math
import re
from typing import Any

import jax

from jaxtrain.engines.private import MEND, private
from jaxtrain.host import extras
from jaxtrain.methods.clipped_clients import ClippedClients
from jaxtrain.methods.method import Method
from jaxtrain.optim.balance import BIAS, SHARES
from jaxtrain.optim.masks import resolve
from jaxtrain.tree import named_leaves

# Privacy losses are rounded up to multiples of it.
_INTERVAL = 2e-4
# With less noise, epsilon is in the hundreds and takes gigabytes to compute.
_LEAST_NOISE = 0.2
_RANGES = {"noise": (_LEAST_NOISE, 1e6), "epsilon": (1e-3, 50), "delta": (1e-12, 1)}


@dataclasses.dataclass(frozen=True)
class Private:
    """Differentially private training (DP-SGD; with bands, DP-FTRL; of clients, DP-FedAvg)."""

    noise: float | None = None
    """Standard deviation of the noise on a step's sum of gradients, in units of private.clip; left
    out, training is not private."""
    epsilon: float | None = None
    """Epsilon after the last step, for which the noise is solved, in place of private.noise."""
    delta: float = 1e-5
    """Delta of the guarantee, at most 1 over the number of training rows, or of clients."""
    clip: float = 1.0
    """Largest norm of the gradient of an example, which is a row, or of what a client of a
    federated round moves the parameters by; inf clips none."""
    bands: int = 1
    """Number of steps over which noise is correlated and within which no row is drawn twice
    (DP-FTRL); 1 draws it anew in every step (DP-SGD)."""

    @property
    def is_on(self) -> bool:
        """Whether training is private."""
        return self.noise is not None or self.epsilon is not None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = f"private.{field.name}", getattr(self, field.name)
            if value is not None and not (value > 0 or (value == 0 and field.name == "noise")):
                raise ValueError(f"`{name}` is {value}: give a number above 0")
            low, high = _RANGES.get(field.name, (0, math.inf))
            if value and not low <= value <= high:
                free = ", or 0 for none" if field.name == "noise" else ""
                raise ValueError(f"`{name}` is {value}: give {low:g} to {high:g}{free}")
            if value != field.default and (
                not self.is_on or None not in (self.noise, self.epsilon)
            ):
                raise ValueError(
                    f"`{name}` is {value}, and either `private.noise` or `private.epsilon` says "
                    "how much noise there is: give one of them"
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
    """Returns the least noise, to 1e-3 of it, with which ``steps`` steps have at most ``epsilon``;
    ``given`` are ``rate``, ``delta`` and ``bands`` of :func:`epsilon_after`."""
    enough = lambda noise: epsilon_after(steps, noise=noise, **given) <= epsilon  # noqa: E731
    high = 1.0
    while not enough(high):
        high *= 2
    while high / 2 >= _LEAST_NOISE and enough(high / 2):
        high /= 2
    low = max(high / 2, _LEAST_NOISE)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def private_fields(given: Private, *, rows: int, examples: int, steps: int) -> dict[str, Any]:
    """Returns the fields of a private :class:`jaxtrain.Experiment`: its engine, its epsilon in the
    logs (``privacy/epsilon``) and the guarantee.

    Args:
      given: the flags, with noise or epsilon.
      rows: of the training data, which :class:`jaxtrain.data.PoissonBatches` draws from.
      examples: the number of rows that a step draws on average.
      steps: of the run.

    Raises:
      ValueError: delta is too large.
      ImportError: the extra ``private`` is not installed.
    """
    noise, fields = _accounted(given, rows, examples, steps, ("row", "step"))
    engine = private(given.clip, noise, examples, bands=given.bands)
    check = functools.partial(check_private, steps=steps)
    return fields | {"engine": dataclasses.replace(engine, check=check)}


def private_clients(
    given: Private, *, clients: int, drawn: int, rounds: int
) -> tuple[ClippedClients, dict[str, Any]]:
    """Returns what makes :func:`jaxtrain.methods.federated.federated` private to a client, and the
    fields of such an experiment: its epsilon in the logs, and the guarantee.

    Args:
      given: the flags, with noise or epsilon.
      clients: of which :class:`jaxtrain.data.PoissonClients` draws.
      drawn: the number of them that a round draws on average.
      rounds: of the run.

    Raises:
      ValueError: delta is too large, or noise is to be correlated.
      ImportError: the extra ``private`` is not installed.
    """
    if given.bands > 1:
        raise ValueError(
            f"`private.bands` is {given.bands} and training is private to clients, for which noise "
            "is drawn anew in each round: leave private.bands out"
        )
    noise, fields = _accounted(given, clients, drawn, rounds, ("client", "round"))
    return ClippedClients(given.clip, noise, drawn, rounds), fields


def _accounted(
    given: Private, count: int, drawn: int, steps: int, words: tuple[str, str]
) -> tuple[float, dict[str, Any]]:
    """The noise, and the fields that say what it gives; ``words`` name what is private, a row or a
    client, and what draws of these."""
    one, step = words
    if given.delta * count > 1:
        raise ValueError(
            f"`private.delta` is {given.delta} and there are {count:,} {one}s: to publish one of "
            "them would be private; give at most 1 over their number"
        )
    known = {"rate": drawn / count, "delta": given.delta, "bands": given.bands}
    noise = noise_for(given.epsilon, steps, **known) if given.noise is None else given.noise
    after = functools.partial(epsilon_after, noise=noise, **known)
    told = f"epsilon {after(steps):.3f} at delta {given.delta:g} after {steps:,} {step}s, for a "
    told += f"{one} more or less of {count:,}, {drawn} of which a {step} draws; clip "
    told += f"{given.clip:g}, noise {noise:.4g}; void to those who know the seed"
    return noise, {"counts": lambda step: {"privacy/epsilon": after(step)}, "guarantee": told}


def check_private(experiment: Any, *, steps: float = math.inf) -> None:
    """Raises ValueError where an experiment would break the guarantee of its gradients, which is of
    so many ``steps``."""
    task = experiment.task
    init = lambda: task.init_fn(jax.random.key(0))  # noqa: E731
    params = {} if task.has_model_state else jax.eval_shape(init)
    held = {} if task.freeze is None else named_leaves(resolve("freeze", task.freeze, params))
    trains = [name for name in named_leaves(params) if not held.get(name)]
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
        "`gather` 'layer', where gradients of examples need whole weights; leave it out": (
            experiment.layout.gather == "layer"
        ),
        "experts that are balanced by counts, which noise covers; route by softmax, and "
        "balance within a row": any(re.search(f"{BIAS}|{SHARES}", name) for name in trains),
        f"{experiment.steps:,} steps, of which {steps:,} are accounted for; make its data and it "
        "by one config, of those steps": experiment.steps > steps,
    }
    for why in (why for why, holds in broken.items() if holds):
        raise ValueError(f"training is private and experiment {experiment.name!r} has {why}")
