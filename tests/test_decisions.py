"""Decisions are values: every code is reached, and the report, the plan and the header print it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.build import compile_train, make_experiment_mesh, make_state
from jaxtrain.decisions import Kind, Why, describe
from jaxtrain.engines.plain import Engine, plain
from jaxtrain.engines.reduction import find_shards, why_not
from jaxtrain.ops import attention as ops
from jaxtrain.ops.context import exchange
from jaxtrain.ops.dispatch import dispatched
from jaxtrain.ops.mask import Mask
from jaxtrain.planning.ahead_of_time import plan_experiment
from jaxtrain.planning.targets import parse_target
from jaxtrain.run.observe.summary import header_facts
from jaxtrain.sharding.placement import tracing_on
from tests import plugs
from tests.engines import test_reduction as losses

# tests/engines/test_reduction.py reaches these, test_compile.py the options, test_own_engine.py BY,
# test_exact.py GRAINS.
ELSEWHERE = {Why.ASKED, Why.ONE_MICROBATCH, Why.UNKNOWN_MEMORY, Why.ROOM, Why.NO_ROOM}
ELSEWHERE |= {Why.OPTIONS, Why.BY, Why.GRAINS, Why.OFFLOADED}


def early(loss_fn=losses.masked, engine=plain, **given):
    return why_not(loss_fn, engine=engine, **given)


def traced(loss_fn=losses.masked, rules=None, may_draw=True, state=True, **batch):
    """The reason for which the gradients of a loss are reduced in every microbatch."""
    mesh, rules = jt.make_mesh(data=8), jt.Rules(losses.RULES, batch=rules or ())
    known = jt.abstract_state(losses.init, optax.sgd(1.0), mesh=mesh, rules=rules)
    how = {"microbatches": 2, "gather": None, "shardings": None, "obstacle": None}
    with tracing_on(mesh, known if state else None, rules) as found:
        given = (known.params, losses.rows() | batch, jax.random.key(0))
        assert find_shards(loss_fn, *given, may_draw=may_draw, **how) is None
    return found[Kind.REDUCTION][0].obstacle


def kernel(backend="gpu", mesh=None, rows=8, **shape):
    """The need of a platform's fused kernel, on a mesh."""
    given = {"dtype": "bfloat16", "head_dim": 64, "length": 128, "sizes": (rows, 2, 128)} | shape
    with tracing_on(jt.make_mesh(**mesh or {"data": 8}), None):
        return ops._choose("auto", backend=backend, **given).need


def split(heads, length=8):
    """The reason of the exchange in attention whose rows two devices split."""
    q = jax.ShapeDtypeStruct((4, length, heads, 4), jnp.float32)
    with tracing_on(jt.make_mesh(data=4, context=2), None) as found:
        jax.eval_shape(ops.attention, q, q, q)
    return found[Kind.CONTEXT][0].reason


def differentiated_twice(monkeypatch):
    monkeypatch.setattr(ops, "platform", lambda: "tpu")
    q = jax.ShapeDtypeStruct((8, 128, 2, 64), jnp.bfloat16)
    with tracing_on(jt.make_mesh(data=8), None) as found, ops.differentiated_twice(True):
        jax.eval_shape(ops.attention, q, q, q)
    return found[Kind.ATTENTION][0].need


def split_for_splash(monkeypatch):
    monkeypatch.setattr(ops, "platform", lambda: "tpu")
    q = jax.ShapeDtypeStruct((4, 256, 2, 64), jnp.bfloat16)
    with tracing_on(jt.make_mesh(data=4, context=2), None) as found, exchange("keys"):
        jax.eval_shape(ops.attention, q, q, q)
        with pytest.raises(ValueError, match=r"'splash' needs whole rows on each device, and"):
            jax.eval_shape(functools.partial(ops.attention, implementation="splash"), q, q, q)
    return found[Kind.ATTENTION][0].need


