"""Flax modules, NNX and Linen, as the two pure functions that the step builders are made of.

Both adapters return ``init_fn`` for :func:`jaxtrain.init_state` and ``apply`` to be called in a
loss. Parameters are what is differentiated and optimized: ``nnx.Param`` in NNX, the collection
``params`` in Linen. Everything else that a module keeps (BatchNorm's running statistics) is model
state, which needs ``has_model_state=True`` here and in the builders. Random numbers (dropout) come
from the key that the loss is given; without a key, as in an evaluation, the module is called in its
evaluation form, and its state stays as it is.

Flax is imported when an adapter is called.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.tree import PyTree, named_leaves

# What Linen modules call the argument that tells training from evaluation.
_MODES = {"train", "training", "is_training", "deterministic", "use_running_average"}

InitFn = Callable[[jax.Array], Any]
Apply = Callable[..., Any]


def from_nnx(make: Callable[[Any], Any], *, has_model_state: bool = False) -> tuple[InitFn, Apply]:
    """Splits an NNX module into ``init_fn`` and ``apply``.

    Args:
      make: ``nnx.Rngs -> module``.
      has_model_state: whether the module keeps anything besides parameters and keys.

    Returns:
      ``init_fn(rng) -> params`` and ``apply(params, *inputs, rng, **options) -> outputs``; with
      ``has_model_state``, ``init_fn(rng) -> (params, model_state)`` and
      ``apply(params, model_state, *inputs, rng, **options) -> (outputs, model_state)``. With a key
      the module is called in its training form (``module.train()``) and each of its random streams
      draws from that key; with ``rng=None`` in its evaluation form (``module.eval()``).

    Raises:
      ValueError: where the module keeps state and ``has_model_state`` is False.

    >>> from flax import nnx
    >>> init_fn, apply = from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
    >>> apply(init_fn(jax.random.key(0)), jnp.ones((4, 2)), rng=None).shape
    (4, 3)
    """
    from flax import nnx

    def is_state(path: Any, value: Any) -> bool:
        return not isinstance(value, nnx.Param | nnx.RngState)

    def state_of(module: Any) -> PyTree:
        return nnx.to_pure_dict(nnx.state(module, is_state))

    shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    definition, _, keys, _ = nnx.split(shapes, nnx.Param, nnx.RngState, ...)

    def create(rng: jax.Array) -> tuple[PyTree, PyTree]:
        module = make(nnx.Rngs(rng))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param)), state_of(module)

    def call(params: PyTree, model_state: PyTree, *inputs: Any, rng: Any, **options: Any) -> Any:
        start = jax.random.key(0) if rng is None else rng
        leaves, tree = jax.tree.flatten(keys)
        streams = [_stream(start, i, leaf) for i, leaf in enumerate(leaves)]
        streams = nnx.to_pure_dict(jax.tree.unflatten(tree, streams))
        module = nnx.merge(definition, streams, params, model_state)
        module.eval() if rng is None else module.train()
        outputs = module(*inputs, **options)
        return outputs, model_state if rng is None else _like(state_of(module), model_state)

    return _functions(create, call, has_model_state)


def from_linen(
    module: Any,
    *inputs: Any,
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    has_model_state: bool = False,
) -> tuple[InitFn, Apply]:
    """Splits a Linen module into ``init_fn`` and ``apply``.

    Args:
      module: the module.
      *inputs: what it is called with, to initialize it; shapes suffice.
      training, evaluation: arguments of its call that differ between the two, such as
        ``{"train": True}`` and ``{"train": False}``.
      has_model_state: whether it has collections besides ``params``.

    Returns:
      As :func:`from_nnx`.

    Raises:
      ValueError: where the module has other collections and ``has_model_state`` is False.

    >>> import flax.linen as nn
    >>> init_fn, apply = from_linen(nn.Dense(3), jnp.ones((4, 2)))
    >>> apply(init_fn(jax.random.key(0)), jnp.ones((4, 2)), rng=None).shape
    (4, 3)
    """
    from flax.core import meta

    modes = _MODES & inspect.signature(type(module).__call__).parameters.keys()

    def variables(rng: jax.Array) -> dict[str, Any]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        return dict(meta.unbox(module.init(rng, *zeros, **(evaluation or {}))))

    def create(rng: jax.Array) -> tuple[PyTree, PyTree]:
        model_state = variables(rng)
        return model_state.pop("params", {}), model_state

    def call(params: PyTree, model_state: PyTree, *inputs: Any, rng: Any, **options: Any) -> Any:
        given = {"params": params, **model_state}
        if rng is not None and training is None and (told := modes - options.keys()):
            warnings.warn(
                f"{type(module).__name__} takes {min(told)}= and is trained with its default: say "
                f"how it differs, as in from_linen(..., training={{'{min(told)}': ...}})",
                stacklevel=2,
            )
        if rng is None:
            return module.apply(given, *inputs, **(evaluation or {}), **options), model_state
        # A stream without a key of its own, such as "dropout", draws from that of "params".
        outputs, updated = module.apply(
            given,
            *inputs,
            rngs={"params": rng},
            mutable=list(model_state),
            **(training or {}),
            **options,
        )
        updated = {**model_state, **_newest(meta.unbox(updated), model_state)}
        return outputs, _like(updated, model_state)

    return _functions(create, call, has_model_state)


def _newest(new: PyTree, old: PyTree) -> PyTree:
    """Linen's variables after a call, where what it has sown, a tuple that it has added to what it
    was given, is that of this call alone."""
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return {k: _newest(x, old[k]) if k in old else x for k, x in new.items()}
    longer = isinstance(new, tuple) and isinstance(old, tuple) and len(new) > len(old) > 0
    return new[-len(old) :] if longer else new


def _functions(create: InitFn, call: Apply, has_model_state: bool) -> tuple[InitFn, Apply]:
    """``init_fn`` and ``apply``, with model state or without any."""
    if has_model_state:
        create.has_model_state = True  # init_state asks for it
        return create, call
    if kept := named_leaves(jax.eval_shape(create, jax.random.key(0))[1]):
        raise ValueError(
            f"the module keeps state besides its parameters ({next(iter(kept))!r}): pass "
            "has_model_state=True here, to init_state and to the step builders"
        )

    def apply(params: PyTree, *inputs: Any, rng: jax.Array | None, **options: Any) -> Any:
        return call(params, {}, *inputs, rng=rng, **options)[0]

    return lambda rng: create(rng)[0], apply


def _stream(rng: jax.Array, index: int, leaf: Any) -> jax.Array:
    """The key, or the count of draws so far, of a random stream (or of several, stacked)."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.zeros(leaf.shape, leaf.dtype)
    key = jax.random.fold_in(rng, index)
    return jax.random.split(key, leaf.shape) if leaf.shape else key


def _like(new: PyTree, old: PyTree) -> PyTree:
    """Model state in the dtypes that it came in; a model that computes in bfloat16 may return it
    in that."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new  # The step builder names what differs.
    return jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)
