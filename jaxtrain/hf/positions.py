"""Rotary positions, and layers with a window or without, as config.json says them."""

import math
from typing import Any

from jaxtrain.hf.family import check_positive
from jaxtrain.hf.table import REQUIRED
from jaxtrain.models.config import windows_of
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.ops.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    YarnScaling,
    scaling_of,
)


def read_rope(theirs: dict[str, Any], default: Any) -> dict[str, Any]:
    """Rotary positions: ``rope_theta`` and ``rope_scaling``, or both in ``rope_parameters``.

    Absent fields mean what transformers 5.24 takes for them.
    """
    fields = {"rope_theta": theirs.pop("rope_theta", default)} | _taken(theirs)
    theta = fields.pop("rope_theta")
    kinds = fields.pop("rope_type", None), fields.pop("type", None)
    kind = kinds[0] or kinds[1] or "default"
    kind = "longrope" if kind == "su" else kind  # its name in the first files
    if theta is REQUIRED:
        raise ValueError("it has no rope_theta")
    if kind in ("llama3", "yarn", "longrope"):
        beside = theirs.pop(_ORIGINAL, None)
        if beside is not None:
            fields[_ORIGINAL] = positive({_ORIGINAL: beside}, _ORIGINAL)
        elif fields.get(_ORIGINAL) is None:
            fields[_ORIGINAL] = positive(theirs, _LENGTH)
    if kind == "dynamic":  # transformers takes its length from nowhere else
        fields[_LENGTH] = positive(theirs, _LENGTH)
    needed, optional = _FIELDS.get(kind, ((), ()))
    if kind not in _FIELDS:
        raise ValueError(f"rope_type={kind!r} is not known here: only {', '.join(_FIELDS)}")
    if lacking := [name for name in needed if name not in fields]:
        raise ValueError(f"rope_type={kind!r} lacks {lacking[0]}, and no other field tells it")
    if unknown := [name for name in fields if name not in (*needed, *optional)]:
        names = ", ".join((*needed, *optional)) or "no more fields"
        raise ValueError(
            f"rope_type={kind!r} has {unknown[0]}={fields[unknown[0]]!r}, and may have {names}: "
            "leave it out"
        )
    if kind in ("yarn", "longrope") and fields.get("factor", 0) is None:
        fields["factor"] = positive(theirs, _LENGTH) / fields[_ORIGINAL]
    for name, value in {"rope_theta": theta, **fields}.items():
        if name in ("rope_theta", *_LLAMA3):
            check_positive(name, value)
    scaling = None
    if kind == "longrope":
        scaling = _long(fields, theirs)
    elif kind == "yarn":
        scaling = _yarn(fields)
    elif kind != "default":
        scaling_class = next(x for x, (name, _) in _SCALINGS.items() if name == kind)
        scaling = scaling_class(*map(fields.get, needed))
    return {"rope_theta": theta, "rope_scaling": scaling}


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ORIGINAL, _LENGTH = _LLAMA3[3], "max_position_embeddings"
_MSCALES = ("mscale", "mscale_all_dim")
_YARN = ("factor", _LLAMA3[3], "attention_factor", "beta_fast", "beta_slow", "truncate")
_YARN += _MSCALES[1:]
_LONG = ("short_factor", "long_factor", _LLAMA3[3], "attention_factor")
# Their name and numbers, in the order of ours.
_SCALINGS = {
    Llama3Scaling: ("llama3", _LLAMA3),
    LinearScaling: ("linear", ("factor",)),
    YarnScaling: ("yarn", _YARN),
    DynamicScaling: ("dynamic", ("factor", _LENGTH)),
    LongScaling: ("longrope", _LONG),
}
# The fields that a kind needs, and those that it may have.
_FIELDS = {name: (numbers, ()) for name, numbers in _SCALINGS.values()}
_FIELDS |= {"default": ((), ()), "yarn": (_YARN[:2], (*_YARN[2:], *_MSCALES))}
_FIELDS |= {"longrope": (_LONG[:3], (_LONG[3], "factor"))}


