"""Train and evaluation steps: pure functions of a state and a batch, neither jitted nor sharded.

A step holds no mesh, no flags and no side effects: ``jax.jit`` it, ``jax.vmap`` it over a
population, ``jax.lax.scan`` it, differentiate through it, or hand it to
:func:`jaxtrain.compile_step`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.engines.accumulated import accumulated
from jaxtrain.engines.cached import check_embeddings
from jaxtrain.engines.exact import evaluated_in_grains, on_pieces
from jaxtrain.engines.exact import exact as in_grains
from jaxtrain.engines.plain import (
    Engine,
    GradientEngine,
    GradientSums,
    accepted_kwargs,
    as_engine,
    plain,
    run_engine,
    scaled,
    trainable,
)
from jaxtrain.engines.reduction import reduced_once, why_not
from jaxtrain.loss import (
    SUMS,
    LossFn,
    WeightedLoss,
    as_weighted,
    check_metrics,
    is_row_wise,
    keeps_sums,
    of_constant_weight,
)
from jaxtrain.ops.scaled import shares_lost
from jaxtrain.optim import frozen, reports
from jaxtrain.optim.accumulation import hold_state, made_of_calls
from jaxtrain.precision import OPTIMIZER, Policy, as_policy
from jaxtrain.sharding.offload import back_to_host, casts_fetched, on_devices
from jaxtrain.sharding.placement import Gather, constrain_tree, gather_for_loss, model_gathers
from jaxtrain.sharding.stack import of_model
from jaxtrain.state import TrainState
from jaxtrain.tree import (
    PyTree,
    all_finite,
    is_count,
    map_named,
    name_of,
    named_leaves,
    partition,
    select,
    to_accum_dtype,
)

Metrics = dict[str, jax.Array]


def build_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    policy: Policy | str | None = None,
    accumulate: int = 1,
    has_model_state: bool = False,
    gradient_shardings: PyTree | None = None,
    gather: Gather | None = None,
    engine: Engine | Callable[[LossFn], GradientEngine] = plain,
    norms: bool = False,
    exact: int = 0,
) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
    """Builds ``step(state, batch) -> (state, metrics)``.

    Args:
      loss_fn: ``(params, batch, rng) -> WeightedLoss`` or scalar (weight 1); with
        ``has_model_state``, ``(params, model_state, batch, rng) -> (loss, model_state)``.
      optimizer: any optax transformation but a line search, which would compute the loss again.
        Its update also receives ``value`` (the mean loss) and ``weight`` (the batch's weight) for
        those that use them.
      policy: dtypes, and whether the loss is scaled, or a policy's name (``"bf16"``); float32 by
        default.
      accumulate: microbatches per step. Loss and gradients are summed over them, divided once by
        the whole batch's weight, and applied in one update.
      has_model_state: which of the two forms ``loss_fn`` has.
      gradient_shardings: from :func:`jaxtrain.gradient_shardings`, to pin how gradients lie.
      gather: when weights that ``data`` and ``fsdp`` split are made whole. ``"step"``: all, once
        for all microbatches, in the compute dtype; gradients are whole too until the step ends.
        That takes a loss that is declared :func:`jaxtrain.row_wise`; weights of any other are made
        whole as they enter it, on meshes that need it
        (:func:`jaxtrain.sharding.placement.specs_for_loss` says which and why), and so they are
        where ``gather`` is left out. ``"model"``: by the model, which calls :func:`jaxtrain.gather`
        layer by layer or :func:`jaxtrain.constrain` on its activations.
      engine: how gradients are computed, as a :class:`jaxtrain.engines.plain.Engine` or a bare
        function that makes a gradient engine of a loss ``(params, model_state, batch, rng) ->
        (WeightedLoss, model_state)``, which brings ``policy`` and ``gather`` along. It is called
        once per microbatch.
      norms: also report ``param_norm`` and ``update_norm`` (a pass over the parameters each).
      exact: the number of grains in which the gradient of a batch is computed, so that every bit is
        the same for any 2 or more devices along ``data`` and ``fsdp``, any ``zero`` and any
        ``accumulate`` (:mod:`jaxtrain.engines.exact`); 0 for the sums that are fastest.

    Returns:
      The step. Its metrics are ``loss``, the loss's own metrics, ``weight``, ``grad_norm`` (of what
      trains, before clipping), ``skipped`` (microbatches left out of this step: all of them where
      it was not finite, else 0), ``loss_scale`` (where there is one) and what the optimizer
      :func:`jaxtrain.optim.reports`: ``learning_rate``, and with ``skip_spikes`` ``spike``, 1 where
      it left this update out as one. :func:`build_update` says what is left out, and when.

    Raises:
      ValueError: for ``accumulate`` below 1, and when the step is traced for a batch that does not
        divide, a metric with a reserved name or that of a report, a complex parameter, or a state
        without the loss scale that ``policy`` asks for.
    """
    if exact:
        if engine is not plain:
            raise ValueError(
                f"`exact` is {exact} and the step has an engine of its own, {name_of(engine)!r}, "
                "whose sums the mesh decides: leave one of them out"
            )
        check_exact(exact, loss_fn, policy, has_model_state=has_model_state)
        engine = in_grains(exact, as_policy(policy).cast_to_compute)
    built = build_engine(
        loss_fn,
        policy=policy,
        accumulate=accumulate,
        has_model_state=has_model_state,
        gradient_shardings=gradient_shardings,
        gather=gather,
        engine=engine,
    )
    own = {"policy": policy, "norms": norms, "constrain": constrain_tree(gradient_shardings)}
    return build_update(built, optimizer, **own, **({"within": on_pieces} if exact else {}))


def check_exact(
    exact: int,
    loss_fn: Callable[..., Any],
    policy: Policy | str | None,
    *,
    has_model_state: bool = False,
) -> None:
    """Raises ValueError where a batch cannot be taken in ``exact`` grains: its loss is not declared
    a sum over rows, or what is rounded is counted."""
    if as_policy(policy).count_rounding:
        raise ValueError(
            f"`exact` is {exact} and `count_rounding` True, whose counts grains do not have: "
            "leave one of them out"
        )
    if reason := why_not(loss_fn, has_model_state=has_model_state and not is_row_wise(loss_fn)):
        raise ValueError(
            f"`exact` is {exact} and a batch cannot be taken in grains, {reason}: leave it out"
        )


def build_engine(
    loss_fn: Callable[..., Any],
    *,
    policy: Policy | str | None,
    accumulate: int,
    has_model_state: bool,
    gather: Gather | None,
    engine: Engine | Callable[[LossFn], GradientEngine],
    gradient_shardings: PyTree | None = None,
) -> GradientEngine:
    """Builds the gradient engine of :func:`build_train_step`, which takes the same arguments."""
    if accumulate < 1:
        raise ValueError(f"`accumulate` is {accumulate}: use 1 or more microbatches")
    engine = as_engine(engine)
    if not _takes(engine.make, 1 + engine.accumulates):
        raise ValueError(
            f"engine is {engine.make!r}: give a function of a loss that returns a gradient engine, "
            "as jaxtrain.engines.plain.plain is"
        )
    check_embeddings(loss_fn, engine, accumulate)
    if engine is not plain and as_policy(policy).count_rounding:
        raise ValueError(
            "`count_rounding` is True and the step has an engine of its own, to which counts would "
            "be gradients: leave one of them out"
        )
    gather = "step" if engine.by_row else gather
    obstacle = why_not(loss_fn, has_model_state=has_model_state, engine=engine)
    joined = engine.joins_state and is_row_wise(loss_fn)
    reason = why_not(loss_fn, has_model_state=has_model_state and not joined)
    if engine.by_parts and reason:
        raise ValueError(
            f"the gradient engine {name_of(engine.make)!r} takes parts of a batch by themselves, "
            f"which are not what the whole is, {reason}: use another engine"
        )
    policy, stack = as_policy(policy), getattr(loss_fn, "stack", None)
    normalized = _with_constant_weight(normalize_loss(loss_fn, has_model_state))
    loss_fn = with_policy(normalized, policy, gather, gradient_shardings)
    built = engine(loss_fn, accumulate) if engine.accumulates else engine(loss_fn)
    if accumulate > 1 and not engine.accumulates:
        built = accumulated(loss_fn, accumulate, constrain_tree(gradient_shardings), engine=engine)
    reduced = reduced_once(
        built,
        loss_fn,
        engine=engine,
        cast=policy.cast_to_compute,
        microbatches=accumulate,
        gather=gather,
        shardings=gradient_shardings,
        obstacle=obstacle,
    )
    if stack is not None:
        reduced.stack = stack
    return reduced


def build_update(
    engine: GradientEngine,
    optimizer: optax.GradientTransformation,
    *,
    policy: Policy | str | None = None,
    constrain: Callable[[PyTree], PyTree] = lambda grads: grads,
    norms: bool = False,
    within: Callable[[Callable], Callable] = lambda update: update,
) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
    """Builds a train step from a gradient engine: mean gradient, one optimizer update, metrics.

    :func:`build_train_step` is this over the engines of :mod:`jaxtrain.engines.plain`; a gradient
    computed some other way (a pipeline) comes in here. Where the optimizer freezes parameters
    (``make_optimizer(freeze=)``), their paths are the engine's argument ``frozen``; an engine that
    has no such argument differentiates everything, and what is frozen stays as it is all the same.

    An update is made of its whole batch or not at all. Where the loss, its weight, the gradient of
    a parameter that trains or the new model state is not finite in any microbatch, the step is left
    out: parameters, optimizer state and model state stay as they are, ``weight`` and ``grad_norm``
    are 0, ``loss`` is NaN, ``skipped`` is the number of microbatches, and a loss scale is halved.
    A gradient whose norm exceeds 1.8e19 counts as not finite, because the square is not a float32.
    No microbatch is left out alone: an overflow takes the largest gradients, and what remains is
    biased. So one rule holds with and without accumulation and in a pipeline, on every mesh; and
    with ``make_optimizer(accumulate=)``, whose updates are made of several steps, a step that is
    left out leaves out the update that it is part of. Of private gradients the loss is not tested.

    The mean is ``total / weight`` for a weight of either sign. A step of weight 0 has none: it
    changes nothing but the count of steps, neither parameters nor optimizer state, model state or
    loss scale; to ``make_optimizer(accumulate=)`` it is one of the calls, and adds nothing.

    ``within`` is what becomes of ``(state, sums) -> (state, metrics)``, what follows the engine.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    policy = as_policy(policy)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        _check_loss_scale(state, policy)
        _check_real(state.params)
        scale = None if state.loss_scale is None else state.loss_scale.scale
        rng = jax.random.fold_in(state.rng, state.step)
        still = frozen(state.opt_state) - frozenset(filter(is_count, named_leaves(state.params)))
        given = (state.params, state.model_state, batch, rng, scale)
        with keeps_sums(False):  # a step within the loss is none of those that are joined
            sums = run_engine(engine, *given, frozen=still, memory=state.memory)
        check_metrics(sums.loss)
        _check_returned("gradient engine", "memory", state.memory, sums.memory)
        return within(update)(state, sums)

    def update(state: TrainState, sums: GradientSums) -> tuple[TrainState, Metrics]:
        still, names = frozen(state.opt_state), named_leaves(state.params)
        counted = frozenset(filter(is_count, names))
        counts = sums.loss.weight != 0
        per_token = jnp.where(counts, 1.0 / jnp.where(counts, sums.loss.weight, 1.0), 0.0)
        # An engine that does not take ``frozen`` has differentiated everything.
        trains = named_leaves(trainable(state.params, {*still, *counted})[0])
        training, _ = partition(lambda name, _: name in trains, sums.grads)
        _check_gradients(named_leaves(training), trains)
        training = constrain(scaled(training, per_token))
        # An infinity that stands there already, as of a running minimum, is not of this batch.
        states = zip(*map(jax.tree.leaves, (sums.model_state, state.model_state)), strict=True)
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
        moved = [jnp.where(new == old, 0, new) for new, old in states if inexact(new)]
        # A step that a loss may leave out leaves out its noise.
        tested = () if sums.private else (sums.loss.total, sums.loss.weight)
        # The norm is not finite where a gradient is not, nor where its square is too large for the
        # second moment of an optimizer, which would stay infinite.
        grad_norm = optax.tree.norm(training)
        finite = all_finite((grad_norm, tested, moved))
        loss = select(finite, sums.loss, jax.tree.map(jnp.zeros_like, sums.loss))
        usable = finite & counts
        metrics = loss.means() | {
            "weight": loss.weight,
            "grad_norm": jnp.where(usable, grad_norm, 0.0),
            "skipped": jnp.where(finite, 0, jnp.int32(sums.microbatches)),
        }
        # The optimizer may be any, and is given zeros for what does not train. What it makes of a
        # step that is left out is thrown away, and at 0 or NaN would have no derivative: 0 * NaN.
        grads = jax.tree.map(
            lambda p, g: (
                jnp.zeros(p.shape, p.dtype)
                if g is None
                else jnp.where(usable, g, 1).astype(p.dtype)
            ),
            state.params,
            training,
        )
        weight = jnp.where(finite, loss.weight, jnp.nan)
        # Some transformations refuse what they do not use.
        extras = {} if sums.private else {"value": metrics["loss"]}
        extras = accepted_kwargs(optimizer.update, extras | {"weight": weight})
        held = (state.params, state.opt_state)
        given, before = on_devices(held, after=metrics["grad_norm"])
        stack = getattr(engine, "stack", None)
        with jax.named_scope(OPTIMIZER), of_model((stack, True)):
            try:
                updates, opt_state = optimizer.update(grads, before, given, **extras)
            except Exception as error:
                made = jax.eval_shape(optimizer.init, state.params)
                if jax.tree.structure(made) == jax.tree.structure(state.opt_state):
                    if isinstance(error, TypeError) and "required keyword-only" in str(error):
                        raise ValueError(
                            f"the optimizer asks for more than a step gives it ({error}): a step "
                            "computes its gradient once, so leave out a line search, as in "
                            "optax.lbfgs(linesearch=None)"
                        ) from None
                    raise
                raise ValueError(
                    "the state was made with another optimizer than the step: give init_state and "
                    "the step builder the same one"
                ) from None
        opt_state = hold_state(~usable, before, opt_state)
        # Accumulated over calls, the last call of an update may be one that adds nothing.
        made = made_of_calls(opt_state, before, names)
        applied = {name: usable | made.get(name, False) for name in names}
        params = map_named(
            lambda name, p, g, new: p if g is None else jnp.where(applied[name], new, p),
            given,
            training,
            optax.apply_updates(given, updates),
        )
        if norms:
            metrics["param_norm"] = _norm(params)
            moves = lambda name, u: jnp.where(applied[name], u, 0)  # noqa: E731
            metrics["update_norm"] = _norm(map_named(moves, updates))
        if state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.scale
        told = reports(opt_state, since=before)
        if both := sorted(told.keys() & metrics.keys()):
            raise ValueError(
                f"the optimizer reports {both[0]!r}, as a metric of the loss or the step is "
                "called: give one of them another name"
            )
        found = named_leaves(sums.grads) if counted else {}
        metrics |= told | shares_lost({name: found[name] for name in counted & names.keys()}, stack)
        metrics |= {SUMS: loss} if keeps_sums.value else {}
        return dataclasses.replace(
            state,
            step=state.step + 1,
            params=back_to_host(params, state.params),
            opt_state=back_to_host(opt_state, state.opt_state),
            model_state=select(usable, sums.model_state, state.model_state),
            memory=select(usable, sums.memory, state.memory),
            loss_scale=state.loss_scale
            and select(counts | ~finite, state.loss_scale.updated(~finite), state.loss_scale),
            skipped=state.skipped + metrics["skipped"],
        ), metrics

    return step


