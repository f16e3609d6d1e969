"""Meetings of replicas are added up from a program, and the interval that hides a network named."""

import dataclasses

import pytest

from jaxtrain.planning.hlo import Collective, Program
from jaxtrain.planning.meetings import Meetings, meetings_of
from jaxtrain.planning.targets import parse_target


@pytest.mark.parametrize(("seconds", "step"), [(0.4, 0.1), (1.13, 0.098), (1e-6, 1.0), (7.0, 0.7)])
def test_the_interval_is_the_least_that_keeps_meetings_to_their_share(seconds, step):
    found = Meetings(50, 0.0, 1e9, seconds, step).least(0.05)
    share = lambda every: seconds / (seconds + every * step)  # noqa: E731
    assert share(found) <= 0.05 * (1 + 1e-9)
    assert found == 1 or share(found - 1) > 0.05
    assert "--local.every" not in str(Meetings(50, 0.0, 1e9))


def test_a_meeting_is_what_crosses_the_axis_of_replicas():
    size, every = 10**9, 50
    met = Collective("all-reduce", ("data",), 4, 1, size, islands=4, share=1 / every)
    inside = Collective("all-gather", ("fsdp",), 8, 3, size)
    target = parse_target("h100:4x8", dcn_gbps=8.0)  # 1 GB/s
    found = meetings_of(Program((met, met, inside)), target, every)
    assert (found.fast, found.crossing) == pytest.approx((0.0, 2 * 1.5 * size))
    assert found.seconds == pytest.approx(3.0 / target.chip.efficiency["links"])
    near = dataclasses.replace(met, islands=1)
    found = meetings_of(Program((near,)), target, every)
    assert (found.fast, found.crossing) == pytest.approx((1.5 * size, 0.0))
    assert f"send {1.5 * size / every / 2**20:.1f} MiB over the fast links per" in str(found)
    assert meetings_of(Program((met,)), parse_target("cpu:8"), every).seconds is None
