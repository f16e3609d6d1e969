"""The expert MLP: every token through the MLPs of its experts, dropless and in bounded memory.

Tokens are sorted by expert, and each expert's are taken in tiles of rows, in a loop whose number of
iterations is data. So the work is that of the tokens routed, plus at most a tile for each expert;
nothing is dropped however uneven the routes are, and no buffer grows with experts x tokens, nor
holds a token once for each of its experts. The hidden layer is computed again for the gradients.

On a mesh each device has some of the experts, and part of their hidden width. It gathers the tokens
of the devices along the axis of the experts, and what its experts add is summed over them and
scattered back; or each token is sent to the devices of its experts, and back
(:mod:`jaxtrain.ops.dispatch`).

Shapes: B batch, T positions, N tokens, D width, F hidden width, E experts of a device, J experts of
a token, A = N J choices, R rows of a tile.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.decisions import Kind
from jaxtrain.ops.activations import ACTIVATIONS, GATED
from jaxtrain.ops.dispatch import Waves, dispatched
from jaxtrain.ops.numerics import wide
from jaxtrain.ops.per_device import not_taken_over, split_over
from jaxtrain.sharding.placement import report_finding

# Rows of a tile, at most: for each tile an expert's weights are read, and the sums of their
# gradients read and written.
ROWS = 2048
# An expert's tokens are at least so many tiles, where tokens are spread evenly. What does not fill
# a tile goes into smaller ones, so many in one, as half of the last is empty in the mean.
TILES, SMALLER = 2, 4
# Begins the scope that says how often a loop runs where tokens are spread evenly, and of how many
# experts here and in all.
TRIPS = "mean_trips_"

Weights = Mapping[str, jax.Array]


def trips_of(scope: str) -> int | None:
    """The mean number of iterations that a scope's name says of its innermost loop, if any.

    >>> trips_of("jit(step)/mean_trips_3/while/body/mean_trips_12_of_2_8/while")
    12
    """
    found = re.findall(rf"\b{TRIPS}(\d+)", scope)
    return int(found[-1]) if found else None


def heat_of(scope: str) -> float:
    """The share by which a device's loop is longer for each time the mean that the hottest of its
    experts has above it, where the others share the rest; 0 where a device has all experts.

    >>> heat_of("jit(step)/mean_trips_12_of_1_8/while"), heat_of("mean_trips_12_of_8_8")
    (1.0, 0.0)
    """
    found = re.findall(rf"\b{TRIPS}\d+_of_(\d+)_(\d+)", scope)
    here, experts = map(int, found[-1]) if found else (1, 1)
    return (experts - here) / (here * max(1, experts - 1))


def expert_mlp(
    form: str,
    x_BTD: jax.Array,
    weights: Weights,
    gates_BTJ: jax.Array,
    experts_BTJ: jax.Array,
) -> jax.Array:
    """Returns ``sum_j gates_j MLP_experts_j(x)`` of every token, [B, T, D].

    Args:
      form: of the MLP, one of :data:`jaxtrain.ops.activations.ACTIVATIONS`.
      x_BTD: tokens.
      weights: ``up`` and, gated, ``gate`` [E, D, F], and ``down`` [E, F, D]; perhaps also
        ``up_bias`` and ``gate_bias`` [E, F].
      gates_BTJ: what the result of each choice is multiplied by.
      experts_BTJ: int32, the choices; E for none, and such a token may be anything.

    >>> weights = {"up": jnp.ones((2, 1, 1)), "down": jnp.array([[[1.0]], [[10.0]]])}
    >>> x, gates = jnp.full((1, 1, 1), 2.0), jnp.full((1, 1, 2), 0.5)
    >>> float(expert_mlp("relu", x, weights, gates, jnp.array([[[0, 1]]]))[0, 0, 0])
    11.0
    """
    operands = x_BTD, weights, gates_BTJ, experts_BTJ
    return _expert_mlp(form, _placed(operands), *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _expert_mlp(form, placed, *operands):
    return _forward(form, placed, *operands)[0]


def _forward(form, placed, *operands):
    compute = functools.partial(_values, form, len(operands[1]["up"]))
    return _on_mesh(compute, placed, operands), operands


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _pull(form, placed, operands, dy_BTD):
    compute = functools.partial(_gradients, form, len(operands[1]["up"]))
    return _on_mesh(compute, placed, operands, dy_BTD)


def _refuse(*_):
    raise ValueError(
        "experts have first derivatives alone, as a loop whose length is data has no others here: "
        "ask for no curvature of this model, or give one without experts"
    )


def _backward(form, placed, operands, dy_BTD):
    return *_pull(form, placed, operands, dy_BTD), np.zeros(operands[-1].shape, jax.dtypes.float0)


_pull.defvjp(lambda *given: (_pull(*given), None), _refuse)
_expert_mlp.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """The axes of the mesh over which rows, positions, experts and hidden width are split; of those
    of the experts, the ones along which tokens meet them; and whether they are sent for that."""

    rows: tuple[str, ...]
    sequence: tuple[str, ...]
    holders: tuple[str, ...]
    hidden: tuple[str, ...]
    meeting: tuple[str, ...]
    sends: bool


def _placed(operands: tuple[Any, ...]) -> _Placed:
    """Decides it for both passes, of which only the first is traced within what chooses."""
    (B, T, _), (E, _, F) = operands[0].shape, operands[1]["up"].shape
    free = not_taken_over()

    def axes_of(logical: str, size: int) -> tuple[str, ...]:
        axes, parts = split_over(logical)
        return axes if free and size % parts == 0 else ()

    rows, sequence = axes_of("batch", B), axes_of("sequence", T)
    holders, hidden = axes_of("experts", E), axes_of("mlp", F)
    meeting, sends = tuple(axis for axis in holders if axis in rows), False
    if meeting and meeting == holders:
        parts = split_over("experts")[1]
        report_finding(Kind.EXPERTS, how := dispatched(parts, E // parts, operands[-1].shape[-1]))
        sends = how.how == "exchange"
    return _Placed(rows, sequence, holders, hidden, meeting, sends)


def _on_mesh(
    compute: Any, placed: _Placed, operands: tuple[Any, ...], *cotangent: jax.Array
) -> Any:
    """Runs ``compute(x_ND, weights, gates_NJ, experts_NJ, *dy_ND)`` on each device's experts, whose
    results are sums over the devices' parts; gradients where a cotangent is given."""
    free, holders, gathered = not_taken_over(), placed.holders, placed.meeting
    partial = tuple(axis for axis in (*holders, *placed.hidden) if axis not in gathered)
    others = tuple(axis for axis in (*placed.rows, *placed.sequence) if axis not in gathered)

    def on_device(x_BTD, weights, gates_BTJ, experts_BTJ, *dy_BTD):
        here, first = weights["up"].shape[0], 0
        for axis in holders:
            first = first * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)

        def on_own(x_ND, gates_NJ, experts_NJ, *dy_ND, even=None):
            own_NJ = experts_NJ - first * here
            own_NJ = jnp.where((own_NJ >= 0) & (own_NJ < here), own_NJ, here)
            return compute(x_ND, weights, gates_NJ, own_NJ, *dy_ND, even=even)

        tokens = x_BTD, gates_BTJ, experts_BTJ, *dy_BTD
        if not placed.sends:
            tokens = [_gather(x, gathered) for x in tokens]
        lead = tokens[0].shape[:2]
        tokens = [x.reshape(-1, x.shape[-1]) for x in tokens]
        found = _by_waves(on_own, weights, gathered, *tokens) if placed.sends else on_own(*tokens)

        def back(y_ND, dtype):
            y_BTD = y_ND.astype(dtype).reshape(*lead, -1)
            return _sum(y_BTD if placed.sends else _scatter(y_BTD, gathered), partial)

        if not cotangent:
            return back(found, x_BTD.dtype)
        dx_ND, dweights, dgates_NJ = found
        dweights = {
            name: _sum(d, others).astype(weights[name].dtype) for name, d in dweights.items()
        }
        return back(dx_ND, x_BTD.dtype), dweights, back(dgates_NJ, gates_BTJ.dtype)

    if not free:
        return on_device(*operands, *cotangent)
    rows, sequence, experts, hidden = (
        axes or None for axes in (placed.rows, placed.sequence, holders, placed.hidden)
    )
    of_tokens = P(rows, sequence, None)
    up, down = P(experts, None, hidden), P(experts, hidden, None)
    of_weights = {name: down if name == "down" else up for name in operands[1]}
    bias = P(experts, hidden)
    of_weights |= {name: bias for name in operands[1] if name.endswith("_bias")}
    specs = (of_tokens, of_weights, of_tokens)
    return jax.shard_map(
        on_device,
        in_specs=(*specs, of_tokens, *(of_tokens for _ in cotangent)),
        out_specs=specs if cotangent else of_tokens,
        axis_names=free,
        # Nothing is differentiated through the map: forward and backward are maps of their own.
        check_vma=False,
    )(*operands, *cotangent)


