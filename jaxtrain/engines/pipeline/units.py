"""A tick table as the executor reads it: in each tick two units and two arrivals."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.engines.pipeline.tables import NONE, Table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unit:
    """One forward or backward unit of this device in this tick; scalars, slots -1 for none."""

    present: jax.Array
    first: jax.Array  # of its stack's stages: embeds, or runs what is between two stacks
    last: jax.Array  # of all stages: has the loss
    microbatch: jax.Array
    stack: jax.Array  # of which stack of layers
    chunk: jax.Array  # of this device's share of that stack
    layer: jax.Array  # the number of its first layer
    layers: jax.Array  # how many it has
    input_slot: jax.Array
    cotangent_slot: jax.Array
    residual_slot: jax.Array


def schedule_arrays(table: Table, counts: Sequence[int], stacks: int = 1) -> dict[str, Any]:
    """Returns the table as int32 and bool arrays [T, S], grouped by unit.

    Args:
      counts: how many layers each global stage has.
      stacks: how many stacks of layers share the table's chunks, in equal parts.
    """
    device_S, counts_G = np.arange(table.stages), np.array(counts, np.int32)
    virtual = table.virtual // stacks
    first_G = np.cumsum(counts_G, dtype=np.int32) - counts_G

    def unit(kind: str, cotangent_TS: np.ndarray) -> Unit:
        microbatch_TS = getattr(table, f"{kind}_microbatch")
        chunk_TS = getattr(table, f"{kind}_chunk")
        present_TS = microbatch_TS != NONE
        stage_TS = np.where(present_TS, chunk_TS * table.stages + device_S, 0)
        return Unit(
            present=present_TS,
            first=present_TS & (stage_TS % (table.stages * virtual) == 0),
            last=present_TS & (stage_TS == table.stages * table.virtual - 1),
            microbatch=np.maximum(microbatch_TS, 0),
            stack=np.maximum(chunk_TS, 0) // virtual,
            chunk=np.maximum(chunk_TS, 0) % virtual,
            layer=first_G[stage_TS],
            layers=counts_G[stage_TS],
            input_slot=getattr(table, f"{kind}_slot"),
            cotangent_slot=cotangent_TS,
            residual_slot=getattr(table, f"residual_slot_{kind}"),
        )

    return {
        "forward": unit("fwd", np.full_like(table.fwd_slot, NONE)),
        "backward": unit("bwd", table.cot_slot),
        "receive_input": table.recv_fwd_slot,
        "receive_cotangent": table.recv_bwd_slot,
    }
