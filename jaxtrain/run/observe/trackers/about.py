"""What a tracker is told of the run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from etils import epath


@dataclasses.dataclass(frozen=True)
class About:
    """One run, as a tracker knows it.

    Args:
      experiment: its name, which groups runs.
      name: of the run, for people.
      identity: of the run, the same in all its attempts and of no other run: hexadecimal digits.
      config: its flags by dotted name.
      run_dir: its folder.
      resume_step: the step that it goes on from; None for a new run.
    """

    experiment: str
    name: str
    identity: str
    config: Mapping[str, Any]
    run_dir: epath.Path
    resume_step: int | None = None
