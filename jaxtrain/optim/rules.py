"""The update rules by name: one function each, whose keywords are the optimizer's options.

A rule takes the ``Parts`` that ``make_optimizer`` has ready and returns the stages that lead from
clipped gradients to updates. ``@rule`` puts it on the list by the name of its function. What its
keywords are and which values they take stands in ``OPTIONS``, but for masks. The flags of
experiments follow from both.

Coupled weight decay is added to the gradient, decoupled decay to the finished update; both are
multiplied by the learning rate. Stages that are switched off are ``optax.identity()``, so that the
state of the others keeps its path whatever the options.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim import layerwise, masks
from jaxtrain.optim.masks import Mask, Stacked
from jaxtrain.optim.numerics import check_choice, check_integer, check_number, concrete
from jaxtrain.optim.options import Option, keywords, resolve

Stages = list[optax.GradientTransformation]

RULES: dict[str, Callable[..., Stages]] = {}
# The rules that see a layer as a whole, and so need to know what is stacked.
PER_LAYER = ("adafactor", "lamb", "lars", "muon")
# Peak learning rates that suit small models, by rule.
LEARNING_RATES: dict[str, float] = {}


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that an update rule combines with its own stages.

    Attributes:
      decay: the stage that adds decayed weights.
      rate: the stage that multiplies by minus the learning rate.
      params: the parameters that train.
      strengths: a tree like ``params``: the weight decay of each, False for none.
      mask: ``(option, mask, default) -> tree of bools`` like ``params``; ``default``, a function of
        parameters, stands in for a mask of None.
      stacked: which leading axes index layers.
    """

    decay: optax.GradientTransformation
    rate: optax.GradientTransformation
    params: Any
    strengths: Any
    mask: Callable[[str, Mask | None, Callable[[Any], Any]], Any]
    stacked: Stacked