def _taken(theirs: dict[str, Any]) -> dict[str, Any]:
    """Takes out both objects of rotary positions, and returns the one that transformers reads."""
    objects = {name: theirs.pop(name, None) for name in ("rope_scaling", "rope_parameters")}
    for name, fields in objects.items():
        if fields is not None and not isinstance(fields, dict):
            raise ValueError(f"{name}={fields!r} is not an object")
    return dict(objects["rope_scaling"] or objects["rope_parameters"] or {})


def take_rotated(theirs: dict[str, Any], usual: float) -> float:
    """Takes out the part of a head that is rotated: ``partial_rotary_factor``, in its object or
    beside it."""
    theirs["rope_parameters"] = _taken(theirs)
    part = theirs.pop("partial_rotary_factor", usual)
    part = theirs["rope_parameters"].pop("partial_rotary_factor", part)
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise ValueError(f"partial_rotary_factor={part!r} must be above 0 and at most 1")
    return part


def rotated_part(config: DecoderConfig) -> float:
    """The inverse of :func:`take_rotated`, of which a product is rounded down."""
    part = config.block.rotated / config.block.head_dim
    fits = int(config.block.head_dim * part) == config.block.rotated
    return part if fits else math.nextafter(part, 1)


def _long(found: dict[str, Any], theirs: dict[str, Any]) -> LongScaling:
    longest, length = positive(theirs, _LENGTH), found[_ORIGINAL]
    if (magnitude := found.get(_LONG[3])) is None:
        magnitude = _long_magnitude(found.get("factor") or longest / length, length)
    return scaling_of([found[_LONG[0]], found[_LONG[1]], length, magnitude])


def _long_magnitude(factor: float, length: int) -> float:
    longer = factor > 1 and length > 1
    return math.sqrt(1 + math.log(factor) / math.log(length)) if longer else 1.0


