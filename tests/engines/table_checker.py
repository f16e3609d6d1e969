"""Runs a tick table on labels in place of arrays, and sees that nothing goes wrong."""

import numpy as np

from jaxtrain.engines.pipeline.tables import NONE, Table


def check_table(table: Table) -> None:
    """Runs the table on labels in place of arrays, tick by tick, and sees that nothing goes wrong.

    Every unit must run exactly once and find its own input, residuals and cotangent in the slots
    that it reads; nothing that is still needed may be overwritten or dropped on arrival. It shares
    no code with :func:`make_table`.

    Raises:
      ValueError: naming the first tick and device where that is not so.
    """
    shape = (table.ticks, table.stages)
    for name, array in table.arrays().items():
        if array.shape != shape or array.dtype != np.int32:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}: every array of a table must be "
                f"int32{list(shape)}, ticks by devices"
            )
    Simulation(table).run()


class Simulation:
    """What every slot holds while a table runs; the state of :func:`check_table`."""

    def __init__(self, table: Table):
        self.table = table
        self.last = table.stages * table.virtual - 1
        # (device, slot) -> the (microbatch, global stage) whose data it holds and still needs.
        self.inputs: dict[tuple[int, int], tuple[int, int]] = {}
        self.cotangents: dict[tuple[int, int], tuple[int, int]] = {}
        self.residuals: dict[tuple[int, int], tuple[int, int]] = {}
        self.forwarded: set[tuple[int, int]] = set()
        self.backwarded: set[tuple[int, int]] = set()

    def run(self) -> None:
        """Runs all ticks."""
        table = self.table
        for tick in range(table.ticks):
            sent_forward, sent_backward = {}, {}
            for device in range(table.stages):
                here = {name: int(array[tick, device]) for name, array in table.arrays().items()}
                where = f"tick {tick}, device {device}"
                sent_forward[device] = self.forward(where, device, here)
                sent_backward[device] = self.backward(where, device, here)
            for device in range(table.stages):
                where = f"tick {tick}, device {device}"
                self.receive_activation(
                    where, tick, device, sent_forward[(device - 1) % table.stages]
                )
                self.receive_cotangent(
                    where, tick, device, sent_backward[(device + 1) % table.stages]
                )
        every = table.microbatches * (self.last + 1)
        for kind, done, units in (
            ("forward", self.forwarded, every),
            ("backward", self.backwarded, every * table.backward),
        ):
            if len(done) != units:
                raise ValueError(f"{len(done)} of {units} {kind} units run: each must, once")

    def unit(self, where: str, device: int, here: dict[str, int], kind: str) -> tuple | None:
        """The forward or backward unit of a device in a tick as (microbatch, global stage)."""
        table = self.table
        microbatch, chunk = here[f"{kind}_microbatch"], here[f"{kind}_chunk"]
        mine = [f"{kind}_slot", f"residual_slot_{kind}"] + ["cot_slot"] * (kind == "bwd")
        if microbatch == NONE:
            for name in [f"{kind}_chunk", *mine]:
                if here[name] != NONE:
                    raise ValueError(f"{where}: {name} is {here[name]} where no {kind} unit runs")
            return None
        if not (0 <= microbatch < table.microbatches and 0 <= chunk < table.virtual):
            raise ValueError(f"{where}: there is no microbatch {microbatch} of chunk {chunk}")
        return microbatch, chunk * table.stages + device

    def forward(self, where: str, device: int, here: dict[str, int]) -> tuple | None:
        """Runs the forward unit; returns it."""
        unit = self.unit(where, device, here, "fwd")
        if unit is None:
            return None
        if unit in self.forwarded:
            raise ValueError(f"{where}: {name_of(unit)} runs forward twice")
        source = None if unit[1] == 0 else unit
        self.read(where, self.inputs, device, here["fwd_slot"], source, "fwd_slot")
        slot = here["residual_slot_fwd"]
        if self.table.backward:
            self.store(where, self.residuals, device, slot, unit, "residual")
        else:
            self.read(where, self.residuals, device, slot, None, "residual_slot_fwd")
            self.inputs.pop((device, here["fwd_slot"]), None)
        self.forwarded.add(unit)
        return unit

    def backward(self, where: str, device: int, here: dict[str, int]) -> tuple | None:
        """Runs the backward unit and frees what only it needed; returns it."""
        unit = self.unit(where, device, here, "bwd")
        if unit is None:
            return None
        if unit not in self.forwarded or unit in self.backwarded:
            state = "twice" if unit in self.backwarded else "before it ran forward"
            raise ValueError(f"{where}: {name_of(unit)} runs backward {state}")
        reads = (
            (self.inputs, "bwd_slot", None if unit[1] == 0 else unit),
            (self.cotangents, "cot_slot", None if unit[1] == self.last else unit),
            (self.residuals, "residual_slot_bwd", unit),
        )
        for buffer, name, expected in reads:
            self.read(where, buffer, device, here[name], expected, name)
            buffer.pop((device, here[name]), None)
        self.backwarded.add(unit)
        return unit

    def receive_activation(self, where: str, tick: int, device: int, sent: tuple | None) -> None:
        """Stores what device ``s - 1`` forwarded."""
        useful = None if sent is None or sent[1] == self.last else (sent[0], sent[1] + 1)
        slot = int(self.table.recv_fwd_slot[tick, device])
        self.arrive(where, self.inputs, device, slot, useful, "input")

    def receive_cotangent(self, where: str, tick: int, device: int, sent: tuple | None) -> None:
        """Stores the cotangent that device ``s + 1`` computed."""
        useful = None if sent is None or sent[1] == 0 else (sent[0], sent[1] - 1)
        slot = int(self.table.recv_bwd_slot[tick, device])
        self.arrive(where, self.cotangents, device, slot, useful, "cotangent")

    def arrive(self, where, buffer, device, slot, useful, kind) -> None:
        """Stores an arrival, which must have a slot if, and only if, it is of use."""
        if useful is None and slot != NONE:
            raise ValueError(f"{where}: {kind} slot {slot} waits for what nobody sends")
        if useful is not None:
            self.store(where, buffer, device, slot, useful, kind)

    def store(self, where, buffer, device, slot, unit, kind) -> None:
        """Puts data into a slot, which must exist and hold nothing that is still needed."""
        size = getattr(self.table, f"{kind}_slots")
        if not 0 <= slot < size:
            raise ValueError(
                f"{where}: the {kind} of {name_of(unit)} goes to slot {slot} of {size}: it is lost"
            )
        if (device, slot) in buffer:
            raise ValueError(
                f"{where}: the {kind} of {name_of(unit)} overwrites that of "
                f"{name_of(buffer[device, slot])} in slot {slot}, which is still needed"
            )
        buffer[device, slot] = unit

    def read(self, where, buffer, device, slot, expected, name) -> None:
        """Sees that a slot holds the data of ``expected`` (None: that no slot is read)."""
        if expected is None and slot != NONE:
            raise ValueError(f"{where}: {name} is {slot} where nothing is read: it must be -1")
        found = buffer.get((device, slot))
        if found != expected:
            held = "nothing" if found is None else f"that of {name_of(found)}"
            raise ValueError(
                f"{where}: {name} {slot} should hold the data of {name_of(expected)}, "
                f"and holds {held}"
            )


def name_of(unit: tuple[int, int]) -> str:
    """A unit in words."""
    return f"microbatch {unit[0]} at global stage {unit[1]}"
