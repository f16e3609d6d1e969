"""A model's forward pass as a program of StableHLO, which JAX alone runs, with its weights beside.

Shapes: B rows, T and S positions, named ``b``, ``t`` and ``s`` in the program, which takes any.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxtrain.hf import safetensors
from jaxtrain.hf.family import ModelConfig
from jaxtrain.hf.weights import SHARD_BYTES, cast, check_new
from jaxtrain.host import extras
from jaxtrain.models import convnet, decoder, encoder, encoder_decoder, vit
from jaxtrain.models.convnet import ConvNetConfig
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.models.encoder_decoder import T5Config
from jaxtrain.tree import PyTree, map_named, named_leaves

PROGRAM = "model.stablehlo"
# Each is lowered to StableHLO by itself, within one program.
PLATFORMS = ("cpu", "cuda", "tpu")


def program(config: ModelConfig | ConvNetConfig, params: PyTree) -> export.Exported:
    """Returns ``call(weights, inputs)`` of a model, for any number of rows of any length: float32
    logits, the scores of a reward model, or the hidden states of a model without a head.

    Args:
      config: the model. Its attention is plain XLA, whichever chip the program will run on.
      params: parameters, or their shapes and dtypes; ``weights`` are these by path, such as
        ``{"embed/tokens": ...}``.

    >>> config = DecoderConfig(vocab_size=5, seq_len=4, layers=1, width=8, heads=2)
    >>> found = program(config, decoder.init(config, jax.random.key(0)))
    >>> found.out_avals
    (ShapedArray(float32[b,t,5]),)
    """
    if hasattr(config, "attention"):
        config = dataclasses.replace(config, attention="xla")
    forward, inputs = _forward(config)
    # What has learned positions has no more of them.
    most = getattr(config, "seq_len", 0) if getattr(config, "positions", "") == "learned" else 0
    limits = [f"t <= {most}"] if most else []
    sizes = dict(zip("bst", export.symbolic_shape("b, s, t", constraints=limits), strict=True))
    batch = {
        name: jax.ShapeDtypeStruct([sizes.get(size, size) for size in shape], dtype)
        for name, (shape, dtype) in inputs.items()
    }
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in named_leaves(params).items()}

    def call(weights: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
        return forward(map_named(lambda name, _: weights[name], params), batch)

    return export.export(jax.jit(call), platforms=PLATFORMS)(shapes, batch)


def _forward(
    config: ModelConfig | ConvNetConfig,
) -> tuple[Callable[[Any, Any], jax.Array], dict[str, Any]]:
    """A model's forward pass, and the shape and dtype of each of its inputs."""
    rows = ("b", "t"), jnp.int32
    if isinstance(config, DecoderConfig):

        def decode(params, batch):
            x_BTD = decoder.run(config, params, batch)
            if config.head == "score":
                return decoder.scores(config, params, x_BTD, batch)
            return decoder.head_logits(config, params, x_BTD)

        return decode, {"tokens": rows}
    if isinstance(config, T5Config):
        source = ("b", "s"), jnp.int32
        inputs = {"source": source, "source_segments": source, "tokens": rows}
        return lambda params, batch: encoder_decoder.logits(config, params, batch), inputs
    if isinstance(config, EncoderConfig):
        module, inputs = encoder, {"tokens": rows, "segments": rows}
        inputs |= {"types": rows} if (config.token_types or 1) > 1 else {}
    else:
        module = convnet if isinstance(config, ConvNetConfig) else vit
        inputs = {"image": (("b", *config.image), jnp.float32)}
    of = module.encode if getattr(config, "head", "") == "none" else module.logits
    return lambda params, batch: of(config, params, batch), inputs


def save(
    folder: str | Path,
    config: ModelConfig | ConvNetConfig,
    params: PyTree,
    *,
    dtype: Any = None,
    max_shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, str] | None = None,
) -> export.Exported:
    """Writes a folder of a model's program, its weights and other files, and returns the program.

    ``program`` is a file of :func:`jax.export.Exported.serialize`, and the weights are safetensors
    by path.

    Args:
      folder: new, or empty.
      config, params: the model and its parameters: arrays, or those of
        :func:`jaxtrain.hf.open_weights`.
      dtype: of the weights, in which the model computes; None means that of each.
      max_shard_bytes: of one file of weights.
      files: more text files by name, such as a tokenizer.json.

    Raises:
      ImportError: the package flatbuffers is not installed.
    """
    extras.load("a program in a file needs flatbuffers", "export", "flatbuffers")
    folder = Path(folder)
    check_new(folder)
    leaves = named_leaves(params)
    kinds = {name: (tuple(x.shape), np.dtype(dtype or x.dtype)) for name, x in leaves.items()}
    shapes = map_named(lambda name, _: jax.ShapeDtypeStruct(*kinds[name]), params)
    found = program(config, shapes)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = ((name, cast(np.asarray(x), kinds[name][1], name)) for name, x in leaves.items())
    safetensors.write(folder, kinds, arrays, max_shard_bytes=max_shard_bytes)
    for name, text in (files or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / PROGRAM).write_bytes(found.serialize())
    return found
