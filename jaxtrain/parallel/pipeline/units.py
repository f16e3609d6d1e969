"""A tick table as the executor reads it: in each tick two units and two arrivals."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxtrain.parallel.pipeline.tables import NONE, Table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unit:
    """One forward or backward unit of this device in this tick; scalars, slots -1 for none."""

    present: jax.Array
    first: jax.Array  # of all stages: embeds
    last: jax.Array  # of all stages: has the loss
    microbatch: jax.Array
    chunk: jax.Array
    layer: jax.Array  # the number of its first layer
    input_slot: jax.Array
    cotangent_slot: jax.Array
    residual_slot: jax.Array


def schedule_arrays(table: Table, chunk: int) -> dict[str, Any]:
    """Returns the table as int32 and bool arrays [T, S], grouped by unit."""
    device_S = np.arange(table.stages)

    def unit(kind: str, cotangent_TS: np.ndarray) -> Unit:
        microbatch_TS = getattr(table, f"{kind}_microbatch")
        chunk_TS = getattr(table, f"{kind}_chunk")
        present_TS = microbatch_TS != NONE
        stage_TS = np.where(present_TS, chunk_TS * table.stages + device_S, 0)
        return Unit(
            present=present_TS,
            first=present_TS & (stage_TS == 0),
            last=present_TS & (stage_TS == table.stages * table.virtual - 1),
            microbatch=np.maximum(microbatch_TS, 0),
            chunk=np.maximum(chunk_TS, 0),
            layer=(stage_TS * chunk).astype(np.int32),
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