def rule(*, learning_rate: float) -> Callable[[Callable[..., Stages]], Callable[..., Stages]]:
    """Puts a function on the list of rules, with a learning rate that suits small models."""

    def register(function: Callable[..., Stages]) -> Callable[..., Stages]:
        RULES[function.__name__] = function
        LEARNING_RATES[function.__name__] = learning_rate
        return function

    return register


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` is {value!r}; it must be True or False")
    return value


def _float_dtype(name: str, dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"`{name}` is {dtype!r}; it must be bfloat16, float16 or float32")
    return found


_fraction = functools.partial(check_number, low=0.0, high=1.0)
_not_negative = functools.partial(check_number, low=0.0)
_positive = functools.partial(check_number, low=0.0, open_low=True)


def _positive_or_off(name: str, value: Any) -> Any:
    value = math.inf if value == "inf" else value  # a flag's, for JSON has no infinity
    return check_number(name, value, low=0.0, high=None, open_low=True)


_count = functools.partial(check_integer, low=1)
_rms_or_width = functools.partial(check_choice, choices=("rms", "width"))

# What every option of a rule is, and which values it takes. Numbers may be traced scalars too, and
# dtypes those of jax.numpy.
OPTIONS = {
    "b1": Option(float, "Decay of the first moment.", _fraction),
    "b2": Option(float, "Decay of the second moment.", _fraction),
    "b3": Option(float, "Decay of Adan's third moment.", _fraction),
    "eps": Option(float, "Added to denominators.", _not_negative),
    "momentum": Option(float, "Of sgd-like rules.", _fraction),
    "nesterov": Option(bool, "Look one step ahead.", _boolean),
    "moment_dtype": Option(
        Literal["float32", "bfloat16", "float16"],
        "Of stored first moments (float32 widens the second too); left out, the parameters'.",
        _float_dtype,
    ),
    "decay_rate": Option(float, "Exponent of Adafactor's growing decay.", _positive),
    "min_dim_size_to_factor": Option(int, "Adafactor factors no smaller dimension.", _count),
    "clipping_threshold": Option(
        Literal["inf"] | float,
        "Largest RMS of an Adafactor update; inf clips none.",
        _positive_or_off,
    ),
    "parameter_scale": Option(bool, "Scale Adafactor's update by the parameter's RMS.", _boolean),
    "trust_coefficient": Option(float, "Trust in a layer of LARS, its eta.", _positive),
    "ns_steps": Option(int, "Newton-Schulz iterations of Muon.", _count),
    "muon_scale": Option(
        Literal["rms", "width"], "Muon's update as large as AdamW's, or by width.", _rms_or_width
    ),
    "adam_ratio": Option(float, "Of the learning rate, for what Muon leaves to AdamW.", _positive),
    "trust_mask": Option(
        tuple[str, ...],
        "Regexes of the paths of parameters that LAMB and LARS scale by a trust ratio; left out, "
        "those with weight decay.",
    ),
}


# Below the rounding of any second moment: a root has no derivative where that is 0.
_TINY = 1e-37
# An eps of 0 would divide a gradient of 0 by 0.
_above_0 = functools.partial(jnp.maximum, _TINY)
_adam = functools.partial(optax.scale_by_adam, eps_root=_TINY)


@rule(learning_rate=0.3)
def sgd(parts: Parts) -> Stages:
    """Gradient descent. Weight decay is coupled."""
    return [parts.decay, parts.rate]


@rule(learning_rate=0.1)
def momentum(parts: Parts, *, momentum=0.9, nesterov=False, moment_dtype=None) -> Stages:
    """Gradient descent along a decaying sum of gradients. Weight decay is coupled."""
    return [parts.decay, _trace(momentum, nesterov, moment_dtype), parts.rate]


@rule(learning_rate=3e-3)
def adam(parts: Parts, *, b1=0.9, b2=0.999, eps=1e-8, nesterov=False, moment_dtype=None) -> Stages:
    """Adam (Kingma & Ba 2014, https://arxiv.org/abs/1412.6980). Weight decay is coupled."""
    return [parts.decay, _adam(b1, b2, eps, mu_dtype=moment_dtype, nesterov=nesterov), parts.rate]


@rule(learning_rate=3e-3)
def adamw(parts: Parts, *, b1=0.9, b2=0.999, eps=1e-8, nesterov=False, moment_dtype=None) -> Stages:
    """Adam with decoupled decay (Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101)."""
    return [_adam(b1, b2, eps, mu_dtype=moment_dtype, nesterov=nesterov), parts.decay, parts.rate]


class AdanState(NamedTuple):
    """State of ``adan``: updates made; means of gradients, changes and squares; last gradients."""

    count: jax.Array
    m: Any
    v: Any
    n: Any
    last: Any


@rule(learning_rate=1e-2)
def adan(parts: Parts, *, b1=0.98, b2=0.92, b3=0.99, eps=1e-8, moment_dtype=None) -> Stages:
    """Adan (Xie et al. 2022, https://arxiv.org/abs/2208.06677). Weight decay is decoupled.

    The betas are those of the authors' code, 1 minus the paper's: ``b1`` of the gradient, ``b2`` of
    its changes, ``b3`` of the square; moments are free of bias. ``optax.adan`` (0.2.8) multiplies
    the changes by ``1 - b2`` where the paper and its code have ``b2``.
    """

    def init(params):
        # Arrays of their own, each of which a step can be given to write over.
        m, v = (optax.tree.zeros_like(params, dtype=moment_dtype) for _ in range(2))
        n, last = (optax.tree.zeros_like(params) for _ in range(2))
        return AdanState(jnp.zeros([], jnp.int32), m, v, n, last)

    def update(grads, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        change = optax.tree.sub(grads, optax.tree.where(count == 1, grads, state.last))
        ahead = optax.tree.add_scale(grads, b2, change)
        m = optax.tree.update_moment(grads, state.m, b1, 1)
        v = optax.tree.update_moment(change, state.v, b2, 1)
        n = optax.tree.update_moment(ahead, state.n, b3, 2)
        means = ((m, b1), (v, b2), (n, b3))
        m_hat, v_hat, n_hat = (optax.tree.bias_correction(x, b, count) for x, b in means)
        updates = jax.tree.map(
            lambda m, v, n: (m + b2 * v) / (jnp.sqrt(n + _TINY) + eps), m_hat, v_hat, n_hat
        )
        return updates, AdanState(count, m, v, n, grads)

    return [optax.GradientTransformation(init, update), parts.decay, parts.rate]


@rule(learning_rate=1e-3)
def rmsprop(
    parts: Parts, *, b2=0.9, eps=1e-8, momentum=0.0, nesterov=False, moment_dtype=None
) -> Stages:
    """RMSProp (Tieleman & Hinton 2012), with eps inside the root. Weight decay is coupled."""
    trace = _trace(momentum, nesterov, moment_dtype)
    return [parts.decay, optax.scale_by_rms(decay=b2, eps=_above_0(eps)), trace, parts.rate]


@rule(learning_rate=1e-2)
def adafactor(
    parts: Parts,
    *,
    momentum=0.0,
    eps=1e-30,
    decay_rate=0.8,
    min_dim_size_to_factor=128,
    clipping_threshold=1.0,
    parameter_scale=True,
    moment_dtype=None,
) -> Stages:
    """Adafactor (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235), per layer.

    As ``optax.adafactor``, whose ``multiply_by_parameter_scale`` is ``parameter_scale``. Weight
    decay is decoupled; optax's is not multiplied by the learning rate.
    """
    rms = functools.partial(optax.safe_root_mean_squares, min_rms=_TINY)
    factored = optax.chain(
        _by_factored_rms(
            decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor, eps=eps
        ),
        optax.stateless_with_tree_map(lambda u, _: u / jnp.maximum(1, rms(u) / clipping_threshold)),
        optax.scale_by_param_block_rms() if parameter_scale else optax.identity(),
    )
    mean = optax.identity()
    if concrete("momentum", momentum) != 0:
        mean = optax.ema(momentum, debias=False, accumulator_dtype=moment_dtype)
    return [layerwise.per_layer(factored, parts.stacked), mean, parts.decay, parts.rate]


def _by_factored_rms(*, eps: Any, **options: Any) -> optax.GradientTransformation:
    """optax's, in a unit in which ``eps`` to the power of -3/2, the derivative where the gradient
    is 0, is a number of float32."""
    eps, scaled = _above_0(eps) * 2.0**40, optax.tree.scale
    tx = optax.scale_by_factored_rms(epsilon=eps, **options)

    def update(grads, state, params=None):
        state = scaled(2.0**40, state)._replace(count=state.count)
        updates, state = tx.update(scaled(2.0**20, grads), state, params)
        return updates, scaled(2.0**-40, state)._replace(count=state.count)

    return optax.GradientTransformation(tx.init, update)


@rule(learning_rate=3e-4)
def lion(parts: Parts, *, b1=0.9, b2=0.99, moment_dtype=None) -> Stages:
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675). Weight decay is decoupled."""
    return [optax.scale_by_lion(b1, b2, mu_dtype=moment_dtype), parts.decay, parts.rate]


@rule(learning_rate=1e-2)
def lamb(parts: Parts, *, b1=0.9, b2=0.999, eps=1e-6, trust_mask=None, moment_dtype=None) -> Stages:
    """LAMB (You et al. 2019, https://arxiv.org/abs/1904.00962), per layer and expert.

    The trust ratio scales the weight decay too. ``trust_mask`` says which parameters take it, as
    ``decay_mask``; by default those that decay, as in the authors' code.
    """
    trust = _trust(parts, trust_mask)
    stacked = masks.per_matrix(parts.params, parts.stacked)
    ratio = layerwise.scale_by_lamb_trust_ratio(trust, stacked=stacked)
    return [_adam(b1, b2, eps, mu_dtype=moment_dtype), parts.decay, ratio, parts.rate]


@rule(learning_rate=3.0)
def lars(
    parts: Parts,
    *,
    momentum=0.9,
    nesterov=False,
    trust_coefficient=0.001,
    trust_mask=None,
    moment_dtype=None,
) -> Stages:
    """LARS (You et al. 2017, https://arxiv.org/abs/1708.03888, algorithm 1), per layer and expert.

    The paper accumulates steps, not gradients: the learning rate goes before the momentum. The
    trust ratio, with ``trust_coefficient`` for the paper's eta, scales the weight decay too.
    ``trust_mask`` says which parameters take it, as ``decay_mask``; by default those that decay.
    """
    ratio = layerwise.scale_by_lars_trust_ratio(
        _trust(parts, trust_mask),
        parts.strengths,
        trust_coefficient=trust_coefficient,
        stacked=masks.per_matrix(parts.params, parts.stacked),
    )
    return [ratio, parts.rate, _trace(momentum, nesterov, moment_dtype)]


@rule(learning_rate=1e-2)
def muon(
    parts: Parts,
    *,
    momentum=0.95,
    nesterov=True,
    ns_steps=5,
    muon_scale="rms",
    muon_mask=None,
    b1=0.9,
    b2=0.95,
    eps=1e-10,
    adam_ratio=1.0,
    moment_dtype=None,
) -> Stages:
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon), per layer.

    ``layerwise.scale_by_muon`` has its options. ``muon_mask`` says which parameters it
    orthogonalises, as ``decay_mask``; by default ``masks.hidden_matrices``, those of each expert
    among them. The others take AdamW
    with ``b1``, ``b2`` and ``eps``, at ``adam_ratio`` of the learning rate: with ``"rms"`` scaling
    one rate fits both; with ``"width"``, the original Muon, they want a much smaller one. Weight
    decay is decoupled.
    """
    stacked = masks.per_matrix(parts.params, parts.stacked)
    default = functools.partial(masks.hidden_matrices, stacked=stacked)
    hidden = parts.mask("muon_mask", muon_mask, default)
    if (leaves := jax.tree.leaves(hidden)) and not any(leaves):
        raise ValueError(
            "optimizer 'muon' has nothing to orthogonalise: no parameter that trains is a matrix "
            "of a hidden layer; use 'adamw', or name matrices by `muon_mask`"
        )
    masks.check_matrices("muon_mask", hidden, parts.params, stacked)
    others = jax.tree.map(lambda hidden: not hidden, hidden)
    orthogonal = layerwise.scale_by_muon(
        hidden,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        muon_scale=muon_scale,
        moment_dtype=moment_dtype,
        stacked=stacked,
    )
    return [
        orthogonal,
        optax.masked(_adam(b1, b2, eps, mu_dtype=moment_dtype), others),
        parts.decay,
        optax.masked(optax.scale(adam_ratio), others),
        parts.rate,
    ]


def resolve_options(name: str, given: dict[str, Any], *, common: tuple[str, ...]) -> dict[str, Any]:
    """Returns the options of the rule ``name``: those given, checked, and defaults for the rest.
    Raises ValueError as :func:`jaxtrain.optim.options.resolve`; for a value out of range, and for
    options that do not go together."""
    given = resolve("optimizer", name, given, RULES, common=common)
    options = {key: p.default for key, p in keywords(RULES[name]).items()}
    for key, value in given.items():
        options[key] = OPTIONS[key].check(key, value) if key in OPTIONS else value
    if "momentum" in options and concrete("momentum", options["momentum"]) == 0:
        if options.get("nesterov"):
            raise ValueError(f"`nesterov` has no effect on {name!r} with momentum 0; set that")
        dtype = options["moment_dtype"]
        if dtype is not None and dtype.itemsize < 4:
            raise ValueError(
                f"`moment_dtype` is {dtype.name}, which applies to the first moment, but {name!r} "
                "with momentum 0 keeps none; set `momentum`, or moment_dtype='float32'"
            )
    return options


def _trace(decay: Any, nesterov: bool, dtype: Any) -> optax.GradientTransformation:
    if concrete("momentum", decay) == 0:
        return optax.identity()
    return optax.trace(decay, nesterov=nesterov, accumulator_dtype=dtype)


def _trust(parts: Parts, given: Mask | None) -> Any:
    decaying = jax.tree.map(lambda strength: strength is not False, parts.strengths)
    return decaying if given is None else parts.mask("trust_mask", given, None)
