"""What faults of the disk do to a checkpoint and to a run: damage, a full disk, a lost folder."""

import contextlib
import errno
import grp
import logging
import os
import pathlib
import pwd
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from jaxtrain.landscape import command as landscape
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import (
    Checkpointer,
    SaveError,
    digest,
)
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError, checksums

ROOT = pathlib.Path(__file__).parents[3]


def make_state(seed: int) -> dict:
    r = np.random.default_rng(seed)
    return {
        "params": {"w": jnp.asarray(r.normal(size=(40, 30)), jnp.float32), "b": jnp.ones(7)},
        "count": jnp.int32(seed),
        "rng": jax.random.key(seed),
        "position": 1000 + seed,
    }


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1, 2 and 3, each of another state."""
    with Checkpointer(tmp_path / "c", keep=None) as checkpoints:
        for step in (1, 2, 3):
            metrics = {"eval/loss": float(step)}
            checkpoints.save(step, make_state(step), metrics=metrics, config={"step": step})
    return tmp_path / "c"


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def restored_step(folder: pathlib.Path) -> int:
    """Restores the newest sound checkpoint and returns its step, having compared every bit."""
    state = Checkpointer(folder).restore(make_state(0))
    step = int(state["count"])
    assert digest(state) == digest(make_state(step))
    return step


def flip(path: pathlib.Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int4", "complex64", "int8"])
def test_checksums_depend_on_every_bit_and_on_no_layout(dtype):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.random.default_rng(0).integers(0, 2, (8, 6)).astype(jnp.dtype(dtype))
    expected = checksums({"x": x})
    for spec in (None, ("a", "b"), ("b",), (("a", "b"),)):
        there = jnp.asarray(x)
        if spec is not None:
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            there = jax.device_put(there, sharding)
        assert checksums({"x": there}) == expected
    others = [np.roll(x, 1), x.T.copy(), x.reshape(-1)]
    for index in np.ndindex(x.shape):
        other = x.copy()
        other[index] = not x[index]
        others.append(other)
    assert len({checksums({"x": other})["x"] for other in others} | {expected["x"]}) == 52


def test_the_checksum_is_the_formula_in_python_integers():
    def mix(h):
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    total = 0
    for (i, j), word in np.ndenumerate(x.view(np.uint32)):
        place = (i + 1) * 0x85EBCA77 * 0x9E3779B1 + (j + 1) * 0x85EBCA77
        total += mix((int(word) + place) % 2**32)
    assert checksums({"x": jnp.asarray(x)}) == {"x": total % 2**32}


@pytest.mark.parametrize("bits", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_any_file_never_gives_a_wrong_state(saved, bits):
    """Some bits of every file: the state is the one saved, or the one before it."""
    r = np.random.default_rng(0)
    passed_over = 0
    for path in files_of(saved / "3"):
        for bit in r.integers(0, 8 * path.stat().st_size, bits):
            whole = path.read_bytes()
            flip(path, int(bit))
            passed_over += restored_step(saved) == 2
            path.write_bytes(whole)
    assert passed_over > 10
    assert restored_step(saved) == 3


def test_a_flipped_bit_in_the_arrays_names_the_leaf(saved, caplog):
    # Where Orbax keeps the arrays' bytes: the largest file.
    largest = max(files_of(saved / "3"), key=lambda path: path.stat().st_size)
    flip(largest, 8 * (largest.stat().st_size // 2))
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint 3 in .* is damaged: ") as caught:
        Checkpointer(saved).restore(make_state(0), step=3)
    assert "'params/w' is not what was saved" in str(caught.value)
    assert "\n" not in str(caught.value)
    with caplog.at_level(logging.WARNING, "jaxtrain"):
        assert restored_step(saved) == 2
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("jaxtrain")]
    assert message == f"{caught.value}; going on from checkpoint 2"


@pytest.mark.parametrize("part", [0.0, 0.5, None])
def test_a_file_cut_short_or_lost_is_found(saved, part):
    passed_over = 0
    for path in files_of(saved / "3"):
        whole = path.read_bytes()
        if part is None:
            path.unlink()
        else:
            path.write_bytes(whole[: int(len(whole) * part)])
        passed_over += restored_step(saved) == 2
        if path.parent.name == "config" and path.name == "metadata":
            with pytest.raises(DamagedCheckpointError, match=r"checkpoint 3 .* its config"):
                Checkpointer(saved).config(3)
        path.write_bytes(whole)
    assert passed_over >= 4
    for item in ("manifest", "state"):
        shutil.move(saved / "3" / item, saved / "elsewhere")
        assert restored_step(saved) == 2
        shutil.move(saved / "elsewhere", saved / "3" / item)
    assert restored_step(saved) == 3


def test_a_run_goes_on_from_the_newest_sound_checkpoint_and_moves_the_damaged_aside(saved):
    (saved / "3" / "manifest" / "metadata").write_text("{")
    checkpoints = Checkpointer(saved, keep=None)
    assert checkpoints.steps() == [1, 2]  # a manifest is read before a step counts
    assert checkpoints.best_step() == 1
    largest = max(files_of(saved / "2"), key=lambda path: path.stat().st_size)
    flip(largest, 4 * largest.stat().st_size)
    state = checkpoints.restore(make_state(0))
    assert int(state["count"]) == 1
    assert (saved / "3").exists()  # reading changes nothing
    assert checkpoints.save(2, make_state(2))
    assert checkpoints.steps() == [1, 2]
    assert restored_step(saved) == 2
    assert (saved / "damaged-2").is_dir()
    assert (saved / "damaged-3").is_dir()
    checkpoints.close()


def test_no_traceback_is_printed_for_damaged_arrays(saved):
    for path in files_of(saved / "3" / "state" / "d"):
        path.write_bytes(b"")
    code = "import sys, numpy as np; from jaxtrain.host import quiet\n"
    code += "from jaxtrain.run.checkpoints.checkpointer import Checkpointer; quiet.start()\n"
    code += "print(Checkpointer(sys.argv[1]).restore_part({'count': np.int32(0)}))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved)], cwd=ROOT, capture_output=True, text=True
    )
    assert "np.int32(2)" in done.stdout, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "checkpoint 3" in done.stderr


@pytest.mark.parametrize("where", ["arrays", "manifest"])
def test_a_read_that_is_torn_once_condemns_no_checkpoint(saved, monkeypatch, where):
    real, torn = ocp.PyTreeCheckpointHandler.restore, []
    manifest, read = saved / "3" / "manifest" / "metadata", epath.Path.read_bytes

    def restore(self, path, *args, **kwargs):
        if where == "arrays" and "/3/" in str(path) and not torn:
            torn.append(path)
            raise ValueError("OUT_OF_RANGE: Requested byte range is not valid for value of size 5")
        return real(self, path, *args, **kwargs)

    def read_bytes(path):
        if where == "manifest" and str(path) == str(manifest) and not torn:
            torn.append(path)
            return read(path)[:20]
        return read(path)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
    monkeypatch.setattr(type(epath.Path(manifest)), "read_bytes", read_bytes)
    assert restored_step(saved) == 3
    assert torn


def test_files_whose_owner_has_no_name_are_saved_and_restored(tmp_path, monkeypatch):
    def nameless(number):
        raise KeyError(f"getgrgid(): gid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    monkeypatch.setattr(grp, "getgrgid", nameless)
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.save(step, make_state(step))
        checkpoints.wait()
        assert checkpoints.size(3) > 1000
        assert checkpoints.written()[1] >= checkpoints.size(3)
    assert restored_step(tmp_path) == 3


def test_what_an_interrupted_deletion_left_is_deleted_by_a_later_writer(saved):
    (saved / "1" / "manifest" / "metadata").unlink()
    with Checkpointer(saved, keep=2, keep_best=0) as checkpoints:
        checkpoints.save(4, make_state(4))
    assert sorted(path.name for path in saved.iterdir()) == ["3", "4"]


def test_a_deletion_that_storage_fails_is_made_up_for_by_the_next_save(tmp_path, monkeypatch):
    real, failed = os.rmdir, []

    def fails(path, **kwargs):
        if str(path) == "d" and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", fails)
    with Checkpointer(tmp_path, keep=1, keep_best=0) as checkpoints:
        for step in (1, 2, 3, 4):
            with contextlib.suppress(SaveError):
                checkpoints.save(step, make_state(step))
    assert failed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4"]


def test_a_failed_save_leaves_no_remains_in_the_end(tmp_path, monkeypatch):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, make_state(1))
    checkpoints.wait()
    monkeypatch.setattr(os, "access", lambda *given: False)
    with pytest.raises(SaveError):
        checkpoints.save(2, make_state(2))
    # A thread of such a save may write on after the next one has cleared away what was left.
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True, exist_ok=True)
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_all_damaged_is_an_error_that_says_so(saved):
    for step in (1, 2, 3):
        (saved / str(step) / "manifest" / "metadata").write_text("[]")
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint 3 .* so are all 3 checkpoints"):
        Checkpointer(saved).restore(make_state(0))


def test_another_process_sees_a_step_only_when_it_is_whole(tmp_path, monkeypatch):
    """Lists and restores while a save is about to give a step its name, and when it has done so."""
    state = {"w": jnp.arange(200_000.0)}
    expected = digest(state)
    looked, rename = threading.Event(), os.rename

    def after_a_look(source, target):
        assert looked.wait(60)
        return rename(source, target)

    monkeypatch.setattr(os, "rename", after_a_look)
    reader = Checkpointer(tmp_path)
    with Checkpointer(tmp_path, keep=None) as writer:
        for step in range(4):
            looked.clear()
            writer.save(step, state)
            time.sleep(0.01 * step)  # more of it is written, and still nothing is there
            assert reader.steps() == list(range(step))
            looked.set()
            while writer.is_saving():
                for there in reader.steps():
                    assert there <= step
            assert reader.steps() == list(range(step + 1))
            assert digest(reader.restore(state, step)) == expected


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, options: str):
    """A file system of its own in memory; the test is skipped where mounting is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("options", ["size=400k", "size=400k,nr_inodes=60", "size=20k"])
