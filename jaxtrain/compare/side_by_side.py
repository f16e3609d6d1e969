"""Several optimizers in one step, each with parameters of its own, and all with its gradients.

Most of what a step costs to trace and to compile is its model. An optimizer whose updates are
compared for replayed gradients does not need a model to itself: here one step has several, and what
each makes of the same gradients is compared as if it were alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from jaxtrain.compare.whole_runs import Errors
from jaxtrain.experiment import Experiment, optimizer_for
from jaxtrain.sharding.stack import Stack
from jaxtrain.tree import PyTree


class Own(NamedTuple):
    """The parameters and the state of one of several optimizers."""

    params: PyTree
    opt_state: Any


def side_by_side(experiments: Sequence[Experiment]) -> Callable[[Stack], Any]:
    """Returns, as a function of the stack, one optimizer of the optimizers of experiments.

    Its state is a tuple of :class:`Own`, in their order. Its updates are those of the first.
    """

    def made(stack: Stack) -> optax.GradientTransformationExtraArgs:
        chains = [optax.with_extra_args_support(optimizer_for(e, stack)) for e in experiments]

        def init(params: PyTree) -> tuple[Own, ...]:
            return tuple(Own(params, chain.init(params)) for chain in chains)

        def update(
            grads: PyTree, state: tuple[Own, ...], params: PyTree, **extras: Any
        ) -> tuple[PyTree, tuple[Own, ...]]:
            del params  # those of the first
            all_updates, after = [], []
            for chain, own in zip(chains, state, strict=True):
                updates, opt_state = chain.update(grads, own.opt_state, own.params, **extras)
                after.append(Own(optax.apply_updates(own.params, updates), opt_state))
                all_updates.append(updates)
            return all_updates[0], tuple(after)

        return optax.GradientTransformationExtraArgs(init, update)

    return made


def errors_of(number: int, groups: Mapping[str, Errors]) -> Errors:
    """Returns the largest error of each part and its leaf for one of the optimizers, by what
    :func:`jaxtrain.compare.parity.errors_by_group` found of the step.

    >>> state = {"0/params/": (0.3, "0/params/w"), "1/opt_state/mu/": (0.1, "1/opt_state/mu/w")}
    >>> errors_of(1, {"loss": {"": (0.0, "loss")}, "optimizer state": state})
    {'loss': (0.0, 'loss'), 'optimizer state': (0.1, 'mu/w')}
    """
    errors: dict[str, tuple[float, str]] = {}
    own = {f"{number}/params/": "parameters", f"{number}/opt_state/": "optimizer state"}
    for part, those in groups.items():
        for error, leaf in those.values():
            beginning = next((x for x in own if leaf.startswith(x)), "")
            if beginning or part != "optimizer state":
                error = error, leaf.removeprefix(beginning)
                name = own.get(beginning, part)
                errors[name] = max(errors.get(name, error), error)
    return errors
