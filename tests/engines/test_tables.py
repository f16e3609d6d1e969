"""Tick tables: every small schedule, against an independent simulation and the closed formulas."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.engines.pipeline.tables import (
    ARRAYS,
    SCHEDULES,
    bubble,
    make_table,
    makespan,
    peak_stash,
)
from tests.engines.table_checker import check_table

SMALL = [
    (schedule, stages, microbatches, virtual)
    for schedule in SCHEDULES
    for stages in range(1, 7)
    for microbatches in range(1, 13)
    for virtual in (range(1, 4) if schedule == "interleaved" else [1])
]


def table_of(case, **options):
    schedule, stages, microbatches, virtual = case
    return make_table(
        schedule, stages=stages, microbatches=microbatches, virtual=virtual, **options
    )


small_tables = st.sampled_from(SMALL).map(table_of)
tables = st.one_of(
    small_tables,
    st.tuples(st.just("interleaved"), st.integers(2, 8), st.integers(1, 40), st.integers(2, 5)).map(
        table_of
    ),
    st.sampled_from(SMALL).map(lambda case: table_of(case, backward=False)),
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_small_table_is_sound(schedule):
    for case in SMALL:
        if case[0] == schedule:
            check_table(table_of(case))
            check_table(table_of(case, backward=False))


@settings(max_examples=30, deadline=None)
@given(tables)
def test_larger_tables_are_sound(table):
    check_table(table)


@settings(max_examples=300, deadline=None)
@given(tables, st.data())
def test_check_table_sees_any_single_corruption(table, data):
    name = data.draw(st.sampled_from(ARRAYS))
    array = getattr(table, name)
    tick = data.draw(st.integers(0, array.shape[0] - 1))
    device = data.draw(st.integers(0, array.shape[1] - 1))
    high = max(table.microbatches, table.virtual, table.input_slots)
    value = data.draw(st.integers(-2, high).filter(lambda v: v != array[tick, device]))
    corrupted = array.copy()
    corrupted[tick, device] = value
    with pytest.raises(ValueError, match=r"tick|units run"):
        check_table(dataclasses.replace(table, **{name: corrupted}))


@settings(max_examples=30, deadline=None)
@given(tables.filter(lambda t: t.ticks > 1), st.data())
def test_check_table_sees_a_missing_tick(table, data):
    tick = data.draw(st.integers(0, table.ticks - 1))
    kept = {name: np.delete(array, tick, axis=0) for name, array in table.arrays().items()}
    with pytest.raises(ValueError, match=r"tick|units run"):
        check_table(dataclasses.replace(table, **kept))


@pytest.mark.parametrize("buffer", ["input_slots", "cotangent_slots", "residual_slots"])
def test_buffers_are_no_larger_than_needed(buffer):
    for case in SMALL:
        table = table_of(case)
        size = getattr(table, buffer)
        if size == 1:
            continue
        with pytest.raises(ValueError, match="lost"):
            check_table(dataclasses.replace(table, **{buffer: size - 1}))


def test_check_table_wants_int32_arrays_of_one_shape():
    table = make_table("1f1b", stages=2, microbatches=3)
    short = dataclasses.replace(table, cot_slot=table.cot_slot[1:])
    with pytest.raises(ValueError, match=r"cot_slot is int32\[4, 2\].*int32\[5, 2\]"):
        check_table(short)
    with pytest.raises(ValueError, match="int64"):
        check_table(dataclasses.replace(table, cot_slot=table.cot_slot.astype(np.int64)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 3), (2.5, 4)])
def test_makespan_of_one_stage_per_device(schedule, forward, backward):
    for case in SMALL:
        if case[0] != schedule:
            continue
        _, stages, microbatches, _ = case
        table = table_of(case)
        expected = (microbatches + stages - 1) * (forward + backward)
        found = makespan(table, forward=forward, backward=backward)
        assert found == pytest.approx(expected)
        share = (stages - 1) / (microbatches + stages - 1)
        assert bubble(table, forward=forward, backward=backward) == pytest.approx(share)


def test_makespan_of_1f1b_is_three_units_for_each_microbatch_and_other_stage():
    assert makespan(make_table("1f1b", stages=8, microbatches=32)) == 3 * 32 + 3 * 7


def test_makespan_of_interleaved_divides_the_bubble_by_the_virtual_stages():
    for case in SMALL:
        schedule, stages, microbatches, virtual = case
        if schedule != "interleaved":
            continue
        found = makespan(table_of(case))
        if microbatches % stages == 0:
            assert found == pytest.approx(3 * (microbatches + (stages - 1) / virtual))
        padded = -(-microbatches // stages) * stages
        holes = padded - microbatches
        assert found == pytest.approx(3 * (padded + (stages - 1 - holes) / virtual))
        assert found <= makespan(table_of(("1f1b", stages, microbatches, 1))) + 1e-9


def test_an_evaluation_goes_through_the_stages_once_and_holds_one_input():
    for case in SMALL:
        _, stages, microbatches, virtual = case
        table = table_of(case, backward=False)
        # The whole pipeline fills and drains once; groups of S microbatches follow without a gap.
        groups, rest = divmod(microbatches - 1, stages)
        enters = groups * stages * virtual + rest
        assert table.ticks == enters + stages * virtual, case
        assert (table.input_slots, table.cotangent_slots, table.residual_slots) == (1, 1, 1)
        assert (table.bwd_microbatch == -1).all()


def test_interleaved_with_one_chunk_is_1f1b():
    for stages, microbatches in [(1, 3), (4, 3), (4, 9)]:
        one = table_of(("1f1b", stages, microbatches, 1)).arrays()
        other = table_of(("interleaved", stages, microbatches, 1)).arrays()
        for name in ARRAYS:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_stash_formulas():
    for case in SMALL:
        schedule, stages, microbatches, virtual = case
        table = table_of(case)
        window = [2 * (stages - s) - 1 for s in range(stages)]
        if schedule == "gpipe":
            expected = [microbatches] * stages
        elif schedule == "1f1b":
            expected = [min(microbatches, w) for w in window]
        else:
            expected = [min(microbatches * virtual, stages * (virtual - 1) + w) for w in window]
        if schedule != "interleaved" or microbatches % stages == 0:
            assert peak_stash(table).tolist() == expected, case
        assert (peak_stash(table) <= expected).all(), case
        assert table.residual_slots == peak_stash(table).max()
        assert table.input_slots <= table.residual_slots
        assert table.cotangent_slots == 1


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2)])
def test_stash_does_not_grow_with_microbatches(schedule, virtual):
    stash = [peak_stash(table_of((schedule, 4, m, virtual))).tolist() for m in (8, 32, 128)]
    assert stash[0] == stash[1] == stash[2]
    if schedule == "1f1b":
        assert max(stash[0]) == 2 * 4 - 1


def test_tables_are_cached_and_read_only():
    table = make_table("gpipe", stages=2, microbatches=2)
    assert make_table("gpipe", stages=2, microbatches=2) is table
    with pytest.raises(ValueError, match="read-only"):
        table.fwd_slot[0, 0] = 1


@pytest.mark.parametrize(
    ("schedule", "sizes", "sentence"),
    [
        ("zigzag", {}, "schedule is 'zigzag': use one of gpipe, 1f1b, interleaved"),
        ("1f1b", {"stages": 0}, "stages is 0: a pipeline needs at least 1"),
        ("gpipe", {"microbatches": 0}, "microbatches is 0"),
        ("interleaved", {"virtual": -1}, "virtual is -1"),
        ("1f1b", {"virtual": 2}, "virtual is 2: use virtual=1 or schedule 'interleaved'"),
    ],
)
def test_sizes_that_no_table_has(schedule, sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_table(schedule, **({"stages": 2, "microbatches": 4} | sizes))


def zero_bubble(stages, microbatches, F, I, W):
    """Makespan of ZB-H1 where every device begins what it can at once.

    Input gradients come first, then forward units while no more microbatches are in flight than
    with 1F1B, and weight gradients where there is nothing else.
    """
    done_F = [[] for _ in range(stages)]
    done_I = [[] for _ in range(stages)]
    done_W, clock = [0] * stages, [0.0] * stages

    def begins(s):
        forward, backward = len(done_F[s]), len(done_I[s])
        if backward < forward:
            given = done_F[s] if s == stages - 1 else done_I[s + 1]
            if len(given) > backward:
                yield max(clock[s], given[backward]), 0
        arrived = s == 0 or len(done_F[s - 1]) > forward
        if arrived and forward < microbatches and forward - backward < stages - s:
            yield max(clock[s], 0 if s == 0 else done_F[s - 1][forward]), 1
        if done_W[s] < backward:
            yield clock[s], 2

    while min(done_W) < microbatches:
        start, unit, s = min((*best, s) for s in range(stages) for best in begins(s))
        clock[s] = start + (I, F, W)[unit]
        if unit == 2:
            done_W[s] += 1
        else:
            (done_I, done_F)[unit][s].append(clock[s])
    return max(clock)


@pytest.mark.parametrize(
    ("units", "wanted"), [((1, 1, 1), 103), ((1, 2, 1), 142), ((1, 2, 3), 206)], ids=str
)
def test_a_zero_bubble_split_wins_no_more_than_chunks(units, wanted):
    """The table of engines/README.md: F, I and W of 32 microbatches on 8 stages."""
    assert zero_bubble(8, 32, *units) == wanted
    backward = 2.0 if units[1] == 1 else 3.0
    tables = [make_table("1f1b", stages=8, microbatches=32)]
    tables += [make_table("interleaved", stages=8, microbatches=32, virtual=v) for v in (2, 4)]
    times = [makespan(table, backward=backward) for table in tables]
    assert times == ([117, 106.5, 101.25] if backward == 2 else [156, 142, 135])
    assert times[2] < wanted
