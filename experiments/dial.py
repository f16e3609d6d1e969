"""Flags of one dial: what --depth and --budget of a config say of its other flags."""

import dataclasses
from collections.abc import Collection
from operator import attrgetter
from typing import Any

from experiments import language
from jaxtrain import optim
from jaxtrain.layout import Layout
from jaxtrain.models import dial, mup
from jaxtrain.models.dial import Setting

# Fields that follow, by their name in :func:`jaxtrain.models.dial.turn`.
FIELDS = {name: name for name in ("width", "heads", "layers", "global_batch", "steps")}
FIELDS["learning_rate"] = "optimizer.learning_rate"


def fill(config: Any, typed: Collection[str] | None = None) -> Any:
    """Returns a config whose fields follow from its depth or budget, where it has one and they have
    not been filled. ``typed`` are the names of fields that are decided; left out, those that differ
    from their defaults. Raises ValueError where another flag says what the model is."""
    if config.depth is None and config.budget is None:
        return config
    name = "budget" if config.depth is None else "depth"
    told = f"`{name}` is {getattr(config, name)}"
    for flag in ("init_from", "model"):
        if (value := getattr(config, flag)) != getattr(type(config), flag):
            raise ValueError(
                f"{told} and `{flag}` is {value}: both say what the model is; leave one of them out"
            )
    if config.layers is not None:
        if "layers" in (typed or ()) or config.depth not in (None, config.layers):
            raise ValueError(
                f"{told} and `layers` is {config.layers}: the depth is the number of layers; leave "
                "one of them out"
            )
        return config
    if typed is None:
        default = type(config)()
        typed = {x for x in FIELDS.values() if attrgetter(x)(config) != attrgetter(x)(default)}
    given = {n: attrgetter(field)(config) for n, field in FIELDS.items() if field in typed}
    found = {name: setting.value for name, setting in settings(config, given).items()}
    if config.epochs is not None:
        del found["steps"]
    if "learning_rate" in found:
        own = {"learning_rate": found.pop("learning_rate")}
        found["optimizer"] = dataclasses.replace(config.optimizer, **own)
        found |= {} if "parametrization" in typed else {"parametrization": "mup"}
    return dataclasses.replace(config, **found)


def settings(config: Any, given: Any) -> dict[str, Setting]:
    """Returns what follows from a config's depth or budget, and from what is given."""
    # A mesh is not to refuse the heads of a depth that is only tried.
    bare = dataclasses.replace(config, layout=Layout())
    size = language.vocab_size(config)
    rule = config.optimizer.name
    return dial.turn(
        lambda **sizes: language.model_config(dataclasses.replace(bare, **sizes), size),
        given,
        depth=config.depth,
        budget=config.budget,
        rate=optim.rules.LEARNING_RATES[rule] if rule in mup.RULES else None,
    )


def facts(config: Any) -> dict[str, str]:
    """Returns the header's fact: each setting with its rule, and "given" where its value is not
    what the rule says today."""
    if config.depth is None and config.budget is None:
        return {}
    given: dict[str, Any] = {}
    for name, field in FIELDS.items():
        found = settings(config, given)
        if name in found and found[name].value != attrgetter(field)(config):
            given[name] = attrgetter(field)(config)
    found = settings(config, given)
    names = dict.fromkeys(("layers", *found))
    return {"dial": "; ".join(f"{name.replace('_', ' ')} {found[name]}" for name in names)}
