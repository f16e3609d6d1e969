"""Compiles a pure step to a sharded, donated program, and checks the program's promises."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import re
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.decisions import Kind, Why, describe
from jaxtrain.host.memory import keep_freed_memory
from jaxtrain.host.paths import cache_folder, delete_oldest
from jaxtrain.jaxprs import SAMPLED, WIDE, equations, multiplies_8_bits, products_in
from jaxtrain.precision import OPTIMIZER, PrecisionWarning
from jaxtrain.sharding.mesh import automatic
from jaxtrain.sharding.mesh import platform as device_platform
from jaxtrain.sharding.offload import is_on_host
from jaxtrain.sharding.overlap import compile_hiding
from jaxtrain.sharding.placement import report_finding, tracing_on
from jaxtrain.sharding.rules import LARGE, Rule, Rules, batch_shardings, copied
from jaxtrain.sharding.specs import axes_of
from jaxtrain.state import TrainState, host_bytes, local_bytes, shapes_on
from jaxtrain.tree import PyTree, named_leaves

# Of the compiled programs that are kept under the cache; those used longest ago go first.
PROGRAM_BYTES = 4 << 30
# Additions in a fixed order, and kernels by name: XLA implies the latter by the former. It has none
# by name for products of Triton's, and does not compile them (jax 0.11, for a chip that is absent).
DETERMINISTIC = {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
# Products of 8 bits by cuBLAS, which writes 16 bits; what XLA tunes against it writes float32.
EIGHT_BITS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True}
# A narrow number is rounded wherever the program says so, whatever is fused.
ROUNDED = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class Check:
    """A promise of a compiled step: its name, what was found, whether it holds.

    ``holds`` is None where the step is right and does not compute as it was asked to.
    """

    name: str
    found: str
    holds: bool | None


@dataclasses.dataclass(eq=False, repr=False)
class CompiledStep:
    """A compiled step, called like the function it came from.

    Attributes:
      compiled: the ``jax.stages.Compiled``, for its text and analyses.
      checks: what was promised and what was found.
      compile_seconds: wall time of lowering and compiling.
      findings: the decisions about its program, such as how gradients are reduced: the distinct
        values of each :class:`jaxtrain.decisions.Kind`.
      jaxpr: what was traced, closed.
      batch_shardings: where a batch is to lie; None without a mesh.
      arguments: the shapes of the state and the batch, with their shardings on a mesh.
    """

    compiled: jax.stages.Compiled
    checks: Sequence[Check]
    compile_seconds: float
    findings: Mapping[Kind, tuple[Any, ...]]
    jaxpr: Any
    batch_shardings: PyTree | None
    arguments: tuple[PyTree, PyTree]
    _compared: bool = False

    def __repr__(self) -> str:
        return f"CompiledStep(compiled in {self.compile_seconds:.1f} s; {self.held})"

    @property
    def held(self) -> str:
        """The names of the checks that hold."""
        return "; ".join(check.name for check in self.checks if check.holds)

    def __call__(self, state: PyTree, batch: PyTree) -> Any:
        """Runs the step. Host arrays in ``batch`` are placed first; a donated ``state`` is gone.

        Raises:
          ValueError: where a leaf has another shape or dtype than the step was compiled for, or the
            state has been donated to an earlier call.
          FloatingPointError: a result has a NaN under ``jax_debug_nans``, or an infinity under
            ``jax_debug_infs``.
        """
        # A program that reads donated buffers may end the process. All are donated together, and to
        # look at one of them costs next to nothing.
        some = state.step if isinstance(state, TrainState) else state
        first = next(iter(jax.tree.leaves(some)), None)
        if isinstance(first, jax.core.Tracer):
            raise ValueError(
                "a compiled step is called within what JAX traces (jax.jit, jt.plan): give the "
                "function that it was compiled of"
            )
        if isinstance(first, jax.Array) and first.is_deleted():
            raise ValueError(
                "this state was donated to an earlier call of a compiled step and is gone: use the "
                "one that the call returned, or compile with donate=False"
            )
        try:
            if not (jax.config.jax_debug_nans or jax.config.jax_debug_infs):
                return self.compiled(state, self.place(batch))
            with jax.debug_nans(False), jax.debug_infs(False):
                result = self.compiled(state, self.place(batch))
        except (TypeError, ValueError):
            # Looked for only now, so that a good call pays nothing for it.
            for what, *pair in zip(("state", "batch"), self.arguments, (state, batch), strict=True):
                _check_like(what, *pair)
            raise
        _check_numbers(result)
        return result

    def place(self, batch: PyTree) -> PyTree:
        """Puts a batch where the step expects it; arrays already there are passed on.

        Host arrays are the global batch, the same in every process, whatever the number of
        processes. Where each process reads rows of its own, make the batch with
        :func:`jaxtrain.from_local_rows`.

        Raises:
          ValueError: where the processes give different host arrays; this is compared in the first
            call alone, for it waits for all processes.
        """
        leaves = jax.tree.leaves(batch)
        # device_put would take longer to find out that there is nothing to do.
        if self.batch_shardings is None:
            there = all(isinstance(x, jax.Array) for x in leaves)
            return batch if there else jax.device_put(copied(batch))
        if all(map(_lies, leaves, jax.tree.leaves(self.batch_shardings))):
            return batch
        batch = copied(batch)
        if jax.process_count() == 1:
            return jax.device_put(batch, self.batch_shardings)
        if not self._compared:
            self._compared = True
            _check_same_rows(batch)
        return jax.tree.map(_place_global, batch, self.batch_shardings)

    @property
    def memory_bytes(self) -> int:
        """Bytes on one device at the step's peak: arguments, results and temporaries."""
        return peak_bytes(self.compiled)

    def report(self) -> str:
        """Draws the checks and findings as a table."""
        rows = [(_MARKS[check.holds], check.name, check.found) for check in self.checks]
        rows += [(_MARKS[True], *row) for row in describe(self.findings).items()]
        width = max(len(name) for _, name, _ in rows)
        return "\n".join(f"{mark}  {name.ljust(width)}  {found}" for mark, name, found in rows)


