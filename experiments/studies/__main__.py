"""``python -m experiments.studies``: lists the studies; with the name of one, runs it."""

import importlib
import pkgutil
import sys
from collections.abc import Sequence

from experiments import studies
from experiments.studies import sweep


def main(arguments: Sequence[str]) -> int:
    """Runs the study of that name, or lists all where none is given."""
    names = {each.name for each in pkgutil.iter_modules(studies.__path__)} - {"__main__", "sweep"}
    found = {name: importlib.import_module(f"{studies.__name__}.{name}") for name in sorted(names)}
    name, *rest = arguments or [""]
    if name not in found:
        if wrong := name not in ("", "-h", "--help"):
            print(f"error: there is no study {name!r}: give the name of one", file=sys.stderr)
        for each, module in found.items():
            print(f"{each:12} {module.__doc__.splitlines()[0]}")
        return 2 if wrong else 0
    if hasattr(found[name], "STUDY"):
        return sweep.main(found[name].STUDY, name, rest)
    return found[name].main(rest) or 0  # a study with a command line of its own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
