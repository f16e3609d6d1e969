"""Keeps quiet the compilers of chips that are not here, which the extra ``aot`` installs.

JAX loads NVIDIA's compiler as it is imported, and starts all of them with its first device. On a
machine without an NVIDIA driver each says several times that it found none, once as an error.
"""

import contextlib
import ctypes
import glob
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what is written to standard error, also by libraries."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def start() -> None:
    """Lets JAX find its devices; in silence where this machine has nothing but its processor."""
    with contextlib.nullcontext() if has_tpu() or has_nvidia_driver() else quiet():
        import jax

        jax.devices()


def has_tpu() -> bool:
    """Whether this machine has a TPU, by its device files."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if not has_nvidia_driver():
    # Otherwise the plugin raises for want of a driver, which JAX prints with its traceback.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    with quiet():
        import jax  # noqa: F401
