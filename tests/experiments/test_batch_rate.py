"""The study of rate and batch: the best rates of losses that are known, and what it trains."""

import re

import numpy as np
import pytest

from experiments.studies import batch_rate
from experiments.studies.batch_rate import Sweep

ROWS = np.array([4.0, 8.0, 16.0, 32.0, 64.0])
RATES = np.geomspace(1e-3, 1e-1, 9)


def losses_of(rows, rates, power):
    """Losses of which the best rate is 0.002 sqrt-like: 0.002 x rows ^ power, a bowl of its own."""
    return 2 + np.square(np.log(rates / (0.002 * rows**power)))


@pytest.mark.parametrize("power", [0.25, 0.5, 0.75])
def test_the_power_of_losses_that_follow_one_is_found_and_its_rule_loses_nothing(power):
    found = Sweep("adamw", ROWS, RATES, np.stack([losses_of(n, RATES, power) for n in ROWS]))
    np.testing.assert_allclose(found.best_B, 0.002 * ROWS**power, rtol=1e-9)
    np.testing.assert_allclose(found.power, (power, 0), atol=1e-9)
    np.testing.assert_allclose(found.ruled(power), found.best_B, rtol=1e-9)
    # Another rule misses the ends by the ratio of the batches to their middle, 4.
    wrong = found.ruled(power + 0.25)
    np.testing.assert_allclose(
        np.log(wrong / found.best_B)[[0, -1]], np.log(4) / 4 * np.array([-1, 1])
    )


def test_a_best_rate_at_an_end_or_beside_one_that_diverged_is_none():
    falling, broken = RATES[::-1], np.where(RATES > 0.01, np.inf, losses_of(4, RATES, 0.5))
    assert np.isnan(batch_rate.vertex(RATES, falling))
    assert np.isfinite(batch_rate.vertex(RATES, broken))
    broken[np.argmin(broken) + 1] = np.inf
    assert np.isnan(batch_rate.vertex(RATES, broken))
    found = Sweep("sgd", ROWS, RATES, np.stack([falling] * 5))
    assert np.isnan([*found.power, *found.ruled(0.5)]).all()


def test_every_batch_has_the_same_tokens_and_one_command_makes_the_table_and_the_picture(
    tmp_path, monkeypatch, capsys
):
    asked = []

    def train(run, flags):
        of = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        asked.append((of["optimizer.name"], int(of["global-batch"]) * int(of["steps"])))
        assert (of["population.size"], run.parent) == ("18", tmp_path)
        return np.repeat(losses_of(int(of["global-batch"]), RATES, 0.5), 2) + np.tile([0, 0.1], 9)

    monkeypatch.setattr(batch_rate, "train", train)
    spread = "=1e-3:0.1:9"
    flags = ["--study-dir", str(tmp_path), "--rules", f"adamw{spread}", f"lion{spread}"]
    batch_rate.main([*flags, "--tokens", "65536", "--png", str(tmp_path / "a.png")])
    assert asked == [(rule, 65536 // 32) for rule in ("adamw", "lion") for _ in ROWS]
    printed = capsys.readouterr().out
    assert "The best rate of lion grows as the batch ^ 0.50 (± 0.00)." in printed
    assert re.search(r"lion +8 +2\.\d+ +0.005657 +0.004 +0.00565[67]\n", printed)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    for more, message in (
        (["--rules", "lamb"], "--rules has 'lamb': write its rates behind it"),
        ([], "has tokens 65536 and not 131072"),
    ):
        folder = tmp_path / "lamb" if more else tmp_path
        with pytest.raises(SystemExit):
            batch_rate.main(["--study-dir", str(folder), *(more or flags[2:])])
        assert message in capsys.readouterr().err
