"""The step folders of a checkpoint directory: what is there, what is whole, and the JSON in them.

The first process alone lists and reads here, and the others are told: a listing that is stale on
one host, or a file that it cannot read, cannot make processes choose different checkpoints.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from jaxtrain.host import storage
from jaxtrain.host.distributed import from_first_process
from jaxtrain.host.paths import (
    exists,
    is_folder,
    is_remote,
    listed,
    look,
    wait_until_seen,
    write_whole,
)
from jaxtrain.run.checkpoints import manifest as manifests
from jaxtrain.run.checkpoints.leaves import ocp
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError

_JSON_FILE = "metadata"  # the name Orbax's JSON handler gives its file
_PARTS = ("state", f"manifest/{_JSON_FILE}", "config")


class StepFolders:
    """Finds and reads the step folders of one directory, local or remote; all processes call it
    alike."""

    def __init__(self, directory: epath.Path):
        self.directory = directory
        # By step: the size and time of a manifest, and the metrics in it. It is read when it is
        # new or has changed.
        self._read: dict[int, tuple[Any, dict[str, float]]] = {}

    def found(self, *, seconds: float | None = None) -> list[int]:
        """Returns the steps with a folder under a final name, whatever is in it, in order; where
        storage fails it is tried again for so many seconds, None for the usual. Raises StorageError
        where it went on failing."""
        return self._from_first(
            lambda: sorted(self._paths()), f"the listing of {self.directory}", seconds
        )

    def whole(self, *, seconds: float | None = None) -> dict[int, dict[str, float]]:
        """Returns the metrics of each step that has all its items and a sound manifest."""
        survey = self._survey(seconds)
        return {step: metrics for step, metrics, _ in survey if metrics is not None}

    def damages(self) -> dict[int, str]:
        """Returns the fault of each damaged step that :meth:`whole` leaves out.

        A step that lacks files counts only if it is later than every whole one, because an earlier
        one may be on its way to be deleted.
        """
        survey = self._survey()
        newest = max((step for step, metrics, _ in survey if metrics is not None), default=-1)
        return {
            step: fault or str(self.damage(step, "files of it are missing"))
            for step, metrics, fault in survey
            if metrics is None and (fault or step > newest)
        }

    def _survey(
        self, seconds: float | None = None
    ) -> list[tuple[int, dict[str, float] | None, str]]:
        """Each step with its metrics, or None and the fault of its manifest ("": it lacks files)"""

        def read() -> list[tuple[int, dict[str, float] | None, str]]:
            survey = []
            for step, path in sorted(self._paths().items()):
                metrics, fault = None, ""
                try:
                    metrics = self._metrics(step) if _is_complete(path) else None
                except DamagedCheckpointError as damage:
                    fault = str(damage) if _is_complete(path) else ""  # it is being deleted
                survey.append((step, metrics, fault))
            return survey

        return self._from_first(read, f"the manifests in {self.directory}", seconds)

    def json(self, step: int, item: str) -> dict[str, Any]:
        """Returns what an item of JSON holds. Raises DamagedCheckpointError where it is missing, or
        is not what was saved, and StorageError where storage went on failing."""

        def read() -> list[Any]:
            try:
                return [self._json(step, item), None]
            except DamagedCheckpointError as damage:
                return [None, str(damage)]

        what = f"the {item} of checkpoint {step} in {self.directory}"
        content, damage = self._from_first(read, what)
        if damage is not None:
            raise DamagedCheckpointError(damage)
        return content

    def replace_manifest(self, step: int, content: dict[str, Any]) -> None:
        """Writes a step's manifest anew, whole or not at all; for the first process alone."""
        path = self.directory / str(step) / "manifest" / _JSON_FILE
        write_whole(path, json.dumps(manifests.seal(content)))

    def set_aside(self, step: int) -> None:
        """Renames a folder without a sound checkpoint to ``damaged-9``; deletes it where it holds
        no file. For the first process alone."""
        path = self._paths()[step]
        if next(files_below(path), None) is None:
            path.rmtree()
            return
        name = f"damaged-{step}"
        names = (self.directory / f"{name}{end}" for end in ("", *(f".{n}" for n in range(1, 999))))
        path.rename(next(path for path in names if not exists(path)))

    def damage(self, step: int, what: str) -> DamagedCheckpointError:
        """Returns the error that says what is wrong with a step."""
        return DamagedCheckpointError(f"checkpoint {step} in {self.directory} is damaged: {what}")

    def wait_for(self, step: int) -> None:
        """Waits in this process until a step that the first one has found is seen here as well.
        Raises StorageError where it does not come to be seen."""
        path = self.directory / str(step)
        wait_until_seen(path / "state", f"checkpoint {step} in {self.directory}")

    def _paths(self) -> dict[int, epath.Path]:
        digits = [x for x in listed(self.directory) if x.name.isascii() and x.name.isdecimal()]
        steps = {int(path.name): path for path in digits if path.name == str(int(path.name))}
        if not is_remote(self.directory):
            return steps
        return {step: path for step, path in steps.items() if self.is_there(step)}

    def is_there(self, step: int) -> bool:
        """Whether a step has been written to its end; asks no other process."""
        path = self.directory / str(step)
        # In a bucket a folder appears before it is whole, and this file when it is.
        last = ocp.path.atomicity.COMMIT_SUCCESS_FILE
        return exists(path / last if is_remote(path) else path)

    def remains(self, *, seconds: float | None = None) -> list[int]:
        """Returns the steps that lack a part, as one does whose deletion was interrupted."""

        def read() -> list[int]:
            steps = self._paths().items()
            return [step for step, path in steps if not _is_complete(path)]

        return self._from_first(read, f"the listing of {self.directory}", seconds)

    def _metrics(self, step: int) -> dict[str, float]:
        stamp = look(self.directory / str(step) / "manifest" / _JSON_FILE)
        if step not in self._read or self._read[step][0] != stamp:
            self._read[step] = stamp, self._json(step, "manifest")["metrics"]
        return self._read[step][1]

    def _json(self, step: int, item: str) -> dict[str, Any]:
        path = self.directory / str(step) / item / _JSON_FILE

        def read() -> dict[str, Any]:
            content = manifests.unseal(json.loads(path.read_bytes()))
            return manifests.check(content) if item == "manifest" else content

        try:
            try:
                return read()
            except (ValueError, RecursionError):
                return read()  # A read that was torn once says nothing of the file.
        except (FileNotFoundError, NotADirectoryError):
            raise self.damage(step, f"its {item} is missing") from None
        except (ValueError, RecursionError) as error:
            raise self.damage(step, f"its {item} cannot be read ({storage.why(error)})") from None

    def _from_first(self, read: Callable[[], Any], what: str, seconds: float | None = None) -> Any:
        """Returns the result of ``read`` in the first process, after a round trip through JSON."""
        return json.loads(
            from_first_process(lambda: json.dumps(storage.retrying(read, what, seconds=seconds)))
        )


def _is_complete(path: epath.Path) -> bool:
    return all(exists(path / part) for part in _PARTS)


def files_below(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields the files in a folder and in those below it."""
    for path in folder.iterdir():
        if is_folder(path):
            yield from files_below(path)
        else:
            yield path
