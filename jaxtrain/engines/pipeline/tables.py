"""Tick tables: which device runs which unit of a pipeline schedule when, and where it keeps what.

``S`` devices along the mesh axis ``pipe`` hold ``V`` virtual stages each: global stage
``g = v * S + s`` is chunk ``v`` on device ``s``. Every one of ``M`` microbatches runs forward
through the ``G = S V`` global stages and backward through them again. Time is cut into ticks. In a
tick a device runs at most one forward unit and then at most one backward unit; at its end
everything computed moves one device on (activations to ``s + 1``, cotangents to ``s - 1``, modulo
``S``), so it is of use there from the next tick on. Only the last global stage may run backward in
the very tick of its forward: its cotangent comes from the loss.

All devices meet in the exchange, so a tick lasts as long as its slowest device. With ``f`` and
``b`` the times of a whole stage forward and backward (``b = 2 f``, or ``3 f`` with full
rematerialisation), and a chunk taking ``1 / V`` of them:

===========  ============================  ==============================================
schedule     makespan                      stage inputs held by device s
===========  ============================  ==============================================
gpipe        ``(M + S - 1) (f + b)``       ``M``
1f1b         ``(M + S - 1) (f + b)``       ``min(M, 2 (S - s) - 1)``
interleaved  ``(M + (S - 1) / V) (f + b)`` ``min(M V, S (V - 1) + 2 (S - s) - 1)``
===========  ============================  ==============================================

The ideal is ``M (f + b)``. The line of interleaved is for M a multiple of S. Any other M is run as
the next multiple ``M'``, with holes in the last group of S microbatches: its makespan is
``(M' + (S - 1 - (M' - M)) / V) (f + b)``, which is never more than that of 1f1b.

Would splitting the backward unit into input gradient (I) and weight gradient (W), as zero-bubble
schedules do, win here? In ticks of one F and one B it gains nothing: device 0 still has to run its
last S - 1 units of W after their I. In ticks of one unit (F, I or W), simulated greedily for S = 8
and M = 32, F = I = W = 1 takes 3 M + (S - 1) = 103, against 117 for 1F1B, 106.5 and 101.25 for
interleaved with V = 2 and 4; but with I = 1.2 and W = 0.8 (attention has no weights) it takes 118.8
at the stash of 1F1B, as one slow unit holds up every tick, and with W = 2 (what plain ``jax.vjp``
with respect to weights costs, running through I again) at least 155. So it is not done.

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2019 (PipeDream, 1F1B), Narayanan et al. 2021
(interleaved 1F1B), Qi et al. 2023 (zero bubble).
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np

SCHEDULES = ("gpipe", "1f1b", "interleaved")
NONE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A schedule, as int32 arrays ``[T, S]`` over ticks and devices; -1 means nothing.

    Args:
      schedule: its name, one of :data:`SCHEDULES`.
      stages: devices along ``pipe``, S.
      microbatches: M.
      virtual: chunks per device, V.
      backward: whether there are backward units; an evaluation has none.
      fwd_microbatch: microbatch of the forward unit.
      fwd_chunk: chunk (virtual stage of this device) of the forward unit.
      bwd_microbatch: microbatch of the backward unit, which runs after the tick's forward unit.
      bwd_chunk: chunk of the backward unit.
      fwd_slot: input slot that holds the input of the forward unit; -1 on global stage 0, which
        makes its own from the microbatch.
      bwd_slot: input slot that holds the stage input of the backward unit; -1 on global stage 0.
      recv_fwd_slot: input slot for the activation that arrives from device ``s - 1`` at the end
        of the tick; -1 where none does or what does is of no use.
      cot_slot: cotangent slot that the backward unit reads; -1 on the last global stage, which
        gets its cotangent from the loss.
      recv_bwd_slot: cotangent slot for what arrives from device ``s + 1`` at the end of the tick.
      residual_slot_fwd: residual slot that the forward unit writes.
      residual_slot_bwd: residual slot that the backward unit reads.
      input_slots: slots of the input buffer, the most that any device needs and at least 1. A slot
        is taken from the arrival to the end of the backward unit (without any: the forward unit).
      cotangent_slots: the same for cotangents, taken from the arrival to the backward unit.
      residual_slots: the same for residuals, taken from the forward to the backward unit.
    """

    schedule: str
    stages: int
    microbatches: int
    virtual: int
    backward: bool
    fwd_microbatch: np.ndarray
    fwd_chunk: np.ndarray
    bwd_microbatch: np.ndarray
    bwd_chunk: np.ndarray
    fwd_slot: np.ndarray
    bwd_slot: np.ndarray
    recv_fwd_slot: np.ndarray
    cot_slot: np.ndarray
    recv_bwd_slot: np.ndarray
    residual_slot_fwd: np.ndarray
    residual_slot_bwd: np.ndarray
    input_slots: int
    cotangent_slots: int
    residual_slots: int

    @property
    def ticks(self) -> int:
        """Number of ticks, T."""
        return len(self.fwd_microbatch)

    def arrays(self) -> dict[str, np.ndarray]:
        """The ``[T, S]`` arrays by name."""
        return {name: getattr(self, name) for name in ARRAYS}


