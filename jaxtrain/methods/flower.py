"""Clients of Flower (https://flower.ai) that train as those of a federated round do."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.host import extras
from jaxtrain.methods.federated import client_round
from jaxtrain.methods.method import Step
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, map_named, named_leaves


def client_app(
    step: Step, init: Callable[[], TrainState], rows: Callable[[int], PyTree], *, local_batch: int
) -> Any:
    """Makes Flower's ``ClientApp`` of a train step; servers, strategies and processes are Flower's.

    A message brings parameters by their paths, the number of the round, and perhaps ``epochs``. The
    answer has the parameters, ``num-examples`` (the weight of the rows that were seen, by which
    Flower's strategies average) and ``loss``. Parameters in bfloat16 are sent as float32, because
    NumPy, with which strategies average, has no bfloat16. It needs the extra ``flower``.

    Args:
      step: of :func:`jaxtrain.build_train_step`.
      init: makes the state that a client begins each round with, but for its parameters.
      rows: ``partition-id -> rows`` [N, ...] of a client; those that fill its last batch have
        ``mask`` 0.
      local_batch: rows of a client's batch.
    """
    flower = extras.load("clients of Flower need it", "flower", "flwr.app", "flwr.clientapp")
    record, app = flower.app, flower.clientapp.ClientApp()
    begun = functools.cache(init)

    @functools.cache  # One program for all messages that a process answers.
    def client(epochs: int) -> Any:
        return jax.jit(client_round(step, epochs=epochs, local_batch=local_batch))

    @app.train()
    def train(message: Any, context: Any) -> Any:
        config, number = message.content["config"], int(context.node_config["partition-id"])
        state, round_ = begun(), int(config["server-round"]) - 1
        arrays = {name: _read(array) for name, array in message.content["arrays"].items()}
        if other := arrays.keys() ^ named_leaves(state.params).keys():
            raise ValueError(
                f"the server's arrays and the model's parameters differ in {min(other)!r}: give "
                "the server parameters of this model"
            )
        params = map_named(lambda name, p: jnp.asarray(arrays[name], p.dtype), state.params)
        key = jax.random.fold_in(jax.random.fold_in(state.rng, round_), number)
        state = dataclasses.replace(state, params=params)
        own, metrics_K = client(int(config.get("epochs", 1)))(key, rows(number), state)
        arrays |= {name: _averaged_form(x) for name, x in named_leaves(own).items()}
        weight_K = np.asarray(metrics_K["weight"])
        losses_K = np.where(weight_K != 0, np.asarray(metrics_K["loss"]), 0)
        loss = float((losses_K * weight_K).sum() / (weight_K.sum() or 1))
        told = {"num-examples": float(weight_K.sum()), "loss": loss}
        answer = record.ArrayRecord(array_dict={n: record.Array(x) for n, x in arrays.items()})
        content = record.RecordDict({"arrays": answer, "metrics": record.MetricRecord(told)})
        return record.Message(content=content, reply_to=message)

    return app


def _read(array: Any) -> np.ndarray:
    """The numbers of a message; NumPy's file format has bfloat16 as bytes without a meaning."""
    numbers = array.numpy()
    return numbers.view(jnp.dtype(array.dtype)) if numbers.dtype.kind == "V" else numbers


def _averaged_form(param: jax.Array) -> np.ndarray:
    """Numbers that Flower's strategies can average: float32 for dtypes that NumPy does not have."""
    array = np.asarray(param)
    return array.astype(np.float32) if array.dtype.kind == "V" else array
