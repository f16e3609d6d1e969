"""LLaVA: its definition in float64, every mesh as one device, and captions as of whole rows."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.compare.parity import compare
from jaxtrain.models import decoder, llava
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.generate import Weights, generate, generate_step, prompts
from jaxtrain.models.llava import LlavaConfig
from jaxtrain.models.vit import ViTConfig
from jaxtrain.sharding.rules import param_shardings
from tests import problems
from tests.models import decoder_definition as definition

SIZES = {"layers": 2, "width": 16, "heads": 2}
IMAGE = ViTConfig(**SIZES, image=(8, 8, 1), patch=4, patch_bias=False, embed_norm=True)
TEXT = DecoderConfig(
    **SIZES | {"width": 24},
    **{"vocab_size": 20, "seq_len": 12, "positions": "rope", "norm": "rmsnorm", "mlp": "swiglu"},
    bias=False,
    tied=False,
)
LLAVA = LlavaConfig(image=IMAGE, text=TEXT, image_token=19, unread_layers=1)
# Rows that every mesh divides, learned positions, and dropout.
EVEN = LlavaConfig(
    image=dataclasses.replace(IMAGE, first=False, dropout=0.1),
    text=DecoderConfig(**SIZES, vocab_size=20, seq_len=12, dropout=0.1),
    image_token=19,
)
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
START = 1  # of the image in a row


def make_batch(config=LLAVA, rows=4, seed=0):
    """Every fourth row is of text alone."""
    rng, N = np.random.default_rng(seed), config.positions_of_image
    tokens = rng.integers(0, 19, (rows, 12)).astype(np.int32)
    tokens[np.arange(rows) % 4 < 3, START : START + N] = config.image_token
    mask = (rng.random((rows, 12)) < 0.7).astype(np.float32)
    mask[:, : START + N] = 0
    images = rng.standard_normal((rows, 8, 8, 1)).astype(np.float32)
    return {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "mask": mask, "image": images}


@functools.cache
def noisy(config):
    """Parameters, with no bias of zero and no scale of 1."""
    made = quick_jit(lambda rng: problems.with_noise(llava.init(config, rng), 0.1))
    return made(jax.random.key(0))


def defined(config, params, batch):
    """The mean loss in float64, row by row."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    own, text, tower = params["image"]["embed"], config.text, config.image.block
    total = 0.0
    for row in range(len(batch["tokens"])):
        image = batch["image"][row].astype(np.float64)
        patches = [image[y : y + 4, x : x + 4] for y in (0, 4) for x in (0, 4)]
        x = np.stack([np.einsum("ijc,ijcd->d", p, own["patch"]["kernel"]) for p in patches])
        x = np.concatenate([own["first"][0], x]) + own["positions"][0]
        x = definition._norm(tower, own["norm"], x)
        for l in range(config.image.layers):
            layer = definition._layer(params["image_blocks"], l)
            x = definition.block(tower, layer, x, None, None)
        hidden = definition._dense(params["project"]["up"], x[1:])
        hidden = hidden / 2 * (1 + np.vectorize(definition.math.erf)(hidden / 2**0.5))
        seen = definition._dense(params["project"]["down"], hidden)
        tokens = batch["tokens"][row]
        x = params["embed"]["tokens"][tokens]
        x[tokens == config.image_token] = seen[: (tokens == config.image_token).sum()]
        for l in range(text.layers):
            layer = definition._layer(params["blocks"], l)
            x = definition.block(text.block, layer, x, None, np.arange(12))
        z = definition._norm(text, params["final_norm"], x) @ params["head"]["kernel"]
        z = z[:, : text.vocab_size]
        nll = np.log(np.exp(z).sum(-1)) - z[np.arange(12), batch["targets"][row]]
        total += (nll * batch["mask"][row]).sum()
    return total / batch["mask"].sum()


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_the_definition_in_float64():
    params, batch = noisy(LLAVA), make_batch()
    mean = lambda params: llava.loss_fn(LLAVA)(params, batch, None).means()["loss"]  # noqa: E731
    loss, grads = quick_jit(jax.value_and_grad(mean))(params)
    np.testing.assert_allclose(loss, defined(LLAVA, params, batch), rtol=2e-6)
    # The derivative along a direction of all parameters, by a difference on both sides.
    rng = np.random.default_rng(1)
    way = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
    ends = (
        jax.tree.map(lambda x, d, e=e: np.asarray(x, np.float64) + e * d, params, way)
        for e in (1e-5, -1e-5)
    )
    up, down = (defined(LLAVA, end, batch) for end in ends)
    along = {
        part: sum(map(np.vdot, jax.tree.leaves(grads[part]), jax.tree.leaves(way[part])))
        for part in params
    }
    np.testing.assert_allclose(sum(along.values()), (up - down) / 2e-5, rtol=1e-4)
    assert along.pop("unread") == 0
    assert min(map(abs, along.values())) > 1e-2
    # The row of text alone is the decoder's own, and its image has no effect.
    got, own = quick_jit(
        lambda params, batch: (
            llava.logits(LLAVA, params, batch),
            decoder.logits(TEXT, params, batch["tokens"][3:]),
        )
    )(params, batch)
    np.testing.assert_allclose(got[3:], own, atol=1e-5)