def test_a_full_disk_is_said_at_once_and_saving_goes_on_when_there_is_room(tmp_path, options):
    state = {"w": jax.random.normal(jax.random.key(0), (128, 128))}  # 64 kB
    with small_disk(tmp_path / "disk", options) as disk:
        ballast = disk / "ballast"
        checkpoints = Checkpointer(disk / "c")
        if options == "size=400k":
            assert checkpoints.save(1, state)
            checkpoints.wait()
            ballast.write_bytes(bytes(280_000))
        start = time.monotonic()
        with pytest.raises(
            SaveError, match=r"checkpoint 2 could not be saved in .*: .*(fre|more)"
        ) as found:
            checkpoints.save(2, state)
        assert not found.value.lasts
        assert time.monotonic() - start < 10
        if options == "size=400k":
            assert checkpoints.steps() == [1]
            ballast.unlink()
            assert checkpoints.save(3, state)
            checkpoints.close()
            assert checkpoints.steps() == [1, 3]
            assert digest(checkpoints.restore(state)) == digest(state)


@pytest.mark.parametrize("options", ["size=400k", "size=400k,nr_inodes=40", "size=100k"])
def test_a_disk_that_fills_while_saving_fails_in_bounded_time(tmp_path, monkeypatch, options):
    """Without the look at the free space, which another program may take in the same moment."""
    monkeypatch.setattr(Checkpointer, "_check_room", lambda self, step, size: None)
    state = {"w": jax.random.normal(jax.random.key(0), (512, 512))}  # 1 MB
    with small_disk(tmp_path / "disk", options) as disk:
        checkpoints = Checkpointer(disk / "c")
        start = time.monotonic()
        with pytest.raises(SaveError, match=r"[Nn]o space left on device"):  # noqa: PT012
            checkpoints.save(1, state)
            checkpoints.wait()
        assert time.monotonic() - start < 30
        assert Checkpointer(disk / "c").steps() == []
        checkpoints.close()
        # The remains of the failed save are cleared away by the next.
        small = {"w": jnp.ones(3)}
        if "nr_inodes" not in options:
            assert checkpoints.save(2, small)
            assert checkpoints.steps() == [2]
            assert sorted(path.name for path in (disk / "c").iterdir()) == ["2"]
            checkpoints.close()