def _yarn(found: dict[str, Any]) -> YarnScaling:
    for name in (*_YARN[2:5], *_MSCALES):
        if found.get(name) is not None:
            check_positive(name, found[name])
    factor, length, magnitude, fast, slow = map(found.get, _YARN[:5])
    log = 0.1 * math.log(max(factor, 1))
    if magnitude is None:
        own, all_dim = map(found.get, _MSCALES)
        magnitude = (log * own + 1) / (log * all_dim + 1) if own and all_dim else log + 1
    return YarnScaling(
        factor, length, magnitude, fast or 32, slow or 1, int(found.get("truncate", 1))
    )


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of :func:`read_rope`."""
    return {"rope_theta": config.rope_theta, "rope_scaling": _scaling(config)}


def _scaling(config: DecoderConfig | EncoderConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    name, numbers = _SCALINGS[type(config.rope_scaling)]
    found = {"rope_type": name} | dict(zip(numbers, config.rope_scaling, strict=True))
    if isinstance(config.rope_scaling, LongScaling):
        length = config.rope_scaling.length
        usual = _long_magnitude(config.seq_len / length, length)
        return {key: x for key, x in found.items() if (key, x) != (_LONG[3], usual)}
    if name != "yarn":
        found.pop(_LENGTH, None)  # which stands beside, not within
        return found
    found["truncate"] = bool(found["truncate"])
    usual = _yarn({key: found[key] for key in _YARN[:2]})._asdict().values()
    usual = dict(list(zip(_YARN, usual, strict=True))[2:])
    scaled = config.rope_scaling.all_dim
    if scaled and found["attention_factor"] == 1:  # as theirs have it, by two equal numbers
        usual |= {"attention_factor": 1}
        found["mscale"] = scaled
    return {key: x for key, x in found.items() if key not in usual or x != usual[key]}


def read_latent_rope(theirs: dict[str, Any]) -> dict[str, Any]:
    """As :func:`read_rope`, of models whose scores are scaled by ``mscale_all_dim`` too."""
    fields = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    rope = read_rope(theirs, 10000.0)
    if isinstance(scaling := rope["rope_scaling"], YarnScaling) and fields.get(_MSCALES[1]):
        rope["rope_scaling"] = scaling._replace(all_dim=float(fields[_MSCALES[1]]))
    return rope


_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_kinds(theirs: dict[str, Any], slides: list[bool], window: int | None) -> dict[str, Any]:
    """Which layers have a window: as ``layer_types`` says, or else ``slides``."""
    layers, kinds = theirs.get("num_hidden_layers", 0), theirs.pop("layer_types", None)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(f"layer_types={kinds!r} has no kind for each of {layers} layers")
        if unknown := [kind for kind in kinds if kind not in (_FULL, _SLIDING)]:
            raise ValueError(
                f"layer_types has {unknown[0]!r}, which is not known here: only {_FULL!r} and "
                f"{_SLIDING!r}"
            )
        slides = [kind == _SLIDING for kind in kinds]
    if not any(slides):
        return {"window": None}
    if window is None:
        raise ValueError(f"layer_types has {_SLIDING!r}, and the other fields give no window")
    repeats = (n for n in range(1, layers + 1) if slides[n:] == slides[:-n])
    return {"window": window, "window_pattern": tuple(slides[: next(repeats)])}


def write_kinds(config: DecoderConfig | EncoderConfig) -> dict[str, Any]:
    """The inverse of :func:`read_kinds`."""
    kinds = [_SLIDING if slides else _FULL for slides in windows_of(config)]
    return {"sliding_window": config.window, "layer_types": kinds}


def read_two_ropes(
    theirs: dict[str, Any], found: dict[str, Any], thetas: dict[str, float]
) -> dict[str, Any]:
    """Rotary positions of layers without a window, which may be scaled, and of those with one.

    What is read of ``theirs`` is taken out. ``found`` is of :func:`read_kinds`, and ``thetas`` has
    the names of older fields, for layers without a window and with one, and their defaults.
    """
    ropes = theirs.pop("rope_parameters", None) or {_FULL: {"rope_type": "default"}}
    if not isinstance(ropes, dict) or not ropes.keys() <= {_FULL, _SLIDING}:
        raise ValueError(f"rope_parameters={ropes!r} is not an object of {_FULL} and {_SLIDING}")
    stretched = _taken({"rope_scaling": theirs.pop("rope_scaling", None)})
    if stretched:  # transformers changes the fields of the newer object by it
        ropes = ropes | {_FULL: (ropes.get(_FULL) or {}) | stretched}
    length = {_LENGTH: theirs.get(_LENGTH)}
    own, local = (
        {"rope_theta": theirs.pop(name, theta), "rope_parameters": ropes.get(kind)} | length
        for (name, theta), kind in zip(thetas.items(), (_FULL, _SLIDING), strict=True)
    )
    full = read_rope(own, REQUIRED)
    local = read_rope(local, REQUIRED)
    if local["rope_scaling"] is not None:
        raise ValueError(f"rope_parameters scale the positions of {_SLIDING}: not known here")
    return found | full | ({"local_rope_theta": local["rope_theta"]} if found["window"] else {})


def write_two_ropes(config: DecoderConfig | EncoderConfig) -> dict[str, Any]:
    """The inverse of :func:`read_two_ropes`."""
    local = config.local_rope_theta or config.rope_theta
    whole = (_scaling(config) or {"rope_type": "default"}) | {"rope_theta": config.rope_theta}
    own = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {_FULL: whole, _SLIDING: own}}


def positive(theirs: dict[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of a config.json; one with a default is taken out. Raises ValueError where it
    is none, or below 1."""
    value = theirs.get(name) if default is None else theirs.pop(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number above 0")
    return value
