"""Hugging Face folders in a bucket, on an in-memory stand-in for S3, against the same on a disk."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.data import blocks
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.hf import adapters, opening
from jaxtrain.models import decoder
from jaxtrain.ops.linear import LowRank
from jaxtrain.tree import named_leaves
from tests import memory_s3

SMALL = decoder.DecoderConfig(vocab_size=64, seq_len=8, layers=2, width=16, heads=4)
FOLDER = "s3://bucket/model"


@pytest.fixture
def s3(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)
    with memory_s3.installed() as bucket:
        yield bucket


def drawn(init):
    """Parameters of any numbers, without a program that draws them."""
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape).astype(x.dtype)  # noqa: E731
    return jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)))


def test_a_model_is_written_and_read_and_no_more_than_its_rows_are_asked_for(
    s3, tmp_path, monkeypatch
):
    params = drawn(functools.partial(decoder.init, SMALL))
    shards = {"max_shard_bytes": 4000}
    for folder in (FOLDER, tmp_path / "model"):
        hf.save(folder, SMALL, params, **shards, files={"tokenizer.json": "{}"})
    there = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert {p.rpartition("/")[2]: x.getvalue() for p, x in s3.store.items()} == there
    assert len(there) > 4
    with pytest.raises(ValueError, match="holds a model already"):
        hf.save(FOLDER, SMALL, params)
    found, real = [], s3.cat_file

    def cat_file(self, path, start=None, end=None, **options):
        found.append(end - start)
        return real(self, path, start=start, end=end, **options)

    monkeypatch.setattr(s3, "cat_file", cat_file)
    assert opening.find_model(FOLDER) == (FOLDER, hf.read_config(tmp_path / "model"), False)
    weights = hf.open_weights(FOLDER)
    del found[:]
    table = weights["embed"]["tokens"]
    np.testing.assert_array_equal(
        table[slice(16, 32), slice(0, 16)], params["embed"]["tokens"][16:32]
    )
    assert 16 * 64 <= sum(found) <= 16 * 64 + 512  # of 64 rows of 64 bytes
    for name, x in named_leaves(weights).items():
        np.testing.assert_array_equal(np.asarray(x), named_leaves(params)[name], strict=True)
    del found[:]
    jax.tree.map(np.asarray, hf.open_weights(FOLDER))
    assert not found  # all of it lies on the disk
    (path,) = (path for path in s3.store if "model-00002-of" in path)
    s3.store[path].truncate(900)
    with pytest.raises(ValueError, match=r"00002-of-\d+.safetensors' is cut short or damaged"):
        hf.open_weights(FOLDER)


def test_weights_that_are_written_again_are_not_taken_for_what_was_read(s3):
    """The same process reads both; files of one shape have the same size."""
    drawn_once = drawn(functools.partial(decoder.init, SMALL))
    for params in (drawn_once, jax.tree.map(np.negative, drawn_once)):
        s3.store.clear()
        hf.save(FOLDER, SMALL, params)
        found = jax.tree.map(np.asarray, hf.open_weights(FOLDER))
        jax.tree.map(np.testing.assert_array_equal, found, params)


def test_an_adapter_is_written_and_read(s3, tmp_path):
    model = dataclasses.replace(SMALL, positions="rope", norm="rmsnorm", mlp="swiglu", bias=False)
    change = LoRA(rank=2, alpha=4.0)
    init = functools.partial(decoder.init, model)
    params = drawn(lambda rng: change.params(init(rng), rng))
    is_low = lambda x: isinstance(x, LowRank)  # noqa: E731
    kernels = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_low)
        if is_low(x)
    }
    for folder in (FOLDER, tmp_path / "adapter"):
        adapters.save(folder, model, kernels, family="llama", base="b", form="decoder")
    far, near = (adapters.read(x, model, family="llama") for x in (FOLDER, tmp_path / "adapter"))
    assert far[0] == near[0]
    assert far[1].keys() == near[1].keys() == kernels.keys()
    jax.tree.map(np.testing.assert_array_equal, far[1], near[1])