_MARKS = {True: "ok ", False: "NOT", None: "BAD"}


def peak_bytes(compiled: Any) -> int:
    """Returns the bytes on one device at the fullest moment of a compiled function.

    Args:
      compiled: ``jax.jit(f).lower(...).compile()``.
    """
    sizes = compiled.memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    total += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
    placed = jax.tree.leaves(compiled.output_shardings)
    # The CPU compiler's own figure leaves temporaries out, and that of others is of the fuller of
    # the two memories, the device's and the host's; another backend may state none.
    on_cpu = not placed or next(iter(placed[0].device_set)).platform == "cpu"
    most_on_host = sizes.host_temp_size_in_bytes > sizes.temp_size_in_bytes
    if on_cpu or sizes.host_argument_size_in_bytes or most_on_host:
        return total
    return sizes.peak_memory_in_bytes or total


def compile_step(
    step: Callable[[PyTree, PyTree], Any],
    state: PyTree,
    batch: PyTree,
    *,
    mesh: Mesh | None = None,
    rules: Rules | Sequence[Rule] | None = None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
    hide_communication: bool = True,
    deterministic: bool = False,
) -> CompiledStep:
    """Compiles ``step(state, batch)`` for the shardings that ``state`` has.

    A step that returns ``(state, anything)`` has its state donated and returned in the shardings it
    came in; ``anything`` is copied to all devices. The leading axis of batch leaves is split over
    ``data`` and ``fsdp``, where ``Rules(batch=)`` says no other.

    On a CPU the first call also has this process keep the memory that steps free, which the kernel
    would otherwise hand out page by page again in each step; options of malloc in the environment
    take precedence (:func:`jaxtrain.host.memory.keep_freed_memory`).

    Args:
      step: a pure function, such as :func:`jaxtrain.build_train_step` returns.
      state: the state, or its shapes with shardings (:func:`jaxtrain.abstract_state`).
      batch: an example of a global batch, or its shapes. Host arrays are welcome and are the whole
        batch in every process; see :func:`jaxtrain.from_local_rows` for rows of each process's own.
      mesh: the mesh that ``state`` lies on; None for one device.
      rules: those of ``init_state``; their ``axes`` say what :func:`jaxtrain.constrain` splits
        activations over, and their ``batch`` how the batch lies.
      donate: False for a step that only reads the state and returns no new one (evaluation).
      compiler_options: XLA options for this program alone, by their flag's name. They take
        precedence over those that hide communication.
      hide_communication: False leaves those out (:mod:`jaxtrain.sharding.overlap`).
      deterministic: on GPUs, only operations whose bits are the same in every run: no atomic
        additions, and no choice of kernels by their speed. Other devices have no others.

    Returns:
      A function like ``step`` that cannot recompile: other shapes are errors.

    Raises:
      ValueError: where the state is not on the mesh, a large leaf lies whole on it by accident, the
        batch does not divide, or the step returns a state unlike the one it was given.
      RuntimeError: where the compiled program breaks a promise (see ``CompiledStep.checks``).

    Warns:
      PrecisionWarning: most products of a step in bfloat16 or float16 are in float32.
    """
    _check_arrays("batch", batch)
    mesh = mesh and automatic(mesh)
    if mesh is None or mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    state_shapes, batch_shapes = jax.eval_shape(lambda *trees: trees, state, batch)
    donated = (0,) if donate else ()

    @functools.wraps(step)
    def checked(state: PyTree, batch: PyTree) -> Any:
        result = step(state, batch)
        if donate:
            _check_returned(state_shapes, result)
        return result

    if mesh is None:
        state_in = batch_in = None
        jitted = jax.jit(checked, donate_argnums=donated, keep_unused=donate)
    else:
        state_in = _shardings_on(state, mesh)
        # A shape alone does not say in which memory it lies, which the step is to know.
        state_shapes = jax.tree.map(
            lambda s, x, place: shapes_on(s, place) if is_on_host(x) else s,
            state_shapes,
            state,
            state_in,
        )
        batch_in = batch_shardings(batch_shapes, mesh, rules)
        copied = NamedSharding(mesh, P())
        jitted = jax.jit(
            checked,
            in_shardings=(state_in, batch_in),
            out_shardings=(state_in, copied) if donate else copied,
            donate_argnums=donated,
            # A leaf that a method makes anew without reading it is donated all the same.
            keep_unused=donate,
        )
    start = time.perf_counter()
    placed = tracing_on(mesh, state, rules) if mesh is not None else contextlib.nullcontext({})
    with placed as findings:
        traced = jitted.trace(state_shapes, batch_shapes)
        if mesh is not None:
            _refuse_idle_axes(mesh, state_in, batch_in, traced.jaxpr.jaxpr)
        options = dict(compiler_options or {})
        options = ROUNDED | options if Kind.EXACT in findings else options
        deterministic = deterministic or Kind.EXACT in findings
        if device_platform() in ("gpu", "cuda"):
            if multiplies_8_bits(traced.jaxpr.jaxpr):
                options = EIGHT_BITS | options
            if deterministic:
                options = DETERMINISTIC | options
                report_finding(Kind.BITS, Why.BY(name=", ".join(DETERMINISTIC)))
        lowered = traced.lower()
        if deterministic:
            _fix_attention(lowered.compiler_ir().operation)
        compiled, hiding = compile_hiding(lowered, mesh, options, hide=hide_communication)
        if hiding:
            report_finding(Kind.HIDING, Why.OPTIONS(count=len(hiding), names=tuple(hiding)))
    seconds = time.perf_counter() - start
    checks = _check_compiled(compiled, state, state_in) if donate else []
    checks.append(Check("no recompilation", "compiled ahead of time for fixed shapes", True))
    checks += _check_products(traced.jaxpr.jaxpr, batch_shapes)
    arguments = state_shapes, batch_shapes
    if mesh is not None:
        arguments = shapes_on(arguments, (state_in, batch_in))
    result = CompiledStep(compiled, checks, seconds, findings, traced.jaxpr, batch_in, arguments)
    if any(check.holds is False for check in checks):
        raise RuntimeError(f"the compiled step breaks a promise:\n{result.report()}")
    return result


