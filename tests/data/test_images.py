"""Images of folders, Parquet files and arrays are the same rows, in the same batches."""

import io
import os
import pickle
import shutil
import sys

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from jaxtrain.data import Augmented, Batches, Images, WorkerRows, blocks, images, open_images
from tests import memory_s3


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), np.uint8)


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def kinds(pixels, tmp_path_factory):
    """A folder, Parquet files as others and as Hugging Face write them, and arrays."""
    root = tmp_path_factory.mktemp("images")
    labels = np.arange(30) % 3
    for n, label in enumerate(labels):
        (root / "folder" / "abc"[label]).mkdir(parents=True, exist_ok=True)
        (root / "folder" / "abc"[label] / f"{n:02}.png").write_bytes(png(pixels[n]))
    encoded = [png(each) for each in pixels]
    for name, column in (("own", encoded), ("hf", [{"bytes": x, "path": None} for x in encoded])):
        table = pyarrow.table({"image": column, "label": labels})
        pyarrow.parquet.write_table(table, root / f"{name}.parquet")
    np.savez(root / "arrays.npz", images=pixels, labels=labels)
    return root


@pytest.mark.parametrize("name", ["folder", "own.parquet", "hf.parquet", "arrays.npz"])
def test_every_image_is_a_row_with_its_label(kinds, pixels, name):
    found = open_images(kinds / name)
    assert (found.shape, len(found.classes)) == ((8, 8, 3), 3)
    assert 0 < len(found.held_out) < len(found.train)
    seen = {}
    for row in (*found.train, *found.held_out):
        image = np.rint(row["image"] * 255).astype(np.uint8)
        seen[image.tobytes()] = int(row["label"])
    assert seen == {each.tobytes(): n % 3 for n, each in enumerate(pixels)}
    batch = Batches(found.train, global_batch=4, seed=0).batch(0)
    assert {key: (x.shape, x.dtype.name) for key, x in batch.items()} == {
        "image": ((4, 8, 8, 3), "float32"),
        "label": ((4,), "int32"),
        "mask": ((4,), "float32"),
    }
    again = open_images(kinds / name)
    assert again.fingerprint == found.fingerprint
    assert [row["label"] for row in again.held_out] == [row["label"] for row in found.held_out]


def by_class(folder, images):
    """A folder of two classes, of which each has every other image."""
    for n, image in enumerate(images):
        (folder / "xy"[n % 2]).mkdir(parents=True, exist_ok=True)
        image.save(folder / "xy"[n % 2] / f"{n}.png")
    return folder


def test_images_are_brought_to_a_size(tmp_path):
    by_class(tmp_path, [Image.new("RGB", (10 + n, 20)) for n in range(4)])
    assert open_images(tmp_path, size=6).shape == (6, 6, 3)
    with pytest.raises(
        ValueError, match=r"has the shape .* and '.*0.png' has \(20, 10, 3\): give `im"
    ):
        open_images(tmp_path)


@pytest.mark.parametrize("name", ["folder", "own.parquet"])
def test_every_header_is_read_before_a_row_is(tmp_path, name):
    images = [Image.new("RGB", (4, 6), (n, 0, 0)) for n in range(70)]
    turned = Image.Exif()
    turned[0x112] = 6  # of the same size when it is turned

    def opened(at, content, size=None):
        encoded = [png(np.asarray(image)) for image in images]
        encoded[at] = content
        for n, each in enumerate(encoded):
            (tmp_path / "folder" / "xy"[n % 2]).mkdir(parents=True, exist_ok=True)
            (tmp_path / "folder" / "xy"[n % 2] / f"{n:02}.png").write_bytes(each)
        table = pyarrow.table({"image": encoded, "label": np.arange(70) % 2})
        pyarrow.parquet.write_table(table, tmp_path / "own.parquet")
        return open_images(tmp_path / name, size=size)

    with io.BytesIO() as file:
        Image.new("RGB", (6, 4)).save(file, "png", exif=turned)
        assert opened(10, file.getvalue()).shape == (6, 4, 3)
    other = png(np.zeros((6, 5, 3), np.uint8))
    which = "10.png" if name == "folder" else "row 10"  # neither is in the sample of colours
    with pytest.raises(ValueError, match=f"{which}' has the shape|{which} has the shape"):
        opened(10, other)
    assert opened(10, other, size=4).shape == (4, 4, 3)
    with pytest.raises(ValueError, match=f"{which}'? is no image, or damaged"):
        opened(10, b"x", size=4)


def test_colours_stay_where_the_first_images_are_grey(tmp_path):
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    few = open_images(by_class(tmp_path / "few", [Image.new("L", (4, 4)), red]))
    rows = {float(row["image"].sum()) for row in (*few.train, *few.held_out)}
    assert (few.shape, rows) == ((4, 4, 3), {0.0, 16.0})
    # Of 70, every other one is not in the sample.
    grey = [Image.new("L", (4, 4), n) for n in range(70)]
    assert open_images(by_class(tmp_path / "many", grey)).shape == (4, 4, 1)
    grey[10] = red  # the second by name
    found = open_images(by_class(tmp_path / "many", grey))
    with pytest.raises(ValueError, match=r"10.png' has colours and .* is grey"):
        list(found.train) + list(found.held_out)


