"""The options of a function that is chosen by name: what it takes by keyword.

Its signature says which options there are and what their defaults are; an ``Option`` in a keyword's
annotation says what the option is and which values it takes.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """A keyword's annotation: ``b1: Annotated[float, Option("Decay of ...", check)] = 0.9``.

    Attributes:
      help: what it is, for command lines.
      check: ``(name, value) -> value`` as the function takes it; a ValueError for any other value.
    """

    help: str
    check: Callable[[str, Any], Any]


def keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns what ``function`` takes by keyword alone, by name.

    >>> list(keywords(lambda peak, *, final=0.0, **rest: None))
    ['final']
    """
    parameters = inspect.signature(function).parameters.items()
    return {name: p for name, p in parameters if p.kind is p.KEYWORD_ONLY}


def resolve(
    kind: str,
    name: str,
    given: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
    *,
    common: tuple[str, ...],
) -> dict[str, Any]:
    """Returns the options that are given to the function ``name``, each of them checked.

    Args:
      kind: what the functions are, for messages.
      name: which of them.
      given: options by name; None stands for not given.
      functions: the functions by name.
      common: what the caller takes itself, whichever function is chosen; no options of theirs.

    Raises:
      ValueError: for an unknown name, an option that the function does not have, or a value that
        the option's check refuses.
    """
    if name not in functions:
        raise ValueError(f"{kind} {name!r} is not one of {', '.join(functions)}")
    own = {key: p for key, p in keywords(functions[name]).items() if key not in common}
    known = {key for function in functions.values() for key in keywords(function)}
    options = {}
    for key, value in given.items():
        if value is None and key in known:
            continue
        if key not in own:
            raise ValueError(
                f"{kind} {name!r} has no option {key} (given {value!r}); "
                f"it takes {', '.join([*own, *common])}"
            )
        notes = getattr(own[key].annotation, "__metadata__", ())
        checks = [note.check for note in notes if isinstance(note, Option)]
        options[key] = checks[0](key, value) if checks else value
    return options
