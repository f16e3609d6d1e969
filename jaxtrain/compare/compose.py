"""The composition table: every pair of capabilities is run, and its cell says what came of it.

A capability is a small change of an experiment, as flags that anyone can type
(:mod:`jaxtrain.compare.capabilities`). The experiment with two of them is trained for a few steps
on one device, and on the mesh that the two ask for, as ``jaxtrain parity`` does: loss, gradients,
parameters and the state of the optimizer are compared. Experiments that differ in their optimizer
alone share a step, and what is not equal so is tried by itself
(:mod:`jaxtrain.compare.side_by_side`). Some have a check of whole runs instead
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
import math
import re
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxtrain.compare import parity, side_by_side
from jaxtrain.compare.capabilities import STORE, Capability, Together, grown_store, together
from jaxtrain.compare.whole_runs import Errors
from jaxtrain.experiment import Experiment
from jaxtrain.layout import Layout
from jaxtrain.planning.fitting import grouped
from jaxtrain.run.main import build_experiment, load_config

STEPS = 2
# As many optimizers are side by side in one step; more would be slow to compile.
SIDE_BY_SIDE = 12


@dataclasses.dataclass(frozen=True)
class Cell:
    """The outcome of capabilities tried together: "equal", "refused", "fault" or "needs", and in
    ``text`` the largest error and where, the refusal, the fault, or the hardware."""

    names: tuple[str, ...]
    outcome: str
    text: str
    command: str
    seconds: float = 0.0


class Laid(NamedTuple):
    """Capabilities together, their experiment, and the layout that it is compared on."""

    cell: Together
    experiment: Experiment
    layout: Layout


def pairs(all_of: Sequence[Capability]) -> list[Together]:
    """All pairs of capabilities that are no alternatives of each other."""
    return [x for pair in itertools.combinations(all_of, 2) if (x := together(pair)) is not None]


def part_of(cells: Iterable[Together], part: int, parts: int) -> list[Together]:
    """One of several parts of about equal size, the same in every process; cells that share what
    they are compared with are together, up to 64."""
    groups = [
        (-len(some[n : n + 64]), zlib.crc32(repr(some[0].shared).encode()), n, some[n : n + 64])
        for some in _by_task(cells)
        for n in range(0, len(some), 64)
    ]
    filled: list[list[Together]] = [[] for _ in range(parts)]
    for *_, some in sorted(groups, key=lambda group: group[:3]):
        min(filled, key=len).extend(some)
    return filled[part]


def compose(cells: Iterable[Together]) -> Iterator[Cell]:
    """Tries capabilities together, task by task, and yields what came of each."""
    for number, those in enumerate(_by_task(cells)):
        yield from _try_task(those)
        if number % 16 == 15:  # small programs are shared; all of them would fill the memory
            jax.clear_caches()


def _by_task(cells: Iterable[Together]) -> list[list[Together]]:
    return grouped(cells, lambda cell: cell.shared)


def _try_task(those: Sequence[Together]) -> Iterator[Cell]:
    here: list[Together] = []
    for cell in those:
        needs = [each.needs for each in cell.chosen if each.needs]
        if needs:
            yield Cell(cell.names, "needs", needs[0], cell.command)
        else:
            here.append(cell)
    laid: list[Laid] = []
    for cells in grouped(here, lambda cell: cell.beside):
        try:
            experiment = _experiment(cells)
        except ValueError as error:
            yield from (refused(cell, str(error)) for cell in cells)
            continue
        for cell in cells:
            try:
                layout = Layout.parse(cell.layout, experiment.layout)
                experiment.with_(layout=layout)
            except ValueError as error:
                yield refused(cell, str(error))
            else:
                laid.append(Laid(cell, experiment, layout))
    alone = [each for each in laid if not each.cell.beside]
    optimizers = list(dict.fromkeys(each.cell.beside for each in laid if each.cell.beside))
    bundles = math.ceil(len(optimizers) / SIDE_BY_SIDE)
    for number in range(bundles):
        chosen = optimizers[number::bundles]
        some = [each for each in laid if each.cell.beside in chosen]
        alone += (yield from _side_by_side(some)) if len(chosen) > 1 else some
    for some in grouped(alone, lambda each: id(each.experiment)):
        yield from _one_by_one(some)


def _experiment(cells: Sequence[Together]) -> Experiment:
    """The experiment of cells that differ in their layouts alone; raises ValueError for a refusal,
    or a flag that it does not have."""
    first, said = cells[0], io.StringIO()
    flags = [grown_store() if flag == STORE else flag for flag in first.task]
    try:
        with contextlib.redirect_stderr(said):
            task = load_config(first.module, flags, command="compose")
        experiment = build_experiment(*task)
    except SystemExit:
        unknown = re.search(r"--[\w.-]+", said.getvalue())
        told = f"the model of {first.module} has no flag {unknown and unknown[0]}"
        raise ValueError(told) from None
    if not (first.changes or experiment.task.has_model_state):
        experiment = experiment.with_(params=functools.partial(_drawn, first, experiment))
    if all(cell.updates for cell in cells):
        experiment = experiment.with_(eval_batches={})
    for each in first.chosen:
        experiment = experiment if each.change is None else each.change(experiment)
    return experiment


def _side_by_side(those: Sequence[Laid]) -> Generator[Cell, None, list[Laid]]:
    """Tries cells that differ in layout and optimizer, all optimizers of a layout in one step;
    returns those that are not equal so, and have to be tried by themselves."""
    experiments = {id(each.experiment): each.experiment for each in those}
    optimizer = side_by_side.side_by_side(list(experiments.values()))
    experiment = those[0].experiment.with_(optimizer=optimizer, freeze=None)
    by_layout = grouped(those, lambda each: each.cell.layout)
    reference = parity.reference_of(experiment, STEPS)
    programs = parity.compiled(experiment, [some[0].layout for some in by_layout])
    left = []
    for some, (number, program) in zip(by_layout, programs, strict=True):
        try:
            groups = parity.errors_by_group(program.result(), reference(number))
        except Exception:  # one of the optimizers may be what it is of: each for itself says so
            left += some
            continue
        for each in some:
            place = list(experiments).index(id(each.experiment))
            cell = _tried(each.cell, functools.partial(side_by_side.errors_of, place, groups))
            if cell.outcome == "equal":
                yield cell
            else:
                left.append(each)
    return left


def _one_by_one(those: Sequence[Laid]) -> Iterator[Cell]:
    """Tries cells of one experiment."""
    experiment = those[0].experiment
    reference = parity.reference_of(experiment, STEPS)
    steps = [each for each in those if not each.cell.checks]
    programs = parity.compiled(experiment, [each.layout for each in steps])
    for each, (number, program) in zip(steps, programs, strict=True):
        errors = lambda p=program, n=number: parity.run_layout(p.result(), reference(n))  # noqa: E731
        rounding = functools.partial(parity.rounding_of, experiment, reference, number)
        yield _tried(each.cell, errors, rounding)
    for each in those:
        if each.cell.checks:
            yield _tried(each.cell, functools.partial(_checked, *each))


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
        own: Mapping[str, float] = {}
        with contextlib.suppress(ValueError):  # on one device it may be refused
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
