"""The families of encoders: BERT, RoBERTa, ModernBERT and ViT."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.hf import positions
from jaxtrain.hf.family import Family
from jaxtrain.hf.table import GELUS, SHAPE, Field, Row, T, dense, norm
from jaxtrain.models import encoder, vit
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
        *norm("embed/norm", f"{embed}.LayerNorm"),
        *(
            row
            for ours, theirs in names.items()
            for row in (norm if "norm" in ours else dense)(f"blocks/{ours}", f"{layer}.{theirs}")
        ),
    )


BERT_ROWS = (
    *_layers("bert"),
    *dense("head/transform", "cls.predictions.transform.dense"),
    *norm("head/norm", "cls.predictions.transform.LayerNorm"),
    Row("head/bias", "cls.predictions.bias", vocab=0),
    *dense("head/pool", "bert.pooler.dense"),
    *dense("head/out", "classifier"),
    *dense("head/tags", "classifier"),
    *dense("head/spans", "qa_outputs"),
)

ROBERTA_ROWS = (
    *_layers("roberta"),
    *dense("head/transform", "lm_head.dense"),
    *norm("head/norm", "lm_head.layer_norm"),
    Row("head/bias", "lm_head.bias", vocab=0),
    *dense("head/pool", "classifier.dense"),
    *dense("head/out", "classifier.out_proj"),
    *dense("head/tags", "classifier"),
    *dense("head/spans", "qa_outputs"),
)


def _modernbert_rows() -> tuple[Row, ...]:
    layer = "model.layers.{l}"
    qkv, up = f"{layer}.attn.Wqkv.weight", f"{layer}.mlp.Wi.weight"
    return (
        Row("embed/tokens", "model.embeddings.tok_embeddings.weight", vocab=0),
        Row("embed/norm/scale", "model.embeddings.norm.weight"),
        # Embeddings are normed, and layer 0 does not do it again.
        Row("blocks/norm_attn/scale", f"{layer}.attn_norm.weight", first=1),
        *(Row(f"blocks/attn/{x}/kernel", qkv, T, part=(i, 3)) for i, x in enumerate("qkv")),
        Row("blocks/attn/out/kernel", f"{layer}.attn.Wo.weight", T),
        Row("blocks/norm_mlp/scale", f"{layer}.mlp_norm.weight"),
        Row("blocks/mlp/gate/kernel", up, T, part=(0, 2)),
        Row("blocks/mlp/up/kernel", up, T, part=(1, 2)),
        Row("blocks/mlp/down/kernel", f"{layer}.mlp.Wo.weight", T),
        Row("final_norm/scale", "model.final_norm.weight"),
        Row("head/transform/kernel", "head.dense.weight", T),
        Row("head/norm/scale", "head.norm.weight"),
        Row("head/bias", "decoder.bias", vocab=0),
        *(row for ours in ("out", "tags", "spans") for row in dense(f"head/{ours}", "classifier")),
    )


def _vit_rows() -> tuple[Row, ...]:
    embed, layer = "vit.embeddings", "vit.encoder.layer.{l}"
    return (
        Row("embed/first", f"{embed}.cls_token"),
        Row("embed/positions", f"{embed}.position_embeddings"),
        # A convolution of PyTorch is [D, C, P, P], ours [P, P, C, D].
        *dense("embed/patch", f"{embed}.patch_embeddings.projection", (2, 3, 1, 0)),
        *norm("blocks/norm_attn", f"{layer}.layernorm_before"),
        *dense("blocks/attn/q", f"{layer}.attention.attention.query"),
        *dense("blocks/attn/k", f"{layer}.attention.attention.key"),
        *dense("blocks/attn/v", f"{layer}.attention.attention.value"),
        *dense("blocks/attn/out", f"{layer}.attention.output.dense"),
        *norm("blocks/norm_mlp", f"{layer}.layernorm_after"),
        *dense("blocks/mlp/up", f"{layer}.intermediate.dense"),
        *dense("blocks/mlp/down", f"{layer}.output.dense"),
        *norm("final_norm", "vit.layernorm"),
        *dense("head/out", "classifier"),
    )


VIT_ROWS = _vit_rows()

_SHAPE = SHAPE | {
    "hidden_act": Field("mlp", "gelu", GELUS),
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

_HEADS = {
    "ForMaskedLM": "tokens",
    "ForSequenceClassification": "classes",
    "ForTokenClassification": "tags",
    "ForQuestionAnswering": "spans",
    "Model": "none",
}

# Heads of rows by the name of their loss there; the first is not written.
PROBLEMS = {
    "single_label_classification": "classes",
    "regression": "score",
    "multi_label_classification": "labels",
}

# What the architectures predict; the first of a head is what is written.
BERT_HEADS, ROBERTA_HEADS, MODERNBERT_HEADS = (
    {f"{name}{ending}": head for ending, head in _HEADS.items()}
    for name in ("Bert", "Roberta", "ModernBert")
)
BERT_HEADS["BertForPreTraining"] = "tokens"
VIT_HEADS = {"ViTForImageClassification": "classes", "ViTModel": "none"}
# Tensors of heads, of which a model with another head reads none or some.
OF_HEADS = r"^(cls|classifier|qa_outputs|lm_head|head|decoder)\.|(^|\.)pooler\."


def read_head(heads: Mapping[str, str], theirs: dict[str, Any]) -> dict[str, Any]:
    """Reads the kind of head from the architecture and the type of problem, and its number of
    classes."""
    named = theirs.get("architectures") or list(heads)
    head = heads[named[0]]
    labels, number = theirs.get("id2label"), theirs.pop("num_labels", None)
    if head not in ("classes", "tags"):
        return {"head": head}
    if labels is not None and not isinstance(labels, dict):
        raise ValueError(f"id2label={labels!r} is not an object")
    classes, kind = len(labels) if labels else number or 2, theirs.get("problem_type")
    if head == "classes":  # transformers reads no type of problem of tags
        head = PROBLEMS.get(kind) if kind else "score" if classes == 1 else "classes"
    fits = {"classes": classes > 1, "tags": classes > 1, "score": classes == 1, "labels": True}
    if not fits.get(head) or (heads is VIT_HEADS and head != "classes"):
        raise ValueError(
            f"problem_type={kind!r} with num_labels={classes} is not known of {named[0]}: give one "
            "label of several, and of a text also several of them, or a regression with one"
        )
    return {"head": head} | ({} if head == "score" else {"classes": classes})


def write_head(heads: Mapping[str, str], config: EncoderConfig | ViTConfig) -> dict[str, Any]:
    """The architecture, names of classes, which transformers counts, and the type of problem where
    that is no class of several."""
    kind = {head: name for name, head in PROBLEMS.items() if head != "classes"}.get(config.head)
    head = "classes" if kind else config.head
    theirs = {"architectures": [next(name for name, each in heads.items() if each == head)]}
    theirs |= {"problem_type": kind} if kind else {}
    names = [f"LABEL_{i}" for i in range(config.classes or int(config.head == "score"))]
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


def read_modernbert(theirs: dict[str, Any]) -> dict[str, Any]:
    """The head, the window of two layers in three, and rotary positions of both kinds."""
    every = positions.positive(theirs, "global_attn_every_n_layers", 3)
    slides = [l % every != 0 for l in range(positions.positive(theirs, "num_hidden_layers"))]
    # As many to either side, and the position itself.
    window = positions.positive(theirs, "local_attention", 128) // 2 + 1
    thetas = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    if theirs.get("rope_scaling"):  # transformers applies it to both kinds of layers
        raise ValueError("rope_scaling is not known here of ModernBERT: give rope_parameters")
    theirs.pop("layer_norm_eps", None)  # of older files, beside norm_eps, which is read
    found = positions.read_two_ropes(theirs, positions.read_kinds(theirs, slides, window), thetas)
    return read_head(MODERNBERT_HEADS, theirs) | found


def write_modernbert(config: EncoderConfig) -> dict[str, Any]:
    """The inverse of :func:`read_modernbert`."""
    theirs = positions.write_kinds(config) | positions.write_two_ropes(config)
    if config.vocab_size <= 50283:
        theirs["pad_token_id"] = None  # else that number, for which their table has no row
    if (window := theirs.pop("sliding_window")) is not None:
        theirs["local_attention"] = 2 * (window - 1)
    return write_head(MODERNBERT_HEADS, config) | theirs


def read_image(theirs: dict[str, Any]) -> tuple[int, int, int]:
    """Reads the size of images, which is a number where they are square, and their channels."""
    size, channels = theirs.pop("image_size", 224), theirs.pop("num_channels", 3)
    sides = size if isinstance(size, list) else [size, size]
    if [type(each) for each in (*sides, channels)] != [int] * 3:
        raise ValueError(f"image_size={size!r} or num_channels={channels!r} is no size of images")
    return (*sides, channels)


def write_image(config: ViTConfig) -> dict[str, Any]:
    """The inverse of :func:`read_image`."""
    height, width, channels = config.image
    size = height if height == width else [height, width]
    return {"image_size": size, "num_channels": channels}


def read_vit(theirs: dict[str, Any]) -> dict[str, Any]:
    """The head, and the size of images."""
    return {"image": read_image(theirs), "classes": read_head(VIT_HEADS, theirs).get("classes")}


def write_vit(config: ViTConfig) -> dict[str, Any]:
    """The inverse of :func:`read_vit`."""
    return write_head(VIT_HEADS, config) | write_image(config)


BERT = Family(
    name="bert",
    architecture="BertForMaskedLM",
    rows=BERT_ROWS,
    fields=FIELDS | {"max_position_embeddings": Field("seq_len", 512)},
    ours={"norm": "layernorm", "bias": True},
    fixed={
        "is_decoder": False,
        "add_cross_attention": False,
        "is_encoder_decoder": False,
        "tie_word_embeddings": True,
    },
    read=functools.partial(read_head, BERT_HEADS),
    write=functools.partial(write_head, BERT_HEADS),
    prefix="bert.",
    # What predicts the next sentence, and where it alone is left, the layer that pools for it.
    buffers=r"\.position_ids$|^bert\.pooler\.|^cls\.seq_relationship\.",
    model=EncoderConfig,
    module=encoder,
    others=tuple(BERT_HEADS)[1:],
    heads=OF_HEADS,
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)

ROBERTA = dataclasses.replace(
    BERT,
    name="roberta",
    architecture="RobertaForMaskedLM",
    rows=ROBERTA_ROWS,
    fields=FIELDS,
    read=read_roberta,
    write=write_roberta,
    prefix="roberta.",
    buffers=r"\.position_ids$|(^|\.)pooler\.",
    others=tuple(ROBERTA_HEADS)[1:],
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)

MODERNBERT = Family(
    name="modernbert",
    architecture="ModernBertForMaskedLM",
    rows=_modernbert_rows(),
    fields=SHAPE
    | {
        "vocab_size": Field("vocab_size"),
        "max_position_embeddings": Field("seq_len", 8192),
        "hidden_activation": Field(
            "mlp", "gelu", {"gelu": "geglu_exact", "gelu_pytorch_tanh": "geglu"}
        ),
        "norm_eps": Field("norm_eps", 1e-5),
        "embedding_dropout": Field("dropout", 0.0),
        "mlp_dropout": Field("dropout", 0.0),
        "attention_dropout": Field("attention_dropout", 0.0),
        "classifier_pooling": Field("pooling", "cls", {"cls": "first_normed", "mean": "mean"}),
    },
    ours={
        "positions": "rope",
        "norm": "layernorm",
        "norm_position": "pre",
        "bias": False,
        "token_types": None,
    },
    fixed={
        "attention_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu",
        "is_encoder_decoder": False,
        "tie_word_embeddings": True,
    },
    read=read_modernbert,
    write=write_modernbert,
    prefix="model.",
    model=EncoderConfig,
    module=encoder,
    others=tuple(MODERNBERT_HEADS)[1:],
    heads=OF_HEADS,
    copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)

VIT = Family(
    name="vit",
    architecture="ViTForImageClassification",
    rows=VIT_ROWS,
    fields=VIT_FIELDS,
    ours={"norm": "layernorm", "bias": True},
    fixed={"is_encoder_decoder": False},
    read=read_vit,
    write=write_vit,
    prefix="vit.",
    buffers=r"(^|\.)pooler\.",
    model=ViTConfig,
    module=vit,
    others=tuple(VIT_HEADS)[1:],
    heads=OF_HEADS,
)

ENCODERS = (BERT, ROBERTA, MODERNBERT, VIT)
