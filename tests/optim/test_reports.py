"""What optimizers report by their state, among the metrics of a step and by itself."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import jit

import jaxtrain as jt
from jaxtrain.optim import reports
from tests import problems


class OwnState(NamedTuple):
    """State of a user's own transformation, which tells two things of itself."""

    inner: Any
    halved: jax.Array
    size: jax.Array

    def reports(self):
        return {"halved": self.halved, "size": self.size}


def halve_every_third(tx):
    """Halves the update in every third call."""

    def init(params):
        return OwnState(tx.init(params), jnp.int32(0), jnp.float32(0))

    def update(updates, state, params=None, **extra):
        updates, inner = tx.update(updates, state.inner, params, **extra)
        calls = optax.tree.get(inner, "LearningRateState").count
        half = calls % 3 == 0
        updates = jax.tree.map(lambda u: jnp.where(half, 0.5 * u, u), updates)
        return updates, OwnState(inner, state.halved + half, optax.tree.norm(updates))

    return optax.GradientTransformationExtraArgs(init, update)


def test_a_users_transformation_reports_among_the_metrics_and_lets_inner_ones_through():
    tx = halve_every_third(jt.make_optimizer("sgd", 0.1, skip_spikes=6.0))
    state = jt.init_state(problems.init, tx, jax.random.key(0))
    step = jit(jt.build_train_step(problems.loss_fn, tx, norms=True))
    for number in range(1, 8):
        state, metrics = step(state, problems.make_batch(number))
        # A count is in the metrics what this step has added to it.
        assert metrics["halved"] == (number % 3 == 0)
        assert metrics["size"] == pytest.approx(float(metrics["update_norm"]), rel=1e-6)
        assert metrics["learning_rate"] == pytest.approx(0.1)
        assert metrics["spike"] == 0
    told = reports(state.opt_state)
    assert {name: int(told[name]) for name in ("halved", "spike")} == {"halved": 2, "spike": 0}
    assert reports(optax.adam(0.1).init(state.params)) == {}


def test_the_first_of_several_reports_a_name():
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    groups = {"w": jt.make_optimizer("sgd", 0.1), "b": jt.make_optimizer("sgd", 0.2)}
    state = optax.partition(groups, {"w": "w", "b": "b"}).init(params)
    assert float(reports(state)["learning_rate"]) == pytest.approx(0.2)  # of "b"


def test_a_report_called_as_a_metric_of_the_step_is_refused():
    class Named(NamedTuple):
        def reports(self):
            return {"grad_norm": 0.0}

    own = optax.GradientTransformation(
        lambda _: Named(), lambda updates, state, _=None: (updates, state)
    )
    state = jt.init_state(problems.init, own, jax.random.key(0))
    with pytest.raises(ValueError, match="the optimizer reports 'grad_norm', as a metric of"):
        jax.eval_shape(jt.build_train_step(problems.loss_fn, own), state, problems.make_batch(0))


def test_every_group_of_a_multi_transform_reports_its_rate():
    groups = {name: jt.make_optimizer("sgd", rate) for name, rate in (("a", 0.1), ("b", 0.2))}
    state = optax.multi_transform(groups, {"w": "b", "v": "a"}).init({"w": 1.0, "v": 1.0})
    told = {name: round(float(value), 6) for name, value in reports(state).items()}
    assert told == {"learning_rate": 0.1, "learning_rate/a": 0.1, "learning_rate/b": 0.2}