def use_compilation_cache(directory: str | os.PathLike | None = None) -> str | None:
    """Keeps compiled programs on disk, so that the next start of the same run does not compile.

    Programs of any size are kept: those of the initial state and around the step are small, and
    many. A directory that JAX has been told already stays, and so does a threshold that the
    environment sets (``JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS``).

    Args:
      directory: where; left out, ``~/.cache/jaxtrain/programs`` (``$XDG_CACHE_HOME`` is heeded)
        and in it a folder per kind of processor, whose programs would not run on another.

    Returns:
      The directory in use; None, and no cache, for a user without a home that can be written.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if jax.config.jax_compilation_cache_dir is not None:
        return jax.config.jax_compilation_cache_dir
    if directory is None:
        if (cache := cache_folder()) is None:
            return None
        directory = cache / "programs" / processor()
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.R_OK | os.W_OK):  # JAX would warn of every program.
            return None
        # In a thread, for over a network thousands of files take seconds to look at.
        room = (directory, PROGRAM_BYTES)
        threading.Thread(target=delete_oldest, args=room, daemon=True).start()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    return str(directory)


def processor() -> str:
    """A short name for the instruction set that this machine's CPU programs are compiled for."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    flags = sorted({line for line in text.splitlines() if line.startswith(("flags", "Features"))})
    digest = hashlib.sha256("\n".join(flags or [text]).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:8]}"