def scan_steps(
    step: Callable[[TrainState, PyTree], tuple[TrainState, Metrics]],
) -> Callable[[TrainState, Sequence[PyTree]], tuple[TrainState, Metrics]]:
    """Makes several steps one: ``(state, batches) -> (state, metrics)``, for one dispatch.

    It pays where a step takes hardly longer than its dispatch (a fraction of a millisecond), and on
    a CPU for somewhat longer ones too, for their temporaries are mapped once per call. The results
    are those of calling ``step`` batch by batch, to rounding.

    Args:
      step: a train step.

    Returns:
      A function of a state and a sequence of batches, in order, with the same shapes. Its metrics
      have a leading axis, one entry per batch.

    >>> double = scan_steps(lambda state, batch: (state + batch, {"sum": state + batch}))
    >>> state, metrics = double(jnp.float32(1), [jnp.float32(2), jnp.float32(3)])
    >>> float(state), metrics["sum"].tolist()
    (6.0, [3.0, 6.0])
    """

    def steps(state: TrainState, batches: Sequence[PyTree]) -> tuple[TrainState, Metrics]:
        return jax.lax.scan(step, state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches))

    return steps


def build_eval_step(
    loss_fn: Callable[..., Any],
    *,
    policy: Policy | str | None = None,
    has_model_state: bool = False,
    gather: Gather | None = None,
    exact: int = 0,
) -> Callable[[TrainState, PyTree], WeightedLoss]:
    """Builds ``evaluate(state, batch) -> WeightedLoss``, sums that can be added over batches.

    Args:
      loss_fn: as for :func:`build_train_step`; it is called with ``rng=None``, by which a model
        knows that nothing is to be dropped.
      policy: dtypes; float32 by default.
      has_model_state: which of the two forms ``loss_fn`` has. New model state is discarded.
      gather, exact: as for :func:`build_train_step`.

    >>> evaluate = build_eval_step(lambda params, batch, rng: WeightedLoss(params * batch, 2.0))
    >>> state = TrainState(0, jnp.float32(3), None, None, None, None, 0)
    >>> (evaluate(state, 4.0) + evaluate(state, 8.0)).means()["loss"]
    Array(9., dtype=float32)
    """
    loss_fn = with_policy(normalize_loss(loss_fn, has_model_state), as_policy(policy), gather)

    def evaluate(state: TrainState, batch: PyTree) -> WeightedLoss:
        loss, _ = loss_fn(state.params, state.model_state, batch, None)
        check_metrics(loss)
        return to_accum_dtype(loss)

    return evaluated_in_grains(evaluate, exact) if exact else evaluate


