"""Imports packages that are optional; without one, a sentence names the extra that installs it."""

import importlib
import sys
from typing import Any


def load(purpose: str, extra: str, *modules: str) -> Any:
    """Imports modules of one package by their full names, and returns the package.

    Without it an ImportError says the purpose, a sentence such as ``"a PNG needs matplotlib"``, and
    which extra of this package installs it.

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
