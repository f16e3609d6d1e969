"""Targets, chips and rooflines: names, and times against sums done by hand."""

import jax
import pytest

from jaxtrain.host.chips import CHIPS, PEAK_FLOPS, peak_flops
from jaxtrain.planning.targets import GPU_TARGETS, parse_target


@pytest.mark.parametrize(
    ("text", "slices", "size", "hosts"),
    [
        ("v5e:4x4", 1, 16, 4),
        ("v5e:16x16", 2, 512, 128),
        ("v5p:4x4x4", 1, 64, 16),
        ("v4:2x2x1", 1, 4, 1),
        ("tpu7x:2x2x1", 1, 8, 1),
        ("7x:2x2x2", 1, 16, 2),
        ("h100:4x8", 1, 32, 4),
        ("a100:8", 1, 8, 1),
        ("b200:2x8", 1, 16, 2),
        ("gb200:1x72", 1, 72, 1),
        ("cpu:8", 1, 8, 1),
        ("v5litepod-16", 1, 16, 4),
        ("v6e-256", 1, 256, 64),
        ("v5p-128", 1, 64, 16),
        ("v4-8", 1, 4, 1),
    ],
)
def test_sizes(text, slices, size, hosts):
    target = parse_target(text, slices=slices)
    assert (target.size, target.hosts) == (size, hosts)


@pytest.mark.parametrize(
    ("text", "slices", "sentence"),
    [
        ("v9:2x2", 1, "use v4:4x4x4, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:2x2x1, a100:4x8"),
        ("v5e", 1, "has no size: write it like v5e:4x4"),
        ("v5e:4xx4", 1, "has no size"),
        ("v5e:0x4", 1, "has no size"),
        ("v5p:4x4", 1, "has 2 sizes and v5p takes 3"),
        ("h100:2x2x2", 1, "has 3 sizes"),
        ("h100:1x8", 2, "only TPU targets have slices"),
        ("v5e:2x2", 0, "at least 1"),
        ("v5p:8x8x7", 1, "no slice that Google has: all sides are multiples of 4"),
        ("v5p:1x1x4", 1, "or it is one of 1x1x1, 1x2x2, 2x2x2, 2x2x4, 2x4x4"),
        ("v5e:4x16", 1, "no slice that Google has: 1x1, or both sides are"),
        ("v5e:1x2", 1, "no slice that Google has"),
        ("v5litepod-24", 1, "has no known topology: write it like v5e:4x4"),
        ("h100-8", 1, "has no known topology: write it like h100:4x8"),
    ],
)
def test_what_cannot_be_names_what_can(text, slices, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_target(text, slices=slices)


def test_simulated_devices():
    here = jax.devices()
    assert parse_target("cpu:4").devices() == here[:4]
    with pytest.raises(ValueError, match="needs 99 simulated devices and JAX has started with 8"):
        parse_target("cpu:99").devices()


def test_one_table_of_peaks_and_a_description_per_gpu():
    for chip in CHIPS.values():
        if chip.kind == "cpu":
            assert chip.peak_flops("float32") is None
            continue
        assert chip.flops["bfloat16"] == PEAK_FLOPS[chip.device_kind]["bfloat16"]
        assert chip.flops["bfloat16"] == peak_flops(chip.device_kind)
        assert set(chip.efficiency) == {"matmul", "attention", "memory", "links"}
        if chip.kind == "gpu":
            config = (GPU_TARGETS / f"{chip.name}.txtpb").read_text()
            assert f"device_memory_size: {chip.memory_bytes}" in config
            described = float(config.split("memory_bandwidth: ")[1].split()[0])
            assert described == pytest.approx(chip.hbm_bytes_per_s, rel=0.01)


def test_the_network_can_be_given():
    usual, given = parse_target("h100:2x8"), parse_target("h100:2x8", dcn_gbps=100)
    assert (usual.chip.dcn_bytes_per_s, given.chip.dcn_bytes_per_s) == (50e9, 12.5e9)
    assert "100 Gb/s between hosts" in given.chip.assumed
    with pytest.raises(ValueError, match="more than 0 Gb/s"):
        parse_target("h100:2x8", dcn_gbps=0)
