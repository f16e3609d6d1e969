"""The ten update rules as lists of optax stages, and the options each of them has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxtrain.optim import layerwise
from jaxtrain.optim.masks import Stacked
from jaxtrain.optim.numerics import check_integer, check_number, concrete

_ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "nesterov": False, "moment_dtype": None}

# What each name takes besides the options common to all, and the default of each.
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "nesterov": False, "moment_dtype": None},
    "adam": _ADAM,
    "adamw": _ADAM,
    "rmsprop": {"b2": 0.9, "eps": 1e-8, "momentum": 0.0, "nesterov": False, "moment_dtype": None},
    "adafactor": {
        "momentum": 0.0,
        "eps": 1e-30,
        "decay_rate": 0.8,
        "min_dim_size_to_factor": 128,
        "clipping_threshold": 1.0,
        "parameter_scale": True,
        "moment_dtype": None,
    },
    "lion": {"b1": 0.9, "b2": 0.99, "moment_dtype": None},
    "lamb": {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "trust_mask": None, "moment_dtype": None},
    "lars": {
        "momentum": 0.9,
        "nesterov": False,
        "trust_coefficient": 0.001,
        "trust_mask": None,
        "moment_dtype": None,
    },
    "muon": {
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "muon_scale": "rms",
        "muon_mask": None,
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-10,
        "adam_ratio": 1.0,
        "moment_dtype": None,
    },
}

COMMON = (
    "weight_decay",
    "clip_norm",
    "decay_mask",
    "freeze",
    "accumulate",
    "skip_spikes",
    "stacked",
)


@dataclass(frozen=True)
class Layout:
    """What is known of the parameters: trees of bools over those that train, and what is stacked.

    Attributes:
      decay: which parameters take weight decay.
      trust: which take a trust ratio.
      hidden: which Muon orthogonalises.
      stacked: which leading axes index layers.
    """

    decay: Any
    trust: Any
    hidden: Any
    stacked: Stacked


def resolve_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of ``name`` with defaults filled in; None in ``given`` is not given.

    Raises:
      ValueError: for an unknown name, an option that it does not have, or a value out of range.
    """
    if name not in OPTIONS:
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(OPTIONS)}")
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if key not in OPTIONS[name]:
            takes = ", ".join([*OPTIONS[name], *COMMON])
            raise ValueError(
                f"optimizer {name!r} has no option {key} (given {value!r}); it takes {takes}"
            )
    options = OPTIONS[name] | given
    _check_values(options)
    no_momentum = "momentum" in options and concrete("momentum", options["momentum"]) == 0
    if no_momentum and options.get("nesterov") is True:
        raise ValueError(f"nesterov=True has no effect on {name!r} with momentum 0; set momentum")
    narrow = options.get("moment_dtype") is not None and options["moment_dtype"].itemsize < 4
    if no_momentum and narrow:
        raise ValueError(
            f"moment_dtype is {options['moment_dtype'].name}, which applies to the first moment, "
            f"but {name!r} with momentum 0 keeps none; set momentum, or moment_dtype='float32'"
        )
    return options


def _check_values(options: dict[str, Any]) -> None:
    for key in ("b1", "b2", "momentum"):
        if key in options:
            check_number(key, options[key], low=0.0, high=1.0)
    if "eps" in options:
        check_number("eps", options["eps"], low=0.0)
    for key in ("decay_rate", "trust_coefficient", "adam_ratio"):
        if key in options:
            check_number(key, options[key], low=0.0, open_low=True)
    if "clipping_threshold" in options:
        threshold = options["clipping_threshold"]
        check_number("clipping_threshold", threshold, low=0.0, high=None, open_low=True)
    for key in ("min_dim_size_to_factor", "ns_steps"):
        if key in options:
            options[key] = check_integer(key, options[key], low=1)
    for key in ("nesterov", "parameter_scale"):
        if key in options and not isinstance(options[key], bool):
            raise ValueError(f"{key} is {options[key]!r}; it must be True or False")
    if options.get("muon_scale", "rms") not in ("rms", "width"):
        raise ValueError(f"muon_scale is {options['muon_scale']!r}; it must be 'rms' or 'width'")
    if options.get("moment_dtype") is not None:
        options["moment_dtype"] = _float_dtype(options["moment_dtype"])


