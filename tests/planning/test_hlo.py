"""Reading programs: groups of devices against their definition, loops, traffic, sizes."""

import collections
import gzip
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.planning.groups import UNKNOWN, group_axes, make_grid, parse_groups
from jaxtrain.planning.hlo import Collective, read_program
from jaxtrain.planning.hlo_text import type_bytes

FAST = {"xla_backend_optimization_level": 0}


def mesh_222():
    return jt.make_mesh(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("replica_groups={}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("replica_groups=[4,2]<=[8]", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica_groups=[4,2]<=[4,2]T(1,0)", [(0, 2), (4, 6), (1, 3), (5, 7)]),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (
            "replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'a'}",
            [(0, 2), (4, 6), (1, 3), (5, 7)],
        ),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("source_target_pairs={{0,1},{1,0}}, x={}", [(0, 1), (1, 0)]),
        ("replica_groups=written[in](another){way}", None),
    ],
)
def test_groups_are_read_in_every_form(text, groups):
    assert parse_groups(f"channel_id=1, {text}, use_global_device_ids=true", 8) == groups


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_groups_of_any_axes_get_their_names(data):
    sizes = data.draw(st.sampled_from([(2, 2, 2), (2, 4, 1), (4, 1, 2), (1, 8, 1)]))
    mesh = jt.make_mesh(data=sizes[0], fsdp=sizes[1], tensor=sizes[2])
    named = [axis for axis, size in mesh.shape.items() if size > 1]
    axes = data.draw(st.lists(st.sampled_from(named), unique=True, min_size=1))
    # By definition: devices whose coordinates differ in those axes alone.
    places = {p: i for i, p in enumerate(np.ndindex(*mesh.shape.values()))}
    kept = [d for d, axis in enumerate(mesh.shape) if axis not in axes]
    groups = {}
    for place, number in places.items():
        groups.setdefault(tuple(place[d] for d in kept), []).append(number)
    wanted = tuple(a for a in mesh.shape if a in axes)
    assert group_axes(list(groups.values()), make_grid(mesh)) == (wanted, 1)


def test_groups_that_are_no_axes_are_reported_as_unknown():
    mesh = mesh_222()
    grid = make_grid(mesh)
    assert group_axes([(0, 1, 2), (3, 4, 5)], grid) == ((UNKNOWN,), 1)
    assert group_axes([(0, 3), (1, 2)], grid) == ((UNKNOWN,), 1)
    assert group_axes(None, grid) == ((UNKNOWN,), 1)
    assert group_axes([(0, 99)], grid) == ((UNKNOWN,), 1)
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %e (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        "  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=strange(1), to_apply=%add\n}\n"
    )
    (only,) = read_program(text, mesh).collectives
    assert (only.axes, only.payload) == ((UNKNOWN,), 32)


@pytest.mark.parametrize(("axes", "size"), [(("data",), 2), (("data", "tensor"), 4)])
def test_executions_multiply_along_nested_loops(axes, size):
    mesh = mesh_222()

    def inner(x, _):
        return jax.lax.psum(x, axes) * 0.5, None

    def outer(x, _):
        return jax.lax.scan(inner, x, length=5)[0] + 1, None

    def f(x):
        return jax.lax.scan(outer, x, length=3)[0]

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((7, 3), jnp.float32)).compile(FAST)
    (only,) = jt.explain(compiled, mesh).collectives
    assert (only.kind, only.axes, only.group) == ("all-reduce", axes, size)
    assert (only.executions, only.payload) == (15, 84)
    assert only.sent == pytest.approx(2 * 84 * (size - 1) / size)


