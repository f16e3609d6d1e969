"""Optimizers by name: clipping, update rule, weight decay, masks and accumulation in one chain."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim import masks, numerics, recipes
from jaxtrain.optim.accumulation import accumulate as accumulate_calls
from jaxtrain.optim.masks import Mask, Stacked
from jaxtrain.optim.rate import LearningRate, scale_by_learning_rate
from jaxtrain.optim.spikes import skip_spikes as skip_spikes_of
from jaxtrain.tree import named_leaves

OPTIMIZERS = tuple(recipes.OPTIONS)


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

    def wanted(node: Any) -> bool:
        return isinstance(node, FrozenState)

    nodes = [node for node in jax.tree.leaves(opt_state, is_leaf=wanted) if wanted(node)]
    return frozenset().union(*(node.names for node in nodes))


def make_optimizer(
    name: str,
    learning_rate: LearningRate,
    *,
    weight_decay: float | jax.Array = 0.0,
    clip_norm: float | jax.Array | None = None,
    decay_mask: Mask | None = None,
    freeze: Mask | None = None,
    stacked: Stacked = (),
    accumulate: int = 1,
    skip_spikes: float | None = None,
    b1: float | jax.Array | None = None,
    b2: float | jax.Array | None = None,
    eps: float | jax.Array | None = None,
    momentum: float | jax.Array | None = None,
    nesterov: bool | None = None,
    moment_dtype: Any = None,
    trust_coefficient: float | jax.Array | None = None,
    trust_mask: Mask | None = None,
    decay_rate: float | None = None,
    min_dim_size_to_factor: int | None = None,
    clipping_threshold: float | None = None,
    parameter_scale: bool | None = None,
    ns_steps: int | None = None,
    muon_mask: Mask | None = None,
    muon_scale: str | None = None,
    adam_ratio: float | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Builds an optimizer: clip by global norm, update rule with weight decay, learning rate.

    Options left at None take the default of the named rule; one that the rule has no use for is an
    error.

    =========== ====================================================================== ============
    name        options and their defaults                                             weight decay
    =========== ====================================================================== ============
    sgd         --                                                                     coupled
    momentum    momentum 0.9, nesterov False                                           coupled
    adam        b1 0.9, b2 0.999, eps 1e-8, nesterov False                             coupled
    adamw       b1 0.9, b2 0.999, eps 1e-8, nesterov False                             decoupled
    rmsprop     b2 0.9, eps 1e-8 (inside the root), momentum 0, nesterov False         coupled
    adafactor   momentum 0, eps 1e-30, decay_rate 0.8, min_dim_size_to_factor 128,     decoupled
                clipping_threshold 1 (inf: off), parameter_scale True
    lion        b1 0.9, b2 0.99                                                        decoupled
    lamb        b1 0.9, b2 0.999, eps 1e-6, trust_mask (all parameters)                in the ratio
    lars        momentum 0.9, nesterov False, trust_coefficient 0.001, trust_mask      in the ratio
                (all parameters)
    muon        momentum 0.95, nesterov True, ns_steps 5, muon_scale "rms" ("width"),  decoupled
                muon_mask (hidden matrices), and for the other parameters, which take
                AdamW: b1 0.9, b2 0.95, eps 1e-10, adam_ratio 1
    =========== ====================================================================== ============

    All but sgd take moment_dtype. Coupled decay is added to the clipped gradient, decoupled decay
    to the finished update, and both are multiplied by the learning rate with the rest. LAMB and
    LARS decay as in their papers, inside what the trust ratio scales.

    In detail:

    * The learning rate in force is in the state (``current_learning_rate``). It is the last stage,
      except in LARS, whose momentum sums steps already scaled by it.
    * The clip takes one norm over all parameters that train, after accumulation, before decay.
    * On stacked layers every rule acts layer by layer: the same numbers as unstacked.
    * ``optax.adafactor`` does not multiply its decay by the learning rate; here it is multiplied.
    * ``adam_ratio`` multiplies the learning rate of Muon's other parameters. With ``"rms"`` scaling
      one rate fits both; with ``"width"``, the original Muon, they want a much smaller one.
    * Arithmetic is float32 for half-precision inputs. Moments are stored in the parameters' dtype;
      ``moment_dtype="bfloat16"`` narrows first moments alone, and ``"float32"`` widens all moments
      of bfloat16 parameters, in which a second moment with b2 above 0.99 can hardly decay.
    * State does not change its paths with the values of these options: the leaf of parameter
      ``a/b`` ends in ``a/b``, on stacked layers and under ``accumulate`` too.

    Args:
      name: one of ``OPTIMIZERS``.
      learning_rate: a number, a traced scalar, or a schedule ``count -> rate``.
      weight_decay: strength; see the table for where it enters.
      clip_norm: largest global norm of the gradient; None does not clip.
      decay_mask: which parameters decay, ``params -> tree of bools`` or path regexes; by default
        ``masks.decay_mask``, all but norms, biases and whatever has rank below 2 per layer.
      freeze: which parameters, besides integers, have no gradient, hold no state, count in no norm
        and get exactly zero updates; see :func:`frozen`.
      stacked: path regexes of parameters whose leading axis indexes layers, or a mapping from regex
        to the number of such axes.
      accumulate: calls per update; beyond 1, ``update`` takes ``weight=``, the number of tokens
        behind each mean gradient; see ``accumulation.accumulate``.
      skip_spikes: leaves out an update whose loss (``update(..., value=)``) or gradient norm before
        clipping, is so many standard deviations above the mean of the last 128; see
        ``spikes.skip_spikes``. None leaves out none.
      b1, b2, eps, momentum, nesterov: of the rule, as in the table.
      moment_dtype: bfloat16, float16 or float32; see above.
      trust_coefficient: eta of LARS.
      trust_mask: which parameters take a trust ratio, as ``decay_mask``.
      decay_rate, min_dim_size_to_factor, clipping_threshold, parameter_scale: of Adafactor, as in
        ``optax.adafactor`` (``parameter_scale`` is its ``multiply_by_parameter_scale``).
      ns_steps, muon_scale, adam_ratio: of Muon; see above and ``layerwise.scale_by_muon``.
      muon_mask: which parameters Muon orthogonalises, as ``decay_mask``; ``masks.hidden_matrices``.

    Returns:
      An optax transformation; call ``update(grads, state, params)``, with the parameters.

    Raises:
      ValueError: for an unknown name, an option the rule does not have, or a value out of range; at
        ``init`` for a pattern that matches no parameter and a mask that does not fit.

    >>> import jax.numpy as jnp
    >>> tx = make_optimizer("lamb", 0.1, weight_decay=0.1, clip_norm=1.0, stacked=(r"^blocks/",))
    >>> params = {"blocks": {"w": jnp.ones((3, 2, 2))}, "bias": jnp.zeros(2)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> updates["blocks"]["w"].shape
    (3, 2, 2)
    >>> make_optimizer("sgd", 0.1, b1=0.9)
    Traceback (most recent call last):
    ...
    ValueError: optimizer 'sgd' has no option b1 (given 0.9); it takes weight_decay, clip_norm, \
decay_mask, freeze, accumulate, skip_spikes, stacked
    """
    options = recipes.resolve_options(
        name,
        {
            "b1": b1,
            "b2": b2,
            "eps": eps,
            "momentum": momentum,
            "nesterov": nesterov,
            "moment_dtype": moment_dtype,
            "trust_coefficient": trust_coefficient,
            "trust_mask": trust_mask,
            "decay_rate": decay_rate,
            "min_dim_size_to_factor": min_dim_size_to_factor,
            "clipping_threshold": clipping_threshold,
            "parameter_scale": parameter_scale,
            "ns_steps": ns_steps,
            "muon_mask": muon_mask,
            "muon_scale": muon_scale,
            "adam_ratio": adam_ratio,
        },
    )
    if not callable(learning_rate):
        numerics.check_number("learning_rate", learning_rate, low=0.0)
    numerics.check_number("weight_decay", weight_decay, low=0.0)
    if clip_norm is not None:
        numerics.check_number("clip_norm", clip_norm, low=0.0, open_low=True)
    if skip_spikes is not None:
        numerics.check_number("skip_spikes", skip_spikes, low=0.0, open_low=True)
    every = numerics.check_integer("accumulate", accumulate, low=1)

    def chain_for(params: Any) -> optax.GradientTransformationExtraArgs:
        trainable, layout = _lay_out(params, options, decay_mask, freeze, stacked)
        tx = optax.chain(
            optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm),
            *recipes.stages(
                name,
                options,
                layout,
                weight_decay=weight_decay,
                rate=scale_by_learning_rate(learning_rate),
            ),
        )
        tx = numerics.in_float32(tx, moment_dtype=options.get("moment_dtype"))
        tx = accumulate_calls(tx, every) if every > 1 else tx
        tx = tx if skip_spikes is None else skip_spikes_of(tx, skip_spikes)
        return tx if all(jax.tree.leaves(trainable)) else _freeze_rest(tx, trainable)

    return _deferred(chain_for)