def _fix_attention(operation: Any) -> None:
    """Asks calls of cuDNN's attention within an MLIR operation for the same bits in each run.

    XLA asks the first of several equal calls alone, and then finds no plan for the others, as in
    layers that are written out (https://github.com/openxla/xla/pull/46500). Calls that JAX leaves
    to the partitioner, as those of ``jax.nn`` outside of a map over devices, are not there yet.
    """
    for inner in (inner for region in operation.regions for block in region for inner in block):
        attributes = inner.operation.attributes
        if "call_target_name" in attributes:
            name, config = (attributes[key] for key in ("call_target_name", "backend_config"))
            if re.fullmatch(r"__cudnn\$fmha\w*Backward", name.value):
                text = json.loads(config.value)
                text["cudnn_fmha_backend_config"]["force_deterministic"] = True
                attributes["backend_config"] = type(config).get(
                    json.dumps(text), context=operation.context
                )
        _fix_attention(inner.operation)


def _check_compiled(compiled: Any, state: PyTree, shardings: PyTree | None) -> list[Check]:
    sizes = compiled.memory_analysis()
    aliased = sizes.alias_size_in_bytes + sizes.host_alias_size_in_bytes
    placed = state if shardings is None else shapes_on(state, shardings)
    wanted = local_bytes(placed) + host_bytes(placed)
    found = f"{aliased:,} of {wanted:,} bytes reused"
    kept = jax.config.jax_debug_nans or jax.config.jax_debug_infs
    if kept and aliased < wanted:
        found += ", as jax_debug_nans and jax_debug_infs keep what they may have to run again"
    checks = [Check("state donated in full", found, aliased >= wanted or (None if kept else False))]
    if shardings is None:
        return checks
    named = named_leaves(state)
    places = map(jax.tree.leaves, (shardings, compiled.output_shardings[0]))
    rows = [*zip(named.items(), *places, strict=True)]
    moved = [name for (name, x), want, got in rows if not want.is_equivalent_to(got, x.ndim)]
    text = f"{moved[0]} moves" if moved else f"all {len(named)} leaves stay where they are"
    whole = [(local_bytes(x), name) for (name, x), want, _ in rows if want.is_fully_replicated]
    size, name = max(whole, default=(0, "none"))
    return [
        *checks,
        Check("state returned as it came", text, not moved),
        Check(f"at most {size:,} bytes of a leaf copied to every device", name, True),
    ]