def _float_dtype(dtype: Any) -> Any:
    try:
        found = jax.numpy.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"moment_dtype is {dtype!r}; it must be bfloat16, float16 or float32")
    return found


def stages(
    name: str,
    options: dict[str, Any],
    layout: Layout,
    *,
    weight_decay: float | jax.Array,
    rate: optax.GradientTransformation,
) -> list[optax.GradientTransformation]:
    """Returns the stages of the rule ``name``, from clipped gradients to updates.

    Stages that are switched off are ``optax.identity()``, so that the state of the others keeps its
    path whatever the options.
    """
    if concrete("weight_decay", weight_decay) == 0:
        decay = optax.identity()
    else:
        decay = optax.add_decayed_weights(weight_decay, mask=layout.decay)
    if name == "lars":
        # The paper accumulates steps, not gradients: the rate goes before the momentum.
        trust = layerwise.scale_by_lars_trust_ratio(
            layout.trust,
            layout.decay,
            weight_decay=weight_decay,
            trust_coefficient=options["trust_coefficient"],
            stacked=layout.stacked,
        )
        return [trust, rate, _trace(options)]
    return [*_RULES[name](options, layout, decay), rate]


def _sgd(options, layout, decay):
    del options, layout
    return [decay]


def _momentum(options, layout, decay):
    del layout
    return [decay, _trace(options)]


def _adam(options, layout, decay):
    del layout
    return [decay, _scale_by_adam(options)]


def _adamw(options, layout, decay):
    del layout
    return [_scale_by_adam(options), decay]


def _rmsprop(options, layout, decay):
    del layout
    return [decay, optax.scale_by_rms(decay=options["b2"], eps=options["eps"]), _trace(options)]


def _adafactor(options, layout, decay):
    factored = optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=options["decay_rate"],
            min_dim_size_to_factor=options["min_dim_size_to_factor"],
            epsilon=options["eps"],
        ),
        optax.clip_by_block_rms(options["clipping_threshold"]),
        optax.scale_by_param_block_rms() if options["parameter_scale"] else optax.identity(),
    )
    mean = optax.identity()
    if concrete("momentum", options["momentum"]) != 0:
        mean = optax.ema(
            options["momentum"], debias=False, accumulator_dtype=options["moment_dtype"]
        )
    return [layerwise.per_layer(factored, layout.stacked), mean, decay]


def _lion(options, layout, decay):
    del layout
    lion = optax.scale_by_lion(b1=options["b1"], b2=options["b2"], mu_dtype=options["moment_dtype"])
    return [lion, decay]


def _lamb(options, layout, decay):
    trust = layerwise.scale_by_lamb_trust_ratio(layout.trust, stacked=layout.stacked)
    return [_scale_by_adam(options), decay, trust]


def _muon(options, layout, decay):
    muon = layerwise.scale_by_muon(
        layout.hidden,
        momentum=options["momentum"],
        nesterov=options["nesterov"],
        ns_steps=options["ns_steps"],
        muon_scale=options["muon_scale"],
        moment_dtype=options["moment_dtype"],
        stacked=layout.stacked,
    )
    others = jax.tree.map(lambda hidden: not hidden, layout.hidden)
    adam = optax.masked(_scale_by_adam(options | {"nesterov": False}), others)
    return [muon, adam, decay, optax.masked(optax.scale(options["adam_ratio"]), others)]


_RULES: dict[str, Callable[..., list[optax.GradientTransformation]]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adamw,
    "rmsprop": _rmsprop,
    "adafactor": _adafactor,
    "lion": _lion,
    "lamb": _lamb,
    "muon": _muon,
}


def _trace(options: dict[str, Any]) -> optax.GradientTransformation:
    if concrete("momentum", options["momentum"]) == 0:
        return optax.identity()
    return optax.trace(
        decay=options["momentum"],
        nesterov=options["nesterov"],
        accumulator_dtype=options["moment_dtype"],
    )


def _scale_by_adam(options: dict[str, Any]) -> optax.GradientTransformation:
    return optax.scale_by_adam(
        b1=options["b1"],
        b2=options["b2"],
        eps=options["eps"],
        mu_dtype=options["moment_dtype"],
        nesterov=options.get("nesterov", False),
    )
