"""Paths: absence is what storage says, never what it fails to say."""

import ast
import errno
import os
import pathlib
import threading

import fsspec
import jax
import pytest
from etils import epath

from jaxtrain.compile import use_compilation_cache
from jaxtrain.hf.export_command import ExportOptions, run_export
from jaxtrain.host import paths
from jaxtrain.run.folder import find_run_dir

ROOT = pathlib.Path(__file__).parents[2]
# Methods and functions that take an error for absence, or fail where an owner has no name.
BLIND = {"exists", "lexists", "isdir", "isfile", "islink", "is_dir", "is_file", "is_symlink"}
BLIND |= {"glob", "rglob", "iglob", "stat", "lstat"}
# What looks at devices of this machine, at what may be made again, or at files just listed.
SIGHTED = {
    "host/paths.py",
    "host/distributed.py",
    "host/quiet.py",
    "data/store.py",
}


def blind_calls(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
            if node.func.attr in BLIND and not of_os:
                yield f"{file.name}:{node.lineno} {node.func.attr}"


def test_nothing_asks_a_path_itself_whether_it_is_there(tmp_path):
    files = [*(ROOT / "jaxtrain").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    assert len(files) > 100
    sighted = {ROOT / "jaxtrain" / name for name in SIGHTED}
    assert [call for file in files if file not in sighted for call in blind_calls(file)] == []
    (tmp_path / "a.py").write_text("import os\nos.stat(p), p.exists(), os.path.isdir(p), q.glob(p)")
    assert len(list(blind_calls(tmp_path / "a.py"))) == 3


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EACCES])
def test_what_storage_does_not_say_is_raised(tmp_path, monkeypatch, number):
    (tmp_path / "file").write_text("text")

    def fails(path, **_):
        raise OSError(number, os.strerror(number), path)

    folder = epath.Path(tmp_path)
    looks = (paths.look, paths.exists, paths.is_folder, paths.is_file)
    assert [look(folder / "none") for look in looks] == [None, False, False, False]
    assert not paths.exists(folder / "file" / "inner")
    assert paths.read_if_there(folder / "none") == b""
    assert [path.name for path in paths.listed(folder, "f*e")] == ["file"]
    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "listdir", "scandir"):
            patch.setattr(os, name, fails)
        for look in (*looks, paths.is_link, lambda path: paths.listed(path)):
            with pytest.raises(OSError, match=os.strerror(number)):
                look(folder)


def test_of_two_that_write_one_file_at_once_one_is_there_whole(tmp_path, monkeypatch):
    path, both, replace, errors = (
        epath.Path(tmp_path / "file"),
        threading.Barrier(2),
        os.replace,
        [],
    )

    def together(*args):
        both.wait(30)
        return replace(*args)

    def write(text):
        try:
            paths.write_whole(path, text)
        except OSError as error:
            errors.append(error)

    monkeypatch.setattr(os, "replace", together)
    threads = [threading.Thread(target=write, args=(text,)) for text in ("one", "two")]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors
    assert path.read_text() in ("one", "two")
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_without_checkpoints_is_refused_at_once():
    for name, why in (
        ("http://host/run", r"'http://host/run' is in no storage known here"),
        ("memory:///run", r"'memory:///run' names no host or bucket: give memory://NAME/..."),
        (os.fsdecode(b"bad\xff"), r"'bad\\udcff' is not named in UTF-8, so no checkpoint can be "),
    ):
        with pytest.raises(ValueError, match=why):
            find_run_dir("gpt", name)


def test_hdfs_without_java_is_one_sentence(monkeypatch):
    def url_to_fs(url):
        raise OSError("Unable to load libjvm\n" + "dlopen(/usr/lib/jvm/libjvm.so) failed\n" * 200)

    paths.as_path("hdfs://host/a")
    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    for call in (paths.look, paths.file_system):
        with pytest.raises(ImportError, match=r"^'hdfs://host/a' needs Java and .* CLASSPATH$"):
            call("hdfs://host/a")


def test_a_user_without_a_home_has_no_cache(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", homeless)
    assert paths.cache_folder() is None
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert use_compilation_cache() is None
        (tmp_path / "file").write_text("")  # in place of a home that cannot be written
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert use_compilation_cache() is None
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        assert use_compilation_cache() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_what_goes_to_a_disk_alone_is_refused_in_a_bucket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("s3://bucket/model", "gs://bucket/model"):
        told = r"--out with --format gguf is '.*/model', in a bucket: give a folder"
        with pytest.raises(ValueError, match=told):
            run_export(ExportOptions(run="run", out=out, format="gguf"), [])
    assert not os.listdir(tmp_path)
