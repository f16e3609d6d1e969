"""Checkpoints in buckets that TensorStore has no client for, on an in-memory stand-in for S3."""

import json

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import jaxtrain as jt
from jaxtrain.host import storage
from jaxtrain.host.paths import as_path
from jaxtrain.run.checkpoints import objects
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, SaveError
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError
from jaxtrain.run.checkpoints.reader import Reader
from jaxtrain.run.folder import find_run_dir, lock_run_dir
from tests import memory_s3
from tests.memory_s3 import S3

FOLDER = "s3://bucket/run/checkpoints"


@pytest.fixture
def s3():
    with memory_s3.installed() as bucket:
        yield bucket


def a_state(mesh, values=1.0):
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    keys = jax.random.split(jax.random.key(3), 4)
    return {
        "both": put(values * jnp.arange(64.0).reshape(8, 8), "fsdp", "data"),
        "half": {"bf16": put(jnp.arange(8, dtype=jnp.bfloat16), "fsdp"), "scalar": jnp.float32(3)},
        "bools": put(jnp.arange(8) % 3 == 0, None),
        "host": np.arange(5, dtype=np.uint8),
        "keys": put(keys, "data"),
        "number": 7,
    }


def assert_same(found, state):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(state), strict=True
    ):
        if isinstance(b, jax.Array):
            assert a.sharding == b.sharding, path
            if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path), strict=True)


def test_another_mesh_reads_what_one_has_written_in_parts(s3, monkeypatch):
    monkeypatch.setattr(objects, "CHUNK_BYTES", 32)  # of 4 shards of 64 bytes, two chunks each
    real, written = S3.pipe_file, []

    def pipe_file(self, path, value, **options):
        written.append(path)
        return real(self, path, value, **options)

    monkeypatch.setattr(S3, "pipe_file", pipe_file)
    state = a_state(jt.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4]))
    with Checkpointer(FOLDER, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state, config={"step": step})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.size(3) == sum(
            len(f.getvalue()) for p, f in s3.store.items() if "/3/" in p
        )
    assert sum("/3/state/both/" in path for path in s3.store) == 8 + 1
    assert len(written) == len(set(written))  # of shards on several devices one is
    for axes in ({"data": 4, "fsdp": 1}, {"data": 1, "fsdp": 1}, {"data": 2, "fsdp": 4}):
        count = axes["data"] * axes["fsdp"]
        other = a_state(jt.make_mesh(**axes, devices=jax.devices()[:count]), values=0.0)
        found = Reader(FOLDER).restore(other)
        assert_same(found, a_state(jt.make_mesh(**axes, devices=jax.devices()[:count])))
    assert Reader(FOLDER).config() == {"step": 3}


def test_a_copy_on_a_disk_is_a_checkpoint_that_orbax_reads(s3, tmp_path):
    state = a_state(jt.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4]))
    with Checkpointer(FOLDER) as checkpoints:
        checkpoints.save(1, state)
    fsspec.filesystem("s3").get(FOLDER, str(tmp_path), recursive=True)
    assert_same(Reader(tmp_path / "checkpoints").restore(state), state)


def test_any_storage_of_fsspec_will_do():
    folder = as_path("memory://bucket/any")
    state = a_state(jt.make_mesh(data=2, devices=jax.devices()[:2]))
    with Checkpointer(folder / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]
    assert_same(Reader("memory://bucket/any/checkpoints").restore(state), state)
    found, resumes = find_run_dir("gpt", str(folder / "run"))
    assert (str(found), resumes) == ("memory://bucket/any/run", False)
    first = lock_run_dir(found)
    assert lock_run_dir(found, resumes=True).taken_by() is None
    assert first.taken_by().startswith("process ")
    assert find_run_dir("gpt", str(folder / "run"), auto_resume=True)[1]
    lock_run_dir(found, overwrite=True)
    assert sorted(path.name for path in found.iterdir()) == ["owner.json"]


