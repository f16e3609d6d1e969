"""The families of two towers: CLIP and SigLIP."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.hf.encoders import read_image, write_image
from jaxtrain.hf.family import Family
from jaxtrain.hf.table import GELUS, Field, Row, T, dense, norm
from jaxtrain.models import clip
from jaxtrain.models.clip import ClipConfig, TextConfig
from jaxtrain.models.vit import ViTConfig

# Fields of old files that are of generation, or of other models, and that no tower reads.
UNREAD = {
    *("bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "do_sample"),
    *("decoder_start_token_id", "diversity_penalty", "dropout", "early_stopping", "is_decoder"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task"),
    *("forced_bos_token_id", "forced_eos_token_id", "is_encoder_decoder", "length_penalty"),
    *("max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
    *("num_return_sequences", "output_scores", "prefix", "projection_dim", "remove_invalid_values"),
    *("repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature"),
    *("tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p"),
    *("tf_legacy_loss", "torchscript", "typical_p", "use_bfloat16"),
}


def _layers(tower: str, theirs: str) -> tuple[Row, ...]:
    names = {"attn/q": "q_proj", "attn/k": "k_proj", "attn/v": "v_proj", "attn/out": "out_proj"}
    names = {ours: f"self_attn.{theirs}" for ours, theirs in names.items()}
    names |= {"mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2"}
    norms = {"norm_attn": "layer_norm1", "norm_mlp": "layer_norm2"}
    pairs = [(dense, *each) for each in names.items()] + [(norm, *each) for each in norms.items()]
    return tuple(
        row
        for rows, ours, its in pairs
        for row in rows(f"{tower}/blocks/{ours}", f"{theirs}.encoder.layers.{{l}}.{its}")
    )


_IMAGE, _TEXT, _HEAD = "vision_model", "text_model", "vision_model.head"
_ROWS = (
    *dense("image/embed/patch", f"{_IMAGE}.embeddings.patch_embedding", (2, 3, 1, 0)),
    Row("image/embed/positions", f"{_IMAGE}.embeddings.position_embedding.weight", ones=1),
    *_layers("image", _IMAGE),
    *norm("image/final_norm", f"{_IMAGE}.post_layernorm"),
    Row("text/embed/tokens", f"{_TEXT}.embeddings.token_embedding.weight", vocab=0),
    Row("text/embed/positions", f"{_TEXT}.embeddings.position_embedding.weight", shorter=True),
    *_layers("text", _TEXT),
    *norm("text/final_norm", f"{_TEXT}.final_layer_norm"),
)
CLIP_ROWS = (
    *_ROWS,
    Row("image/embed/first", f"{_IMAGE}.embeddings.class_embedding", ones=2),
    *norm("image/embed/norm", f"{_IMAGE}.pre_layrnorm"),
    Row("project/image/kernel", "visual_projection.weight", T),
    Row("project/text/kernel", "text_projection.weight", T),
    Row("scale", "logit_scale", ones=1),
)
SIGLIP_ROWS = (
    *_ROWS,
    Row("image/pool/query", f"{_HEAD}.probe"),
    *(
        Row(f"image/pool/attn/{x}/{ours}", f"{_HEAD}.attention.in_proj_{theirs}", axes, part=(i, 3))
        for ours, theirs, axes in (("kernel", "weight", T), ("bias", "bias", None))
        for i, x in enumerate("qkv")
    ),
    *dense("image/pool/attn/out", f"{_HEAD}.attention.out_proj"),
    *norm("image/pool/norm", f"{_HEAD}.layernorm"),
    *dense("image/pool/mlp/up", f"{_HEAD}.mlp.fc1"),
    *dense("image/pool/mlp/down", f"{_HEAD}.mlp.fc2"),
    *dense("project/text", f"{_TEXT}.head"),
    Row("scale", "logit_scale"),
    Row("bias", "logit_bias"),
)


def _tower(
    name: str,
    model: type,
    sizes: tuple[int, int],
    act: str,
    eps: float,
    own: Mapping[str, Field],
    ours: Mapping[str, Any],
    **given: Any,
) -> Family:
    """A tower, as a family whose config.json is a part of another one; files leave out what is as
    in the first model, whose width and heads are ``sizes``."""
    width, heads = sizes
    fields = {
        "hidden_size": Field("width", width),
        "num_hidden_layers": Field("layers", 12),
        "num_attention_heads": Field("heads", heads),
        "intermediate_size": Field("mlp_width", 4 * width),
        "hidden_act": Field("mlp", act, GELUS | {"quick_gelu": "gelu_quick"}),
        "layer_norm_eps": Field("norm_eps", eps),
        "attention_dropout": Field("attention_dropout", 0.0),
    }
    given = {"fixed": {}} | given
    if model is ViTConfig:
        given |= {"read": lambda theirs: {"image": read_image(theirs)}, "write": write_image}
    ours = {"norm": "layernorm", "bias": True} | ours
    own = {"fields": fields | own, "ours": ours, "rows": ()}
    return Family(name=name, architecture=name, model=model, **own, **given)


def _read_end(theirs: dict[str, Any]) -> dict[str, Any]:
    # The first files say 2, and mean the largest token of a text.
    end = theirs.pop("eos_token_id", 49407)
    return {"end": None if end == 2 else end}


def _family(name: str, architecture: str, image: Family, text: Family, **given: Any) -> Family:
    """Two towers, each in an object of config.json."""
    towers = {"vision_config": ("image", image), "text_config": ("text", text)}

    def read(theirs: dict[str, Any]) -> dict[str, Any]:
        found = {}
        theirs.pop("tie_word_embeddings", None)
        for where, (ours, family) in towers.items():
            fields, again = dict(theirs.pop(where, None) or {}), theirs.pop(f"{where}_dict", None)
            if not (again or {}).items() <= fields.items():
                raise ValueError(f"{where}_dict={again!r} says other things than {where}")
            fields = {key: x for key, x in fields.items() if key not in UNREAD}
            features = fields.pop("projection_size", None)
            found[ours] = family.config(fields)
            if name == "siglip":  # the last tower, that of text, says it
                found["features"] = features or found[ours].width
        return found

    def write(config: ClipConfig) -> dict[str, Any]:
        found = {}
        for where, (ours, family) in towers.items():
            found[where] = family.config_json(getattr(config, ours))
            del found[where]["architectures"]
            if name == "clip":
                found[where]["projection_dim"] = config.features
        if name == "siglip":
            found["text_config"]["projection_size"] = config.features
        return found

    own = {"read": read, "write": write, "fixed": {}, "buffers": r"\.position_ids$"}
    own |= {"model": ClipConfig, "module": clip}
    return Family(name=name, architecture=architecture, **own, **given)


def _lengths(vocab_size: int, seq_len: int) -> dict[str, Field]:
    lengths = {"max_position_embeddings": Field("seq_len", seq_len)}
    return lengths | {"vocab_size": Field("vocab_size", vocab_size)}


_OF_TEXT = {"positions": "learned", "tied": True}
_CLIP, _SIGLIP = ("quick_gelu", 1e-5), ("gelu_pytorch_tanh", 1e-6)
_PATCHES = {n: {"patch_size": Field("patch", n)} for n in (16, 32)}
_IMAGE_OF_CLIP = {"patch_bias": False, "embed_norm": True}
CLIP_IMAGE = _tower("clip_vision_model", ViTConfig, (768, 12), *_CLIP, _PATCHES[32], _IMAGE_OF_CLIP)
CLIP = _family(
    "clip",
    "CLIPModel",
    CLIP_IMAGE,
    _tower(
        "clip_text_model",
        TextConfig,
        (512, 8),
        *_CLIP,
        _lengths(49408, 77),
        _OF_TEXT,
        read=_read_end,
        write=lambda config: {"eos_token_id": 2 if config.end is None else config.end},
    ),
    rows=CLIP_ROWS,
    fields={"projection_dim": Field("features", 512)},
    ours={"loss": "softmax"},
)
SIGLIP = _family(
    "siglip",
    "SiglipModel",
    _tower(
        "siglip_vision_model",
        ViTConfig,
        (768, 12),
        *_SIGLIP,
        _PATCHES[16],
        {"first": False},
        fixed={"vision_use_head": True},
    ),
    _tower(
        "siglip_text_model",
        TextConfig,
        (768, 12),
        *_SIGLIP,
        _lengths(32000, 64),
        _OF_TEXT | {"causal": False},
    ),
    rows=SIGLIP_ROWS,
    fields={},
    ours={"loss": "sigmoid"},
)
TOWERS = (CLIP, SIGLIP)