def test_sixteen_bits_are_scaled_and_what_a_camera_was_turned_by_is_undone(tmp_path):
    deep = np.linspace(0, 65535, 24).astype(np.uint16).reshape(4, 6)
    turned = Image.Exif()
    turned[0x112] = 6  # 90 degrees clockwise
    for label in "xy":
        (tmp_path / label).mkdir()
        Image.fromarray(deep).save(tmp_path / label / "a.png", exif=turned)
    image = open_images(tmp_path).train[0]["image"][..., 0]
    np.testing.assert_allclose(image, np.rot90(deep, -1) / 65535, atol=0.5 / 255)


@pytest.mark.parametrize("name", ["folder", "own.parquet", "arrays.npz"])
def test_a_copy_elsewhere_has_the_same_fingerprint_and_other_images_another(kinds, tmp_path, name):
    ours, copy = kinds / name, tmp_path / "copy" / name
    copy.parent.mkdir()
    shutil.copytree(ours, copy) if ours.is_dir() else shutil.copyfile(ours, copy)
    os.utime(copy / "a" / "00.png" if ours.is_dir() else copy, (1, 1))
    fingerprint = open_images(ours).fingerprint
    assert open_images(copy).fingerprint == fingerprint
    if name == "folder":
        (copy / "a" / "00.png").rename(copy / "b" / "00.png")
    elif name == "own.parquet":
        table = pyarrow.parquet.read_table(copy)
        pyarrow.parquet.write_table(table.take(list(reversed(range(30)))), copy)
    else:
        with np.load(ours) as arrays:
            np.savez(copy, images=arrays["images"][::-1], labels=arrays["labels"])
    assert open_images(copy).fingerprint != fingerprint


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "none", "none' does not exist"),
        (lambda root: root, r"holds 0 image\(s\) of 0 class\(es\): give two or more"),
        (lambda root: write(root / "a.txt", b""), "a.txt' holds no images: give a folder by class"),
        (
            lambda root: write(root / "a.npz", b"x"),
            "a.npz' cannot be read: it needs images and lab",
        ),
        (lambda root: write(root / "a.parquet", b"x"), "a.parquet' is cut short or damaged"),
        (lambda root: arrays(root, np.zeros((2, 4)), np.arange(2)), r"images \(2, 4\) and labels"),
        (lambda root: arrays(root, np.zeros((2, 4, 4)), np.arange(2.0)), "no integers from 0"),
        (
            lambda root: arrays(root, np.zeros((2, 4, 4), np.int64), np.arange(2)),
            "a.npz' has images of int64, whose range nobody knows",
        ),
        (
            lambda root: arrays(root, np.zeros((2, 4, 4)), np.array([0, 10**6])),
            "has the label 1000000, of which",
        ),
        (
            lambda root: arrays(root, np.zeros((2, 4, 4)), np.array([3, 3])),
            r"holds 2 image\(s\) of 1 class",
        ),
        (lambda root: structs(root, [{"data": b"x"}] * 2), "row 0 has no bytes of an image"),
        (
            lambda root: write(root / "c" / "a.png", b"x").parents[1],
            "a.png' is no image, or damaged",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path, make, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        open_images(make(tmp_path))
    assert "\n" not in str(raised.value)


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def arrays(root, images, labels):
    np.savez(root / "a.npz", images=images, labels=labels)
    return root / "a.npz"


def structs(root, column):
    table = pyarrow.table({"image": column, "label": [0, 1]})
    pyarrow.parquet.write_table(table, root / "a.parquet")
    return root / "a.parquet"


def test_arrays_that_do_not_fit_the_memory_are_refused_before_they_are_unpacked(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=np.zeros((20, 1024, 1024), np.uint8), labels=np.arange(20) % 2)
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 12)  # 4,096 pages of 4 KiB
    with pytest.raises(ValueError, match=r"a.npz' cannot be read: .*20.0 MiB, of 16.0 MiB here"):
        open_images(path)
    table = pyarrow.table({"image": [bytes(1 << 20)] * 20, "label": list(range(20))})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="zstd")
    assert path.stat().st_size < 50_000
    with pytest.raises(ValueError, match=r"unpacked '.*a.parquet' is 20.0 MiB, of 16.0 MiB here"):
        open_images(path)


def test_hidden_files_and_folders_are_no_images(tmp_path):
    by_class(tmp_path, [Image.new("L", (4, 4))] * 4)
    write(tmp_path / ".ipynb_checkpoints" / "0.png", b"")
    write(tmp_path / "x" / "._0.png", b"")
    found = open_images(tmp_path)
    assert (found.classes, len(found.train) + len(found.held_out)) == (("x", "y"), 4)


