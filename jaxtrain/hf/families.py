"""The families that are known, by name."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.hf.decoders import DECODERS
from jaxtrain.hf.encoder_decoders import T5
from jaxtrain.hf.encoders import ENCODERS
from jaxtrain.hf.family import Family, ModelConfig
from jaxtrain.hf.llava import LLAVA
from jaxtrain.hf.towers import TOWERS

FAMILIES = {family.name: family for family in (*DECODERS, *ENCODERS, T5, *TOWERS, LLAVA)}


def family_of(theirs: Mapping[str, Any]) -> Family:
    """Returns the family that a config.json names. Raises ValueError where there is none of it
    here."""
    known = {name: each for each in FAMILIES.values() for name in each.architectures}
    named, kind = theirs.get("architectures"), theirs.get("model_type")
    if named is not None and not isinstance(named, list):
        raise ValueError(f"architectures={named!r} is not a list of names")
    named = list(map(str, named or []))
    if kind is None and not named:
        raise ValueError("it names no model_type and no architectures")
    found = FAMILIES.get(kind) if isinstance(kind, str) else None
    if kind is None and len(named) == 1:
        found = known.get(named[0])
    if found is None:
        told = (
            f"model_type is {kind}" if kind is not None else f"architecture is {', '.join(named)}"
        )
        raise ValueError(
            f"its {told}, of which there is none here, but {', '.join(FAMILIES)} "
            f"({', '.join(known)})"
        )
    if named and (len(named) > 1 or named[0] not in found.architectures):
        raise ValueError(
            f"its architecture is {', '.join(named)}, and of {found.name} there is only "
            f"{' or '.join(found.architectures)} here"
        )
    return found


def family_for(config: ModelConfig, name: str | None = None) -> Family:
    """Returns the first family that has such a model, or the one of that name. Raises ValueError
    where there is none, or it has not."""
    if name is not None and name not in FAMILIES:
        raise ValueError(f"`family` is {name!r}: use one of {', '.join(FAMILIES)}")
    reasons = []
    for family in FAMILIES.values() if name is None else [FAMILIES[name]]:
        if not isinstance(config, family.model):
            if name is None:
                continue
            reasons.append(f"{family.name} has no {type(config).__name__}")
            continue
        try:
            family.config_json(config)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return family
    reasons = reasons or [f"none has a {type(config).__name__}"]
    raise ValueError(
        f"no Hugging Face family has this model: {'; '.join(reasons)}; export it with --format "
        "stablehlo, which has every model"
    )