def _by_waves(on_own: Any, weights: Weights, axes, x_ND, gates_NJ, experts_NJ, *dy_ND) -> Any:
    """What ``on_own`` gives of all tokens, each of which is sent to the devices of its experts."""
    here, J = weights["up"].shape[0], gates_NJ.shape[1]
    waves, dtype = Waves(experts_NJ, axes, here), wide(x_ND.dtype)
    # One message for both: the numbers of experts are small enough to be exact.
    of_routes = jnp.concatenate([gates_NJ, experts_NJ.astype(gates_NJ.dtype)], axis=1)
    sums = {"tokens": jnp.zeros(x_ND.shape, dtype)}
    if dy_ND:
        sums["gates"] = jnp.zeros(gates_NJ.shape, wide(gates_NJ.dtype))
        sums["weights"] = {name: jnp.zeros(w.shape, dtype) for name, w in weights.items()}

    def wave(w, sums):
        token_PC = waves.members(w)
        routes = waves.sent(of_routes, token_PC, fill=here * waves.places)
        gates_MJ, experts_MJ = routes[:, :J], routes[:, J:].astype(experts_NJ.dtype)
        x_MD, *dy_MD = (waves.sent(x, token_PC) for x in (x_ND, *dy_ND))
        found = on_own(x_MD, gates_MJ, experts_MJ, *dy_MD, even=waves.even)
        if not dy_MD:
            (out,) = waves.add_back([sums["tokens"]], [found.astype(x_ND.dtype)], token_PC)
            return {"tokens": out}
        dx_MD, dweights, dgates_MJ = found
        back = dx_MD.astype(x_ND.dtype), dgates_MJ.astype(gates_NJ.dtype)
        dx, dgates = waves.add_back([sums["tokens"], sums["gates"]], list(back), token_PC)
        dweights = jax.tree.map(jnp.add, sums["weights"], dweights)
        return {"tokens": dx, "gates": dgates, "weights": dweights}

    sums = waves.loop(wave, sums, f"{TRIPS}{waves.mean_count}")
    return (sums["tokens"], sums["weights"], sums["gates"]) if dy_ND else sums["tokens"]


