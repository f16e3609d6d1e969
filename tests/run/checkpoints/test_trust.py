"""Nothing that a checkpoint, a config, a tokenizer or a data file holds is executed or followed."""

import io
import json
import os
import pathlib
import pickle
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import data
from jaxtrain.run import trained
from jaxtrain.run.checkpoints import manifest
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: pathlib.Path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.fixture
def alarm(tmp_path, monkeypatch):
    """A module and a pickle that leave a file behind when they are run; the test fails if so."""
    fired = tmp_path / "fired"
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "evil_module.py").write_text(f"open({str(fired)!r}, 'w')\nclass Handler: pass\n")
    monkeypatch.syspath_prepend(str(modules))
    pickle.loads(pickle.dumps(Bomb(tmp_path / "works")))
    assert (tmp_path / "works").exists()  # the bomb is a live one
    yield Bomb(fired)
    assert not fired.exists()
    assert "evil_module" not in sys.modules


STATE = {"w": jnp.arange(6.0), "count": jnp.int32(3)}


@pytest.fixture
def checkpoint(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(1, STATE, config={"a": 1})
    return tmp_path / "c" / "1"


def replace_strings(tree, value):
    """JSON with every string that names a type, a class or a handler replaced."""
    if isinstance(tree, dict):
        return {
            key: value if isinstance(each, str) else replace_strings(each, value)
            for key, each in tree.items()
        }
    if isinstance(tree, list):
        return [replace_strings(each, value) for each in tree]
    return tree


def test_metadata_that_names_code_imports_nothing(checkpoint, alarm):
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.parent.name not in ("manifest", "config"):
            whole = path.read_bytes()
            try:
                content = json.loads(whole)
            except ValueError:
                continue
            for value in ("evil_module.Handler", "evil_module:Handler", "!!python/object:evil"):
                path.write_text(json.dumps(replace_strings(content, value)))
                try:
                    restored = Checkpointer(checkpoint.parent).restore(STATE, 1)
                except DamagedCheckpointError:
                    continue
                np.testing.assert_array_equal(restored["w"], STATE["w"])
            path.write_bytes(whole)


def test_pickles_in_the_place_of_every_file_are_not_loaded(checkpoint, alarm):
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            whole = path.read_bytes()
            path.write_bytes(pickle.dumps(alarm))
            for read in (lambda c: c.restore(STATE, 1), lambda c: c.config(1)):
                try:
                    read(Checkpointer(checkpoint.parent))
                except DamagedCheckpointError:
                    continue
            path.write_bytes(whole)


def test_names_in_a_manifest_are_compared_and_never_opened(checkpoint, alarm):
    path = checkpoint / "manifest" / "metadata"
    content = manifest.unseal(json.loads(path.read_text()))
    outside = checkpoint.parents[1] / "outside"
    content["leaves"]["../../../outside"] = content["leaves"]["w"]
    path.write_text(json.dumps(manifest.seal(content)))
    with pytest.raises(ValueError, match=r"it holds '\.\./\.\./\.\./outside'"):
        Checkpointer(checkpoint.parent).restore(STATE)
    assert not outside.exists()


def test_a_hostile_config_names_no_tokenizer_file_of_its_own(tmp_path, alarm):
    content = {"model": {"vocab_size": 257}, "tokenizer": "../../../../etc/passwd"}
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.ones(2)}}, config=content)
    with pytest.raises(ValueError, match="no whole model"):
        trained.load(str(tmp_path / "run"))
    content["model"] = {"__class__": "evil_module.Handler", "__reduce__": ["os.system", "true"]}
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(2, {"params": {"w": jnp.ones(2)}}, config=content)
    with pytest.raises(ValueError, match="no model with the sizes of a Decoder"):
        trained.load(str(tmp_path / "run"), 2)


