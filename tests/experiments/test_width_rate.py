"""The study of rate and width: what it trains and says, of losses that are known."""

import re

import numpy as np

from experiments.studies import width_rate

RATES = np.geomspace(1e-4, 1e-1, 7)


def test_each_form_has_its_best_rate_at_every_width(tmp_path, monkeypatch, capsys):
    asked = []

    def train(run, flags):
        of = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        form, width = of["parametrization"], int(of["width"])
        asked.append((run.name, of["population.size"], of["steps"]))
        best = 0.003 if form == "mup" else 0.1 / width
        losses_R = 2 + np.square(np.log(RATES / best))
        return np.repeat(losses_R, 2) + np.tile([0, 0.1], 7)

    monkeypatch.setattr(width_rate, "train", train)
    flags = ["--study-dir", str(tmp_path), "--rates", "1e-4:0.1:7", "--widths", "32", "64", "128"]
    width_rate.main([*flags, "--steps=9", "--png", str(tmp_path / "a.png")])
    names = [f"{form}-{width}" for form in ("standard", "mup") for width in (32, 64, 128)]
    assert asked == [(name, "14", "9") for name in names]
    printed = capsys.readouterr().out
    assert "The best rate of standard grows as the width ^ -1.00 (± 0.00)." in printed
    assert re.search(r"mup +128 +2\.\d+ +0.003 +0.0015 +0.003\n", printed)
    assert (tmp_path / "a.png").stat().st_size > 10_000
