"""How a program says no: one sentence on standard error and exit status 2, without a traceback.

What is refused is what the user can mend: a value, a file, a folder, a package that is missing.
Storage that fails for a while is a sentence too, with a status that launchers restart on. Anything
else is a bug and keeps its traceback.
"""

import contextlib
import sys
from collections.abc import Iterator

from jaxtrain.host import exit_codes, storage


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Ends the program with a sentence where its body raises an error of the user's making.

    Those are ``ValueError`` (and its kinds: what is no JSON, no UTF-8, another model's or a damaged
    checkpoint), ``OSError`` (files, folders, disks), and ``ImportError`` for an optional package.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise refuse(error) from None
    except ImportError as error:
        if error.name is not None:  # a failed import statement: a bug, or a broken installation
            raise
        raise refuse(error) from None


def refuse(error: Exception) -> SystemExit:
    """Prints an error as one sentence and returns the exit to raise.

    Its status is ``REFUSED``, or ``STORAGE`` where the error may be gone at the next start.
    """
    print(f"error: {sentence(error)}", file=sys.stderr)
    passes = isinstance(error, OSError) and storage.passes(error)
    return SystemExit(exit_codes.STORAGE if passes else exit_codes.REFUSED)


def sentence(error: Exception) -> str:
    """Returns an error's text on one line, and a system error's without its number.

    >>> sentence(ValueError("two\\nlines"))
    'two lines'
    >>> sentence(PermissionError(13, "Permission denied", "/etc/shadow"))
    "Permission denied: '/etc/shadow'"
    """
    text = str(error)
    if isinstance(error, OSError) and text.startswith("[Errno "):
        text = text.partition("] ")[2]
    return " ".join(text.split()) or type(error).__name__
