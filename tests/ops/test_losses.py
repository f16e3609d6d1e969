"""Cross-entropy against its definition in NumPy float64, and what it compiles to."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.ops import losses
from jaxtrain.ops.linear import LowRank, merge
from jaxtrain.ops.losses import cross_entropy, matmul_float32, scores
from jaxtrain.planning.hlo import read_program
from jaxtrain.sharding.mesh import make_mesh

VOCAB, PADDED, D = 11, 16, 5


def arrays(seed=0, B=2, T=6):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((B, T, D))
    kernel = rng.standard_normal((D, PADDED))
    targets = rng.integers(0, VOCAB, (B, T))
    return x, kernel, targets, rng.integers(0, 3, (B, T)) * 0.5


def definition(x, kernel, targets, mask, z_loss=0.0, softcap=np.inf):
    """Value, gradients of x, kernel and mask, and the correct count, by the formula."""
    logits = (x @ kernel)[..., :VOCAB]
    capped = logits if softcap == np.inf else softcap * np.tanh(logits / softcap)
    slope, logits = 1 - (capped / softcap) ** 2, capped
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    one_hot = np.eye(VOCAB)[targets]
    log_z = np.log(np.exp(logits).sum(-1))
    nll = -np.log((softmax * one_hot).sum(-1)) + z_loss * log_z**2
    d_logits = (softmax * (1 + 2 * z_loss * log_z[..., None]) - one_hot) * mask[..., None]
    d_logits *= slope
    d_kernel = np.zeros_like(kernel)
    d_kernel[:, :VOCAB] = np.einsum("btd,btv->dv", x, d_logits)
    correct = ((logits.argmax(-1) == targets) * mask).sum()
    return (nll * mask).sum(), (d_logits @ kernel[:, :VOCAB].T, d_kernel, nll), correct


def total(x, kernel, targets, mask, **options):
    return cross_entropy(x, kernel, targets, mask, vocab_size=VOCAB, **options)


def float32(*xs):
    return tuple(jnp.asarray(x, jnp.int32 if x.dtype == int else jnp.float32) for x in xs)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99),
    chunk=st.sampled_from([None, 1, 2]),
    scale=st.floats(0.1, 9.0),
    z_loss=st.sampled_from([0.0, 0.3]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_value_and_gradients_are_those_of_the_definition(seed, chunk, scale, z_loss, softcap):
    batch, cap = arrays(seed), softcap or np.inf
    value, grads, correct = definition(*batch, z_loss, cap)
    expected = (value, correct, value - definition(*batch, softcap=cap)[0])
    forward = functools.partial(total, chunk=chunk, z_loss=z_loss, softcap=softcap)
    np.testing.assert_allclose(jax.jit(forward)(*float32(*batch)), expected, rtol=1e-5, atol=1e-5)

    def scaled(*args):  # a cotangent other than 1
        loss, hits, _ = forward(*args)
        return scale * loss, hits

    gradient = jax.jit(jax.value_and_grad(scaled, (0, 1, 3), has_aux=True))
    (got, hits), got_grads = gradient(*float32(*batch))
    np.testing.assert_allclose(got, scale * value, rtol=1e-5)
    np.testing.assert_allclose(hits, correct)
    for a, b in zip(got_grads, grads, strict=True):
        np.testing.assert_allclose(a, scale * b, rtol=1e-4, atol=scale * 1e-5)


def test_sums_in_one_pass_are_those_of_three(monkeypatch):
    batch = float32(*arrays(3))

    def gradient():
        return jax.value_and_grad(lambda *a: total(*a, z_loss=0.3)[0], (0, 1, 3))(*batch)

    in_three = gradient()
    monkeypatch.setattr(losses, "platform", lambda: "gpu")
    monkeypatch.setattr(losses, "_three_passes", None)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
    jax.tree.map(close, gradient(), in_three)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_bias_is_the_row_of_a_feature_that_is_one(chunk):
    x, kernel, targets, mask = float32(*arrays())
    bias = jnp.linspace(-1.0, 1.0, PADDED)

    def value(x, kernel, bias_V):
        return total(x, kernel, targets, mask, bias_V=bias_V, chunk=chunk)[0]

    def appended(x, kernel, bias):
        ones = jnp.ones((*x.shape[:2], 1))
        return value(jnp.concatenate([x, ones], -1), jnp.vstack([kernel, bias]), None)

    got, expected = (jax.value_and_grad(f, (0, 1, 2))(x, kernel, bias) for f in (value, appended))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, got, expected)


def test_padding_gets_no_gradient_whatever_its_logits():
    x, kernel, targets, mask = arrays()
    kernel[:, VOCAB:] = 1e4
    grad = jax.grad(lambda kernel: total(x, kernel, targets, mask)[0])(jnp.asarray(kernel))
    assert not grad[:, VOCAB:].any()
    assert jnp.isfinite(grad).all()


def test_a_chunk_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="chunk=4 does not divide the 6 positions"):
        total(*arrays(), chunk=4)


def test_tiles_bound_the_logits_per_device(monkeypatch):
    monkeypatch.setattr(losses, "TILE", 2 * 2 * PADDED)
    assert losses._tiles(2, 6, PADDED) == 3
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert losses._tiles(4, 6, PADDED) == 3
    batch = float32(*arrays(B=8))
    sizes = [
        v.aval.size
        for grad in [jax.make_jaxpr(jax.grad(lambda x: total(x, *batch[1:])[0]))(batch[0])]
        for eqn in losses_equations(grad.jaxpr)
        for v in eqn.outvars
    ]
    assert max(sizes) < 8 * 6 * PADDED


def test_memory_at_a_large_vocabulary_is_a_tile_and_two_kernels():
    N, V, tiles = 512, 128 * 1024, 16
    shapes = [((1, N, 8), jnp.float32), ((8, V), jnp.float32)]
    shapes += [((1, N), jnp.int32), ((1, N), jnp.float32)]
    batch = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def temp_bytes(loss):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def tiled(*batch):
        return cross_entropy(*batch, vocab_size=V, chunk=N // tiles)[0]

    def plain(x, kernel, targets, mask):
        logits = jax.nn.log_softmax(x @ kernel)
        return -(jnp.take_along_axis(logits, targets[..., None], 2)[..., 0] * mask).sum()

    all_logits, kernel = 4 * N * V, 4 * 8 * V
    assert temp_bytes(plain) >= all_logits
    # Logits and their gradient, of one tile; the kernel's gradient, summed and of a tile; and what
    # is of the size of x.
    assert temp_bytes(tiled) <= 2 * all_logits / tiles + 2 * kernel + 4 * N * 8 * 8


def losses_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from losses_equations(inner)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_sharded_batch_gives_the_same_and_moves_gradients_once(chunk):
    batch = float32(*arrays(B=4, T=8))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "tensor"))
    gradient = jax.value_and_grad(lambda x, k, t, m: total(x, k, t, m, chunk=chunk)[0], (0, 1))
    expected = gradient(*batch)
    with jax.set_mesh(mesh):
        placed = jax.jit(gradient, in_shardings=(rows, columns, rows, rows))
        got = placed(*batch)
        text = placed.lower(*batch).compile().as_text()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, expected)
    # No activation is gathered: every device keeps its own rows. The kernel's gradient (each device
    # has half the columns) is reduced after the tiles, not in each.
    assert "all-gather" not in text
    computations = text.split("\n\n")
    entry = next(part for part in computations if part.startswith("ENTRY"))
    of_kernel = re.compile(rf"f32\[(1,)?{D},{PADDED // 2}\]\S*.* all-reduce\(")
    assert len(of_kernel.findall(text)) == len(of_kernel.findall(entry)) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_what_fsdp_splits_of_a_kernel_is_gathered_once_for_all_tiles(tied):
    x, kernel, *rest = arrays(B=4, T=8)
    x, kernel = x[..., :4], kernel[:4]
    loss, (d_x, d_kernel, _), _ = definition(x, kernel, *rest)
    mesh = make_mesh(fsdp=4, tensor=2)
    split = P("tensor", "fsdp") if tied else P("fsdp", "tensor")
    split, across = (NamedSharding(mesh, spec) for spec in (split, P("fsdp")))
    weight = kernel.T if tied else kernel

    def value(x, weight, targets, mask):
        return total(x, weight.T if tied else weight, targets, mask, chunk=2)[0]

    with jax.set_mesh(mesh):
        given = jax.device_put(float32(x, weight, *rest), (across, split, across, across))
        gradient = jax.jit(jax.value_and_grad(value, (0, 1)), out_shardings=(None, (across, split)))
        compiled = gradient.lower(*given).compile()
        got, (got_x, got_weight) = compiled(*given)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, (got, got_x, got_weight.T if tied else got_weight), (loss, d_x, d_kernel))
    columns = 4 * PADDED // 2 * 4  # bytes of the kernel's half that a device needs
    moved = read_program(compiled.as_text(), mesh).collectives
    moved = [c for c in moved if "fsdp" in c.axes and c.payload > 4]
    assert [(c.axes, c.executions) for c in moved] == [(("fsdp",), 1)] * 2
    gathered, reduced = moved
    assert (gathered.kind, gathered.payload) == ("all-gather", columns)
    assert columns <= reduced.payload <= columns + 4  # the loss may go with it


@pytest.mark.parametrize("low_rank", [False, True])
def test_losses_by_token_and_kernels_that_are_no_array_gather_and_reduce_once_too(low_rank):
    x, kernel, targets, mask = arrays(B=4, T=8)
    a, b = np.random.default_rng(1).standard_normal((2, 4, 2))
    added = LowRank(0 * kernel[:4], a, np.tile(b.T, 4), scale=0.5)
    x, base = x[..., :4], kernel[:4]
    whole = base + merge(added) if low_rank else base
    loss, (d_x, d_whole, _), _ = definition(x, whole, targets, mask)
    mesh = make_mesh(fsdp=4, tensor=2)
    by = {"": ("fsdp", "tensor"), "/a": ("fsdp", None), "/b": (None, "tensor"), "x": ("fsdp",)}
    at = {name: NamedSharding(mesh, P(*spec)) for name, spec in by.items()}

    def value(x, trained, base, targets, mask):
        kernel = LowRank(base, *trained, scale=0.5) if low_rank else trained
        found, _ = scores(x, kernel, targets, vocab_size=VOCAB, chunk=2)
        return -(found * mask).sum()

    trained, split = (added.a, added.b), (at["/a"], at["/b"])
    trained, split = (trained, split) if low_rank else (base, at[""])
    given = jax.tree.map(jnp.asarray, (x, trained, base, targets, mask))
    places = (at["x"], split, at[""], at["x"], at["x"])
    with jax.set_mesh(mesh):
        given = jax.device_put(jax.tree.map(lambda a: float32(a)[0], given), places)
        gradient = jax.jit(jax.value_and_grad(value, (0, 1)), out_shardings=(None, places[:2]))
        compiled = gradient.lower(*given).compile()
        got = compiled(*given)
    d_low = (0.5 * d_whole @ added.b.T, 0.5 * added.a.T @ d_whole)
    expected = loss, (d_x, d_low if low_rank else d_whole)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, expected)
    moved = read_program(compiled.as_text(), mesh).collectives
    moved = [c for c in moved if "fsdp" in c.axes and c.payload > 4]
    assert {c.executions for c in moved} == {1}
    # The kernel's half that a device needs, and that of the low rank's a.
    gathers = sorted(c.payload for c in moved if c.kind == "all-gather")
    assert gathers == [4 * 2 * 4] * low_rank + [4 * PADDED // 2 * 4]


def test_it_maps_over_kernels():
    x, kernel, targets, mask = float32(*arrays())
    kernels = jnp.stack([kernel, -kernel])

    def gradient(kernel):
        return jax.grad(lambda k: total(x, k, targets, mask, chunk=2)[0])(kernel)

    several = jax.vmap(gradient)(kernels)
    np.testing.assert_allclose(several[1], gradient(-kernel), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_gradients_are_rounded_not_lost(dtype):
    x, kernel, targets, mask = float32(*arrays(B=8, T=8))
    x, kernel = (0.1 * a.astype(dtype) for a in (x, kernel))

    def mean(x, kernel):
        return total(x, kernel, targets, mask)[0] / mask.sum()

    got = jax.grad(mean, (0, 1))(x, kernel)
    _, expected, _ = definition(
        *(np.asarray(a, np.float64) for a in (x, kernel)), np.asarray(targets), np.asarray(mask)
    )
    for a, b in zip(got, expected, strict=False):
        assert a.dtype == dtype
        b = b / float(mask.sum())
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=0.02 * np.abs(b).max())


def test_float16_keeps_small_probabilities():
    # About a millionth each: a few of float16's smallest steps before the loss scale meets it.
    x, kernel = jnp.ones((1, 1, 1), jnp.float16), jnp.zeros((1, 1000), jnp.float16)
    kernel = kernel.at[0, 0].set(13.7)
    batch = jnp.zeros((1, 1), int), jnp.ones((1, 1))

    def loss(kernel):
        return 2.0**15 * cross_entropy(x, kernel, *batch, vocab_size=1000)[0]

    probability = 1 / (999 + np.exp(float(kernel[0, 0])))
    grad = jax.grad(loss)(kernel)[0, 1:].astype(jnp.float32)
    np.testing.assert_allclose(grad / 2.0**15, probability, rtol=2e-3)


@pytest.mark.parametrize("weight", [1e-9, 100.0, -1e5])
def test_float16_takes_token_weights_of_any_size(weight):
    x, kernel, targets, mask = float32(*arrays(B=8, T=8))
    x, kernel = (0.1 * a.astype(jnp.float16) for a in (x, kernel))

    def mean(kernel, mask):
        return total(x, kernel, targets, mask)[0] / mask.sum()

    expected = jax.grad(mean)(kernel, mask)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(jax.grad(mean)(kernel, weight * mask), expected, atol=1e-5)


def test_matmul_float32_accumulates_forward_and_rounds_backward():
    x, kernel = jnp.ones((3, 300), jnp.bfloat16), jnp.ones((300, 2), jnp.bfloat16)
    out, pullback = jax.vjp(matmul_float32, x, kernel)
    assert out.dtype == jnp.float32
    assert out[0, 0] == 300 + 0  # 300 is no bfloat16 sum: 256 + 1 rounds to 256
    d_x, d_kernel = pullback(jnp.ones_like(out))
    assert (d_x.dtype, d_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert d_kernel[0, 0] == 3
    text = str(jax.make_jaxpr(pullback)(out))
    assert "preferred_element_type=float32" not in text