def normalize_loss(loss_fn: Callable[..., Any], has_model_state: bool) -> Callable[..., Any]:
    """Brings a loss to ``(params, model_state, batch, rng) -> (WeightedLoss, model_state)``.

    Raises:
      ValueError: where the loss cannot be called in the form that ``has_model_state`` says, and,
        when it is traced, where state or result have another form.
    """
    _check_arguments(loss_fn, has_model_state)

    def normalized(params, model_state, batch, rng):
        if not has_model_state:
            if model_state is not None:
                raise ValueError(
                    "the state holds model state and the loss does not update it: pass "
                    "has_model_state=True to the step builder, or create the state without it"
                )
            return as_weighted(loss_fn(params, batch, rng)), None
        if model_state is None:
            raise ValueError(
                "has_model_state=True and the state holds no model state: pass "
                "has_model_state=True to init_state, with init_fn returning (params, model_state)"
            )
        result = loss_fn(params, model_state, batch, rng)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"with has_model_state=True the loss returns (loss, model_state), and it returned "
                f"{type(result).__name__}"
            )
        _check_returned("loss", "model state", model_state, result[1])
        return as_weighted(result[0]), result[1]

    return normalized


def _with_constant_weight(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def warning(params, *rest):
        loss, model_state = loss_fn(params, *rest)
        return of_constant_weight(loss, params), model_state

    return warning


def with_policy(
    loss_fn: Callable[..., Any],
    policy: Policy,
    gather: Gather | None = None,
    shardings: PyTree | None = None,
) -> Callable[..., Any]:
    """Brings parameters into a normalized loss: in the compute dtype, placed for the computation.

    Args:
      loss_fn: from :func:`normalize_loss`.
      policy: dtypes.
      gather: as for :func:`build_train_step`.
      shardings: of the parameters or their gradients; None for what ``compile_step`` knows.

    Raises:
      ValueError: for another ``gather``.
    """
    if gather not in (None, "step", "model"):
        raise ValueError(f"`gather` is {gather!r}: use 'step' or 'model'")

    def entered(params, model_state, batch, rng):
        params, batch = policy.cast_to_compute(params), policy.cast_inputs(batch)
        with casts_fetched(policy.cast_layer):
            if gather != "model":
                return loss_fn(gather_for_loss(params, shardings), model_state, batch, rng)
            with model_gathers():
                return loss_fn(params, model_state, batch, rng)

    return entered


def _norm(tree: PyTree) -> jax.Array:
    return optax.tree.norm(to_accum_dtype(tree))


def _check_real(params: PyTree) -> None:
    for name, leaf in named_leaves(params).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"parameter {name!r} is a random key: keep it in model state or in the batch"
            )
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(
                f"parameter {name!r} is {leaf.dtype}: optimizers here take real gradients; keep "
                "its real and imaginary parts as two parameters"
            )


