"""What a schedule leaves exposed: programs written by hand, whose waits are counted by hand."""

import pytest

import jaxtrain as jt
from jaxtrain.planning.exposure import exposed_seconds
from jaxtrain.planning.hlo import read_program

HEADER = "HloModule m, is_scheduled=true, num_partitions=8\n\n"
DOT = "f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GROUPS = "replica_groups=[4,2]<=[8], dimensions={0}"
GATHER = f"(f32[8,8]{{1,0}}, f32[16,8]{{1,0}}) all-gather-start(%a), channel_id=1, {GROUPS}"
# Two gathers at once, one product behind the first and one behind the second.
BODY = f"""\
  %a = f32[8,8]{{1,0}} parameter(0)
  %g.1 = {GATHER}
  %g.2 = {GATHER}
  %d.1 = {DOT}
  %e.1 = f32[16,8]{{1,0}} all-gather-done(%g.1)
  %d.2 = {DOT}
  %e.2 = f32[16,8]{{1,0}} all-gather-done(%g.2)
"""


def waits(text, *, products, gather, others=0.0):
    """Waits where a collective takes ``gather`` seconds of the fast links, or what that returns."""
    found = exposed_seconds(
        read_program(text, jt.make_mesh(data=4, tensor=2)),
        products=products,
        others=others,
        seconds=gather if callable(gather) else lambda collective: (gather, 0.0),
    )
    return found and {axes: pytest.approx(seconds) for axes, seconds in found.items()}


@pytest.mark.parametrize(
    ("gather", "waited"),
    [
        (0.5, 0.0),  # both are over before the first product is
        (3.0, 2.0 + 2.0),  # over at 3 and 6, where the products would be over at 1 and at 3 + 1
    ],
)
def test_a_device_waits_for_what_products_do_not_hide(gather, waited):
    text = f"{HEADER}ENTRY %main (a: f32[8,8]) -> f32[8,8] {{\n{BODY}"
    text += f"  ROOT %d.3 = {DOT}\n}}\n"
    assert waits(text, products=3.0, gather=gather) == {"tensor": waited}


@pytest.mark.parametrize(
    ("across", "waited"),
    [
        # The network is taken from 0 to 3 by the first; the second has the fast links from 0 to 3.
        ((0.0, 3.0), 2.0),
        # The first has the fast links to 1 and the network to 3, the second the fast ones to 4.
        ((1.0, 2.0), 2.0),
    ],
)
def test_fast_links_and_the_network_carry_one_collective_each(across, waited):
    text = f"{HEADER}ENTRY %main (a: f32[8,8]) -> f32[8,8] {{\n{BODY}"
    text += f"  ROOT %d.3 = {DOT}\n}}\n"
    seconds = lambda collective: across if collective.name == "g.1" else (3.0, 0.0)  # noqa: E731
    assert waits(text, products=3.0, gather=seconds) == {"tensor": waited}


def test_what_has_no_start_hides_behind_nothing_and_loops_wait_in_every_trip():
    text = f"""{HEADER}%body (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %d = {DOT}
  ROOT %r = f32[8,8]{{1,0}} all-reduce(%d), channel_id=2, replica_groups=[4,2]<=[8]
}}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %m = f32[8,8]{{1,0}} add(%a, %a)
  ROOT %w = f32[8,8]{{1,0}} while(%m), condition=%c, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""
    assert waits(text, products=10.0, others=1.0, gather=0.25) == {"tensor": 5 * 0.25}


FUSION = """\
%f.{0} (p.{0}: f32[8,8]) -> f32[16,8] {{
  %p.{0} = f32[8,8] parameter(0)
  %g.{0} = f32[16,8] all-gather(%p.{0}), channel_id=1, replica_groups=[4,2]<=[8], dimensions={{0}}
  ROOT %c.{0} = f32[16,8] custom-call(%g.{0}), custom_call_target="AsyncCollective{0}"
}}

"""


def test_a_tpu_gathers_from_the_fusion_that_starts_to_the_one_that_ends():
    text = f"""{HEADER}{FUSION.format("Start")}{FUSION.format("Done")}\
ENTRY %main (a: f32[8,8]) -> f32[16,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %s = f32[16,8]{{1,0}} fusion(%a), kind=kCustom, calls=%f.Start
  %d = {DOT}
  %e = f32[16,8]{{1,0}} fusion(%a), kind=kCustom, calls=%f.Done
  ROOT %d.2 = {DOT}
}}
"""
    assert waits(text, products=2.0, gather=3.0) == {"tensor": 2.0}


def test_a_sparse_core_gathers_from_the_update_that_gives_it_what_to_send():
    text = f"""{HEADER}%inner (p: f32[8,8]) -> f32[16,8] {{
  %p = f32[8,8] parameter(0)
  ROOT %g = f32[16,8] all-gather(%p), channel_id=1, replica_groups=[4,2]<=[8], dimensions={{0}}
}}, execution_thread="sparsecore"

%outer (q: f32[8,8]) -> f32[16,8] {{
  %q = f32[8,8] parameter(0)
  ROOT %c = f32[16,8] custom-call(%q), custom_call_target="x", called_computations={{%inner}}
}}, execution_thread="sparsecore"

ENTRY %main (a: f32[8,8]) -> f32[16,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %s = ((), (), s32[8]) async-start(), async_execution_thread="sparsecore", calls=%outer
  %d.1 = {DOT}
  %u = ((f32[8,8]), f32[16,8], s32[8]) async-update(%s, %a)
  %d.2 = {DOT}
  %e = f32[16,8]{{1,0}} async-done(%u)
  ROOT %d.3 = {DOT}
}}
"""
    # Begun after the first product; of its three seconds the second one hides one.
    assert waits(text, products=3.0, gather=3.0) == {"tensor": 2.0}


def test_a_program_that_is_not_scheduled_says_nothing():
    text = f"{HEADER}ENTRY %main (a: f32[8,8]) -> f32[8,8] {{\n{BODY}  ROOT %d.3 = {DOT}\n}}\n"
    assert waits(text.replace("is_scheduled=true, ", ""), products=3.0, gather=3.0) is None
