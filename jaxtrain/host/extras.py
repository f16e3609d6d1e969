"""Imports packages that are optional; without one, a sentence names the extra that installs it."""

import importlib
import sys
from typing import Any


def load(purpose: str, extra: str, *modules: str) -> Any:
    """Imports modules of one package, and returns the package.

    Args:
      purpose: the sentence that says what needs the package, such as ``"a PNG needs matplotlib"``.
      extra: the extra of this package that installs it.
      modules: their full names.

    Raises:
      ImportError: the package is not installed.

    >>> load("a picture needs colours", "plot", "colorsys").rgb_to_hls(0, 0, 0)[1]
    0.0
    """
    package = modules[0].partition(".")[0]
    try:
        for name in (package, *modules):
            importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{purpose}: pip install -e '.[{extra}]'") from None
    return sys.modules[package]
