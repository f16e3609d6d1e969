"""Flags of a population, as an experiment that trains all of its members at once."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jaxtrain as jt
from jaxtrain.finetune.held import hold_in_compute
from jaxtrain.finetune.low_rank import LoRA, Strengths
from jaxtrain.methods.population import Member, Population, follow, populate
from jaxtrain.run.options import RULE_OPTIONS, make_optimizer

# Numbers of an optimizer that a program can have as data; others are of its form.
SCALED = ("learning_rate", "weight_decay", "clip_norm", "clip_value", "skip_spikes")
VARIED = SCALED + tuple(name for name, option in RULE_OPTIONS.items() if option.kind is float)
OF_LORA = ("lora.rank", "lora.alpha")


def of_members(config: Any, make: Callable[[Any], jt.Experiment]) -> jt.Experiment:
    """Returns ``make(config)``, or what trains all members of ``config.population`` at once.

    Raises:
      ValueError: flags are varied that members cannot have apart.
    """
    population = config.population
    if getattr(config, "hold_frozen_in", None) == "compute":
        make = functools.partial(_held, make)
    if population == Population():
        return make(config)
    if config.optimizer.ema is not None:
        raise ValueError(
            f"--optimizer.ema is {config.optimizer.ema}: members of a population keep no averages; "
            "leave it out"
        )
    members = population.members(config.seed)
    lora, adapter = getattr(config, "lora", LoRA()), getattr(config, "adapter", None)
    if (every := population.exploit_every) is not None and every < config.run.log_every:
        raise ValueError(
            f"--population.exploit-every is {every} and --log-every {config.run.log_every}: the "
            "log has to tell of each exploit; give at least as many steps, or a smaller --log-every"
        )
    for name in members[0]:
        scaled = name == "seed" or name.removeprefix("optimizer.") in SCALED
        if every is not None and not scaled:
            some = ", ".join(f"optimizer.{each}" for each in SCALED)
            raise ValueError(
                f"--population.exploit-every is given and --population.vary has {name}, which no "
                f"factor may multiply as members are copied: vary seed or {some}"
            )
        known = name == "seed" or name in OF_LORA or name.removeprefix("optimizer.") in VARIED
        without = adapter is not None or lora.rank is None
        if not known or (name in OF_LORA and without):
            some = ", ".join(f"optimizer.{each}" for each in VARIED)
            why = "it is no number that members can have apart"
            if known:
                why = "--adapter says it" if adapter else "--lora.rank is not given"
            raise ValueError(
                f"--population.vary has {name}: {why}; vary {', '.join(OF_LORA)}, seed or {some}"
            )
    loras = [_lora(lora, flags) for flags in members]
    numbers = [_numbers(flags) for flags in members]
    for each in numbers:  # which are checked while they are numbers
        make_optimizer(dataclasses.replace(config.optimizer, **each), steps=config.steps)
    if len(set(loras)) > 1:
        loras = [Strengths(**vars(lora)) for lora in loras]
    alone = {each: make(_with_lora(config, each)) for each in set(loras)}
    whole = alone[max(loras, key=lambda lora: lora.rank or 0)]
    made = [
        Member(alone[lora].laid.init_fn, int(flags["seed"]), each, flags)
        for lora, each, flags in zip(loras, numbers, members, strict=True)
    ]
    stored = {"members": members, "set": whole.deciding_set or ""}
    whole = whole.with_(
        optimizer=follow(whole.optimizer),
        config={**whole.metadata.config, "population": stored},
    )
    given = {"together": population.together, "exploit_every": every}
    return populate(whole, made, **given)


def _held(make: Callable[[Any], jt.Experiment], config: Any) -> jt.Experiment:
    return hold_in_compute(make(config))


def _with_lora(config: Any, lora: LoRA) -> Any:
    return dataclasses.replace(config, lora=lora) if hasattr(config, "lora") else config


def _lora(lora: LoRA, flags: Mapping[str, float]) -> LoRA:
    own = {name.removeprefix("lora."): flags[name] for name in OF_LORA if name in flags}
    return dataclasses.replace(lora, **own)


def _numbers(flags: Mapping[str, float]) -> dict[str, float]:
    of = "optimizer."
    return {name.removeprefix(of): x for name, x in flags.items() if name.startswith(of)}
