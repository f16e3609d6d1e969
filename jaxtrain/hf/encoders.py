"""The tables of encoders: those of BERT, RoBERTa and ViT."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.hf.table import Field, Row, T
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.models.vit import ViTConfig


def _layers(prefix: str) -> tuple[Row, ...]:
    """Tables and layers, whose names begin alike."""
    embed, layer = f"{prefix}.embeddings", f"{prefix}.encoder.layer.{{l}}"
    names = {
        "attn/q": "attention.self.query",
        "attn/k": "attention.self.key",
        "attn/v": "attention.self.value",
        "attn/out": "attention.output.dense",
        "norm_attn": "attention.output.LayerNorm",
        "mlp/up": "intermediate.dense",
        "mlp/down": "output.dense",
        "norm_mlp": "output.LayerNorm",
    }
    return (
        Row("embed/tokens", f"{embed}.word_embeddings.weight", vocab=0),
        Row("embed/positions", f"{embed}.position_embeddings.weight", shorter=True),
        Row("embed/types", f"{embed}.token_type_embeddings.weight"),
        *_norm("embed/norm", f"{embed}.LayerNorm"),
        *(
            row
            for ours, theirs in names.items()
            for row in (_norm if "norm" in ours else _dense)(f"blocks/{ours}", f"{layer}.{theirs}")
        ),
    )


def _dense(ours: str, theirs: str) -> tuple[Row, Row]:
    return Row(f"{ours}/kernel", f"{theirs}.weight", T), Row(f"{ours}/bias", f"{theirs}.bias")


def _norm(ours: str, theirs: str) -> tuple[Row, Row]:
    return Row(f"{ours}/scale", f"{theirs}.weight"), Row(f"{ours}/bias", f"{theirs}.bias")


BERT_ROWS = (
    *_layers("bert"),
    *_dense("head/transform", "cls.predictions.transform.dense"),
    *_norm("head/norm", "cls.predictions.transform.LayerNorm"),
    Row("head/bias", "cls.predictions.bias", vocab=0),
    *_dense("head/pool", "bert.pooler.dense"),
    *_dense("head/out", "classifier"),
)

ROBERTA_ROWS = (
    *_layers("roberta"),
    *_dense("head/transform", "lm_head.dense"),
    *_norm("head/norm", "lm_head.layer_norm"),
    Row("head/bias", "lm_head.bias", vocab=0),
    *_dense("head/pool", "classifier.dense"),
    *_dense("head/out", "classifier.out_proj"),
)


def _vit_rows() -> tuple[Row, ...]:
    embed, layer = "vit.embeddings", "vit.encoder.layer.{l}"
    return (
        Row("embed/first", f"{embed}.cls_token"),
        Row("embed/positions", f"{embed}.position_embeddings"),
        # A convolution of PyTorch is [D, C, P, P], ours [P, P, C, D].
        Row("embed/patch/kernel", f"{embed}.patch_embeddings.projection.weight", (2, 3, 1, 0)),
        Row("embed/patch/bias", f"{embed}.patch_embeddings.projection.bias"),
        *_norm("blocks/norm_attn", f"{layer}.layernorm_before"),
        *_dense("blocks/attn/q", f"{layer}.attention.attention.query"),
        *_dense("blocks/attn/k", f"{layer}.attention.attention.key"),
        *_dense("blocks/attn/v", f"{layer}.attention.attention.value"),
        *_dense("blocks/attn/out", f"{layer}.attention.output.dense"),
        *_norm("blocks/norm_mlp", f"{layer}.layernorm_after"),
        *_dense("blocks/mlp/up", f"{layer}.intermediate.dense"),
        *_dense("blocks/mlp/down", f"{layer}.output.dense"),
        *_norm("final_norm", "vit.layernorm"),
        *_dense("head/out", "classifier"),
    )


VIT_ROWS = _vit_rows()

_SHAPE = {
    "hidden_size": Field("width"),
    "num_hidden_layers": Field("layers"),
    "num_attention_heads": Field("heads"),
    "intermediate_size": Field("mlp_width"),
    "hidden_act": Field(
        "mlp",
        "gelu",
        {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"},
    ),
    "layer_norm_eps": Field("norm_eps", 1e-12),
}

FIELDS = _SHAPE | {
    "vocab_size": Field("vocab_size"),
    "type_vocab_size": Field("token_types", 2),
    "hidden_dropout_prob": Field("dropout", 0.1),
    "attention_probs_dropout_prob": Field("attention_dropout", 0.1),
}

VIT_FIELDS = _SHAPE | {
    "patch_size": Field("patch", 16),
    "qkv_bias": Field("qkv_bias", True),
    "hidden_dropout_prob": Field("dropout", 0.0),
    "attention_probs_dropout_prob": Field("attention_dropout", 0.0),
}

# What the architectures predict; the first of a head is what is written.
BERT_HEADS = {
    "BertForMaskedLM": "tokens",
    "BertForSequenceClassification": "classes",
    "BertModel": "none",
    "BertForPreTraining": "tokens",
}
ROBERTA_HEADS = {
    "RobertaForMaskedLM": "tokens",
    "RobertaForSequenceClassification": "classes",
    "RobertaModel": "none",
}
VIT_HEADS = {"ViTForImageClassification": "classes", "ViTModel": "none"}
# Tensors of heads, of which a model with another head reads none or some.
OF_HEADS = r"^(cls|classifier|lm_head)\.|(^|\.)pooler\."


def read_head(heads: Mapping[str, str], theirs: dict[str, Any]) -> dict[str, Any]:
    """What is predicted, by the architecture, and of how many classes."""
    named = theirs.get("architectures") or list(heads)
    head = heads[named[0]]
    labels, number = theirs.get("id2label"), theirs.pop("num_labels", None)
    if head != "classes":
        return {"head": head}
    if labels is not None and not isinstance(labels, dict):
        raise ValueError(f"id2label={labels!r} is not an object")
    if (kind := theirs.get("problem_type")) not in (None, "single_label_classification"):
        raise ValueError(f"problem_type={kind!r} is not known here: only one label of several")
    classes = len(labels) if labels else number or 2
    if classes == 1:
        raise ValueError("it has one label, which is a regression: no model here has that")
    return {"head": head, "classes": classes}


def write_head(heads: Mapping[str, str], config: EncoderConfig | ViTConfig) -> dict[str, Any]:
    """The architecture, and names of classes, which transformers counts."""
    theirs = {"architectures": [next(name for name, head in heads.items() if head == config.head)]}
    names = [f"LABEL_{i}" for i in range(config.classes or 0)]
    return theirs | (label_fields(names) if names else {})


def label_fields(names: Sequence[str]) -> dict[str, Any]:
    """The fields of config.json that name classes.

    >>> label_fields(["no", "yes"])["label2id"]
    {'no': 0, 'yes': 1}
    """
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def read_roberta(theirs: dict[str, Any]) -> dict[str, Any]:
    """The head, and positions: those of padding and before come first in their table."""
    found, last = theirs.pop("pad_token_id", 1), theirs.pop("max_position_embeddings", 512)
    for name, value in {"pad_token_id": found, "max_position_embeddings": last}.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name}={value!r} must be a whole number")
    places = {"unused_positions": found + 1, "seq_len": last - found - 1}
    return read_head(ROBERTA_HEADS, theirs) | places


def write_roberta(config: EncoderConfig) -> dict[str, Any]:
    """The inverse of :func:`read_roberta`."""
    unused = config.unused_positions
    if unused is None:
        raise ValueError("roberta has no unused_positions=None")
    places = {"pad_token_id": unused - 1, "max_position_embeddings": config.seq_len + unused}
    return write_head(ROBERTA_HEADS, config) | places


def read_vit(theirs: dict[str, Any]) -> dict[str, Any]:
    """The head, and the size of images, which is a number where they are square."""
    size, channels = theirs.pop("image_size", 224), theirs.pop("num_channels", 3)
    sides = size if isinstance(size, list) else [size, size]
    if [type(each) for each in (*sides, channels)] != [int] * 3:
        raise ValueError(f"image_size={size!r} or num_channels={channels!r} is no size of images")
    found = read_head(VIT_HEADS, theirs)
    return {"image": (*sides, channels), "classes": found.get("classes")}


def write_vit(config: ViTConfig) -> dict[str, Any]:
    """The inverse of :func:`read_vit`."""
    height, width, channels = config.image
    size = height if height == width else [height, width]
    return write_head(VIT_HEADS, config) | {"image_size": size, "num_channels": channels}
