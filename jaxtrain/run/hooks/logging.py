"""Metrics of steps to the logs and the line of progress."""

from collections.abc import Mapping

import numpy as np

from jaxtrain.build import call_end
from jaxtrain.host import memory
from jaxtrain.run.context import Run
from jaxtrain.run.hook import Hook, Value
from jaxtrain.run.observe.goodput import MOVED
from jaxtrain.run.observe.writers import Histogram
from jaxtrain.run.survive.stragglers import Stragglers

# What the account of an attempt has of its readings.
COSTS_READ = {"kwh": "device/energy", "cpu_kwh": "host/energy"}
COSTS_READ |= {name: f"host/{name}" for name in MOVED}


class Logging(Hook):
    """Writes metrics to the logs every so many steps, and shows each step's loss."""

    def __init__(self, run: Run, stragglers: Stragglers):
        self.run, self.stragglers = run, stragglers
        self.timed_to = 0
        self.steps = self.empty = 0
        self.shown: Mapping[str, Value] = {}

    def on_metrics(self, step: int, metrics: Mapping[str, Value]) -> None:
        run, data, rate = self.run, self.run.data, self.run.rate
        if step > self.timed_to:  # the first step of a call, all of whose metrics come at once
            self.timed_to = call_end(step - 1, run.steps, run.steps_per_call)
            rate.step(self.timed_to - step + 1)
        run.journal.step = step
        self.steps += 1
        if not metrics["skipped"] and not np.any(metrics.get("weight", 1)):
            self.empty += 1
            # At 1, 10, 100 and so on, because such data mostly has many of them.
            if self.empty == 10 ** (len(str(self.empty)) - 1):
                part = f"{self.empty} of {self.steps} steps"
                run.progress.note(f"no token counts in {part}: they change nothing")
        shown = {name: metrics[name] for name in ("loss", *run.metadata.beside_loss)}
        run.progress.update(step, shown, rate.items_per_second)
        quiet = not metrics["skipped"] and not metrics.get("spike", 0)
        quiet = quiet and not run.alerts.is_urgent(metrics)
        if step % run.options.log_every and step != run.steps and quiet:
            return
        histograms = {name: x for name, x in metrics.items() if "_histogram/" in name}
        metrics = {name: x for name, x in metrics.items() if name not in histograms}
        metrics |= run.metadata.derived(metrics)
        values = {f"train/{name}": x for name, x in metrics.items() if not name.startswith("_")}
        seconds = rate.seconds_per_step
        if seconds is not None:
            values["time/step_seconds"] = seconds
            values[f"time/{data.item}_per_second"] = rate.items_per_second
            values |= self.stragglers.report(seconds) | run.sampling.report()
            read = {cost: values[name] for cost, name in COSTS_READ.items() if name in values}
            run.journal.costs |= read
            if (utilisation := run.mfu(seconds)) is not None:
                values["time/mfu"] = utilisation
        if data.steps_per_epoch is not None:
            values["data/epoch"] = float(step / data.steps_per_epoch)
        values |= data.counts(step) if data.counts else {}
        values |= {f"memory/{name}": value for name, value in memory.device_memory().items()}
        run.log.write(step, values | run.journal.counts())
        if any(not np.array_equal(x, self.shown.get(name)) for name, x in histograms.items()):
            self.shown, found = histograms, {}
            for name, x in histograms.items():
                for place in np.ndindex(x.shape[:-1]):  # () outside of layers
                    of_layer = "/".join(["train", name, *map(str, place)])
                    found[of_layer] = Histogram(x[place][:-1], float(x[place][-1]))
            run.log.show(step, found)