def test_a_tokenizer_file_runs_and_opens_nothing(tmp_path, alarm):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(pickle.dumps(alarm))
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        data.SubwordTokenizer.load(path)
    good = json.loads(data.SubwordTokenizer.train([b"some words " * 9], 260).to_json())
    hostile = [
        {"normalizer": {"type": "Custom", "code": "import evil_module"}},
        {"pre_tokenizer": {"type": "evil_module.Handler"}},
        {"model": {"type": "BPE", "vocab": "/etc/passwd", "merges": "../../etc/passwd"}},
        {"auto_map": {"AutoTokenizer": ["evil_module.Handler", None]}, "trust_remote_code": True},
    ]
    for change in hostile:
        path.write_text(json.dumps(good | change))
        try:
            loaded = data.SubwordTokenizer.load(path)
        except ValueError:
            continue
        assert loaded.decode(loaded.encode("some words")) == "some words"


def test_a_pickle_in_a_token_store_is_refused(tmp_path, alarm):
    documents = [data.Document("a", b"some words")]
    corpus = data.tokenize(documents, data.ByteTokenizer(), cache_dir=tmp_path / "cache")
    assert corpus.num_bytes == 10
    (folder,) = (tmp_path / "cache").iterdir()
    bomb = np.empty(1, object)
    bomb[0] = alarm
    whole = io.BytesIO()
    np.save(whole, bomb, allow_pickle=True)
    for content in (whole.getvalue(), pickle.dumps(alarm), b"", b"PK\x03\x04"):
        (folder / "train.starts.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.starts\.npy' is damaged .*; delete "):
            data.tokenize(documents, data.ByteTokenizer(), cache_dir=tmp_path / "cache")
    (folder / "manifest.json").write_bytes(pickle.dumps(alarm))
    with pytest.raises(ValueError, match=r"manifest\.json' is damaged .*; delete "):
        data.open_store(folder)


def test_a_pickle_among_the_notes_of_an_unfinished_store_is_refused(tmp_path, alarm):
    split = data.Split([data.Document("a", b"some words")], [data.Document("b", b"more")])
    kept = data.write_store(split, data.ByteTokenizer(), tmp_path / "store")
    (name, _), *_ = kept.manifest["sets"]["train"]["shards"]
    begun = {key: kept.manifest[key] for key in kept.manifest if key != "sets"}
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(begun))
    notes = tmp_path / "store" / name.replace(".tokens", ".npz")
    bomb = np.empty(1, object)
    bomb[0] = alarm
    np.savez(notes, lengths=bomb, sizes=bomb, text="", allow_pickle=True)
    for content in (notes.read_bytes(), pickle.dumps(alarm), b"", b"PK\x03\x04"):
        notes.write_bytes(content)
        with pytest.raises(ValueError, match=r"npz' is damaged .*; delete "):
            data.write_store(split, data.ByteTokenizer(), tmp_path / "store")


def test_pickles_named_as_text_are_refused(tmp_path, alarm):
    for name in ("a.txt", "b.jsonl", "c.parquet"):
        folder = tmp_path / name[0]
        folder.mkdir()
        (folder / name).write_bytes(pickle.dumps(alarm))
        with pytest.raises((ValueError, ImportError)):
            list(data.text_folder(folder).train)


def test_a_text_folder_keeps_to_itself_by_name_and_hides_hidden_files(tmp_path):
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "secret.txt").write_text("secret")
    (folder / ".env.txt").write_text("secret")
    for name in "abc":
        (folder / f"{name}.txt").write_text(name)
    os.symlink(tmp_path, folder / "up")  # a folder of links is not entered
    (tmp_path / "secret.txt").write_text("secret")
    split = data.text_folder(folder)
    assert b"secret" not in {d.text for part in split for d in part}
    shutil.rmtree(folder)


ROWS = {"shape": [3, 2], "dtype": "float32", "cut": [4, 2], "rows": [0, 1, 3]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": [0, 1, 4]},
        {"rows": [1, 0, 3]},
        {"rows": [0, 1]},
        {"rows": [0, 1, 1]},
        {"rows": [-1, 1, 3]},
        {"rows": [0, 1, "3"]},
        {"cut": [4, 3]},
        {"cut": [2, 2, 2], "rows": [0, 1, 5]},
    ],
    ids=str,
)
def test_an_order_of_layers_that_cannot_be_is_no_manifest(wrong):
    whole = {"metrics": {}, "leaves": {"w": ROWS}}
    assert manifest.check(whole) == whole
    with pytest.raises(ValueError, match="leaf 'w' is "):
        manifest.check(whole | {"leaves": {"w": ROWS | wrong}})
