"""The family of encoder-decoders: T5."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from jaxtrain.hf.family import Family
from jaxtrain.hf.table import Field, Row, T
from jaxtrain.models import encoder_decoder
from jaxtrain.models.encoder_decoder import T5Config


def _read_t5(theirs: dict[str, Any]) -> dict[str, Any]:
    """One rate of dropout, and whether the head has weights of its own and a scaled input."""
    rate, tied = theirs.pop("dropout_rate", 0.1), theirs.pop("tie_word_embeddings", True)
    scaled, mlp = theirs.pop("scale_decoder_outputs", tied), theirs.get("feed_forward_proj", "relu")
    form = ("gelu_new" if mlp == "gated-gelu" else mlp, mlp == "gated-gelu")
    told = theirs.pop("dense_act_fn", form[0]), theirs.pop("is_gated_act", form[1])
    if told != form:
        raise ValueError(f"dense_act_fn, is_gated_act are {told} and feed_forward_proj={mlp!r}")
    return {"dropout": rate, "attention_dropout": rate, "tied": tied, "scaled_head": scaled}


def _write_t5(config: T5Config) -> dict[str, Any]:
    if config.scaled_head and not config.tied:
        raise ValueError("t5 has no scaled_head=True with tied=False")
    tied = {"tie_word_embeddings": config.tied, "scale_decoder_outputs": config.scaled_head}
    gated = config.mlp == "geglu"
    form = {"dense_act_fn": "gelu_new" if gated else config.mlp, "is_gated_act": gated}
    return tied | form | {"dropout_rate": config.dropout}


def _settle_t5(config: T5Config, names: Callable[[], Collection[str]]) -> T5Config:
    # Since its version 5 transformers calls every head tied, and shares it unless the file has it.
    own = not config.scaled_head and config.tied and "lm_head.weight" in names()
    return dataclasses.replace(config, tied=config.tied and not own)


def _attention(stack: str, ours: str, number: int, theirs: str) -> tuple[Row, ...]:
    layer = f"{stack}.block.{{l}}.layer.{number}"
    names = zip(("q", "k", "v", "out"), "qkvo", strict=True)
    return (
        *(Row(f"{stack}/{ours}/{x}/kernel", f"{layer}.{theirs}.{y}.weight", T) for x, y in names),
        Row(f"{stack}/norm_{ours}/scale", f"{layer}.layer_norm.weight"),
    )


def _mlp(stack: str, number: int, **names: str) -> tuple[Row, ...]:
    layer = f"{stack}.block.{{l}}.layer.{number}"
    return (
        Row(f"{stack}/norm_mlp/scale", f"{layer}.layer_norm.weight"),
        *(
            Row(f"{stack}/mlp/{x}/kernel", f"{layer}.DenseReluDense.{y}.weight", T)
            for x, y in names.items()
        ),
    )


_BIAS = "SelfAttention.relative_attention_bias.weight"

T5_ROWS = (
    Row("embed/tokens", "shared.weight", vocab=0),
    Row("distance/encoder/table", f"encoder.block.0.layer.0.{_BIAS}"),
    *_attention("encoder", "attn", 0, "SelfAttention"),
    *_mlp("encoder", 1, up="wi", down="wo"),
    Row("encoder_norm/scale", "encoder.final_layer_norm.weight"),
    Row("distance/decoder/table", f"decoder.block.0.layer.0.{_BIAS}"),
    *_attention("decoder", "attn", 0, "SelfAttention"),
    *_attention("decoder", "cross", 1, "EncDecAttention"),
    *_mlp("decoder", 2, up="wi", down="wo"),
    Row("final_norm/scale", "decoder.final_layer_norm.weight"),
    Row("head/kernel", "lm_head.weight", T, vocab=1),
)

_GATED = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
T5_GATED_ROWS = (*_mlp("encoder", 1, **_GATED), *_mlp("decoder", 2, **_GATED))

T5 = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    rows=T5_ROWS,
    gated_rows=T5_GATED_ROWS,
    fields={
        "vocab_size": Field("vocab_size"),
        "d_model": Field("width"),
        "d_kv": Field("head_dim"),
        "d_ff": Field("mlp_width"),
        "num_layers": Field("layers"),
        "num_decoder_layers": Field("decoder_layers", None),
        "num_heads": Field("heads"),
        "relative_attention_num_buckets": Field("buckets", 32),
        "relative_attention_max_distance": Field("max_distance", 128),
        "layer_norm_epsilon": Field("norm_eps", 1e-6),
        "feed_forward_proj": Field("mlp", "relu", {"relu": "relu", "gated-gelu": "geglu"}),
    },
    ours={"source_len": 512, "target_len": 114},
    fixed={"is_encoder_decoder": True, "is_decoder": False, "decoder_start_token_id": 0},
    read=_read_t5,
    write=_write_t5,
    # In some files, and never read.
    buffers=r"EncDecAttention\.relative_attention_bias\.weight$",
    model=T5Config,
    module=encoder_decoder,
    settle=_settle_t5,
    copies=dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
        "shared.weight",
    ),
)
