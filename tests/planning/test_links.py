"""Links as measured: the fit, the file, and what a plan makes of it."""

import dataclasses
import json

import numpy as np
import pytest

from jaxtrain.host.links import BETWEEN, KINDS, WITHIN, Link, Links, fit, read_links
from jaxtrain.planning.roofline import wire_seconds
from jaxtrain.planning.targets import parse_target, with_links
from tests.commands import refused, run

SENT = np.array([2.0**10, 2.0**14, 2.0**18, 2.0**22, 2.0**26])
KIND = "NVIDIA H100 80GB HBM3"


def saved(tmp_path, links, kind=KIND):
    path = tmp_path / "new" / "links.json"
    Links(kind, "2026-11-27, 16 devices", links).save(path)
    return path


@pytest.mark.parametrize(("latency", "rate"), [(2e-5, 3.8e11), (4e-3, 1e9), (0.0, 5e10)])
def test_the_fit_returns_what_made_the_times(latency, rate):
    found = fit(list(zip(SENT, latency + SENT / rate, strict=True)))
    assert found.bytes_per_s == pytest.approx(rate, rel=1e-4)
    assert found.seconds == pytest.approx(latency, rel=1e-4, abs=1e-9)


def test_the_fit_bears_noise_and_neither_number_is_negative():
    noise = np.random.default_rng(0).uniform(0.9, 1.1, (200, 5))
    fits = [fit(list(zip(SENT, each * (2e-5 + SENT / 1e11), strict=True))) for each in noise]
    assert np.median([each.seconds for each in fits]) == pytest.approx(2e-5, rel=0.03)
    assert np.median([each.bytes_per_s for each in fits]) == pytest.approx(1e11, rel=0.03)
    assert fit([(1.0, 1e-6), (1e6, 1.1)]).seconds == 0.0
    # Times that fall with the bytes tell no bandwidth beyond what was reached.
    assert fit([(1e3, 2e-3), (1e6, 1e-3)]) == Link(0.0, 1e9)
    # Of one size no two numbers follow.
    with pytest.raises(ValueError, match="`sizes` all send 4 bytes"):
        fit([(4, 1e-5), (4, 2e-5)])


def test_a_collective_takes_what_was_measured_of_each_class_of_links(tmp_path):
    usual = parse_target("h100:2x8")
    within = {kind: Link(1e-5, 1e11 * (i + 1)) for i, kind in enumerate(KINDS)}
    target = with_links(usual, saved(tmp_path, {WITHIN: within}))
    assert read_links(tmp_path / "new" / "links.json").links == {WITHIN: within}
    # 3 all-gathers of 1e9 bytes in all, of which a quarter crosses the network, as published.
    fast, slow = wire_seconds("all-gather", 1e9, 2.5e8, target.chip, 3)
    assert fast == pytest.approx(3e-5 + 7.5e8 / 2e11)
    assert slow == wire_seconds("all-gather", 1e9, 2.5e8, usual.chip)[1]
    # Nothing is sent, and nothing waited for.
    assert wire_seconds("all-gather", 1e9, 0.0, target.chip)[1] == 0
    both = with_links(usual, saved(tmp_path, {WITHIN: within, BETWEEN: within}))
    assert wire_seconds("all-to-all", 1e9, 1e9, both.chip) == (0.0, pytest.approx(1e-5 + 0.005))
    assert "measured" not in usual.chip.assumed
    told = "between hosts, as measured (--links): all-reduce 100 GB/s + 10 us, all-gather 200"
    assert told in both.chip.assumed
    assert told not in target.chip.assumed


@pytest.mark.slow
def test_a_search_ranks_by_measured_links_and_says_so(capsys, tmp_path):
    slow = {kind: Link(0.5, 1e9) for kind in KINDS}
    path = saved(tmp_path, {WITHIN: slow})
    flags = "--target h100:1x2 --search --compile-best 0 --tokenizer 257 --json"
    flags = f"{flags} --layers 2 --width 64 --heads 4 --seq-len 64 --global-batch 8".split()
    seconds = []
    for more in ([], ["--links", str(path)]):
        status, out, err = run(capsys, "plan", "experiments.gpt", *flags, *more)
        assert status == 0, err
        found = json.loads(out)
        seconds.append(sum(found["rows"][0]["wire_s"].values()))
        assert ("within hosts, as measured" in found["assumed"]) == bool(more)
    # At least one collective of half a second.
    assert seconds[0] < 0.5 <= seconds[1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "it holds no measured links"),
        ("no JSON", "it holds no measured links"),
        (
            '{"device_kind": "x", "measured": "", "links": {"within": {"a": 1}}}',
            "no measured links",
        ),
        *(
            (f'{{"device_kind": "x", "measured": "", "links": {links}}}', sentence)
            for links, sentence in (
                ('{"Within": {"all-reduce": {"seconds": 0, "bytes_per_s": 1}}}', "unknown names"),
                ('{"within": {"all-reduce": {"seconds": 1, "bytes_per_s": Infinity}}}', "finite"),
            )
        ),
    ],
)
def test_a_file_without_links_is_refused(text, sentence, tmp_path):
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_links(path)


def test_links_of_another_chip_and_a_network_stated_twice_are_refused(tmp_path, capsys):
    link = {"all-reduce": Link(0.0, 1e9)}
    path = saved(tmp_path, {BETWEEN: link}, "TPU v4")
    flags = ["plan", "experiments.gpt", "--target", "h100:2x8", "--links", str(path)]
    assert refused(capsys, *flags) == (
        "error: --links was measured on 'TPU v4' and the target is h100:2x8: measure on a TPU or "
        f"GPU of the target's kind, {KIND!r}\n"
    )
    saved(tmp_path, {BETWEEN: link})
    assert "give one" in refused(capsys, *flags, "--dcn-gbps", "100")
    assert dataclasses.asdict(Link(1.0, 2.0)) == {"seconds": 1.0, "bytes_per_s": 2.0}
