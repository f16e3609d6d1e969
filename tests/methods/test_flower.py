"""Flower's own server, its FedAvg and its messages, over clients that train as ours do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.methods.federated import Federated
from tests.methods import test_federated as ours

flwr = pytest.importorskip("flwr")


class InProcess:
    """A grid that hands every message to the app and keeps its answer."""

    def __init__(self, app, count):
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        # Messages ask for a run, a task and a node, which Flower's launchers set.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        given = {"run_id": 1, "state": RecordDict(), "run_config": {}}
        self.app, self.answers = app, {}
        self.contexts = {
            2 + i: Context(node_id=2 + i, node_config={"partition-id": i}, **given)
            for i in range(count)
        }

    def get_node_ids(self):
        return list(self.contexts)

    def get_nodes(self):
        return []

    def send_and_receive(self, messages, *, timeout=None):
        return [self.app(each, self.contexts[each.metadata.dst_node_id]) for each in messages]


@pytest.mark.slow
def test_flowers_rounds_are_ours():
    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from jaxtrain.methods.flower import client_app

    how = Federated(per_round=ours.C, epochs=2)
    made = ours.experiment(how)
    optimizer = made.laid.optimizer
    step = jt.build_train_step(ours.loss_fn, optimizer)
    init = lambda: jt.init_state(made.task.init_fn, optimizer, jax.random.key(0))  # noqa: E731

    def rows(number):
        part = slice(number * ours.N, (number + 1) * ours.N)
        return {name: x[part] for name, x in ours.batch(0).items()}

    app = client_app(step, init, rows, local_batch=ours.B)
    begun = ArrayRecord(array_dict={n: Array(np.asarray(x)) for n, x in ours.START.items()})
    strategy = FedAvg(fraction_evaluate=0.0)
    config = ConfigRecord({"epochs": 2})
    found = strategy.start(InProcess(app, ours.C), begun, num_rounds=3, train_config=config)
    state, _ = ours.trained(made, batches=lambda number: ours.batch(0))
    for name, x in state.params.items():
        np.testing.assert_allclose(found.arrays[name].numpy(), x, rtol=2e-6, err_msg=name)
    assert found.train_metrics_clientapp[3]["loss"] < found.train_metrics_clientapp[1]["loss"]


@pytest.mark.slow
def test_parameters_in_bfloat16_are_averaged_as_float32():
    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from jaxtrain.methods.flower import client_app

    optimizer = optax.sgd(0.5)
    start = {"w": jnp.ones(3, jnp.bfloat16)}

    def loss_fn(params, batch, rng):
        return jt.WeightedLoss(
            (params["w"] * batch["x"]).sum(), jnp.float32(len(batch["x"]))
        )  # its gradient is the mean of x

    step = jt.build_train_step(loss_fn, optimizer, policy="pure_bf16")
    init = lambda: jt.init_state(  # noqa: E731
        lambda key: start, optimizer, jax.random.key(0), policy="pure_bf16"
    )
    assert init().params["w"].dtype == jnp.bfloat16
    rows = lambda number: {"x": np.full((4, 3), 1 + number, np.float32)}  # noqa: E731
    app = client_app(step, init, rows, local_batch=4)
    begun = ArrayRecord(array_dict={n: Array(np.asarray(x)) for n, x in start.items()})
    result = FedAvg(fraction_evaluate=0.0).start(
        InProcess(app, 2), begun, num_rounds=2, train_config=ConfigRecord({})
    )
    # Every round moves by half the mean of 1 and 2.
    np.testing.assert_array_equal(result.arrays["w"].numpy(), np.float32([-0.5, -0.5, -0.5]))