def _values(form, experts, x_ND, weights, gates_NJ, experts_NJ, *, even=None):
    """The weighted sum [N, D] of what the experts here make of the tokens that chose them."""
    tiles = _Tiles(x_ND, gates_NJ, experts_NJ, len(weights["up"]), experts, even)

    def expert(out_ND, of_expert):
        own, *place = of_expert

        def tile(first, size, out_ND):
            x_RD, token_R, _, gate_R1 = tiles.rows(first, size, *place)
            pre = _pre(form, x_RD, own)
            y_RD = _dot(ACTIVATIONS[form](*pre), own["down"], 1, 0, wide(x_ND.dtype))
            return out_ND.at[token_R].add(y_RD * gate_R1, mode="drop")

        return tiles.loop(tile, out_ND, place), None

    out_ND = jnp.zeros(x_ND.shape, wide(x_ND.dtype))
    return jax.lax.scan(expert, out_ND, (weights, *tiles.places))[0]


def _gradients(form, experts, x_ND, weights, gates_NJ, experts_NJ, dy_ND, *, even=None):
    """The gradients by tokens, weights and gates, in at least float32."""
    dtype = wide(x_ND.dtype)
    tiles = _Tiles(x_ND, gates_NJ, experts_NJ, len(weights["up"]), experts, even)

    def expert(sums, of_expert):
        own, *place = of_expert

        def tile(first, size, sums):
            dx_ND, dgates_A, dweights = sums
            x_RD, token_R, choice_R, gate_R1 = tiles.rows(first, size, *place)
            dy_RD = _rows(dy_ND, token_R)
            pre = _pre(form, x_RD, own)
            h_RF, pull = jax.vjp(ACTIVATIONS[form], *pre)
            back_RF = _dot(dy_RD, own["down"], 1, 1, dtype)
            dgate_R = (back_RF * h_RF).sum(-1)
            dpre = pull((back_RF * gate_R1).astype(h_RF.dtype))
            into = dict(zip(_entering(form), dpre, strict=True))
            dx_RD = sum(_dot(d_RF, own[name], 1, 1, dtype) for name, d_RF in into.items())
            found = {name: _dot(x_RD, d_RF, 0, 0, dtype) for name, d_RF in into.items()}
            found["down"] = _dot(h_RF, (dy_RD * gate_R1).astype(h_RF.dtype), 0, 0, dtype)
            if "up_bias" in own:
                found |= {f"{n}_bias": d_RF.sum(0, dtype=dtype) for n, d_RF in into.items()}
            return (
                dx_ND.at[token_R].add(dx_RD, mode="drop"),
                dgates_A.at[choice_R].set(dgate_R, mode="drop"),
                {name: dweights[name] + d for name, d in found.items()},
            )

        zeros = {name: jnp.zeros(w.shape, dtype) for name, w in own.items()}
        *sums, dweights = tiles.loop(tile, (*sums, zeros), place)
        return tuple(sums), dweights

    sums = jnp.zeros(x_ND.shape, dtype), jnp.zeros(gates_NJ.size, dtype)
    (dx_ND, dgates_A), dweights = jax.lax.scan(expert, sums, (weights, *tiles.places))
    return dx_ND, dweights, dgates_A.reshape(gates_NJ.shape)