def test_without_pillow(kinds, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[vision\]'"):
        open_images(kinds / "folder")


def test_augmented_images_are_those_of_the_definition():
    pixels = np.random.default_rng(0).random((6, 5, 4, 1)).astype(np.float32) + 1
    images = Images(pixels, np.arange(6, dtype=np.int32))
    moved = {
        label: [
            np.pad(pixels[label], ((2, 2), (2, 2), (0, 0)))[y : y + 5, x : x + 4][:, ::turn]
            for y in range(5)
            for x in range(5)
            for turn in (1, -1)
        ]
        for label in range(6)
    }
    rows, seen = Augmented(images, seed=3, crop=2, flip=True), set()
    for index in range(60):  # ten epochs
        row = rows[index]
        assert row["label"] == index % 6
        (found,) = [n for n, x in enumerate(moved[index % 6]) if np.array_equal(x, row["image"])]
        seen.add(found)
    assert len(seen) > 25  # of 50

    mixed, kept, same = Augmented(images, seed=3, mixup=0.4), 0.0, 0
    for index in range(600):
        row, basis = mixed[index], np.stack(pixels).reshape(6, -1).T
        shares = np.linalg.lstsq(basis, row["image"].ravel(), rcond=None)[0]
        np.testing.assert_allclose(basis @ shares, row["image"].ravel(), atol=1e-4)
        assert (np.sort(shares)[:4] < 1e-3).all()
        assert shares.sum() == pytest.approx(1, abs=1e-3)
        kept, same = kept + shares[index % 6], same + (row["label"] == index % 6)
    # A share is one half on average, but where an image meets itself, one time in six.
    assert kept / 600 == pytest.approx(7 / 12, abs=0.05)
    assert same / 600 == pytest.approx(7 / 12, abs=0.06)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_augmented_batches_are_of_the_seed_and_the_step_alone(workers):
    images = Images(np.random.default_rng(0).random((6, 5, 4, 1)), np.arange(6, dtype=np.int32))

    def batches(seed=1, workers=0):
        rows = Augmented(images, seed=seed, crop=2, flip=True, mixup=0.4)
        rows = WorkerRows(rows, workers) if workers else rows
        return Batches(rows, global_batch=6, seed=0)

    one, again = batches(), batches(workers=workers)
    for step in (7, 0, 1):  # whatever was read before
        found = again.batch(step) if workers else batches().batch(step)
        for name, value in one.batch(step).items():
            np.testing.assert_array_equal(value, found[name])
    first, second, other = one.batch(0), one.batch(1), batches(seed=2).batch(0)
    assert not np.array_equal(first["image"], other["image"])
    assert not np.array_equal(np.sort(first["image"], None), np.sort(second["image"], None))
    assert sorted(one.source_index(n) % 6 for n in range(6, 12)) == list(range(6))


@pytest.mark.parametrize("name", ["folder", "own.parquet", "arrays.npz"])
def test_images_in_a_bucket_are_those_of_a_disk_and_are_read_once(
    kinds, name, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)  # of a file of 267 bytes
    images._block_cache.cache_clear()
    with memory_s3.installed() as s3:
        for path in [kinds / name, *(kinds / name).rglob("*")]:
            if path.is_file():
                fsspec.filesystem("s3").pipe_file(
                    f"s3://b/{path.relative_to(kinds)}", path.read_bytes()
                )
        near, far = open_images(kinds / name), open_images(f"s3://b/{name}")
        assert (far.classes, far.fingerprint) == (near.classes, near.fingerprint)
        one, other = (Batches(x.train, global_batch=8, seed=1) for x in (near, far))
        for step in range(3):
            for key, array in one.batch(step).items():
                np.testing.assert_array_equal(other.batch(step)[key], array, strict=True)
        monkeypatch.setattr(s3, "cat_file", None)  # all that was read lies on the disk
        np.testing.assert_array_equal(other.batch(1)["image"], one.batch(1)["image"])
        assert pickle.loads(pickle.dumps(far.train))[0].keys() == near.train[0].keys()


def test_images_of_other_folders_and_those_written_again_are_not_taken_for_what_was_read(
    pixels, tmp_path, monkeypatch
):
    """Bitmaps of one shape have the same sizes, as their names are the same here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images._block_cache.cache_clear()

    def read(folder, first):
        for n in range(4):
            packed = io.BytesIO()
            Image.fromarray(pixels[first + n]).save(packed, "bmp")
            name = f"s3://b/{folder}/{'ab'[n % 2]}/{n}.bmp"
            fsspec.filesystem("s3").pipe_file(name, packed.getvalue())
        found = open_images(f"s3://b/{folder}").train.images
        want = [pixels[first + n] for n in (0, 2, 1, 3)]  # by class
        np.testing.assert_array_equal([found[n] for n in range(4)], want)

    with memory_s3.installed():
        for folder, first in (("one", 0), ("two", 4), ("one", 8)):
            read(folder, first)


def test_a_file_in_a_bucket_is_an_image(kinds, pixels):
    with memory_s3.installed():
        fsspec.filesystem("s3").pipe_file("s3://b/0.png", png(pixels[0]))
        (found,) = images.images_of(["s3://b/0.png"], ["a"], (8, 8, 3))
        np.testing.assert_array_equal(found, pixels[0])
        with pytest.raises(FileNotFoundError):
            images.images_of(["s3://b/1.png"], ["a"], (8, 8, 3))[0]
