"""The encoder-decoder: every layout against one device, padding, packing and dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.compare.parity import TOLERANCE
from jaxtrain.models import encoder_decoder as t5
from jaxtrain.ops import tiled
from jaxtrain.ops.remat import REMAT
from jaxtrain.sharding import placement
from tests.compare import noisy

ROWS, S, T = 16, 12, 8
T5 = t5.T5Config(
    vocab_size=61, source_len=S, target_len=T, layers=2, width=32, heads=4, buckets=8,
    max_distance=10, mlp_width=48,
)  # fmt: skip
FLAN = dataclasses.replace(T5, tied=False, scaled_head=None, mlp="geglu", head_dim=6)
FORMS = {
    "t5": T5,
    "flan": FLAN,
    "dropout in tiles": dataclasses.replace(T5, dropout=0.1, attention_dropout=0.2, remat="full"),
}
SLOW = pytest.mark.slow
INTERLEAVED = {"schedule": "interleaved"}
ONCE = INTERLEAVED | {"when": "step"}


def batch(seed=0, form="padded"):
    """Rows of several lengths, padded, or of several pairs each, packed."""
    r = np.random.default_rng(seed)
    source, tokens, targets = (r.integers(0, 61, (ROWS, n)).astype(np.int32) for n in (S, T, T))
    places = np.arange(S), np.arange(T)
    ends = [r.integers(1, len(place) + 1, (ROWS, 1)) for place in places]
    segments = [(place < end).astype(np.int32) for place, end in zip(places, ends, strict=True)]
    mask = (segments[1] * (r.random((ROWS, T)) < 0.8)).astype(np.float32)
    made = {"source": source, "tokens": tokens, "targets": targets, "mask": mask}
    if form == "packed":
        segments = [
            (1 + (place >= end)).astype(np.int32) for place, end in zip(places, ends, strict=True)
        ]
        made["segments"] = segments[1]
    return made | {"source_segments": segments[0]}


def errors_on(layout, model, options, policy="f32"):
    """Of a T5 whose every parameter counts, with a layer for every chunk of both stacks."""
    layers, options = noisy.chunks_on(layout, options), dict(options)
    model = dataclasses.replace(model, layers=layers, decoder_layers=layers)
    form = options.pop("form", "padded")
    train = [batch(seed, form) for seed in range(3)]
    built = noisy.experiment_of(t5, model, train, gather="model", **options)
    return noisy.errors_of(built, layout, policy)


# The form, queries per tile of attention (of 2, a loop over them), the layout, and options.
CASES = [
    pytest.param("t5", 16, "fsdp=2,tensor=2", {}, marks=SLOW),
    pytest.param("t5", 16, "pipe=2,data=2,tensor=2", INTERLEAVED, marks=SLOW),
    pytest.param("flan", 4, "data=2,fsdp=2,tensor=2", {}, marks=SLOW),
    pytest.param("flan", 2, "pipe=2,fsdp=2,tensor=2", INTERLEAVED, marks=SLOW),
    pytest.param("t5", 2, "data=2,tensor=4", {"form": "packed"}, marks=SLOW),
    pytest.param("t5", 2, "data=8,zero=3", {}, marks=SLOW),
    pytest.param("t5", 4, "context=4,fsdp=2", {}, marks=SLOW),
    pytest.param("flan", 2, "data=2,context=2,tensor=2", {"form": "packed"}, marks=SLOW),
    pytest.param("dropout in tiles", 4, "pipe=2,context=2,data=2", INTERLEAVED, marks=SLOW),
    pytest.param("flan", 4, "fsdp=8", {"form": "packed"}, marks=SLOW),
    pytest.param("dropout in tiles", 4, "data=2,fsdp=2,tensor=2,zero=2", {}, marks=SLOW),
    pytest.param("dropout in tiles", 2, "pipe=4,data=2", INTERLEAVED, marks=SLOW),
    pytest.param("dropout in tiles", 4, "pipe=2,fsdp=2,tensor=2", ONCE, marks=SLOW),
    pytest.param("dropout in tiles", 4, "pipe=2,fsdp=4", INTERLEAVED | {"virtual": 2}, marks=SLOW),
]


@pytest.mark.parametrize(("form", "block", "layout", "options"), CASES)
def test_layout_agrees_with_one_device(form, block, layout, options, monkeypatch):
    monkeypatch.setattr(tiled, "_block", lambda T: block)
    errors = errors_on(layout, FORMS[form], options)
    assert not {part: e for part, e in errors.items() if e[0] > TOLERANCE}, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "bound"),
    [("pipe=2", INTERLEAVED, 2**-8), ("data=2,fsdp=2,tensor=2", {}, 5e-2)],
)
def test_bf16_differs_from_one_device_by_the_rounding_of_parts(layout, options, bound):
    # Of a smooth activation: where rounding turns the sign of an input, a ReLU has another slope.
    # On one device bfloat16 changes these gradients by 3 %, as scores are not divided by sqrt(K).
    errors = errors_on(layout, FLAN, options, "bf16")
    assert errors["gradients"][0] < bound, errors
    assert errors["loss"][0] < 1e-3, errors
    assert errors["parameters"][0] < TOLERANCE, errors


@pytest.fixture(scope="module")
def params():
    return t5.init(T5, jax.random.key(0))


def test_padding_and_other_documents_are_not_seen(params):
    logits = jax.jit(lambda batch: t5.logits(T5, params, batch))
    packed = {name: x[:4] for name, x in batch(form="packed").items()}
    padded = packed | {name: packed[name] % 2 for name in ("segments", "source_segments")}
    found = {name: logits(b) for name, b in {"packed": packed, "padded": padded}.items()}
    first = padded["segments"] == 1
    np.testing.assert_allclose(found["packed"][first], found["padded"][first], atol=2e-5)
    # What a row holds beyond its own document changes nothing of it.
    other = padded | {
        "source": np.where(padded["source_segments"] == 1, padded["source"], 7),
        "tokens": np.where(first, padded["tokens"], 9),
    }
    np.testing.assert_allclose(logits(other)[first], found["padded"][first], atol=1e-6)
    blind = logits(padded | {"source": np.full_like(packed["source"], 7)})
    assert np.abs(blind - found["padded"]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("remat", REMAT[1:])
def test_remat_changes_no_gradient(remat, params):
    model = dataclasses.replace(T5, remat=remat, dropout=0.1, attention_dropout=0.1)
    plain = dataclasses.replace(model, remat="none")
    made = jax.tree.map(jnp.asarray, batch())

    def gradient(model):
        loss = t5.loss_fn(model)
        return jax.jit(jax.grad(lambda p: loss(p, made, jax.random.key(1)).total))(params)

    found, expected = gradient(model), gradient(plain)
    for path, leaf in jt.tree.named_leaves(expected).items():
        np.testing.assert_allclose(jt.tree.named_leaves(found)[path], leaf, atol=1e-4, err_msg=path)


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="buckets=7 must be even and at least 4"):
        dataclasses.replace(T5, buckets=7)
    with pytest.raises(ValueError, match="T5 has no window, and it is 4"):
        dataclasses.replace(T5, window=4)
    model, made = dataclasses.replace(T5, attention="cudnn"), batch()
    shapes = jax.eval_shape(lambda: t5.init(model, jax.random.key(0)))
    with pytest.raises(ValueError, match="attention='cudnn' needs an NVIDIA GPU"):
        jax.eval_shape(lambda p: t5.logits(model, p, made), shapes)
    del made["source_segments"]
    with pytest.raises(ValueError, match="a batch with segments needs source_segments"):
        jax.eval_shape(lambda p: t5.logits(T5, p, made | {"segments": made["tokens"]}), shapes)


def test_both_streams_are_split_over_tensor_between_branches():
    mesh, stages = jt.make_mesh(data=4, tensor=2), t5.stages(T5)
    params = jax.eval_shape(lambda: t5.init(T5, jax.random.key(0)))
    layers = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params[key])
              for key in t5.STACKS]  # fmt: skip

    def specs(function, *args):
        """How what a function returns is pinned; None for what it hands on."""
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
        made = {v: e for e in jaxpr.eqns for v in e.outvars}
        pins = (made.get(v) for v in jaxpr.outvars)
        return [e and e.params["sharding"].spec for e in pins]

    with placement.tracing_on(mesh, None):
        x = jax.eval_shape(stages.embed, params, batch(), None)
        split = P("data", "tensor", None)
        assert specs(lambda p: stages.embed(p, batch(), None), params) == [split] * 2
        assert specs(lambda p, x: stages.between[0](p, x, batch(), None), params, x) == [split] * 2
        rest = (params, x)
        for k, found in enumerate([[split, None], [None, split]]):
            run = lambda w, p, x, k=k: stages.blocks[k](w, p, x, batch())  # noqa: E731
            assert specs(run, layers[k], *rest) == found
