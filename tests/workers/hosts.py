"""One process of several that restore together, the last of which sees a disk of its own.

``hosts.py DIRECTORY PROCESS PROCESSES PORT``; the directory holds checkpoints of steps 1, 2 and 3.
"""

import errno
import os
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from etils.epath import backend
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.host import paths, storage
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest

directory, process, processes, port = sys.argv[1], *map(int, sys.argv[2:])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", processes, process)

mesh = Mesh(np.array(jax.devices()), ("data",))
odd = process == processes - 1
real_listdir, real_stat = backend._OsPathBackend.listdir, os.stat
read = ocp.PyTreeCheckpointHandler.restore
storage.pause = lambda seconds: None
ticks = iter(range(10**9))
storage.now = lambda: float(next(ticks))  # so that patience ends after some tries


def at(*spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)


def restore(what):
    """What comes of restoring: the same words in all processes, or they differ."""
    template = {"whole": at(), "cut": at("data"), "n": np.zeros((), np.int64)}
    try:
        state = Checkpointer(directory).restore(template)
        print(what, "step", int(state["n"]), digest(state)[:8], flush=True)
    except Exception as error:
        print(what, type(error).__name__, flush=True)
        print(error, file=sys.stderr, flush=True)


restore("sound")

hidden = 5


def listdir(self, path):
    return [name for name in real_listdir(self, path) if name != "3"]


def stat(path, *args, **kwargs):
    global hidden
    if f"{directory}/3" in str(path) and hidden:
        hidden -= 1
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return real_stat(path, *args, **kwargs)


def other_bits(self, path, *args, **kwargs):
    arrays = read(self, path, *args, **kwargs)
    if "/3/" in str(path):
        arrays["whole"] = arrays["whole"] + 1
    return arrays


def timeout(self, path, *args, **kwargs):
    raise ValueError("DEADLINE_EXCEEDED: it takes too long")


if odd:  # a directory over the network, listed a while ago
    backend._OsPathBackend.listdir, os.stat = listdir, stat
restore("stale")
backend._OsPathBackend.listdir, os.stat = real_listdir, real_stat
if odd:  # one host reads other bits of an array that each has whole
    ocp.PyTreeCheckpointHandler.restore = other_bits
restore("other-bits")
if odd:
    ocp.PyTreeCheckpointHandler.restore = timeout
restore("timeout")
ocp.PyTreeCheckpointHandler.restore = read
restore("again")
for name in ("shared", "unshared"):
    folder = epath.Path(directory) / (f"own-{process}" if name == "unshared" else "own")
    folder.mkdir(parents=True, exist_ok=True)
    if process == 0:
        (folder / "config.json").write_text(name)
    try:
        paths.check_shared(folder / "config.json")
        print(name, "seen", flush=True)
    except ValueError as error:
        print(name, str(error).partition(" in ")[0], flush=True)