class _Tiles:
    """The choices of tokens sorted by expert, tile by tile: those of ``here`` experts, of
    ``experts`` in all; ``even`` of each where routes are even, if not all are among these."""

    def __init__(self, x_ND, gates_NJ, experts_NJ, here: int, experts: int, even: int | None):
        self.x_ND, self.gates_A, self.each = x_ND, gates_NJ.reshape(-1), gates_NJ.shape[1]
        chosen_A = experts_NJ.reshape(-1)
        self.order_A = jnp.argsort(chosen_A, stable=True)
        counts_E = jnp.bincount(chosen_A, length=here)
        self.places = jnp.cumsum(counts_E) - counts_E, counts_E
        if even is None:
            even = ROWS  # of an exported program's shapes, which are symbols, any
            if isinstance(chosen_A.size, int):
                even = -(-chosen_A.size // experts)
        large = min(ROWS, max(8, 1 << (even // TILES).bit_length() >> 1))  # a power of 2
        self.sizes = (large, large // SMALLER) if large > 8 * SMALLER else (large,)
        self.even, self.of = even, f"_of_{here}_{experts}"

    def loop(self, tile: Any, sums: Any, place: Any) -> Any:
        """Applies ``tile(first, size, sums)`` to all rows of the expert that has ``place``."""
        first, mean_first = 0, 0
        for size in self.sizes:

            def step(t, sums, first=first, size=size):
                return tile(first + t * size, size, sums)

            # The last tiles are filled up, the others full.
            over = size - 1 if size == self.sizes[-1] else 0
            trips = (place[1] - first + over) // size
            mean = (self.even - mean_first + over) // size
            with jax.named_scope(f"{TRIPS}{mean}{self.of}"):
                sums = jax.lax.fori_loop(0, trips, step, sums)
            first, mean_first = first + trips * size, mean_first + mean * size
        return sums

    def rows(self, first, size: int, start, count) -> tuple[jax.Array, ...]:
        """Rows of an expert from ``first`` on: tokens [R, D], their numbers, those of the choices,
        and the gates [R, 1]; behind the expert's last all is 0 and the numbers are beyond the
        arrays' ends."""
        at_R = first + jnp.arange(size)
        choice_R = self.order_A.at[start + at_R].get(mode="clip")
        choice_R = jnp.where(at_R < count, choice_R, self.order_A.shape[0])
        token_R = jnp.where(at_R < count, choice_R // self.each, self.x_ND.shape[0])
        return _rows(self.x_ND, token_R), token_R, choice_R, _rows(self.gates_A, choice_R)[:, None]


def _rows(x_ND: jax.Array, token_R: jax.Array) -> jax.Array:
    return x_ND.at[token_R].get(mode="fill", fill_value=0)


def _entering(form: str) -> tuple[str, ...]:
    """The kernels that read the tokens, in the order in which an activation takes their results."""
    return ("gate", "up") if form in GATED else ("up",)


def _pre(form: str, x_RD: jax.Array, own: Weights) -> list[jax.Array]:
    """What an activation takes."""
    pre = [_dot(x_RD, own[name], 1, 0) for name in _entering(form)]
    if "up_bias" not in own:
        return pre
    biases = (own[f"{name}_bias"] for name in _entering(form))
    return [(y_RF + bias_F).astype(y_RF.dtype) for y_RF, bias_F in zip(pre, biases, strict=True)]


def _dot(a: jax.Array, b: jax.Array, i: int, j: int, dtype: Any = None) -> jax.Array:
    """Contracts axis i of a with axis j of b."""
    dims = (((i,), (j,)), ((), ()))
    common = jnp.promote_types(a.dtype, b.dtype)
    return jax.lax.dot_general(
        a.astype(common), b.astype(common), dims, preferred_element_type=dtype
    )


def _gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def _scatter(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True) if axes else x


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x
