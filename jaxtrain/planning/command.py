"""Runs `jaxtrain plan` with its flags."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from jaxtrain.experiment import Experiment
from jaxtrain.host.paths import check_on_disk
from jaxtrain.planning import by_layer, nearest_fit
from jaxtrain.planning.ahead_of_time import Plan, plan_experiment
from jaxtrain.planning.targets import Target, stay_on_cpu


def run_plan(
    load: Callable[[Sequence[str]], Experiment],
    flags: Sequence[str],
    target: Target,
    *,
    as_json: bool = False,
    save_hlo: Path | None = None,
    show_parts: bool = False,
    has_layout: bool = True,
) -> Plan:
    """Plans an experiment, looks for a change where it does not fit, and prints the result.

    Args:
      load, flags: what builds the experiment, and the flags that it builds it from.
      target: what for.
      as_json, save_hlo, show_parts: the command's own flags.
      has_layout: whether the experiment's module has the flags of a layout.
    """
    if save_hlo is not None:
        check_on_disk(save_hlo, "--save-hlo")
    stay_on_cpu()
    target.devices()  # before anything asks JAX for devices
    experiment = load(flags)
    devices = experiment.layout.mesh.devices
    if devices not in (target.size, -1) and devices > 0 and not has_layout:
        raise ValueError(
            f"experiment {experiment.name!r} is made for {devices} devices and its Config has no "
            f"layout to change that: give a target of {devices}, not {target}"
        )
    plan = plan_experiment(experiment, target)
    if save_hlo is not None and plan.hlo:
        save_hlo.write_text(plan.hlo)
    if not plan.fits:
        found = nearest_fit.nearest_fit(experiment, target) if has_layout else None
        plan = dataclasses.replace(plan, mend=nearest_fit.describe(found))
    if as_json:
        print(json.dumps(plan.to_json(), allow_nan=False, default=str))
    else:
        # Wide enough for the tables where the output is no terminal.
        console = Console(highlight=False, width=None if Console().is_terminal else 100)
        plan.draw(console)
        if show_parts and plan.memory is not None:
            console.print("\nmemory per device, by part", style="bold")
            console.print(by_layer.table(plan.parts, plan.memory))
    return plan