ARRAYS = tuple(f.name for f in dataclasses.fields(Table) if f.type is np.ndarray)


@functools.cache
def make_table(
    schedule: str, *, stages: int, microbatches: int, virtual: int = 1, backward: bool = True
) -> Table:
    """Computes the tick table of a schedule. Tables are cached and their arrays read-only.

    Args:
      schedule: ``"gpipe"`` (all forward units, then all backward units), ``"1f1b"`` (one of each
        per tick) or ``"interleaved"`` (the same over ``virtual`` chunks per device).
      stages: devices along ``pipe``.
      microbatches: microbatches per step.
      virtual: chunks per device; more than 1 only for ``"interleaved"``.
      backward: False leaves the backward units out, for an evaluation: no residual is kept, and a
        stage input is held until its forward unit alone.

    Raises:
      ValueError: for a schedule that there is not, or sizes that it cannot have.

    >>> table = make_table("1f1b", stages=2, microbatches=3)
    >>> table.fwd_microbatch.T.tolist()
    [[0, 1, 2, -1, -1], [-1, 0, 1, 2, -1]]
    >>> table.bwd_microbatch.T.tolist()
    [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, -1]]
    """
    check_sizes(schedule, stages, microbatches, virtual)
    fwd_tick_MG, bwd_tick_MG = unit_ticks(schedule, stages, microbatches, virtual)
    last_tick_MG = bwd_tick_MG if backward else fwd_tick_MG
    arrays = {
        name: np.full((int(last_tick_MG.max()) + 1, stages), NONE, np.int32) for name in ARRAYS
    }
    for kind, tick_MG in (("fwd", fwd_tick_MG), ("bwd", bwd_tick_MG))[: 1 + backward]:
        for (m, g), tick in np.ndenumerate(tick_MG):
            chunk, device = divmod(g, stages)
            arrays[f"{kind}_microbatch"][tick, device] = m
            arrays[f"{kind}_chunk"][tick, device] = chunk
    sent, arrived = fwd_tick_MG[:, :-1], fwd_tick_MG[:, 1:]
    marks = {"recv_fwd_slot": sent, "fwd_slot": arrived}
    marks |= {"bwd_slot": bwd_tick_MG[:, 1:]} if backward else {}
    inputs = place(arrays, 1, sent, last_tick_MG[:, 1:], marks)
    cotangents = residuals = 1
    if backward:
        sent, arrived = bwd_tick_MG[:, 1:], bwd_tick_MG[:, :-1]
        marks = {"recv_bwd_slot": sent, "cot_slot": arrived}
        cotangents = place(arrays, 0, sent, arrived, marks)
        # The forward unit of a tick writes before the backward unit reads, so its slot is taken
        # from the end of the tick before.
        marks = {"residual_slot_fwd": fwd_tick_MG, "residual_slot_bwd": bwd_tick_MG}
        residuals = place(arrays, 0, fwd_tick_MG - 1, bwd_tick_MG, marks)
    for array in arrays.values():
        array.setflags(write=False)
    return Table(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        virtual=virtual,
        backward=backward,
        input_slots=inputs,
        cotangent_slots=cotangents,
        residual_slots=residuals,
        **arrays,
    )


Times = float | Sequence[float]


def unit_times(table: Table, forward: Times, backward: Times) -> tuple[np.ndarray, np.ndarray]:
    """Returns how long the forward and the backward unit of each tick and device take, ``[T, S]``.

    Args:
      forward, backward: as for :func:`makespan`.
    """

    def times(kind: str, time: Times) -> np.ndarray:
        chunk_TS = getattr(table, f"{kind}_chunk")
        stage_TS = np.maximum(chunk_TS, 0) * table.stages + np.arange(table.stages)
        each = np.ndim(time) == 0
        time_G = np.full(table.stages * table.virtual, time / table.virtual) if each else time
        return np.where(chunk_TS != NONE, np.asarray(time_G)[stage_TS], 0.0)

    return times("fwd", forward), times("bwd", backward)


def makespan(table: Table, *, forward: Times = 1.0, backward: Times = 2.0) -> float:
    """Time of one step, when a tick lasts as long as its slowest device.

    Args:
      forward: time of a whole stage forward, of which a chunk takes ``1 / virtual``; or the times
        of all global stages, S V of them.
      backward: the same backward: 2 forwards, or 3 when it recomputes the forward.

    Returns:
      The time, in the unit of ``forward``; communication and the optimizer not counted.

    >>> makespan(make_table("1f1b", stages=4, microbatches=8))  # 3 M + 3 (S - 1)
    33.0
    >>> makespan(make_table("interleaved", stages=4, microbatches=8, virtual=3))
    27.0
    >>> makespan(make_table("1f1b", stages=2, microbatches=8), forward=[1, 2], backward=[2, 4])
    51.0
    """
    return math.fsum(sum(unit_times(table, forward, backward)).max(axis=1))