def test_a_read_only_disk_is_refused_and_read_from(tmp_path):
    state = {"w": jnp.arange(3.0)}
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        with Checkpointer(disk / "c") as checkpoints:
            checkpoints.save(1, state)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        checkpoints = Checkpointer(disk / "c")
        assert digest(checkpoints.restore(state)) == digest(state)
        with pytest.raises(SaveError, match=r"checkpoint 2 could not be saved in .*ermis") as found:
            checkpoints.save(2, state)
        assert found.value.lasts
        with pytest.raises(SaveError, match=r"could not be saved in .*[Rr]ead-only"):
            Checkpointer(disk / "other").save(2, state)


def test_a_lost_folder_is_made_again_and_a_file_in_its_place_refused(tmp_path):
    state = {"w": jnp.arange(3.0)}
    checkpoints = Checkpointer(tmp_path / "c")
    assert checkpoints.save(1, state)
    checkpoints.wait()
    shutil.rmtree(tmp_path / "c")
    assert checkpoints.save(2, state)
    assert checkpoints.steps() == [2]
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").write_text("not a folder")
    with pytest.raises(OSError, match="c"):
        checkpoints.save(3, state)
    with contextlib.suppress(OSError):
        checkpoints.close()


@pytest.mark.parametrize("damage", ["byte", "junk", "lost", "part"])
def test_who_reads_a_run_without_a_step_is_told_of_a_damaged_manifest(saved, damage, caplog):
    checkpoints, run = saved.rename(saved.with_name("checkpoints")), saved.parent
    assert trained.default_step(run) == 1  # the best
    manifest = checkpoints / "3" / "manifest" / "metadata"
    if damage == "byte":
        text = manifest.read_bytes()
        flip(manifest, 8 * (text.index(b'"checksum": ') + 12))
    elif damage == "junk":
        manifest.write_text("{")
    else:
        manifest.unlink() if damage == "lost" else shutil.rmtree(checkpoints / "3" / "state")
    place = rf"checkpoint 3 in {checkpoints} is damaged: .*\(1, 2\).*{checkpoints / '3'} out"
    for read in (trained.default_step, trained.load, trained.unmerged, landscape.sound_steps):
        with pytest.raises(DamagedCheckpointError, match=place):
            read(run)
    reader = Checkpointer(checkpoints)
    assert reader.config(2) == {"step": 2}  # a step was asked for
    with caplog.at_level(logging.WARNING, "jaxtrain"):
        w = reader.restore_params({"w": make_state(0)["params"]["w"]})["w"]
    np.testing.assert_array_equal(w, make_state(2)["params"]["w"])
    assert "checkpoint 3" in caplog.text
    # An earlier one that lacks files may be on its way to be deleted.
    shutil.rmtree(checkpoints / "3")
    (checkpoints / "1" / "manifest" / "metadata").unlink()
    assert trained.default_step(run) == 2
