"""One order of sums for every token, whoever reads it: the log-probability that a trainer gives a
token is that of the sampler, to the bit.

Tokens of any rows are read in blocks of :data:`LANES`, by a loop whose body has one shape, whether
they are a prompt, an answer that is being written, or a text to train on. Within a layer the keys
of a block are written before they are read, so a block may hold several tokens of a row; each
attends to itself first, then to tiles of :data:`TILE` earlier positions in their order. So the
log-probability of a token depends on the weights and on what stands before it in its row, and on
nothing else. That holds on one kind of machine, in float32 and in bfloat16.

Shapes: B rows, C tokens of a chunk, T positions, N lanes of a block, M rows of a loop, P pages of a
row, H query heads, G key and value heads, K features per head, D width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.models import attending, decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import CausalDecoder, Pages, check_pages, check_positions, scan_layers
from jaxtrain.ops.cached import Tiles
from jaxtrain.ops.per_device import not_taken_over, split_over

# Tokens of a block. One alone would be a product of another kind.
LANES = 16
# Positions of a page, over each of which the softmax is summed.
TILE = 64


@dataclasses.dataclass(frozen=True)
class ExactDecoder(CausalDecoder):
    """A :class:`CausalDecoder` that reads every token alike, into :class:`Pages` of :data:`TILE`
    positions."""

    def prefill(self, params, tokens_BP, lengths_B, *, room):
        B, P = tokens_BP.shape
        pages = self._empty(params, B, P + room)
        return self.extend(params, pages, tokens_BP, jnp.zeros_like(lengths_B), lengths_B)

    def extend(self, params, cache, tokens_BC, start_B, count_B):
        x_BCD, cache = self._extended(params, cache, tokens_BC, start_B, count_B)
        x_BD = jnp.take_along_axis(x_BCD, jnp.maximum(count_B - 1, 0)[:, None, None], 1)[:, 0]
        return self._head(params, x_BD), cache

    def extend_every(self, params, cache, tokens_BC, start_B, count_B):
        x_BCD, cache = self._extended(params, cache, tokens_BC, start_B, count_B)
        logits_MV = self._head(params, x_BCD.reshape(-1, x_BCD.shape[-1]))
        return logits_MV.reshape(*x_BCD.shape[:2], -1), cache

    def logits(self, params, tokens_BT):
        start_B = jnp.zeros(len(tokens_BT), jnp.int32)
        pages = self._empty(params, *tokens_BT.shape)
        count_B = start_B + tokens_BT.shape[1]
        return self.extend_every(params, pages, tokens_BT, start_B, count_B)[0]

    def log_softmax(self, logits_MV):
        return _by_lanes(jax.nn.log_softmax, logits_MV)

    def log_probs(self, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        """What the function :func:`log_probs` gives on one device; it has no derivative."""
        tokens_BT, targets_BT, mask_BT = (batch[name] for name in ("tokens", "targets", "mask"))
        (B, T), start_B = tokens_BT.shape, jnp.zeros(len(tokens_BT), jnp.int32)
        count_B = _count(mask_BT)
        pages = self._empty(params, B, T)
        x_BTD, _ = self._extended(params, pages, tokens_BT, start_B, count_B)

        def score(x_ND, targets_N):
            log_p_NV = self.log_softmax(self._head(params, x_ND))
            return jnp.take_along_axis(log_p_NV, targets_N[:, None], axis=1)[:, 0]

        scores_M = _by_lanes(score, x_BTD.reshape(B * T, -1), targets_BT.reshape(-1))
        return jnp.where(jnp.arange(T) < count_B[:, None], scores_M.reshape(B, T), 0)

    def _head(self, params, x_MD):
        return _by_lanes(functools.partial(self._last_logits, params), x_MD)

    def _last_logits(self, params, x_ND):
        return decoder.head_logits(self.config, params, x_ND[:, None])[:, 0]

    def _empty(self, params, rows, positions):
        """Pages of so many rows of their own."""
        P, block = -(-positions // TILE), self.config.block
        L, dtype = self.config.layers, params["embed"]["tokens"].dtype
        pages = (jnp.zeros((L, 1 + rows * P, G, TILE, K), dtype) for G, K in block.cached)
        return Pages(*pages, 1 + jnp.arange(rows * P).reshape(rows, P))

    def _extended(self, params, cache, tokens_BC, start_B, count_B):
        B, C = tokens_BC.shape
        live_BC = jnp.arange(C) < count_B[:, None]
        # Tokens that count, row by row; behind them the others.
        order_M = jnp.argsort(~live_BC.reshape(-1), stable=True)
        at_BC = start_B[:, None] + jnp.arange(C)
        given = (x.reshape(-1)[order_M] for x in (live_BC, tokens_BC, at_BC))
        live_M, tokens_M, at_M, rows_M = (_padded(x) for x in (*given, order_M // C))

        def read(i, carry):
            k, v, x_MD = carry
            lanes = (_lanes(x, i) for x in (live_M, tokens_M, at_M, rows_M))
            x_ND, k, v = self._block(params, k, v, cache.table, *lanes)
            return k, v, jax.lax.dynamic_update_slice_in_dim(x_MD, x_ND, i * LANES, axis=0)

        dtype = params["embed"]["tokens"].dtype
        nothing_MD = jnp.zeros((len(live_M), self.config.width), dtype)
        begun = _bits(cache.k), _bits(cache.v), nothing_MD
        k, v, x_MD = jax.lax.fori_loop(0, _blocks(count_B.sum()), read, begun)
        k, v = (jax.lax.bitcast_convert_type(x, dtype) for x in (k, v))
        x_MD = jnp.zeros((B * C, x_MD.shape[1]), dtype).at[order_M].set(x_MD[: B * C])
        return x_MD.reshape(B, C, -1), dataclasses.replace(cache, k=k, v=v)

    def _block(self, params, k, v, table_BP, live_N, tokens_N, at_N, rows_N):
        """Reads a token in each lane: the residual stream [N, D], and the bits of all pages."""
        dtype = params["embed"]["tokens"].dtype
        at_N = jnp.where(live_N, at_N, 0)
        table_NP = jnp.where(live_N[:, None], table_BP[rows_N], 0)
        page_N = jnp.take_along_axis(table_NP, at_N[:, None] // TILE, axis=1)[:, 0]

        def layer(carry, params_and_index):
            x_N1D, *pages = carry
            layer_params, l = params_and_index

            def attend(q_N1HK, *new, **sinks):
                new = [x.astype(dtype) for x in new]
                kept = [
                    x.at[l, page_N, :, at_N % TILE].set(_bits(y_N1GK[:, 0]))
                    for x, y_N1GK in zip(pages, new, strict=True)
                ]
                read = Pages(*kept, table_NP).tiles(l).read
                numbers = functools.partial(jax.lax.bitcast_convert_type, new_dtype=dtype)
                tiles = Tiles(TILE, lambda t: tuple(map(numbers, read(t))))
                own = (x.swapaxes(1, 2) for x in new)
                given = q_N1HK, *own, at_N, tiles
                return attending.step_attention(self.config.block, l, *given, **sinks), kept

            attend, form = self._attends(attend), self.config.block
            x_N1D, pages = self._layer(form, layer_params, l, x_N1D, at_N[:, None], attend)
            return (x_N1D, *pages), None

        batch = {"tokens": tokens_N[:, None], "positions": at_N[:, None]}
        x_N1D = decoder.embed(self.config, params, batch)
        carry, before = (x_N1D, k, v), self._before(params)
        (x_N1D, k, v), _ = scan_layers(layer, carry, params["blocks"], before)
        return x_N1D[:, 0], k, v


def log_probs(config: DecoderConfig, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The log-probability of each of a batch's ``targets``, with the bits that a sampler whose
    ``exact`` is set tells; its derivative is that of the usual forward pass.

    So what multiplies a gradient by the ratio of both, as reinforcement learning does, begins with
    a ratio of 1. It costs a forward pass of the usual kind and one of this, whose work ends at the
    last token of a row that ``mask`` counts. On a mesh each device reads its own rows.

    Args:
      config, params: the model, in the dtype in which the sampler has it.
      batch: ``tokens``, ``targets`` and ``mask`` [B, T].

    Returns:
      float32 [B, T], 0 behind the last token that ``mask`` counts.

    Raises:
      ValueError: for rows of several documents, or beyond the length of dynamic scaling, and on
        meshes that split more than rows.
    """
    check_form(config)
    check_positions(config, batch["tokens"].shape[1])
    if found := {"segments", "positions"} & batch.keys():
        raise ValueError(
            f"the batch has {' and '.join(sorted(found))}: exact log-probabilities are those of "
            "one text a row, from its first position on; give such rows"
        )
    check_mesh(dict(jax.sharding.get_abstract_mesh().shape))
    axes, parts = split_over("batch")
    if (rows := len(batch["tokens"])) % parts:
        raise ValueError(
            f"a batch of {rows} rows does not divide over the {parts} devices of {axes}: exact "
            "log-probabilities are those of whole rows; give a multiple"
        )
    kept = {name: batch[name] for name in ("tokens", "targets", "mask")}
    return _log_probs(config, params, kept)