def _deferred(chain_for: Any) -> optax.GradientTransformationExtraArgs:
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


def _lay_out(
    params: Any,
    options: dict[str, Any],
    decay_mask: Mask | None,
    freeze: Mask | None,
    stacked: Stacked,
) -> tuple[Any, recipes.Layout]:
    """Returns the mask of trainable parameters, and the masks of the rest without the frozen."""
    masks.check_matches("stacked", stacked, params)
    everything = jax.tree.map(lambda _: True, params)
    trainable = jax.tree.map(lambda p: jnp.issubdtype(jnp.result_type(p), jnp.inexact), params)
    if freeze is not None:
        frozen = masks.resolve("freeze", freeze, params)
        trainable = jax.tree.map(lambda x, is_frozen: x and not is_frozen, trainable, frozen)
        if not any(jax.tree.leaves(trainable)):
            raise ValueError("freeze freezes every parameter; leave one to train")

    def of_trainable(option: str, mask: Mask | None, default: Any) -> Any:
        tree = default if mask is None else masks.resolve(option, mask, params)
        if option == "muon_mask":
            masks.check_matrices(option, tree, params, stacked)
        return jax.tree.map(lambda keep, x: x if keep else optax.MaskedNode(), trainable, tree)

    hidden = masks.hidden_matrices(params, stacked=stacked)
    return trainable, recipes.Layout(
        decay=of_trainable("decay_mask", decay_mask, masks.decay_mask(params, stacked=stacked)),
        trust=of_trainable("trust_mask", options.get("trust_mask"), everything),
        hidden=of_trainable("muon_mask", options.get("muon_mask"), hidden),
        stacked=stacked,
    )


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
