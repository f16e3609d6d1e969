"""A change freezes under any optimizer, and its patterns are checked as ever."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.optim import freezing, frozen

PARAMS = {"blocks": {"w": jnp.ones((2, 3, 3))}, "head": jnp.ones(3)}


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(0.1),
        optax.MultiSteps(optax.sgd(0.1), 1).gradient_transformation(),
        # Layers are stacked where nothing trains, and one more leaf is frozen twice.
        jt.make_optimizer("lamb", 0.1, stacked=("^blocks/",), rate_multipliers=[("^blocks/", 2.0)]),
    ],
)
def test_what_is_frozen_stays_under_any_optimizer(optimizer):
    optimizer = freezing(optimizer, ("^blocks/",))
    state = optimizer.init(PARAMS)
    assert frozen(state) == {"blocks/w"}
    assert not any(np.shape(x) == (2, 3, 3) for x in jax.tree.leaves(state))
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS)
    assert not updates["blocks"]["w"].any()
    assert updates["head"].all()


def test_a_pattern_of_no_parameter_is_refused_under_a_mask_too():
    optimizer = jt.make_optimizer("sgd", 0.1, rate_multipliers=[("^typo", 2.0)])
    with pytest.raises(ValueError, match=r"'\^typo' matches no parameter"):
        freezing(optimizer, ("^blocks/",)).init(PARAMS)
