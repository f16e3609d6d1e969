"""The training of the best member of a population whose members are copied: the members in whose
place it was, and the numbers that it had there."""

import itertools

from jaxtrain.methods.population import ALL, BEST, FLAG, PARENT, lineage
from jaxtrain.run.observe.report.records import Record


def found(record: Record) -> list[str]:
    """Returns the sentence of a run; none if its members are not copied, or its files damaged."""
    try:
        return _found(record)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return []


def _found(record: Record) -> list[str]:
    """The best is that of the last evaluation or, before any, that of the least training loss. A
    member's numbers change only with a copy, so it has each set of them for one stretch of steps.
    """
    every, prefix = record.config.get("population.exploit_every"), f"train/{ALL}{FLAG}"
    parents = record.vectors.get(f"train/{PARENT}")
    if not every or parents is None:
        return []
    # The last line of each segment: the exploit is before its first step.
    lines = {(int(step) - 1) // every: i for i, step in enumerate(parents.steps)}
    if len(lines) <= max(lines):
        return []
    evaluated = [record.values(name) for name in record.series if name.endswith(BEST)]
    losses_P = record.vectors[f"train/{ALL}loss"].values[-1]
    best = int(evaluated[0][-1]) if evaluated else int(losses_P.argsort()[0])
    line = lineage([parents.values[lines[e]].astype(int) for e in range(1, len(lines))], best)
    parts, start = [], 0
    for member, segments in itertools.groupby(line):
        end = start + len(list(segments))
        numbers = (
            f"{name.removeprefix(prefix)} {series.values[lines[start], member]:.4g}"
            for name, series in record.vectors.items()
            if name.startswith(prefix)
        )
        steps = f"{start * every + 1:,} to {min(end * every, record.step):,}"
        parts.append(f"steps {steps} as member {member} with {', '.join(numbers)}")
        start = end
    return [f"The best is member {best}, which was trained in {'; '.join(parts)}."]