def test_each_kind_of_collective_and_its_whole_array():
    mesh = mesh_222()

    def f(x):
        a = jax.lax.all_gather(x, "tensor")
        b = jax.lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True)
        c = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
        d = jax.lax.all_to_all(x, "tensor", 0, 1, tiled=True)
        return a.sum() + b.sum() + c.sum() + d.sum()

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 4), jnp.float32)).compile(FAST)
    found = {c.kind: c for c in jt.explain(compiled, mesh).collectives}
    assert found["collective-permute"].axes == ("data",)
    assert found["collective-permute"].payload == 128
    assert found["all-gather"].axes == found["all-to-all"].axes == ("tensor",)
    assert found["all-gather"].payload == 256
    # The CPU backend may write a scatter as a reduction of the whole.
    scattered = found.get("reduce-scatter") or found["all-reduce"]
    assert (scattered.axes, scattered.payload) == (("fsdp",), 128)


def test_a_loop_of_unknown_length_is_said_and_its_collectives_stay():
    mesh = mesh_222()

    def f(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: jax.lax.psum(x, "data") + 1, x)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile(FAST)
    explained = jt.explain(compiled, mesh)
    assert explained.loops == (None,)
    assert [(c.axes, c.executions) for c in explained.collectives] == [(("data",), 1)]
    assert "unknown length" in explained.report()


def test_a_branch_is_counted_and_marked():
    mesh = mesh_222()

    def f(flag, x):
        return jax.lax.cond(flag > 0, lambda: jax.lax.psum(x, "data"), lambda: x)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.float32)
    explained = jt.explain(jax.jit(mapped).lower(*shapes).compile(FAST), mesh)
    (only,) = explained.collectives
    assert only.conditional
    assert "≤ 1" in explained.report()


def test_sizes_of_types():
    assert type_bytes("f32[2,3]{1,0:T(8,128)}") == 24
    assert type_bytes("(bf16[4]{0}, /*index=1*/pred[3], s4[8])") == 8 + 3 + 4
    assert type_bytes("f8e4m3fn[16]{0}") == 16


@pytest.mark.parametrize(
    ("kind", "ring"),
    [("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-to-all", 0.75), ("all-reduce", 1.5)],
)
def test_what_a_device_sends_in_a_ring(kind, ring):
    """By playing it: n devices, chunks of 1/n passed on n - 1 times (twice for an all-reduce)."""
    n, payload = 4, 1000
    passes = sum(1 for _ in itertools.chain(*[range(n - 1)] * (2 if kind == "all-reduce" else 1)))
    one = Collective(kind, ("data",), n, 1, payload)
    assert one.sent == pytest.approx(passes * payload / n) == pytest.approx(ring * payload)


def test_a_new_spelling_is_unknown_and_nothing_is_lost():
    text = """HloModule m, num_partitions=8

body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  t = (s32[], f32[4]{0}) parameter(0)
  x = f32[4]{0} get-tuple-element(t), index=1
  i = s32[] get-tuple-element(t), index=0
  y = f32[4]{0} all-mingle(x), replica_groups=[4,2]<=[8]
  ROOT r = (s32[], f32[4]{0}) tuple(i, y)
}

cond (s: (s32[], f32[4])) -> pred[] {
  s = (s32[], f32[4]{0}) parameter(0)
  ROOT p = pred[] mystery(s)
}

ENTRY main (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  a = (s32[], f32[4]{0}) parameter(0)
  ROOT w = (s32[], f32[4]{0}) while(a), condition=cond, body=body
}
"""
    program = read_program(text, mesh_222())
    assert program.loops == (None,)
    assert [(c.kind, c.axes, c.executions, c.payload) for c in program.collectives] == [
        ("all-mingle", ("tensor",), 1, 16)
    ]


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        read_program("nonsense")