def bubble(table: Table, *, forward: Times = 1.0, backward: Times = 2.0) -> float:
    """The part of the makespan in which a device, on average, has nothing to do, 0 to 1.

    >>> bubble(make_table("gpipe", stages=4, microbatches=9))
    0.25
    """
    busy = sum(times.sum() for times in unit_times(table, forward, backward)) / table.stages
    return float(1 - busy / makespan(table, forward=forward, backward=backward))


def peak_stash(table: Table) -> np.ndarray:
    """The most stage inputs that each device holds at a time, ``[S]``.

    A stage input is held from its arrival (on global stage 0, from its forward unit) to the end of
    its backward unit. With residuals stashed in place of inputs, as many sets of residuals are
    held, each of one chunk.

    >>> peak_stash(make_table("1f1b", stages=4, microbatches=32)).tolist()
    [7, 5, 3, 1]
    """
    arrived_TS = table.recv_fwd_slot != NONE
    # An arrival at the end of a tick is held in the next one.
    held_TS = np.roll(arrived_TS, 1, axis=0).astype(np.int64)
    embeds_TS = (table.fwd_chunk == 0) & (np.arange(table.stages) == 0)
    backward_TS = table.bwd_microbatch != NONE
    begun_TS = np.cumsum(held_TS + embeds_TS, axis=0)
    over_TS = np.cumsum(backward_TS, axis=0) - backward_TS
    return (begun_TS - over_TS).max(axis=0)


def check_sizes(schedule: str, stages: int, microbatches: int, virtual: int) -> None:
    """Raises ValueError for sizes that no table of this schedule has."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}: use one of {', '.join(SCHEDULES)}")
    sizes = {"stages": stages, "microbatches": microbatches, "virtual": virtual}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}: a pipeline needs at least 1")
    if virtual > 1 and schedule != "interleaved":
        raise ValueError(
            f"schedule {schedule!r} has one stage per device, and virtual is {virtual}: use "
            "virtual=1 or schedule 'interleaved'"
        )


def unit_ticks(
    schedule: str, stages: int, microbatches: int, virtual: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tick of every forward and every backward unit, both ``[M, G]``.

    A microbatch never waits: it is one global stage further every tick, turns around at the last
    one, and comes back one stage per tick. So the tick at which it enters decides all. In 1F1B that
    is its own number. In the interleaved schedule a device sees a microbatch again S ticks later,
    so microbatches enter in groups of S, one group every ``S V`` ticks: the group's V passes then
    fill each device without a gap, forward as backward. (With V = 1 that is 1F1B.)
    """
    m = np.arange(microbatches)[:, None]
    g = np.arange(stages * virtual)[None, :]
    last = stages * virtual - 1
    group, member = np.divmod(m, stages)
    enter = group * stages * virtual + member
    if schedule == "gpipe":
        turn = microbatches + stages - 1 + m
        return m + g, turn + (last - g)
    return enter + g, enter + last + (last - g)


def place(
    arrays: dict[str, np.ndarray],
    first: int,
    after_MG: np.ndarray,
    until_MG: np.ndarray,
    marks: dict[str, np.ndarray],
) -> int:
    """Gives every unit a slot on its device, and notes it wherever the table names the slot.

    Taken in order of time, the lowest free slot needs no more slots than are taken at once.

    Args:
      arrays: the table's, which are filled in.
      first: the global stage of the units in column 0; the next column is of the next one.
      after_MG, until_MG: a slot is taken after tick ``after``, and free again after tick ``until``.
      marks: array of the table to the tick of each unit's entry in it.

    Returns:
      The most slots that any device needs, and at least 1, so that a buffer of that size can be
      indexed.
    """
    stages = arrays["fwd_slot"].shape[1]
    busy, idle = ([[] for _ in range(stages)] for _ in range(2))
    sizes = [0] * stages
    for unit in sorted(np.ndindex(after_MG.shape), key=lambda unit: after_MG[unit]):
        device = (first + unit[1]) % stages
        while busy[device] and busy[device][0][0] <= after_MG[unit]:
            heapq.heappush(idle[device], heapq.heappop(busy[device])[1])
        if not idle[device]:
            heapq.heappush(idle[device], sizes[device])
            sizes[device] += 1
        slot = heapq.heappop(idle[device])
        heapq.heappush(busy[device], (until_MG[unit], slot))
        for name, tick_MG in marks.items():
            arrays[name][tick_MG[unit], device] = slot
    return max(*sizes, 1)
