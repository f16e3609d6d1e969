"""Attention whose rows are split over devices: what is exchanged, what is held, what is refused.

That every layout with an axis context computes the same is in tests/compare/test_parity.py.

Shapes: B batch, T queries and keys, H query heads, G key heads, K features.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.decisions import Kind
from jaxtrain.flops import count_flops
from jaxtrain.models import decoder
from jaxtrain.ops.attention import attention
from jaxtrain.ops.context import exchange
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.tiled import tile_rows
from jaxtrain.sharding.placement import check_length, constrain, tracing_on

T, WIDTH, ROWS = 2048, 64, 2
MODEL = decoder.DecoderConfig(
    **{"vocab_size": 61, "seq_len": T, "layers": 2, "width": WIDTH, "heads": 8, "kv_heads": 2},
    **{"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "remat": "full"},
)
RULES = jt.Rules(decoder.RULES, batch=decoder.BATCH)


def compiled(mesh, model=MODEL, length=T):
    ids = jax.ShapeDtypeStruct((ROWS, length), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "mask"), ids)
    optimizer = optax.sgd(0.1)
    init = functools.partial(decoder.init, model)
    state = jt.abstract_state(init, optimizer, mesh=mesh, rules=RULES)
    step = jt.build_train_step(decoder.loss_fn(model), optimizer)
    options = {"xla_backend_optimization_level": 0}
    how = {"mesh": mesh, "rules": RULES, "compiler_options": options}
    return jt.compile_step(step, state, batch, **how)


def collectives(compiled):
    """The numbers of elements that collectives of each kind give."""
    found = {}
    kinds = "all-to-all|all-gather|collective-permute"
    for result, kind in re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", compiled.as_text()):
        sizes = re.search(r"\[([\d,]*)\]", result)[1]
        found.setdefault(kind, []).append(np.prod([int(n) for n in sizes.split(",")]))
    return found


def test_positions_are_exchanged_for_heads_and_temporaries_fall_with_the_devices():
    alone = compiled(jt.make_mesh(data=2, devices=jax.devices()[:2]))
    split = compiled(jt.make_mesh(data=2, context=4))
    found = collectives(split.compiled)
    # Queries, keys, values and the result, and the gradients of all four.
    assert len(found.pop("all-to-all")) >= 8
    # Of a row nothing is gathered but its document numbers, and nothing is sent otherwise.
    assert {kind: max(sizes) for kind, sizes in found.items()} == {"all-gather": T}
    one, four = (x.compiled.memory_analysis().temp_size_in_bytes for x in (alone, split))
    assert four < 0.3 * one
    assert [str(x) for x in split.findings[Kind.CONTEXT]] == [
        "attention exchanges positions for heads, for context of size 4 divide its 8 heads"
    ]


def test_keys_are_gathered_where_heads_are_too_few_and_queries_are_not():
    split = compiled(jt.make_mesh(context=8), dataclasses.replace(MODEL, heads=4))
    found = collectives(split.compiled)
    # Keys of half as many heads as the queries have.
    assert {kind: max(sizes) for kind, sizes in found.items()} == {
        "all-gather": ROWS * T * WIDTH // 2
    }
    assert [str(x) for x in split.findings[Kind.CONTEXT]] == [
        "attention gathers keys and values, for context of size 8 do not divide its 4 heads"
    ]


# Mesh, query and key heads, rows of a tile, what is seen, and the exchange.
PADDED = [
    ({"data": 2, "context": 4}, (4, 1), None, {}, None),
    ({"context": 4, "tensor": 2}, (8, 2), 8, {"window": 9}, None),
    ({"context": 8}, (4, 2), 1, {"window": 9}, None),
    ({"data": 2, "context": 4}, (6, 3), None, {"window": 5, "leading": 3}, None),
    ({"context": 8}, (2, 1), 4, {"causal": False}, None),
    ({"context": 8}, (2, 2), None, {"causal": False, "window": 5}, None),
    # Pieces in zig-zag, whose tiles are a loop; windows that end within a device, and beyond.
    ({"context": 4, "tensor": 2}, (4, 1), 1, {}, "ring"),
    ({"context": 8}, (2, 1), None, {"window": 9, "windowed": True}, "ring"),
]
MORE_PADDED = [
    ({"data": 2, "context": 4}, (4, 1), None, {}, "ring"),
    ({"context": 8}, (2, 1), None, {"length": 72}, "ring"),  # 9 positions are not halved
    ({"context": 8}, (2, 1), 1, {"window": 9, "windowed": False}, "ring"),
    ({"context": 8}, (4, 2), 1, {"window": 20}, "ring"),
    ({"context": 8}, (4, 2), None, {"window": 1}, "ring"),
    ({"context": 8}, (2, 1), 4, {"causal": False}, "ring"),
    ({"context": 8}, (2, 2), None, {"causal": False, "window": 12}, "ring"),
    ({"context": 4, "tensor": 2}, (4, 1), 1, {"softcap": 2.0}, "ring"),
    ({"data": 4, "context": 2}, (4, 2), None, {}, "keys"),
    ({"context": 4, "tensor": 2}, (8, 2), 8, {"window": 9, "leading": 5}, None),
]


@pytest.mark.parametrize(
    ("sizes", "heads", "block", "seen", "by"),
    PADDED + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE_PADDED],
)
def test_rows_of_padding_and_what_stands_in_it_change_nothing(sizes, heads, block, seen, by):
    """Against one device without the padding's values, written out and in a loop over tiles."""
    seen = {"length": 64, "softcap": None} | seen
    r, (H, G), length, cap = (
        np.random.default_rng(0),
        heads,
        seen.pop("length"),
        seen.pop("softcap"),
    )
    q, k, v, d_out = (r.normal(size=(2, length, n, 4)).astype("f4") for n in (H, G, G, H))
    segments = np.sort(r.integers(1, 4, (2, length)), axis=1)
    segments[0, 50:] = segments[1] = 0  # the end of one row, and another row
    padded = (segments == 0)[..., None, None]
    if "windowed" in seen or ("window" in seen and by != "ring"):
        seen["windowed"] = jnp.array(seen.get("windowed", True))

    def loss(q, k, v, d_out):
        q = constrain(q, "batch", "sequence", "heads", None)
        k, v = (constrain(x, "batch", "sequence", "kv_heads", None) for x in (k, v))
        with tile_rows(block), exchange(by):
            out = attention(q, k, v, Mask(segments=segments, **seen), softcap=cap)
        return (out * d_out).sum(), out

    def gradients(poison):
        given = (np.where(padded, poison, x) for x in (q, k, v))
        with_out = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        (_, out), found = with_out(*given, np.where(padded, 0, d_out))
        assert all(np.isfinite(x).all() for x in (out, *found))
        return [np.where(padded, 0, x) for x in (out, *found)]

    expected = gradients(0.0)
    with tracing_on(jt.make_mesh(**sizes), None) as findings:
        found = gradients(1e15)
    assert by in (None, findings[Kind.CONTEXT][0].exchanged)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_ring_shares_causal_work_evenly_and_holds_no_row():
    """Of what each device computes of all scores, and of what is sent."""
    mesh, rows = jt.make_mesh(context=8), jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.float32)

    def loss(q, k, v, causal):
        with exchange("ring"), tile_rows(8):
            return attention(q, k, v, Mask(causal)).sum()

    def gradient(causal):
        return functools.partial(jax.grad(loss, (0, 1, 2)), causal=causal)

    with jax.set_mesh(mesh):
        causal, whole = (count_flops(gradient(c), *[rows] * 3).total for c in (True, False))
        # Half of the scores, and, of a device's own, tiles that the diagonal cuts.
        assert 0.5 < causal / whole < 0.52
        split = jax.NamedSharding(mesh, jax.P(None, "context"))
        lowered = jax.jit(gradient(True), in_shardings=(split,) * 3).lower(*[rows] * 3)
        found = collectives(lowered.compile())
    assert found.keys() == {"collective-permute"}
    assert max(found["collective-permute"]) == 512 // 8 * 2 * 8