@pytest.mark.slow
def test_what_is_written_is_the_most_probable_token_of_whole_rows():
    params, batch = noisy(LLAVA), make_batch()
    lengths = np.array([6, 9, 7, 4])
    given = {"temperature": 0.0, "max_new_tokens": 3, "prompt_lengths": lengths}
    new = np.asarray(generate(LLAVA, params, batch["tokens"], image=batch["image"], **given))
    rows = batch["tokens"].copy()
    for row, length in enumerate(lengths):
        rows[row, length : length + 3] = new[row]
    whole = quick_jit(functools.partial(llava.logits, LLAVA))(params, batch | {"tokens": rows})
    at = lengths[:, None] - 1 + np.arange(3)
    np.testing.assert_array_equal(np.take_along_axis(whole.argmax(-1), at, axis=1), new)
    text = generate(TEXT, params, batch["tokens"][3:, :4], temperature=0.0, max_new_tokens=3)
    np.testing.assert_array_equal(text, new[3:])


def test_what_does_not_fit_is_refused():
    batch = make_batch()
    short = np.where(np.arange(12) == START, 0, batch["tokens"])
    given = {"temperature": 0.0, "max_new_tokens": 1}
    for model, tokens, image, why in (
        (LLAVA, short, batch["image"], "a row has 3 image tokens"),
        (LLAVA, batch["tokens"], batch["image"][:, :4], r"`image` has the shape \(4, 4, 8, 1\)"),
        (TEXT, batch["tokens"], batch["image"], "`image` is given, and the model reads none"),
    ):
        with pytest.raises(ValueError, match=why):
            prompts(model, tokens, image=image, **given)
    for wrong, why in (
        ({"image_token": 20}, "image_token=20 is none of the 20 tokens"),
        ({"image": dataclasses.replace(IMAGE, classes=3)}, "no part of a tower"),
        ({"text": dataclasses.replace(TEXT, experts=4)}, "`text` has experts"),
    ):
        with pytest.raises(ValueError, match=why):
            dataclasses.replace(LLAVA, **wrong)


def experiment_of(config):
    """Two steps, with a weight of each row's own."""
    batches = [make_batch(config, 16, seed) for seed in range(2)]
    return jt.Experiment.of(
        name="captions",
        init_fn=lambda rng: problems.with_noise(llava.init(config, rng), 0.02),
        stages=llava.stages(config),
        optimizer=lambda stack: jt.make_optimizer(
            "lamb", 1e-2, weight_decay=0.1, stacked=stack.axes, freeze=["^unread/"]
        ),
        batch=jax.eval_shape(lambda: batches[0]),
        train_batches=lambda start, sharding: contextlib.nullcontext(iter(batches)),
        steps=2,
        rules=jt.Rules(llava.RULES, batch=llava.BATCH),
        gathers_layers=True,
    )


INTERLEAVED = "pipeline.microbatches=4,pipeline.schedule=interleaved,pipeline.virtual=1"
LAYOUTS = {
    "the file's form": (LLAVA, "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2,accumulate=2,zero=3"),
    "even rows": (EVEN, "data=2,fsdp=2,tensor=2,accumulate=2", "data=2,context=2,tensor=2"),
    "pipelines": (
        EVEN,
        f"pipe=2,data=2,tensor=2,{INTERLEAVED}",
        f"pipe=2,fsdp=2,context=2,gather=layer,{INTERLEAVED}",
    ),
    "pipelines of the file's form": (LLAVA, f"pipe=2,data=2,fsdp=2,{INTERLEAVED}"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rows of")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_mesh_agrees_with_one_device(name):
    config, *layouts = LAYOUTS[name]
    for found in compare(experiment_of(config), layouts=layouts, steps=2):
        assert found.refusal is None
        assert {"gradients", "parameters", "optimizer state"} <= found.worst.keys()
        assert not {part: x for part, x in found.worst.items() if x[0] > 1e-5}, found.worst


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rows of")
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}])
def test_a_mesh_writes_what_one_device_writes(mesh):
    batch, params = make_batch(rows=8), noisy(LLAVA)
    given = {"temperature": 0.0, "max_new_tokens": 4, "image": batch["image"]}
    asked = prompts(LLAVA, batch["tokens"][:, :7], **given)
    step, mesh = generate_step(LLAVA, max_new_tokens=4), jt.make_mesh(**mesh)
    placed = Weights(jax.device_put(params, param_shardings(params, mesh, llava.RULES)))
    on_mesh = jt.compile_step(step, placed, asked, mesh=mesh, rules=llava.RULES, donate=False)
    one = jax.jit(step)(Weights(params), asked)
    np.testing.assert_array_equal(on_mesh(placed, asked), one)
    assert len({*jnp.ravel(one).tolist()}) > 3


@pytest.mark.slow
def test_a_pipeline_that_is_not_interleaved_is_refused():
    layout = "pipe=2,pipeline.microbatches=4,pipeline.schedule=1f1b"
    (found,) = compare(experiment_of(EVEN), layouts=[layout], steps=1)
    assert "several stacks of layers (image_blocks, blocks)" in str(found.refusal)
