"""Services that keep the metrics of many runs: each an adapter to its own client.

Where a service lies and how it is spoken to is for its own environment variables to say
(``WANDB_MODE``, ``MLFLOW_TRACKING_URI``, ``TRACKIO_DIR``): addresses and keys are no flags, which
are written down with the run. A resumed run goes on with what it has begun there.
"""

import dataclasses
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from jaxtrain.host.exit_codes import Ended
from jaxtrain.host.paths import is_remote
from jaxtrain.run.hook import Value
from jaxtrain.run.observe.writers import flat

# What one request of MLflow may hold.
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_TEXT = 1000, 100, 6000
_MLFLOW_TAG = "jaxtrain.identity"


@dataclasses.dataclass(frozen=True)
class About:
    """One run, as a tracker knows it.

    Args:
      name: of the run, for people.
      identity: of the run, the same in all its attempts and of no other run: hexadecimal digits.
      resume_step: the step that it goes on from; None for a new run.
    """

    experiment: str
    name: str
    identity: str
    config: Mapping[str, Any]
    run_dir: epath.Path
    resume_step: int | None = None


class WandbWriter:
    """A run of Weights & Biases, whose x axis is ``step``: what a resumed run does again is drawn
    over.

    ``WANDB_PROJECT`` names the project; by default the experiment does. ``error`` is what has ended
    the run.
    """

    def __init__(self, about: About):
        import wandb

        self.error: BaseException | None = None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", about.experiment),
            id=about.identity,
            name=about.name,
            config=dict(about.config),
            resume="allow",
            dir=None if is_remote(about.run_dir) else str(about.run_dir),
            # Standard output is the run's own.
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        self._run.log({"step": step, **dict(flat(values))})

    def show(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        import wandb

        images = {name: wandb.Image(pixels) for name, pixels in pictures.items()}
        self._run.log({"step": step, **images})

    def close(self) -> None:
        self._run.finish(exit_code=getattr(self.error, "code", 1) if self.error else 0)


class MLflowWriter:
    """A run of MLflow, found again by a tag.

    ``MLFLOW_EXPERIMENT_NAME`` names the experiment; by default ours does. ``error`` is what has
    ended the run. A log that is pushed adds only the points that MLflow lacks.
    """

    def __init__(self, about: About):
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self.error: BaseException | None = None
        self._there: set[tuple[str, int]] = set()
        self._entities, self._client = entities, MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", about.experiment)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        there = self._client.search_runs(
            [experiment], f"tags.`{_MLFLOW_TAG}` = '{about.identity}'", max_results=1
        )
        if there:
            self._id = there[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            for key in there[0].data.metrics if about.resume_step is None else ():
                points = self._client.get_metric_history(self._id, key)
                self._there |= {(key, point.step) for point in points}
            return
        tags = {_MLFLOW_TAG: about.identity}
        self._id = self._client.create_run(experiment, tags=tags, run_name=about.name).info.run_id
        params = [
            entities.Param(_mlflow_name(name), str(value)[:_MLFLOW_TEXT])
            for name, value in about.config.items()
        ]
        for i in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[i : i + _MLFLOW_PARAMS])

    @staticmethod
    def connect() -> None:
        """Asks the store that the environment names; raises what the client raises."""
        from mlflow.tracking import MlflowClient

        MlflowClient().search_experiments(max_results=1)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(_mlflow_name(name), value, now, step)
            for name, value in flat(values)
            if (_mlflow_name(name), step) not in self._there
        ]
        for i in range(0, len(metrics), _MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=metrics[i : i + _MLFLOW_METRICS])

    def show(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        for name, pixels in pictures.items():
            file = f"pictures/{_mlflow_name(name)}/{step}.png"
            self._client.log_image(self._id, pixels, artifact_file=file)

    def close(self) -> None:
        # A run that was stopped goes on later.
        ended = "KILLED" if isinstance(self.error, Ended) else "FAILED"
        self._client.set_terminated(self._id, ended if self.error else "FINISHED")


class TrackioWriter:
    """A run of trackio, on this machine unless its environment says otherwise.

    ``TRACKIO_PROJECT`` names the project; by default the experiment does. It never replaces a
    step, so that the steps that a resumed run makes again are there twice.
    """

    def __init__(self, about: About):
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", about.experiment),
            name=f"{about.name}-{about.identity[:6]}",
            config=dict(about.config),
            resume="never" if about.resume_step is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        self._run.log(dict(flat(values)), step=step)

    def show(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        import trackio

        images = {name: trackio.Image(pixels) for name, pixels in pictures.items()}
        self._run.log(images, step=step)

    def close(self) -> None:
        self._run.finish()


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)
