"""Eight simulated CPU devices for every test; set before JAX starts its backend."""

import atexit
import gc
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import zlib

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Without these the TPU compiler (extra `aot`) looks for a TPU to talk to, and is loud about it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_LOG_DIR", "disabled")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.compare import parity
from jaxtrain.host.simulated import thread_setting

# These programs run for microseconds: what counts is how long the compiler takes. Of the newer
# emitters that is three times as long. XLA_FLAGS= in the environment keeps XLA's own choices.
parity.set_flags(parity.QUICK)

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault(*thread_setting(8))
# What a test compiles, it compiles: not every analysis survives the way through a file. Where whole
# runs begin again and again, in these folders, equal programs are compiled once.
jax.config.update("jax_enable_compilation_cache", False)
RUNS = {"evaluate", "experiments", "finetune", "hf", "landscape", "methods", "predict", "run"}
RUNS |= {"serve", "study"}
# Programs that the tests start share what they compile, and leave the user's own cache alone.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxtrain-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Programs that the tests start find this package from any folder.
paths = [str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# A shell ignores SIGINT in what it starts in the background, and so would all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tracing makes millions of objects that live on; looking through them for cycles, again and again,
# took a fifth of the time.
gc.set_threshold(100_000)


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def compiled_once(request):
    """Keeps the programs of a file's tests, and of those before it, where files hold whole runs."""
    folders = request.path.relative_to(pathlib.Path(__file__).parent).parts
    # Scopes in the text of a kept program may be those of an equal one.
    kept = folders[0] in RUNS and "observe" not in folders
    before = jax.config.jax_compilation_cache_dir
    if kept:
        _keep_programs(True, os.path.join(os.environ["XDG_CACHE_HOME"], "tests"))
    yield
    if kept:
        _keep_programs(False, before)


def _keep_programs(keep, folder):
    jax.config.update("jax_enable_compilation_cache", keep)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if keep else 1.0)
    compilation_cache.reset_cache()  # JAX asks its options once


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        metavar="I/N",
        help="Of the slow tests, run part I of N, of about equal size, from 0.",
    )
    parser.addoption(
        "--skipped",
        action="store_true",
        help="Of the everyday tests, run those alone that the last run skipped.",
    )


def pytest_configure(config):
    # By their number of tests, files that start processes for a minute each would come last, and
    # one of two workers would wait for the other.
    config.option.loadscopereorder = False
    # By default pytest-xdist starts another worker for one that crashed, and then waits for ever.
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"
    if not hasattr(config, "workerinput") and hasattr(config, "cache"):
        config.pluginmanager.register(_Skipped(config.cache))


class _Skipped:
    """Notes what a run skips, for ``--skipped``, when what it wants is installed."""

    def __init__(self, cache):
        self.cache, self.names = cache, []

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report):  # a whole file
        if report.skipped:
            self.names.append(report.nodeid)

    def pytest_sessionfinish(self):
        self.cache.set("jaxtrain/skipped", sorted(set(self.names)))


@pytest.hookimpl(trylast=True)  # when -m and -k have chosen theirs
def pytest_collection_modifyitems(config, items):
    chosen = {item for item in items if not item.get_closest_marker("slow")}
    slow = [item for item in items if item not in chosen]
    if config.getoption("--skipped"):
        names = set(config.cache.get("jaxtrain/skipped", []))
        chosen = {item for item in chosen if names & {item.nodeid, item.nodeid.split("::")[0]}}
    if config.getoption("--part"):
        slow = _part(slow, *map(int, config.getoption("--part").split("/")))
    chosen.update(slow)
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def _part(items, part, parts):
    """Those of one of several parts of about equal size, the same in every process."""
    groups = {}
    for item in items:
        groups.setdefault(_shared(item), []).append(item)
    # The largest first, each to the part that has least; equal ones by a hash of their names, so
    # that tests of one file, which take equally long, are in all parts.
    order = sorted(groups, key=lambda name: (-len(groups[name]), zlib.crc32(name.encode()), name))
    sizes, where = [0] * parts, {}
    for name in order:
        where[name] = sizes.index(min(sizes))
        sizes[where[name]] += len(groups[name])
    return [item for item in items if where[_shared(item)] == part]


def _shared(item):
    """What tests have in common that compare with the same run on one device: all but the mesh."""
    params = dict(getattr(getattr(item, "callspec", None), "params", {}))
    if "layout" not in params:
        return item.nodeid
    del params["layout"]
    # Where a function lies in memory is another place in every process.
    return re.sub(r" at 0x[0-9a-f]+", "", f"{item.nodeid.split('[')[0]} {params}")


@pytest.fixture
def traces():
    """Of tests that trace: XLA's profiler crashes a process that has loaded PyTorch."""
    if "torch" in sys.modules:
        pytest.skip("jax.profiler.start_trace crashes where torch is loaded: run this file alone")


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Compiled programs of one module are of no use to the next one."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of a dozen texts of a few words, for experiments; it is only read."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["stage", "bubble", "mesh", "shard", "loss", "step", "grad"]
    for i in range(12):
        order = np.random.default_rng(i).integers(0, len(words), 200)
        (folder / f"{i}.txt").write_text(" ".join(words[j] for j in order))
    return str(folder)
