"""The range test of learning rates, on curves that formulas make."""

import numpy as np
import pytest

from jaxtrain.run.observe.report import command, page, rates, records
from tests.run.observe.test_report import data_of, line, write_run

RATES = np.geomspace(1e-3, 10, 17)
VARY = "optimizer.learning_rate=log:1e-3:10:17"


def descent(rates, steps, curvatures=(1.0, 0.1)):
    """Losses [steps, R] of gradient descent on a sum of parabolas, which starts at 1."""
    factors = np.array(curvatures)[:, None] / sum(curvatures)
    away = 1 - np.array(curvatures)[:, None] * rates
    return np.stack([(factors * away ** (2 * t)).sum(0) for t in range(steps)])


def test_the_rule_finds_the_rates_that_theory_gives():
    losses_LR = descent(RATES, 40)
    diverged_R, fastest, largest = rates.suggest(losses_LR)
    assert largest == np.flatnonzero(RATES < 2).max()  # 2 over the largest curvature
    assert diverged_R.tolist() == (RATES > 2).tolist()
    assert fastest == np.argmin(losses_LR[-4:].mean(0))
    _, fastest, largest = rates.suggest(
        descent(RATES, 20, (2.0,))
    )  # which Newton's rate solves at once
    assert fastest == np.argmin(np.abs(1 - 2 * RATES))
    assert RATES[largest] <= 1 + 1e-9 < RATES[largest + 1]


def test_noise_of_batches_is_no_divergence_and_no_number_is():
    r = np.random.default_rng(0)
    noise_L1 = 0.2 * r.normal(size=(40, 1)) + 0.01 * r.normal(size=(40, 1))
    still_LR = 3 + noise_L1 + 0.003 * r.normal(size=(40, 5))
    assert not rates.suggest(still_LR)[0].any()
    losses_LR = descent(RATES, 40) + noise_L1 + 2
    assert rates.suggest(losses_LR)[1:] == rates.suggest(descent(RATES, 40))[1:]
    losses_LR[7, 5] = np.nan  # and falls again: whatever is larger is not trusted either
    diverged_R, *best = rates.suggest(losses_LR)
    assert diverged_R[[5, 6]].tolist() == [True, False]
    assert best == [4, 4]
    losses_LR[3, 0] = np.inf
    assert rates.suggest(losses_LR)[1:] == (None, None)


def write(path, losses_LM, config):
    lines = [
        line(10 * i + 10)
        | {"train/members/loss": [x if np.isfinite(x) else str(x) for x in losses]}
        for i, losses in enumerate(losses_LM.tolist())
    ]
    write_run(path, lines, config={"flags": config})
    return records.read([path])[0]


def test_a_report_says_and_draws_it(tmp_path):
    pytest.importorskip("matplotlib")
    losses_LR = descent(RATES, 12)
    losses_LR[:, -1] = np.inf
    # Two seeds of each rate, whose mean is the curve.
    losses_LM = np.repeat(losses_LR, 2, 1) + np.tile([0.125, -0.125], RATES.size)
    flags = {"population.vary": [VARY], "population.size": 34, "seed": 3}
    record = write(tmp_path / "run", losses_LM, flags)
    (test,) = rates.found(record)
    np.testing.assert_allclose(test.rates_R, RATES, rtol=1e-3)
    assert test.steps == [30, 60, 120]
    np.testing.assert_allclose(test.losses_SR[-1, :12], losses_LR[-3:, :12].mean(0), rtol=1e-5)
    best = int(np.argmin(losses_LR[-3:].mean(0)))
    assert f"A learning rate of {test.rates_R[best]:.4g} is suggested" in test.text
    assert f"not diverged is {RATES[RATES < 2].max():.4g}, a bound." in test.text
    assert "end of the range" not in test.text
    told = data_of(page.make_page([record]))["runs"][0]["findings"]
    assert test.text in [each["text"] for each in told]
    lines = command.leave_report(tmp_path / "run")
    assert f"rates        {test.text}" in lines
    assert (tmp_path / "run/report.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_no_range_of_rates_has_none(tmp_path):
    losses_LM = descent(np.array([0.1, 0.2, 0.3, 0.4]), 12)
    rate = "optimizer.learning_rate="
    for i, (vary, count) in enumerate(
        [
            ([f"{rate}0.1,0.2,0.3,0.4"], 1),
            ([f"{rate}0.1,0.2"], 0),  # whose 4 members are 2 rates
            ([f"{rate}0.1,0.2,0.3,0.4", "optimizer.weight_decay=0"], 0),
            ([f"{rate}0.1,0.2,0.3"], 0),
            (["lora.rank=1,2,3,4"], 0),
            (3, 0),
        ]
    ):
        flags = {"population.vary": vary, "population.size": 4 if i == 1 else None}
        assert len(rates.found(write(tmp_path / f"{i}", losses_LM, flags))) == count, vary
    assert rates.found(write(tmp_path / "none", losses_LM, {})) == []
    flags = {"population.vary": [f"{rate}0.1,0.2,0.3,0.4"], "population.size": None}
    (edge,) = rates.found(write(tmp_path / "edge", losses_LM, flags))
    assert edge.text.endswith("The suggestion is an end of the range: widen it there.")
    bad = losses_LM.copy()
    bad[5] = np.inf
    bad = write(tmp_path / "bad", bad, flags)
    told = [each["text"] for each in data_of(page.make_page([bad]))["runs"][0]["findings"]]
    assert "The smallest learning rate has diverged: begin the range lower." in told