def _check_gradients(found: dict[str, jax.Array], params: dict[str, jax.Array]) -> None:
    for name, param in params.items():
        shape = jnp.shape(found[name]) if name in found else None
        if shape != jnp.shape(param):
            raise ValueError(
                f"the gradient engine gives {'none' if shape is None else f'shape {shape}'} for "
                f"parameter {name!r} of shape {jnp.shape(param)}: a gradient has that shape"
            )


def _check_arguments(loss_fn: Callable[..., Any], has_model_state: bool) -> None:
    forms = ("params, batch, rng", "params, model_state, batch, rng")
    takes = [_takes(loss_fn, len(form.split(","))) for form in forms]
    if not takes[has_model_state]:
        mend = (
            f"pass has_model_state={not has_model_state} where it is {forms[not has_model_state]}"
            if takes[not has_model_state]
            else "give it these arguments"
        )
        raise ValueError(
            f"the loss is to be called as loss_fn({forms[has_model_state]}) and does not take "
            f"that: {mend}"
        )


def _takes(function: Callable[..., Any], count: int) -> bool:
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some builtins have none.
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _check_returned(by: str, what: str, given: PyTree, returned: PyTree) -> None:
    def kinds(tree: PyTree) -> dict[str, str]:
        leaves = named_leaves(jax.eval_shape(lambda: tree)).items()
        return {name: f"{x.dtype}{list(x.shape)}" for name, x in leaves}

    before, after = kinds(given), kinds(returned)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise ValueError(
                f"the {by} was given {what} {name!r} as {before.get(name, 'nothing')} and "
                f"returned {after.get(name, 'nothing')}: return every leaf as it came"
            )


def _check_loss_scale(state: TrainState, policy: Policy) -> None:
    wanted = policy.loss_scale is not None
    if (state.loss_scale is not None) != wanted:
        has, wants = ("no loss scale", "one") if wanted else ("a loss scale", "none")
        raise ValueError(
            f"the state has {has} and the step's policy wants {wants}: give init_state and "
            "build_train_step the same policy"
        )