def test_a_save_that_was_killed_is_no_checkpoint_and_is_written_anew(s3):
    state = a_state(jt.make_mesh(devices=jax.devices()[:1]))
    with Checkpointer(FOLDER) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    del s3.store["/bucket/run/checkpoints/2/commit_success.txt"]
    s3.store["/bucket/run/checkpoints/2/remains"] = s3.store[
        "/bucket/run/checkpoints/1/config/metadata"
    ]
    reader = Reader(FOLDER)
    assert reader.steps() == [1]
    with Checkpointer(FOLDER) as checkpoints:
        assert checkpoints.is_saved(2) is False
        checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.is_saved(2)
    assert "/bucket/run/checkpoints/2/remains" not in s3.store
    assert_same(reader.restore(state), state)


def test_what_is_cut_short_once_is_read_again_and_what_stays_so_is_damaged(s3, monkeypatch):
    state, real = a_state(jt.make_mesh(devices=jax.devices()[:1])), S3.cat_file
    with Checkpointer(FOLDER) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    torn = []

    def once(self, path, *args, **kwargs):
        found = real(self, path, *args, **kwargs)
        if path.endswith("2/state/both/0.0") and not torn:
            torn.append(path)
            return found[:100]
        return found

    monkeypatch.setattr(S3, "cat_file", once)
    assert_same(Reader(FOLDER).restore(state, 2), state)
    assert torn
    chunk = s3.store["/bucket/run/checkpoints/2/state/both/0.0"]
    chunk.seek(5)
    chunk.write(b"\xff")
    with pytest.raises(DamagedCheckpointError, match="'both' is not what was saved"):
        Reader(FOLDER).restore(state, 2)
    del s3.store["/bucket/run/checkpoints/2/state/both/0.0"]
    with pytest.raises(DamagedCheckpointError, match="its arrays cannot be read"):
        Reader(FOLDER).restore(state, 2)
    assert_same(Reader(FOLDER).restore(state), state)


def test_throttling_is_waited_for_and_a_refusal_lasts(s3, monkeypatch):
    state, real, refused = a_state(jt.make_mesh(devices=jax.devices()[:1])), S3.pipe_file, []

    def slow_down(self, path, value, **options):
        if len(refused) < 5:
            refused.append(path)
            raise OSError(16, "Please reduce your request rate.")  # what s3fs makes of SlowDown
        return real(self, path, value, **options)

    monkeypatch.setattr(S3, "pipe_file", slow_down)
    monkeypatch.setattr(storage, "pause", lambda seconds: None)
    with Checkpointer(FOLDER) as checkpoints:
        checkpoints.save(1, state)
    assert len(refused) == 5
    assert_same(Reader(FOLDER).restore(state), state)

    def forbidden(self, path, value, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(S3, "pipe_file", forbidden)
    checkpoints = Checkpointer(FOLDER)
    checkpoints.save(2, state)
    with pytest.raises(SaveError, match="Access Denied") as error:
        checkpoints.wait()
    assert error.value.lasts
    assert Reader(FOLDER).steps() == [1]


def test_the_description_of_an_array_is_zarrs(s3):
    import tensorstore

    rows = jnp.arange(32, dtype=jnp.bfloat16).reshape(4, 8)
    with Checkpointer(FOLDER) as checkpoints:
        checkpoints.save(1, {"rows": rows})
    files = {
        path.rpartition("/")[2]: s3.store[path].getvalue() for path in s3.store if "/rows/" in path
    }
    about = json.loads(files[".zarray"])
    assert (about["shape"], about["chunks"], about["dtype"]) == ([4, 8], [4, 8], "bfloat16")
    store = tensorstore.KvStore.open({"driver": "memory"}).result()
    for name, data in files.items():
        store.write(name, data).result()
    found = tensorstore.open({"driver": "zarr"}, kvstore=store).result().read().result()
    np.testing.assert_array_equal(found, np.asarray(rows))


def test_a_storage_that_nothing_installed_writes_to_is_refused():
    with pytest.raises(ValueError, match="in no storage known here"):
        Reader("http://host/run")
    known = fsspec.registry.get("az")
    if known is None:
        with pytest.raises(ValueError, match="az://, and the package that writes there is missing"):
            Reader(epath.Path("az://bucket/run"))