def check_form(config: Any) -> None:
    """Raises ValueError for a model that is no decoder, or keeps more of a row than keys."""
    if not isinstance(config, DecoderConfig):
        form = type(config).__name__.removesuffix("Config").lower()
        raise ValueError(
            f"a model of the form {form} has no exact log-probabilities: give a decoder, whose "
            "tokens alone are read in one order of sums"
        )
    check_pages(config)


def check_mesh(shape: Mapping[str, int]) -> None:
    """Raises ValueError for a mesh on which sums would have another order."""
    split = {axis: n for axis, n in shape.items() if n > 1 and axis not in ("data", "fsdp")}
    if split:
        told = ", ".join(f"{axis}={n}" for axis, n in split.items())
        raise ValueError(
            f"the mesh has {told}, over which sums have another order: exact log-probabilities "
            "are those of one device; split rows over data or fsdp"
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_probs(config, params, batch):
    exact = ExactDecoder(config).log_probs
    if not (free := not_taken_over()):
        return exact(params, batch)
    rows = PartitionSpec(split_over("batch")[0])
    return jax.shard_map(
        exact,
        in_specs=(PartitionSpec(), rows),
        out_specs=rows,
        axis_names=free,
        # Loops carry what begins alike on all devices.
        check_vma=False,
    )(params, batch)


@_log_probs.defjvp
def _log_probs_jvp(config, primals, tangents):
    (params, batch), (d_params, _) = primals, tangents

    def usual(params):
        log_p_BT = decoder.log_probs(config, params, decoder.run(config, params, batch), batch)
        at_T = jnp.arange(log_p_BT.shape[1])
        return jnp.where(at_T < _count(batch["mask"])[:, None], log_p_BT, 0)

    return _log_probs(config, params, batch), jax.jvp(usual, (params,), (d_params,))[1]


def _count(mask_BT: jax.Array) -> jax.Array:
    """How many tokens of each row there are up to the last that counts."""
    return jnp.where(mask_BT > 0, jnp.arange(1, mask_BT.shape[1] + 1), 0).max(1)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of numbers: to write some of bfloat16 a CPU would widen all, and round them."""
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _blocks(rows: int | jax.Array) -> jax.Array:
    """The number of blocks of some rows, which no compiler knows beforehand: it would write out a
    loop of one, and fuse it with what is around it."""
    return jax.lax.optimization_barrier(jnp.asarray((rows + LANES - 1) // LANES, jnp.int32))


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % LANES), *[(0, 0)] * (x.ndim - 1)))


def _lanes(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * LANES, LANES)


def _by_lanes(function: Callable[..., jax.Array], *given: jax.Array) -> jax.Array:
    """Applies a function of blocks of rows to all rows. It is fused with nothing before and behind
    it, with which it would be rounded as that is."""
    padded = [_padded(x) for x in given]
    made = jax.eval_shape(function, *(x[:LANES] for x in padded))

    def apply(i, found):
        alone = jax.lax.optimization_barrier
        rows = alone(function(*alone([_lanes(x, i) for x in padded])))
        return jax.lax.dynamic_update_slice_in_dim(found, rows, i * LANES, axis=0)

    nothing = jnp.zeros((len(padded[0]), *made.shape[1:]), made.dtype)
    return jax.lax.fori_loop(0, _blocks(len(padded[0])), apply, nothing)[: len(given[0])]
