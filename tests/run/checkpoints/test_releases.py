"""A checkpoint of an earlier release is resumed and exported by this one."""

import json
import tarfile

import pytest

import jaxtrain as jt
from tests.run.checkpoints import releases
from tests.run.checkpoints.releases import EARLIER, export, train


@pytest.mark.parametrize(
    "release", sorted(path.name.removesuffix(".tar.xz") for path in EARLIER.glob("*"))
)
def test_a_run_of_an_earlier_release_goes_on_as_it_would_have_there(tmp_path, release):
    with tarfile.open(EARLIER / f"{release}.tar.xz") as file:
        file.extractall(tmp_path, filter="data")
    then = json.loads((tmp_path / "then.json").read_text())
    assert export(tmp_path) == pytest.approx(then["sums"], rel=1e-6, abs=1e-6)
    losses = train(tmp_path, "--resume")
    assert {n: losses[int(n)] for n in then["losses"]} == pytest.approx(then["losses"], rel=1e-5)


def test_the_file_of_a_release_is_never_made_anew(tmp_path, monkeypatch):
    kept = tmp_path / f"{jt.__version__}.tar.xz"
    kept.write_bytes(b"as it was")
    monkeypatch.setattr(releases, "EARLIER", tmp_path)
    monkeypatch.setattr(releases, "train", lambda *_: {5: 0.0, 6: 0.0})
    monkeypatch.setattr(releases, "export", lambda *_: {})
    with pytest.raises(FileExistsError):
        releases.main()
    assert kept.read_bytes() == b"as it was"
