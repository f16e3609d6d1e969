"""The options of a function that is chosen by name: what its signature takes by keyword."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of rules or of schedules, as a keyword and as a flag.

    Attributes:
      kind: type of the flag.
      help: what it is.
      check: ``(name, value) -> value`` as the function takes it; a ValueError for any other value.
    """

    kind: Any
    help: str
    check: Callable[[str, Any], Any] = lambda name, value: value


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
    """Returns those of ``given`` that are given, all of them options of the function ``name``.
    Raises ValueError for an unknown name, or an option that the function does not have.

    Args:
      kind: what the functions are, for messages.
      name: which of them.
      given: options by name; None stands for not given.
      functions: the functions by name.
      common: what the caller takes itself, whichever function is chosen; no options of theirs.
    """
    if name not in functions:
        raise ValueError(f"{kind} {name!r} is not one of {', '.join(functions)}")
    own = [key for key in keywords(functions[name]) if key not in common]
    known = {key for function in functions.values() for key in keywords(function)}
    for key, value in given.items():
        if key not in own and (value is not None or key not in known):
            others = [other for other, function in functions.items() if key in keywords(function)]
            of_others = f", which is of {', '.join(others)}" if others else ""
            raise ValueError(
                f"{kind} {name!r} has no option {key} (given {value!r}){of_others}; "
                f"it takes {', '.join([*own, *common])}"
            )
    return {key: value for key, value in given.items() if value is not None}
