"""The folder of a run: found, then made; never shared by two runs, its files whole or not there."""

import json

import jax
from etils import epath

from jaxtrain import storage
from jaxtrain.parallel import distributed
from jaxtrain.paths import as_path, check_writable

RUNS = "runs"


def find_run_dir(
    name: str,
    run_dir: str | None,
    *,
    resume: bool = False,
    auto_resume: bool = False,
    overwrite: bool = False,
) -> tuple[epath.Path, bool]:
    """Finds the folder of a run, the same one in all processes, and changes nothing.

    Args:
      name: the experiment's; it names folders under runs/.
      run_dir: the folder; None for the next free number, or with ``resume`` the newest.
      resume: it must hold a run.
      auto_resume: where it holds a run, that is resumed.
      overwrite: what it holds will be deleted.

    Returns:
      The folder, and whether it holds a run to resume.

    Raises:
      FileExistsError: where it holds a run, and none of the three is set.
      FileNotFoundError: where there is nothing to resume.
      OSError: where nothing can be written there.
      ValueError: where they contradict each other.
    """
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite deletes it: give one of them")
    if auto_resume and (run_dir is None or overwrite):
        raise ValueError("--auto-resume needs --run-dir, and does not go with --overwrite")

    def find() -> str:
        found = _numbered(name, new=not resume) if run_dir is None else as_path(run_dir)
        taken = found.exists() and any(found.iterdir())
        is_run = taken and any((found / name).exists() for name in ("config.json", "checkpoints"))
        if resume and not is_run:
            raise FileNotFoundError(f"there is no run to resume in {found}")
        if taken and not (resume or overwrite or (auto_resume and is_run)):
            raise FileExistsError(
                f"{found} holds a run already: continue it with --resume, delete it with "
                "--overwrite, or choose another --run-dir"
            )
        check_writable(found)
        return json.dumps([str(found), is_run and not overwrite])

    # The first process decides for all: one that comes later might find what it has made by then.
    folder, resumes = json.loads(distributed.from_first_process(find))
    return epath.Path(folder), resumes


def prepare_run_dir(run_dir: epath.Path, *, overwrite: bool = False) -> None:
    """Makes the folder of a run, empty where ``overwrite`` is set; the first process does."""
    if jax.process_index() != 0:
        return
    if overwrite and run_dir.exists():
        run_dir.rmtree()
    run_dir.mkdir(parents=True, exist_ok=True)


def has_checkpoint(directory: epath.Path) -> bool:
    """Whether the first process sees a step's folder, good or bad; all processes call it alike.

    A run that was killed before its first checkpoint has none.
    """

    def look() -> str:
        there = directory.exists() and any(path.name.isdigit() for path in directory.iterdir())
        return "yes" if there else ""

    what = f"the listing of {directory}"
    return bool(distributed.from_first_process(lambda: storage.retrying(look, what)))


def write_text(path: epath.Path, text: str) -> None:
    """Writes a file of the run, whole or not at all, and once: the first process does."""
    if jax.process_index() == 0:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.replace(path)


def _numbered(name: str, *, new: bool) -> epath.Path:
    number = _last_number(name) + (1 if new else 0)
    if number == 0:
        raise FileNotFoundError(
            f"there is no run to resume under {RUNS}/: name its folder with --run-dir"
        )
    return epath.Path(RUNS) / f"{name}-{number}"


def _last_number(name: str) -> int:
    runs = epath.Path(RUNS)
    ends = (
        [p.name.removeprefix(f"{name}-") for p in runs.glob(f"{name}-*")] if runs.exists() else []
    )
    return max((int(end) for end in ends if end.isdigit()), default=0)
