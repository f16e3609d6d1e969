"""The folder of a run: found, then made; never shared by two runs, its files whole or not there."""

import jax
from etils import epath

from jaxtrain.paths import as_path, check_writable
from jaxtrain.survive.lifeline import from_first_process

RUNS = "runs"


def find_run_dir(
    name: str, run_dir: str | None, *, resume: bool = False, overwrite: bool = False
) -> epath.Path:
    """Finds the folder of a run, the same one in all processes, and changes nothing.

    Args:
      name: the experiment's; it names folders under runs/.
      run_dir: the folder; None for the next free number, or with ``resume`` the newest.
      resume: it must hold a run.
      overwrite: what it holds will be deleted.

    Raises:
      FileExistsError: where it holds a run, and neither ``resume`` nor ``overwrite`` is set.
      FileNotFoundError: where there is nothing to resume.
      OSError: where nothing can be written there.
      ValueError: where both are set.
    """
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite deletes it: give one of them")
    # The first process decides for all: one that comes later might find what it has made by then.
    return epath.Path(from_first_process(lambda: str(_find(name, run_dir, resume, overwrite))))


def prepare_run_dir(run_dir: epath.Path, *, overwrite: bool = False) -> None:
    """Makes the folder of a run, empty where ``overwrite`` is set; the first process does."""
    if jax.process_index() != 0:
        return
    if overwrite and run_dir.exists():
        run_dir.rmtree()
    run_dir.mkdir(parents=True, exist_ok=True)


def has_checkpoint(directory: epath.Path) -> bool:
    """Whether there is a step's folder, good or bad: a run killed before its first has none."""
    return directory.exists() and any(path.name.isdigit() for path in directory.iterdir())


def write_text(path: epath.Path, text: str) -> None:
    """Writes a file of the run, whole or not at all, and once: the first process does."""
    if jax.process_index() == 0:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.replace(path)


def _find(name: str, given: str | None, resume: bool, overwrite: bool) -> epath.Path:
    if given is None:
        number = _last_number(name) + (0 if resume else 1)
        if number == 0:
            raise FileNotFoundError(
                f"there is no run to resume under {RUNS}/: name its folder with --run-dir"
            )
        run_dir = epath.Path(RUNS) / f"{name}-{number}"
    else:
        run_dir = as_path(given)
    taken = run_dir.exists() and any(run_dir.iterdir())
    if resume and not taken:
        raise FileNotFoundError(f"there is no run to resume in {run_dir}")
    if taken and not (resume or overwrite):
        raise FileExistsError(
            f"{run_dir} holds a run already: continue it with --resume, delete it with "
            "--overwrite, or choose another --run-dir"
        )
    check_writable(run_dir)
    return run_dir


def _last_number(name: str) -> int:
    runs = epath.Path(RUNS)
    ends = (
        [p.name.removeprefix(f"{name}-") for p in runs.glob(f"{name}-*")] if runs.exists() else []
    )
    return max((int(end) for end in ends if end.isdigit()), default=0)
