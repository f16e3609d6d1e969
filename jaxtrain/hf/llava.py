"""The family of LLaVA: CLIP's image tower, two dense layers, and a decoder of Llama's form."""

import dataclasses
from typing import Any

from jaxtrain.hf import decoders, towers
from jaxtrain.hf.family import Family
from jaxtrain.hf.table import Row, dense
from jaxtrain.models import llava
from jaxtrain.models.llava import LlavaConfig

# Decoders whose tensors have Llama's names; the first one that has a model is the one it is
# written as.
TEXTS = {family.name: family for family in (decoders.LLAMA, decoders.MISTRAL, decoders.QWEN2)}
# Sizes that the files of the first models leave out, as those of transformers' LlamaConfig.
SEVEN_B = {"hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048}
SEVEN_B |= {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
POOLS = {"default": False, "full": True}


def _moved(rows: tuple[Row, ...], *pairs: tuple[str, str, str, str]) -> tuple[Row, ...]:
    """Rows with another beginning of our path and of their name."""
    return tuple(
        dataclasses.replace(
            row,
            ours=row.ours.replace(ours, our_new, 1),
            theirs=row.theirs.replace(theirs, their_new, 1),
        )
        for ours, our_new, theirs, their_new in pairs
        for row in rows
        if row.ours.startswith(ours) and row.theirs.startswith(theirs)
    )


_TOWER = "vision_model.", "vision_tower."
ROWS = (
    *_moved(
        towers.CLIP_ROWS,
        ("image/embed/", "image/embed/", *_TOWER),
        ("image/blocks/", "image_blocks/", *_TOWER),
        ("image/blocks/", "unread/blocks/", *_TOWER),
        ("image/final_norm/", "unread/final_norm/", *_TOWER),
    ),
    *dense("project/up", "multi_modal_projector.linear_1"),
    *dense("project/down", "multi_modal_projector.linear_2"),
    *_moved(decoders.LLAMA_ROWS, *(("", "", x, f"language_model.{x}") for x in ("model.", "lm_"))),
)


def _read(theirs: dict[str, Any]) -> dict[str, Any]:
    vision, text = (dict(theirs.pop(f"{name}_config", None) or {}) for name in ("vision", "text"))
    for name in ("ignore_index", "image_seq_length", "vocab_size", "tie_word_embeddings"):
        theirs.pop(name, None)  # of training, of prompts, and again what the parts say
    if (kind := vision.get("model_type", towers.CLIP_IMAGE.name)) != towers.CLIP_IMAGE.name:
        raise ValueError(f"its image tower is {kind!r}: only {towers.CLIP_IMAGE.name} is known")
    if (kind := text.get("model_type", "llama")) not in TEXTS:
        raise ValueError(f"its text model is {kind!r}: only {', '.join(TEXTS)} are known")
    unread = towers.UNREAD | {"vocab_size"}
    image = towers.CLIP_IMAGE.config({k: x for k, x in vision.items() if k not in unread})
    layer, pool = (
        theirs.pop(f"vision_feature_{name}", usual)
        for name, usual in (("layer", -2), ("select_strategy", "default"))
    )
    if pool not in POOLS:
        raise ValueError(f"vision_feature_select_strategy={pool!r} is none of {', '.join(POOLS)}")
    if type(layer) is not int or not -image.layers <= layer <= image.layers or not layer:
        raise ValueError(
            f"vision_feature_layer={layer!r} must be the number of one of {image.layers} layers"
        )
    used = layer if layer > 0 else image.layers + 1 + layer
    token = {theirs.pop(f"image_token_{name}", None) for name in ("index", "id")} - {None}
    if len(token) > 1:
        raise ValueError(f"image_token_index and image_token_id are {sorted(token)}: give one")
    usual = SEVEN_B if kind == "llama" else {}
    return {
        "image": dataclasses.replace(image, layers=used),
        "text": TEXTS[kind].config(usual | text),
        "image_token": min(token, default=32000),
        "keep_first": POOLS[pool],
        "unread_layers": image.layers - used,
    }


def _write(config: LlavaConfig) -> dict[str, Any]:
    whole = dataclasses.replace(config.image, layers=config.image.layers + config.unread_layers)
    parts, reasons = {"vision_config": towers.CLIP_IMAGE.config_json(whole)}, []
    for family in TEXTS.values():
        try:
            parts["text_config"] = family.config_json(config.text)
            break
        except ValueError as error:
            reasons.append(str(error))
    else:
        raise ValueError(f"llava has no such decoder: {'; '.join(reasons)}")
    for part in parts.values():
        del part["architectures"]
    pool = {keeps: name for name, keeps in POOLS.items()}[config.keep_first]
    return parts | {
        "image_token_index": config.image_token,
        "image_seq_length": config.positions_of_image,
        "vision_feature_layer": -1 - config.unread_layers,
        "vision_feature_select_strategy": pool,
        "tie_word_embeddings": config.text.tied,
    }


LLAVA = Family(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    rows=ROWS,
    fields={},
    ours={},
    fixed={"projector_hidden_act": "gelu", "multimodal_projector_bias": True},
    read=_read,
    write=_write,
    # Files of before transformers 5 call the tower's tensors so.
    old_names=(r"^vision_tower\.vision_model\.", "vision_tower."),
    buffers=r"\.position_ids$|rotary_emb\.inv_freq$",
    model=LlavaConfig,
    module=llava,
    sized=lambda config: {"unread/blocks/": {"offset": config.image.layers}},
    copies={"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
)
