"""The composition table: every pair of capabilities is run, and its cell says what came of it.

A capability is a small change of an experiment, as flags that anyone can type
(:mod:`jaxtrain.compare.capabilities`). The experiment with two of them is trained for a few steps
on one device, and on the mesh that the two ask for, as ``jaxtrain parity`` does: loss, gradients,
parameters and the state of the optimizer are compared. Some have a check of whole runs instead
(:mod:`jaxtrain.compare.whole_runs`): one that is interrupted and resumed is compared with one that
is not, to the bit, and so are the weights that it exports and the tokens that its model writes.

So each cell is *equal*, *refused* in one sentence that names both, or a *fault*: a wrong number, a
crash, or a refusal that does not say what does not fit. What needs hardware that is not here says
so. ``jaxtrain compose`` prints the faults, and writes the table and a page.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import re
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.compare import parity
from jaxtrain.compare.capabilities import Capability, Together, together
from jaxtrain.compare.whole_runs import Errors
from jaxtrain.experiment import Experiment
from jaxtrain.layout import Layout
from jaxtrain.run.main import build_experiment, load_config

STEPS = 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """The outcome of capabilities tried together: "equal", "refused", "fault" or "needs", and in
    ``text`` the largest error and where, the refusal, the fault, or the hardware."""

    names: tuple[str, ...]
    outcome: str
    text: str
    command: str
    seconds: float = 0.0


def pairs(all_of: Sequence[Capability]) -> list[Together]:
    """All pairs of capabilities that are no alternatives of each other."""
    return [x for pair in itertools.combinations(all_of, 2) if (x := together(pair)) is not None]


def part_of(cells: Iterable[Together], part: int, parts: int) -> list[Together]:
    """One of several parts of about equal size, the same in every process; cells that share what
    they are compared with are together, up to 64."""
    groups = [
        (-len(some[n : n + 64]), zlib.crc32(" ".join(task).encode()), n, some[n : n + 64])
        for task, some in _by_task(cells).items()
        for n in range(0, len(some), 64)
    ]
    filled: list[list[Together]] = [[] for _ in range(parts)]
    for *_, some in sorted(groups, key=lambda group: group[:3]):
        min(filled, key=len).extend(some)
    return filled[part]


def compose(cells: Iterable[Together]) -> Iterator[Cell]:
    """Tries capabilities together, task by task, and yields what came of each."""
    for number, those in enumerate(_by_task(cells).values()):
        yield from _try_task(those)
        if number % 16 == 15:  # small programs are shared; all of them would fill the memory
            jax.clear_caches()


def _by_task(cells: Iterable[Together]) -> dict[tuple, list[Together]]:
    tasks: dict[tuple, list[Together]] = {}
    for cell in cells:
        tasks.setdefault(cell.shared, []).append(cell)
    return tasks


def _try_task(those: Sequence[Together]) -> Iterator[Cell]:
    here = []
    for cell in those:
        needs = [each.needs for each in cell.chosen if each.needs]
        if needs:
            yield Cell(cell.names, "needs", needs[0], cell.command)
        else:
            here.append(cell)
    if not here:
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            task = load_config(those[0].module, list(those[0].task), command="compose")
        experiment = build_experiment(*task)
        if not (those[0].changes or experiment.task.has_model_state):
            experiment = experiment.with_(params=functools.partial(_drawn, those[0], experiment))
        if all(cell.updates for cell in those):
            experiment = experiment.with_(eval_batches={})
        for each in those[0].chosen:
            experiment = experiment if each.change is None else each.change(experiment)
    except SystemExit:  # for a flag that it does not have
        unknown = re.search(r"--[\w.-]+", said.getvalue())
        told = f"the model of {those[0].module} has no flag {unknown and unknown[0]}"
        yield from (refused(cell, told) for cell in here)
        return
    except ValueError as error:
        yield from (refused(cell, str(error)) for cell in here)
        return
    laid = []
    for cell in here:
        try:
            layout = Layout.parse(cell.layout, experiment.layout)
            experiment.with_(layout=layout)
        except ValueError as error:
            yield refused(cell, str(error))
        else:
            laid.append((cell, layout))
    reference = parity.reference_of(experiment, STEPS)
    steps = [each for each in laid if not each[0].checks]
    programs = parity.compiled(experiment, [layout for _, layout in steps])
    for (cell, _), (number, program) in zip(steps, programs, strict=True):
        errors = lambda p=program, n=number: parity.run_layout(p.result(), reference(n))  # noqa: E731
        yield _tried(
            cell, errors, functools.partial(parity.rounding_of, experiment, reference, number)
        )
    for cell, layout in laid:
        if cell.checks:
            yield _tried(cell, functools.partial(_checked, cell, experiment, layout))


# Parameters as drawn, by what their model is of: their program takes longer to compile than to run.
_DRAWN: dict[tuple, Any] = {}


def _drawn(cell: Together, experiment: Experiment) -> Any:
    of_others = ("--optimizer.", "--precision")
    of_model = (x for x in cell.flags.items() if not x[0].startswith(of_others))
    if (key := (cell.module, *of_model)) not in _DRAWN:
        draw = jax.jit(experiment.task.init_fn)
        _DRAWN[key] = jax.device_get(draw(jax.random.key(experiment.seed)))
    return _DRAWN[key]


def _checked(cell: Together, experiment: Experiment, layout: Layout) -> Errors:
    return {part: x for check in cell.checks for part, x in check(experiment, layout).items()}


def _tried(
    cell: Together,
    errors: Callable[[], Errors],
    rounding: Callable[[], Mapping[str, float]] = dict,
) -> Cell:
    """The cell of what ``errors`` gives, refuses or breaks by.

    Where that is more than is allowed, ``rounding`` says how far from float32 the precision takes
    one device in each part: two that round differently may lie twice as far from each other.
    """
    start = time.perf_counter()
    try:
        found = errors()
    except ValueError as error:
        return refused(cell, str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} in {last.filename}:{last.lineno}: {error}"
        return Cell(cell.names, "fault", text, cell.command, time.perf_counter() - start)
    part, (error, leaf) = max(found.items(), key=lambda each: each[1][0])
    text = f"{error:.1e} in the {part}" + (f" of {leaf}" if leaf else "")
    equal = error <= cell.tolerance
    if not equal and "--precision" in cell.flags:
        own = rounding()
        most = {part: max(cell.tolerance, 2 * own.get(part, 0.0)) for part in found}
        equal = all(error <= most[part] for part, (error, _) in found.items())
        text += f"; the precision itself makes {own.get(part, 0.0):.1e}"
    outcome = "equal" if equal else "fault"
    return Cell(cell.names, outcome, text, cell.command, time.perf_counter() - start)


def refused(cell: Together, sentence: str) -> Cell:
    """The cell of a refusal, which is a fault where it does not name what does not fit."""
    names = [each.called or re.escape(each.name) for each in cell.chosen]
    fits = all(re.search(x, sentence, re.IGNORECASE) for x in names) and "\n" not in sentence
    text = sentence if fits else f"a refusal that does not name both: {sentence}"
    return Cell(cell.names, "refused" if fits else "fault", text, cell.command)