def _check_numbers(result: Any) -> None:
    """Raises for a NaN under ``jax_debug_nans``, and for an infinity under ``jax_debug_infs``.

    JAX checks too, but no longer in a thread that has left ``jax.debug_nans(False)`` once. Many of
    its functions do, for example ``jnp.var`` (jax 0.10.2 and 0.12.0.1).
    """
    pair = isinstance(result, tuple) and len(result) == 2
    leaves = named_leaves({"metrics": result[1], "state": result[0]} if pair else result)
    numbers = {name: x for name, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    checks = ("jax_debug_nans", "NaN", jnp.isnan), ("jax_debug_infs", "an infinity", jnp.isinf)
    for option, kind, is_bad in checks:
        checked = numbers.items() if getattr(jax.config, option) else ()
        if bad := [name for name, x in checked if is_bad(x).any()]:
            raise FloatingPointError(
                f"{bad[0]!r} has {kind}, as {len(bad)} of {len(numbers)} results of a compiled "
                f"step do, and {option.upper()} is set, which forbids it: repair the loss or the "
                "data, or unset it to go on"
            )


def _check_products(jaxpr: Any, batch: PyTree) -> list[Check]:
    """Names the float32 products of a program that computes in bfloat16 or float16 besides."""
    count, lines, reduced = products_in(jaxpr, outside=(OPTIMIZER, WIDE, SAMPLED))
    if not reduced:
        return []
    name = f"{len(lines)} of {count} products in float32"
    most = 2 * len(lines) > count
    if most:
        leaves = named_leaves(batch).items()
        wide = [repr(name) for name, x in leaves if x.dtype in (jnp.float32, jnp.float64)]
        warnings.warn(
            f"the step computes {name} although it is to compute in 16 bits: one float32 "
            "operand is enough. Cast what the model reads of the batch's float32 leaves "
            f"({', '.join(wide) or 'none'}) by a regex, as Policy.bf16(cast_batch='^x$') or "
            "--cast-batch '^x$'; and what a norm returns whose parameters are kept in float32. "
            f"The first of them: {lines[0]}",
            PrecisionWarning,
            stacklevel=3,
        )
    return [Check(name, "; ".join(dict.fromkeys(lines)) or "none", None if most else True)]


def _check_returned(given: PyTree, result: Any) -> None:
    """Raises unless a step's result is a pair whose first part is like the state it was given."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"the step returns {type(result).__name__} and not (state, metrics); for a step that "
            "returns no state, pass donate=False"
        )
    returned = jax.eval_shape(lambda: result[0])
    if jax.tree.structure(given) != jax.tree.structure(returned):
        raise ValueError(
            "the step returns a state of another structure than it was given: every field and key "
            "must come back"
        )
    for (name, a), b in zip(named_leaves(given).items(), jax.tree.leaves(returned), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            mend = "cast it back so that it can be fed to the next call"
            if name.startswith("opt_state/") and not jnp.issubdtype(a.dtype, jnp.inexact):
                mend = (
                    "where it belongs to a parameter that is no floating-point number, keep the "
                    "optimizer from it with optax.masked, or use make_optimizer, which does so"
                )
            raise ValueError(
                f"the step was given state leaf {name!r} as {a.dtype}{list(a.shape)} and returns "
                f"{b.dtype}{list(b.shape)}: {mend}"
            )


def _check_like(what: str, wanted: PyTree, given: PyTree) -> None:
    if jax.tree.structure(wanted) != jax.tree.structure(given):
        raise ValueError(
            f"the {what} has leaves {sorted(named_leaves(given))} and the step was compiled for "
            f"{sorted(named_leaves(wanted))}"
        )
    _check_arrays(what, given)
    given = jax.eval_shape(lambda tree: tree, given)
    for (name, a), b in zip(named_leaves(wanted).items(), jax.tree.leaves(given), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"{what} leaf {name!r} is {b.dtype}{list(b.shape)} and the step was compiled "
                f"for {a.dtype}{list(a.shape)}: keep shapes fixed; pad and mask the last batch"
            )


def _check_arrays(what: str, tree: PyTree) -> None:
    """Raises ValueError for a tensor of another library, such as PyTorch's DataLoader makes, and
    for an array of texts or objects, which rows may have for a loop of your own."""
    for name, leaf in named_leaves(tree).items():
        dtype = getattr(leaf, "dtype", None)
        if isinstance(dtype, np.dtype) and dtype.kind in "OUSMm":
            raise ValueError(
                f"{what} leaf {name!r} has dtype {dtype}, and a step computes with numbers: leave "
                "it out, or make numbers of it"
            )
        if hasattr(leaf, "numpy"):
            kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
            raise ValueError(f"{what} leaf {name!r} is a {kind}: give x.numpy()")


def _shardings_on(state: PyTree, mesh: Mesh) -> PyTree:
    """The state's shardings, having checked that it lies on the mesh and not whole by accident."""
    splitting = [a for a in ("fsdp", "tensor") if mesh.shape.get(a, 1) > 1]
    for name, leaf in named_leaves(state).items():
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or automatic(sharding.mesh) != mesh:
            place = "is on the host" if sharding is None else f"has {sharding}"
            raise ValueError(
                f"state leaf {name!r} {place} and not on the mesh: create the state with "
                "init_state(..., mesh=mesh)"
            )
        # A spec that names every dimension, P(None, None), is whole on purpose.
        accident = sharding.is_fully_replicated and len(sharding.spec) < leaf.ndim
        if splitting and math.prod(leaf.shape) >= LARGE and accident:
            raise ValueError(
                f"state leaf {name!r} of shape {tuple(leaf.shape)} is copied whole to all "
                f"{mesh.size} devices although mesh axis {splitting[0]!r} is to split it: add a "
                "sharding rule for it (of Rules(state=...) where it is no parameter), "
                f"{(None,) * leaf.ndim} where it is to be whole"
            )

    def on_mesh(leaf: Any) -> NamedSharding:  # the same, unless that mesh has explicit axes
        s = leaf.sharding
        return s if s.mesh == mesh else NamedSharding(mesh, s.spec, memory_kind=s.memory_kind)

    return jax.tree.map(on_mesh, state)


def _refuse_idle_axes(mesh: Mesh, state: PyTree, batch: PyTree, jaxpr: Any) -> None:
    """Raises where an axis of the mesh splits nothing, so that its devices repeat each other."""
    kept = {axis for s in jax.tree.leaves(state) for axis in axes_of(s.spec)}
    used = kept | {axis for s in jax.tree.leaves(batch) for axis in axes_of(s.spec)}
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "sharding_constraint":
            used |= set(axes_of(eqn.params["sharding"].spec))
        elif eqn.primitive.name == "shard_map":
            used |= {axis for spec in eqn.params["in_specs"] for axis in axes_of(spec)}
    mends = {
        "pipe": "give the stacked parameters a sharding rule whose first axis is 'layers'",
        "context": "let the model constrain its activations along 'sequence' (jaxtrain.constrain)",
        "expert": "give the parameters of experts a sharding rule with 'experts'",
    }
    for axis, mend in mends.items():
        of, idle = kept, "no leaf of the state"
        if axis == "context":
            of, idle = used, "nothing in this step"
        if mesh.shape.get(axis, 1) > 1 and axis not in of:
            raise ValueError(
                f"mesh axis {axis!r} of size {mesh.shape[axis]} splits {idle}, so its "
                f"devices would repeat each other's work: {mend}, or use size 1"
            )


def _lies(x: Any, sharding: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and x.sharding == sharding


def _check_same_rows(batch: PyTree) -> None:
    """Raises where the processes hold different host arrays."""
    digest = 0
    for x in jax.tree.leaves(batch):
        if not _is_global(x):
            x = _raw(x)
            digest = zlib.crc32(x.tobytes(), zlib.crc32(str(x.shape).encode(), digest))
    digests = multihost_utils.process_allgather(np.uint32(digest))
    if (digests != digests[0]).any():
        other = int(np.argmax(digests != digests[0]))
        raise ValueError(
            f"process {other} was given other rows than process 0: a compiled step takes host "
            "arrays for the global batch, the same in every process; where each process reads its "
            "own rows, pass jaxtrain.from_local_rows(batch, mesh)"
        )


def _place_global(x: Any, sharding: NamedSharding) -> jax.Array:
    if _is_global(x):
        return jax.device_put(x, sharding)
    raw = _raw(x)
    placed = jax.make_array_from_callback(raw.shape, sharding, lambda index: raw[index])
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(x)) if _is_key(x) else placed


def _is_global(x: Any) -> bool:
    """Whether it is an array of all processes, and not one that each has by itself."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _raw(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
