"""Metrics of steps to the logs and the line of progress."""

from collections.abc import Mapping

import numpy as np

from jaxtrain.experiment import call_end
from jaxtrain.host import memory
from jaxtrain.run.context import Run
from jaxtrain.run.hook import Hook, Value
from jaxtrain.run.observe import throughput
from jaxtrain.run.observe.writers import Histogram
from jaxtrain.run.survive.pace import Pace


class Logging(Hook):
    """Writes metrics to the logs every so many steps, and shows each step's loss."""

    def __init__(self, run: Run, pace: Pace):
        self.run, self.pace = run, pace
        self.timed_to = 0
        self.shown: Mapping[str, Value] = {}

    def on_metrics(self, step: int, metrics: Mapping[str, Value]) -> None:
        experiment, rate = self.run.experiment, self.run.rate
        if step > self.timed_to:  # the first step of a call, all of whose metrics come at once
            self.timed_to = call_end(step - 1, experiment.steps, experiment.layout.steps_per_call)
            rate.step(self.timed_to - step + 1)
        self.run.journal.step = step
        self.run.progress.update(step, metrics["loss"], rate.items_per_second)
        quiet = not metrics["skipped"] and not metrics.get("spike", 0)
        quiet = quiet and not self.run.alerts.is_urgent(metrics)
        if step % self.run.options.log_every and step != experiment.steps and quiet:
            return
        histograms = {name: x for name, x in metrics.items() if "_histogram/" in name}
        metrics = {name: x for name, x in metrics.items() if name not in histograms}
        metrics |= experiment.derived(metrics)
        values = {f"train/{name}": value for name, value in metrics.items()}
        seconds = rate.seconds_per_step
        if seconds is not None:
            values["time/step_seconds"] = seconds
            values[f"time/{experiment.item}_per_second"] = rate.items_per_second
            values |= self.pace.report(seconds) | self.run.sampling.report()
            if "device/energy" in values:
                self.run.journal.costs["kwh"] = values["device/energy"]
            devices, dtype = self.run.mesh.devices.flat, experiment.policy.compute_dtype
            utilisation = throughput.mfu(experiment.flops_per_step, seconds, devices, dtype=dtype)
            if utilisation is not None:
                values["time/mfu"] = utilisation
        if experiment.steps_per_epoch is not None:
            values["data/epoch"] = float(step / experiment.steps_per_epoch)
        if experiment.counts is not None:
            values |= experiment.counts(step)
        for name, value in memory.device_memory().items():
            values[f"memory/{name}"] = value
        self.run.log.write(step, values | self.run.journal.counts())
        if any(not np.array_equal(x, self.shown.get(name)) for name, x in histograms.items()):
            self.shown, found = histograms, {}
            for name, x in histograms.items():
                for place in np.ndindex(x.shape[:-1]):  # () outside of layers
                    of_layer = "/".join(["train", name, *map(str, place)])
                    found[of_layer] = Histogram(x[place][:-1], float(x[place][-1]))
            self.run.log.show(step, found)