REACHED = {
    Why.MODEL_STATE: lambda: early(has_model_state=True),
    Why.UNDECLARED: lambda: early(losses.contrastive),
    Why.NO_PROMISE: lambda: early(engine=Engine(plain.make)),
    Why.MEMORY: lambda: early(engine=Engine(plain.make, row_wise=True, init=lambda params: ())),
    Why.UNPLACED: lambda: traced(state=False),
    Why.ENGINE_DRAWS: lambda: traced(losses.drawn_whole, may_draw=False),
    Why.DRAWS: lambda: traced(losses.drawn_whole),
    Why.LAST: lambda: traced(losses.with_the_last),
    Why.OTHER_ROWS: lambda: traced(more=np.ones(losses.ROWS // 2, "f4")),
    Why.NO_LEADING_ROWS: lambda: traced(rules=[("^x$", (None, None))]),
    Why.INDIVISIBLE: lambda: traced(**{k: v[:24] for k, v in losses.rows().items()}),
    Why.CHIP: lambda: ops._obstacle("cudnn", backend="tpu"),
    Why.NO_SINKS: lambda: kernel(mask=Mask(sinks=np.ones(2))),
    Why.NO_BIAS: lambda: kernel(mask=Mask(bias=np.ones((2, 255)))),
    Why.NO_LEADING: lambda: kernel(mask=Mask(window=4, leading=2)),
    Why.OWN_KEYS: lambda: kernel(mask=Mask(key_segments=np.ones((8, 128)))),
    Why.NO_DROPOUT: lambda: kernel(dropout=0.1),
    Why.KEYS: lambda: kernel("tpu", sizes=(8, 2, 64)),
    Why.NO_SOFTCAP: lambda: kernel(softcap=1.0),
    Why.CAUSAL_WINDOW: lambda: kernel(mask=Mask(False, window=2)),
    Why.DTYPE: lambda: kernel(dtype="float32"),
    Why.HEAD_WIDTH: lambda: kernel(head_dim=12),
    Why.EVEN_ROWS: lambda: kernel(length=3, mask=Mask(segments=np.ones((8, 3)))),
    Why.WHOLE_TILES: lambda: kernel("tpu", length=100),
    Why.HEADS_DIVIDE: lambda: split(heads=2),
    Why.FEW_HEADS: lambda: split(heads=3),
    Why.LONG_ROWS: lambda: split(heads=3, length=2**13),
    Why.DIVISIBLE: lambda: kernel(rows=9),
    Why.SPREAD: lambda: dispatched(8, 1, 2).reason,
    Why.ONE_GRADIENT: differentiated_twice,
    Why.WHOLE_ROWS: split_for_splash,
}


@pytest.mark.parametrize("code", Why, ids=lambda code: code.name)
def test_every_code_is_reached_and_has_a_sentence(code, monkeypatch):
    if code not in ELSEWHERE:
        reach = REACHED[code]
        patched = reach in (differentiated_twice, split_for_splash)
        reason = reach(monkeypatch) if patched else reach()
        assert reason.code is code
        assert not set("{}") & set(str(reason))


def test_the_report_the_header_and_the_plan_print_the_same_values():
    layout = jt.Layout.parse("data=4,fsdp=2,accumulate=2")
    config = plugs.Config(layout=layout, global_batch=16, precision="bf16")
    engine = Engine(plugs.clipped, row_wise=True)
    own = plugs.experiment(config, engine=engine, gather="model")
    mesh = make_experiment_mesh(own)
    state = make_state(own, mesh)
    train = compile_train(own, state, mesh)
    said = describe(train.findings)
    assert {kind.value for kind in (Kind.GATHER, Kind.ENGINE, Kind.REDUCTION)} == said.keys()
    assert said.items() <= header_facts(own, mesh, state, {1: train}).items()
    notes = plan_experiment(own, parse_target("cpu:8")).notes
    for name, text in said.items():
        assert any(name in x and text in x for x in train.report().splitlines())
        assert f"{name} {text}" in notes
