"""The command ``jaxtrain coordinates``; tests/models/test_mup.py holds what it measures."""

import pytest

from tests.commands import refused, run


@pytest.mark.slow
def test_a_check_is_printed_and_drawn(tmp_path, capsys):
    picture = tmp_path / "coordinates.png"
    flags = ["--layers", "1", "--seq-len", "16", "--global-batch", "8", "--data", "jaxtrain/study"]
    flags += ["--held-out-bytes", "500", "--widths", "32", "128", "--png", str(picture)]
    status, out, _ = run(capsys, "coordinates", "experiments.gpt", *flags)
    assert status == 0
    slopes = {line.rsplit(None, 3)[0]: float(line.split()[-1]) for line in out.splitlines()[1:9]}
    assert len(slopes) == 8
    assert slopes["standard: layers"] > slopes["mup: layers"] + 0.5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_has_no_slope_is_refused(capsys):
    flags = ["coordinates", "experiments.gpt", "--widths", "32", "32"]
    assert "--widths are (32, 32): give two different ones" in refused(capsys, *flags)