def test_what_cannot_be_split_is_refused_before_it_is_compiled():
    mesh = jt.make_mesh(data=2, context=4)
    with pytest.raises(
        ValueError, match=r"'(tokens|mask)'.* \(30\) .* 'context' of size 4; use rows of a mul"
    ):
        compiled(mesh, length=30)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"30 positions, which mesh axis context of size 4 .*multi"),
    ):
        check_length(30)
    dropped = {"heads": 6, "kv_heads": 3, "head_dim": 8, "attention_dropout": 0.1}
    with pytest.raises(ValueError, match=r"6 query heads .* with dropout on its weights .* cannot"):
        compiled(mesh, dataclasses.replace(MODEL, **dropped))
    bias = Mask(bias=jnp.ones((6, 15)))
    for rows, asked, mask, said in (
        (2, None, bias, "size 4, and attention with a bias, as T5's, cannot gather keys"),
        (2, "ring", bias, "`exchange` is 'ring', and attention with a bias, as T5's, exchanges"),
        (2, "ring", Mask(sinks=jnp.ones(6)), "`exchange` is 'ring', and attention has sinks"),
        (2, "heads", Mask(), "`exchange` is 'heads', and 6 query heads are not divisible by"),
        (3, "ring", Mask(), "`exchange` is 'ring', and the batch's 3 rows are not divisible"),
        (2, "ring", Mask(window=2, leading=1), "'ring', and 1 positions are seen by all"),
    ):
        q = jax.ShapeDtypeStruct((rows, 8, 6, 4), jnp.float32)
        with jax.set_mesh(mesh), exchange(asked), pytest.raises(ValueError, match=said):
            jax.eval_shape(attention, q, q, q, mask)