def test_an_asynchronous_collective_of_a_tpu_is_one_though_it_runs_on_in_a_loop():
    """As the TPU compiler writes it: started in one fusion, carried on in others, ended in one."""
    gather = (
        "  %p.{0} = f32[4]{{0}} parameter(0)\n"
        "  %g.{0} = f32[8]{{0}} all-gather(%p.{0}), channel_id=7, replica_groups=[4,2]<=[8]\n"
    )
    text = f"""HloModule m, num_partitions=8

%start (p.0: f32[4]) -> f32[8] {{
{gather.format(0)}\
  ROOT %c.0 = f32[8]{{0}} custom-call(%g.0), custom_call_target="AsyncCollectiveStart"
}}

%goes_on (p.1: f32[4]) -> f32[8] {{
{gather.format(1)}\
  ROOT %c.1 = f32[8]{{0}} add(%g.1, %g.1)
}}

%ends (p.2: f32[4]) -> f32[8] {{
{gather.format(2)}\
  ROOT %c.2 = f32[8]{{0}} custom-call(%g.2), custom_call_target="AsyncCollectiveDone"
}}

%condition (s: (s32[], f32[4])) -> pred[] {{
  %s = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(9)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %t = (s32[], f32[4]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %x = f32[4]{{0}} get-tuple-element(%t), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%j, %two)
  %f = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%goes_on
  ROOT %r = (s32[], f32[4]{{0}}) tuple(%next, %x)
}}

ENTRY %main (a: f32[4]) -> f32[8] {{
  %a = f32[4]{{0}} parameter(0)
  %f.0 = f32[8]{{0}} fusion(%a), kind=kCustom, calls=%start
  %one = s32[] constant(1)
  %carry = (s32[], f32[4]{{0}}) tuple(%one, %a)
  %w = (s32[], f32[4]{{0}}) while(%carry), condition=%condition, body=%body
  ROOT %f.2 = f32[8]{{0}} fusion(%a), kind=kCustom, calls=%ends
}}
"""
    program = read_program(text, mesh_222())
    assert program.loops == (4,)  # 1, 3, 5, 7
    assert [(c.kind, c.axes, c.executions) for c in program.collectives] == [
        ("all-gather", ("tensor",), 1)
    ]


PROGRAMS = pathlib.Path(__file__).parent / "programs"
# Steps of a llama of 8 layers, compiled by jaxlib 0.10.2; most arithmetic is left out.
# Loops, and per kind and axes: executions and bytes of whole arrays.
GOLDEN = {
    "v5e_2x4_llama_fsdp8": (
        {"fsdp": 8},
        (8, 2, 2, 2, 2, 2, 2, 2, 4, 8, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
        {
            ("all-reduce", ("fsdp",)): {"times": 12, "bytes": 34876},
            ("all-gather", ("fsdp",)): {"times": 5, "bytes": 327680000},
            ("collective-permute", ("fsdp",)): {"times": 1512, "bytes": 608698368},
            ("reduce-scatter", ("fsdp",)): {"times": 2, "bytes": 262144000},
        },
    ),
    "h100_1x8_llama_pipe2_data2_tensor2": (
        {"pipe": 2, "data": 2, "tensor": 2},
        (8, 10, 4, 2, 4),
        {
            ("all-reduce", ("data",)): {"times": 101, "bytes": 1106616472},
            ("all-gather", ("tensor",)): {"times": 10, "bytes": 655360000},
            ("all-reduce", ("tensor",)): {"times": 223, "bytes": 3020881954},
            ("collective-permute", ("pipe",)): {"times": 20, "bytes": 335544320},
            ("all-gather", ("data",)): {"times": 20, "bytes": 336199680},
            ("all-reduce", ("pipe",)): {"times": 6, "bytes": 131076142},
            ("all-reduce", ("pipe", "tensor")): {"times": 3, "bytes": 17},
        },
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_real_programs_are_read_as_they_were(name):
    axes, loops, traffic = GOLDEN[name]
    text = gzip.decompress((PROGRAMS / f"{name}.hlo.gz").read_bytes()).decode()
    program = read_program(text, jt.make_mesh(**axes))
    assert program.loops == loops
    found = collections.Counter()
    for c in program.collectives:
        found[c.kind, c.axes, "times"] += c.executions
        found[c.kind, c.axes, "bytes"] += c.executions * c.payload
    assert found == {(*key, n): x for key, row in traffic.items() for n, x in row.items()}
