"""Optimizers by name: clipping, update rule, weight decay, masks and accumulation in one chain."""

import contextlib
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim import layerwise, masks, numerics, rules
from jaxtrain.optim.accumulation import accumulate as accumulate_calls
from jaxtrain.optim.averages import ema as ema_of
from jaxtrain.optim.balance import balance_experts
from jaxtrain.optim.masks import Mask, Multipliers, Stacked
from jaxtrain.optim.options import keywords
from jaxtrain.optim.rate import LearningRate, reduce_on_plateau, scale_by_learning_rate
from jaxtrain.optim.reports import nodes
from jaxtrain.optim.spikes import skip_spikes as skip_spikes_of
from jaxtrain.optim.watching import watch
from jaxtrain.tree import named_leaves

OPTIMIZERS = tuple(rules.RULES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenState:
    """State without arrays, of ``make_optimizer``: the paths of frozen parameters."""

    names: frozenset[str] = dataclasses.field(metadata={"static": True})


def frozen(opt_state: Any) -> frozenset[str]:
    """Returns the paths of the parameters that ``make_optimizer(freeze=)`` has frozen.

    >>> params = {"a": jax.numpy.ones(2), "b": jax.numpy.ones(2)}
    >>> sorted(frozen(make_optimizer("sgd", 0.1, freeze=("^b$",)).init(params)))
    ['b']
    """
    found = nodes(opt_state, lambda node: isinstance(node, FrozenState))
    return frozenset().union(*(node.names for node in found))


def frozen_of(state: Any) -> frozenset[str]:
    """Returns the paths of the frozen parameters of a train state, of which a method may keep the
    optimizer's part (:func:`frozen`)."""
    return frozen((state.opt_state, state.method))


def make_optimizer(
    name: str,
    learning_rate: LearningRate,
    *,
    weight_decay: float | jax.Array = 0.0,
    clip_norm: float | jax.Array | None = None,
    clip_order: float | Literal["max"] = 2.0,
    clip_value: float | jax.Array | None = None,
    decay_mask: Mask | None = None,
    decay_multipliers: Multipliers = (),
    rate_multipliers: Multipliers = (),
    freeze: Mask | None = None,
    stacked: Stacked | Callable[[Any], Stacked] | None = None,
    accumulate: int = 1,
    accumulate_ramp: Sequence[tuple[int, int]] = (),
    plateau_factor: float | None = None,
    plateau_patience: int = 10,
    plateau_window: int = 100,
    skip_spikes: float | None = None,
    ema: float | None = None,
    balance_rate: float = 1e-3,
    watch_every: int = 0,
    watch_bins: int = 0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Builds an optimizer: clip by value and norm, update rule with weight decay, learning rate.

    The rules are the functions of :mod:`jaxtrain.optim.rules`, of which each tells its options, its
    paper and where weight decay enters: ``help(jaxtrain.optim.rules.lamb)``. An option left out, or
    None, takes the default of the rule; one that the rule does not have is an error.

    * The learning rate in force is in the state (``current_learning_rate``). It is the last stage,
      except in LARS, whose momentum sums steps already scaled by it.
    * The clip takes one norm over all parameters that train, after accumulation, before decay.
    * On stacked layers every rule acts layer by layer: the same numbers as unstacked.
    * Multipliers by path are a sequence of (path regex, factor), of which the first that matches
      decides and which leave the rest at 1, or a function from path to factor. The factor of a
      stacked parameter may be an array with one number for each layer: layer decay is
      ``rate_multipliers=[("^blocks/", 0.75 ** np.arange(layers)[::-1])]``.
    * Arithmetic is float32 for half-precision inputs. Moments are stored in the parameters' dtype;
      ``moment_dtype="bfloat16"`` narrows first moments alone, and ``"float32"`` widens all moments
      of bfloat16 parameters, in which a second moment with b2 above 0.99 can hardly decay.
    * State does not change its paths with the values of these options: the leaf of parameter
      ``a/b`` ends in ``a/b``, on stacked layers and under ``accumulate`` too.

    Args:
      name: one of ``OPTIMIZERS``.
      learning_rate: a number, a traced scalar, or a schedule ``count -> rate``.
      weight_decay: strength; the rule says where it enters.
      clip_norm: largest global norm of the gradient; None does not clip.
      clip_order: p of that norm, ``(sum |g|^p)^(1/p)``, at least 1; ``"max"`` is infinity.
      clip_value: largest absolute value of the gradient, before its norm is clipped; None does not
        clip.
      decay_mask: which parameters decay, ``params -> tree of bools`` or path regexes; by default
        ``masks.decay_mask``, all but norms, biases and whatever has rank below 2 per layer.
      decay_multipliers: factors on the weight decay of those that decay, by path.
      rate_multipliers: factors on the finished update, weight decay included, by path.
      freeze: which parameters, besides integers, have no gradient, hold no state, count in no norm
        and get exactly zero updates; see :func:`frozen`.
      stacked: path regexes of parameters whose leading axis indexes layers, or a mapping from regex
        to the number of such axes (:attr:`jaxtrain.Stack.axes`), or a function of the parameters
        that returns those. Left out it is ``()``, with a warning where a state or a step is made of
        parameters that look stacked.
      accumulate: calls per update; beyond 1, ``update`` takes ``weight=``, the number of tokens
        behind each mean gradient; see ``accumulation.accumulate``.
      accumulate_ramp: other calls per update for the first ones, as pairs (calls, updates), by
        which the batch of an update grows; as there.
      plateau_factor: multiplies the learning rate where the loss (``update(..., value=)``) has not
        fallen by 0.01 % of its magnitude in ``plateau_patience`` windows in a row; None never does.
        See ``rate.reduce_on_plateau``; under ``accumulate`` the loss is that of all calls.
      plateau_patience: windows.
      plateau_window: updates in a window, whose losses are averaged.
      skip_spikes: leaves out an update whose loss (``update(..., value=)``) or gradient norm before
        clipping, is so many standard deviations above the mean of the last 128; see
        ``spikes.skip_spikes``. None leaves out none.
      ema: decay of a moving average of the parameters that train, in the state: one that an
        evaluation reads with :func:`jaxtrain.averaged`; see ``averages.ema``. None keeps none.
      balance_rate: step of the balancing biases of routers; see ``balance.balance_experts``.
      watch_every: updates between two measurements of the norms of every layer's gradient (before
        clipping), parameters and update; see ``watching.watch``. 0 measures none.
      watch_bins: of these, histograms of so many bins besides; 0 makes none.
      **options: of the rule. All but sgd take moment_dtype; see above.

    Returns:
      An optax transformation; call ``update(grads, state, params)``, with the parameters.

    Raises:
      ValueError: for an unknown name, an option the rule does not have, or a value out of range; at
        ``init`` for a pattern that matches no parameter, a mask that selects none or does not fit,
        and a multiplier of a shape that does not fit.

    >>> import jax.numpy as jnp
    >>> tx = make_optimizer("lamb", 0.1, weight_decay=0.1, clip_norm=1.0, stacked=(r"^blocks/",))
    >>> params = {"blocks": {"w": jnp.ones((3, 2, 2))}, "bias": jnp.zeros(2)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> updates["blocks"]["w"].shape
    (3, 2, 2)
    >>> make_optimizer("sgd", 0.1, b1=0.9)
    Traceback (most recent call last):
    ...
    ValueError: optimizer 'sgd' has no option b1 (given 0.9), which is of adam, adamw, adan, lion, \
lamb, muon; it takes weight_decay, clip_norm, clip_order, clip_value, decay_mask, \
decay_multipliers, rate_multipliers, freeze, stacked, accumulate, accumulate_ramp, \
plateau_factor, plateau_patience, plateau_window, skip_spikes, ema, balance_rate, watch_every, \
watch_bins
    """
    options = rules.resolve_options(name, options, common=tuple(keywords(make_optimizer)))
    if not callable(learning_rate):
        numerics.check_number("learning_rate", learning_rate, low=0.0)
    numerics.check_number("weight_decay", weight_decay, low=0.0)
    off = {"clip_norm": clip_norm, "clip_value": clip_value, "skip_spikes": skip_spikes}
    shares = {"ema": ema, "plateau_factor": plateau_factor}
    for option, value in (off | shares).items():
        if value is not None:
            high = {"high": 1.0} if option in shares else {}
            numerics.check_number(option, value, low=0.0, open_low=True, **high)
    order = np.inf if clip_order == "max" else clip_order
    numerics.check_number("clip_order", order, low=1.0, high=None)
    if clip_order != 2 and clip_norm is None:
        raise ValueError(f"`clip_order` is {clip_order} and `clip_norm` None: give `clip_norm` too")
    if plateau_factor is None and (plateau_patience, plateau_window) != (10, 100):
        raise ValueError("`plateau_patience` and `plateau_window` need `plateau_factor`: give it")
    plateau = None
    if plateau_factor is not None:
        plateau = reduce_on_plateau(
            plateau_factor,
            patience=numerics.check_integer("plateau_patience", plateau_patience, low=1),
            window=numerics.check_integer("plateau_window", plateau_window, low=1),
        )
    every = numerics.check_integer("accumulate", accumulate, low=1)
    watch_every = numerics.check_integer("watch_every", watch_every, low=0)
    if numerics.check_integer("watch_bins", watch_bins, low=0) and not watch_every:
        raise ValueError(f"`watch_bins` is {watch_bins} and `watch_every` 0: give that, too")

    no_decay = numerics.concrete("weight_decay", weight_decay) == 0

    def chain_for(params: Any) -> optax.GradientTransformationExtraArgs:
        axes = (stacked(params) if callable(stacked) else stacked) or ()
        masks.check_matches("stacked", axes, params)
        told, by_rank = None if stacked is None else axes, not no_decay and decay_mask is None
        masks.warn_of_stack(name, told, params, per_layer=name in rules.PER_LAYER, by_rank=by_rank)
        trainable = _trainable(freeze, params)

        def kept(tree: Any) -> Any:
            return jax.tree.map(lambda keep, x: x if keep else optax.MaskedNode(), trainable, tree)

        def mask(option: str, given: Mask | None, default: Any) -> Any:
            return kept(default(params) if given is None else masks.resolve(option, given, params))

        def multipliers(option: str, given: Multipliers) -> Any:
            return kept(masks.multipliers(option, given, params, stacked=axes))

        factors = multipliers("rate_multipliers", rate_multipliers)
        strengths = jax.tree.map(
            lambda decays, factor: weight_decay * factor if decays else False,
            mask("decay_mask", decay_mask, functools.partial(masks.decay_mask, stacked=axes)),
            multipliers("decay_multipliers", decay_multipliers),
        )
        groups = _groups(rate_multipliers)
        rate = scale_by_learning_rate(learning_rate, groups=groups, plateau=plateau)
        stages = rules.RULES[name](
            rules.Parts(
                decay=optax.identity() if no_decay else layerwise.add_decayed_weights(strengths),
                rate=rate,
                params=kept(params),
                strengths=strengths,
                mask=mask,
                stacked=axes,
            ),
            **options,
        )
        if rate_multipliers:
            scale = functools.partial(jax.tree.map, operator.mul, factors)
            stages.append(optax.stateless(lambda updates, _: scale(updates)))
        clips = [] if clip_value is None else [optax.clip(clip_value)]
        clips += [] if clip_norm is None else [clip_by_global_norm(clip_norm, order)]
        tx = optax.chain(optax.chain(*clips) if clips else optax.identity(), *stages)
        tx = numerics.in_float32(tx, moment_dtype=options.get("moment_dtype"))
        tx = balance_experts(tx, balance_rate)
        tx = tx if ema is None else ema_of(tx, ema)
        tx = watch(tx, watch_every, bins=watch_bins, stacked=axes) if watch_every else tx
        if every > 1 or accumulate_ramp:
            mean_value = plateau is not None
            tx = accumulate_calls(tx, every, ramp=accumulate_ramp, mean_value=mean_value)
        tx = tx if skip_spikes is None else skip_spikes_of(tx, skip_spikes)
        return tx if all(jax.tree.leaves(trainable)) else _freeze_rest(tx, trainable)

    return deferred(chain_for)


def freezing(tx: optax.GradientTransformation, freeze: Mask | None) -> optax.GradientTransformation:
    """Returns an optax transformation of what trains alone, as ``make_optimizer(freeze=)`` does.

    >>> params = {"a": jax.numpy.ones(2), "b": jax.numpy.ones(2)}
    >>> sorted(frozen(freezing(optax.adam(0.1), ("^b$",)).init(params)))
    ['b']
    """
    tx = optax.with_extra_args_support(tx)
    return deferred(lambda params: _freeze_rest(tx, _trainable(freeze, params)))


def deferred(chain_for: Any) -> optax.GradientTransformationExtraArgs:
    """A transformation built anew from the parameters at every call, that is at every trace.

    Masks depend on paths and shapes, which are known only there; built outside the optax stages,
    they see the whole tree, whatever those stages have masked out of it.
    """

    def init(params):
        return chain_for(params).init(params)

    def update(updates, state, params=None, **extra):
        tx = chain_for(updates if params is None else params)
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _trainable(freeze: Mask | None, params: Any) -> Any:
    """Returns the mask of the parameters that train."""
    trainable = jax.tree.map(lambda p: jnp.issubdtype(jnp.result_type(p), jnp.inexact), params)
    if freeze is not None:
        frozen = masks.resolve("freeze", freeze, params)
        trainable = jax.tree.map(lambda x, is_frozen: x and not is_frozen, trainable, frozen)
        if not any(jax.tree.leaves(trainable)):
            raise ValueError("`freeze` freezes every parameter; leave one to train")
    return trainable


def _groups(multipliers: Multipliers) -> tuple[tuple[str, Any], ...]:
    """The factors of patterns, by what is left of these in the name of a metric."""
    found: dict[str, Any] = {}
    pairs = multipliers.pairs if isinstance(multipliers, masks.Times) else multipliers
    for pattern, factor in () if callable(pairs) else pairs:
        name = re.sub(r"[^\w/.-]", "", pattern).strip("/") or "all"
        name = name if name not in found else f"{name}_{len(found)}"
        with contextlib.suppress(jax.errors.TracerArrayConversionError):
            value = np.asarray(factor, np.float64)
            found[name] = tuple(value.ravel().tolist()) if value.ndim else float(value)
    return tuple(found.items())


def clip_by_global_norm(limit: float | jax.Array, order: float) -> optax.GradientTransformation:
    """Scales updates whose norm of any order exceeds ``limit``, with a derivative where they are 0,
    and without overflow where the norm itself is a number."""

    def norm_of(updates):
        sizes = jax.tree.leaves(jax.tree.map(jnp.abs, updates))
        if order == 2:
            return numerics.norm(sizes)
        largest = functools.reduce(jnp.maximum, (x.max(initial=0) for x in sizes))
        if order == np.inf:
            return largest
        unit = jnp.where(largest == 0, 1, largest)
        # Powers of what is at most 1 do not overflow.
        return largest * sum(jnp.sum((x / unit) ** order) for x in sizes) ** (1 / order)

    def clip(updates, _):
        norm = norm_of(updates)
        divisor = jnp.where(norm == 0, 1, norm)
        return jax.tree.map(lambda u: jnp.where(norm < limit, u, u / divisor * limit), updates)

    return optax.stateless(clip)


def _freeze_rest(
    tx: optax.GradientTransformationExtraArgs, trainable: Any
) -> optax.GradientTransformationExtraArgs:
    rest = jax.tree.map(lambda keep: not keep, trainable)
    names = frozenset(name for name, is_frozen in named_leaves(rest).items() if is_frozen)
    still = optax.GradientTransformation(
        lambda params: FrozenState(names),
        lambda updates, state, params=None: (optax.tree.zeros_like(updates), state),
    )
    return optax.chain(optax.masked(tx, trainable), optax.masked(still, rest))
