"""What serving a decoder takes of devices that need not be here: bytes of weights and caches, what
the compiler adds, how many rows fit, and times that the programs cannot better.

Shapes: B rows, C tokens of a chunk, P pages of a row.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxtrain.compile import peak_bytes
from jaxtrain.experiment import Experiment
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.flops import count_jaxpr
from jaxtrain.host.memory import human_bytes, human_count, is_out_of_memory
from jaxtrain.models import decoder
from jaxtrain.models.config import keys_seen
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import CausalDecoder, check_positions
from jaxtrain.models.sampling import History
from jaxtrain.ops.attention import ahead_of_time
from jaxtrain.ops.linear import kernel_rules
from jaxtrain.planning.ahead_of_time import GPU_MEMORY
from jaxtrain.planning.report import Report, line, new_table, seconds_text, section
from jaxtrain.planning.targets import Target
from jaxtrain.run import trained
from jaxtrain.serve.engine import cache_shapes, unasked
from jaxtrain.serve.programs import Rows, advance
from jaxtrain.sharding.mesh import make_mesh
from jaxtrain.sharding.rules import param_shardings
from jaxtrain.state import local_bytes, shapes_on

# As `jaxtrain serve` has them where nothing is said.
READERS, CHUNK, PAGE = 4, 64, 64


@dataclasses.dataclass(frozen=True)
class ServingPlan(Report):
    """A server's memory on one device, and bounds of its time.

    Args:
      weights, position: bytes of the parameters, and of one position of one row in the cache, by
        dtype: the model's, and int8.
      working: bytes that the programs of so many slots need beside both, by the compiler; None
        where there are none, by ``refusal``.
      limit: bytes that the device has; None where that is not known.
      seconds: by what is done, the least time, at the memory's bandwidth and at the products' peak;
        None where the chip's is not known.
    """

    name: str
    target: str
    slots: int
    longest: int
    dtype: str
    weights: Mapping[str, int]
    position: Mapping[str, int]
    working: int | None
    limit: int | None
    seconds: Mapping[str, tuple[float | None, float | None]]
    refusal: str | None = None

    @property
    def needed(self) -> int:
        """Bytes of weights, of the cache of all slots, and what the programs add."""
        cache = self.position[self.dtype] * self.slots * self.longest
        return self.weights[self.dtype] + cache + (self.working or 0)

    @property
    def fits(self) -> bool:
        """Whether that is within the limit, and the compiler agrees."""
        return self.refusal is None and (self.limit is None or self.needed <= self.limit)

    def rows(self, weights: str, cache: str) -> int | None:
        """Returns how many slots fit, with weights and a cache of some dtypes, where what the
        programs add grows with the slots; None where that is not known."""
        if self.limit is None or self.working is None:
            return None
        slot = self.position[cache] * self.longest + self.working // self.slots
        return max(0, (self.limit - self.weights[weights]) // slot)

    def draw(self, console: Console) -> None:
        """Prints it."""
        line(console, f"{self.name}, served on {self.target}", style="bold")
        shape = f"{self.slots} slots of {self.longest:,} positions, {self.dtype}"
        room = "how much there is, is not known"
        if self.limit is not None:
            room = f"{'fits in' if self.fits else 'does not fit in'} {human_bytes(self.limit)}"
        line(console, f"{shape}: {human_bytes(self.needed)} per device; {room}")
        table = new_table("", "bytes", "")
        parts = {"weights": self.weights[self.dtype]}
        parts |= {"cache, of a position": self.position[self.dtype]}
        parts |= {"cache, of a slot": self.position[self.dtype] * self.longest}
        if self.working is not None:
            parts["the programs add"] = self.working
        for name, size in parts.items():
            table.add_row(name, f"{size:,}", human_bytes(size))
        section(console, "memory per device", table)
        if self.refusal is not None:
            line(console, self.refusal)
        elif self.limit is not None:
            table = new_table("weights", *(f"cache {kind}" for kind in self.position))
            for kind in self.weights:
                table.add_row(kind, *(f"{self.rows(kind, cache):,}" for cache in self.position))
            section(console, f"slots of {self.longest:,} positions that fit", table)
        table = new_table("", "at the memory's bandwidth", "at the products' peak")
        for name, both in self.seconds.items():
            table.add_row(name, *map(seconds_text, both))
        section(console, "least time of these programs", table)

    def to_json(self) -> dict[str, Any]:
        """Returns it as data that ``json.dumps`` takes."""
        pairs = {f"{w}, {c}": self.rows(w, c) for w in self.weights for c in self.position}
        return dataclasses.asdict(self) | {"needed": self.needed, "fits": self.fits, "rows": pairs}


def plan_serving(experiment: Experiment, target: Target, shape: str) -> ServingPlan:
    """Compiles the programs of a server for a target, and says what they need.

    Args:
      experiment: whose model is served, in the dtype that it computes in.
      shape: ``SLOTSxLENGTH``, such as ``16x8192``.

    Raises:
      ValueError: there is no such shape, the model is no decoder, or the mesh has other axes.
    """
    if (found := re.fullmatch(r"(\d+)x(\d+)", shape)) is None or int(found[1]) < 2:
        raise ValueError(f"--serve is {shape!r}: give SLOTSxLENGTH, of 2 slots or more, as 16x8192")
    slots, longest = map(int, found.groups())
    model = trained.read_model(experiment.metadata.config, where=f"experiment {experiment.name!r}")
    if not isinstance(model, DecoderConfig):
        raise ValueError(f"--serve plans decoders, and {experiment.name!r} has another model")
    if model.positions == "learned" and longest > model.seq_len:
        raise ValueError(
            f"--serve is {shape!r}: the model has {model.seq_len} learned positions; ask for less"
        )
    check_positions(model, longest)
    if experiment.layout.mesh.filled(target.size).tensor != target.size:
        raise ValueError(
            f"{target} has {target.size} devices, over which a server splits heads and MLP width: "
            f"give --mesh.tensor {target.size}"
        )
    mesh = make_mesh(tensor=target.size, devices=target.devices())
    dtype, limit = experiment.policy.compute_dtype, target.chip.memory_bytes
    kept = {kind: _weights(model, mesh, dtype, kind) for kind in (None, "int8")}
    with jax.set_mesh(mesh):
        weights = {kind or dtype.name: local_bytes(params) for kind, params in kept.items()}
        one = {kind: cache_shapes(model, dtype, 1, PAGE, mesh, kind) for kind in kept}
        position = {kind or dtype.name: local_bytes(x) // PAGE for kind, x in one.items()}
        pages = 1 + slots * -(-longest // PAGE)
        cache = cache_shapes(model, dtype, pages, PAGE, mesh, None)
        program = functools.partial(advance, [CausalDecoder(model)])
        given = [
            ([kept[None]], [cache], _rows(model, B, C, longest))
            for B, C in ((slots, 1), (READERS, CHUNK))
        ]
        with ahead_of_time("traced"):
            flops = [count_jaxpr(jax.make_jaxpr(program)(*each)).total for each in given]
        with ahead_of_time("compiled"):
            working, refusal = None, "weights and cache alone do not fit, so nothing was compiled"
            if limit is None or local_bytes((kept[None], cache)) <= limit:
                working, refusal = _added(program, given, target)
    # The embedding of a token is one row of its table.
    unread = 0 if model.tied else local_bytes(kept[None]["embed"])
    seconds = _least(
        model, target, dtype, (slots, longest), weights[dtype.name] - unread, position, flops
    )
    name = f"{experiment.name} of {human_count(decoder.parameter_count(model))}parameters"
    sizes = slots, longest, dtype.name, weights, position, working, limit
    return ServingPlan(name, str(target), *sizes, seconds, refusal)


def _added(program: Any, given: Any, target: Target) -> tuple[int | None, str | None]:
    """Compiles a program for each of some arguments, and returns the most bytes that one needs
    beside its parameters and caches; or None, and what the compiler says."""
    most, options = 0, GPU_MEMORY if target.chip.kind == "gpu" else None
    for params, caches, rows in given:
        lowered = jax.jit(program, donate_argnums=1).lower(params, caches, rows)
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None, str(error).splitlines()[0].strip()
        added = compiled.memory_analysis().generated_code_size_in_bytes + peak_bytes(compiled)
        most = max(most, added - local_bytes((params, caches)))
    return most, None


def _least(
    model: DecoderConfig,
    target: Target,
    dtype: Any,
    sizes: tuple[int, int],
    read: int,
    position: Mapping[str, int],
    flops: Sequence[float],
) -> dict[str, tuple[float | None, float | None]]:
    """The least seconds of what a server does, by ``read`` bytes of weights, bytes of a position
    and ``flops`` of a step and of a chunk, which count the keys of one page."""
    (slots, longest), (step, chunk) = sizes, flops
    bandwidth, peak = target.chip.hbm_bytes_per_s, target.chip.peak_flops(dtype)
    met = keys_seen(model, longest)  # in all layers, of a full row
    keys = met * position[dtype.name] / model.layers  # bytes of them, and of their values
    more = max(0, met - model.layers * PAGE)  # beyond the page that is counted
    scores = 4 * model.heads * model.block.head_dim * more
    calls = -(-longest // CHUNK)

    def least(bytes_read: float, count: float) -> tuple[float | None, float | None]:
        return (
            None if bandwidth is None else bytes_read / bandwidth,
            None if peak is None else count / target.size / peak,
        )

    prompt = calls * chunk / READERS + longest * scores / 2  # half of all pairs are met
    return {
        f"a step of {slots} slots at their first token": least(read, step),
        f"a step of {slots} full slots": least(read + slots * keys, step + slots * scores),
        f"reading {longest:,} tokens, in {calls} chunks": least(calls * (read + keys / 2), prompt),
    }


def _weights(model: DecoderConfig, mesh: Mesh, dtype: Any, kind: str | None) -> Any:
    """Shapes of the parameters as a server holds them, where they lie on the mesh."""

    def make() -> Any:
        key = jax.random.key(0)
        params = jax.tree.map(lambda x: x.astype(dtype), decoder.init(model, key))
        return Quantize(kind).params(params, key)

    params = jax.eval_shape(make)
    return shapes_on(params, param_shardings(params, mesh, kernel_rules(decoder.RULES, params)))


def _rows(model: DecoderConfig, B: int, C: int, longest: int) -> Rows:
    """Shapes of what a program receives beside parameters and caches."""
    one, tokens = np.zeros(B, np.int32), np.zeros((B, C), np.int32)
    table = np.zeros((B, -(-longest // PAGE)), np.int32)
    history = History(np.zeros((B, longest), np.int32), np.bool_(False))
    rows = Rows(table, tokens, one, one, unasked(model, B), np.bool_(False), one, history)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), rows)
