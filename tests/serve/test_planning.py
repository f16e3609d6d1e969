"""Plans of servers against the engine's own arrays, and against counts by hand."""

import dataclasses
import importlib.util
import json

import jax
import pytest

from jaxtrain.models import decoder
from jaxtrain.serve.engine import Engine
from tests.commands import refused, run

pytestmark = pytest.mark.usefixtures("devices")
TINY = ["plan", "experiments.gpt", "--layers", "2", "--width", "32", "--heads", "2"]


@pytest.fixture
def devices():
    """Has JAX start with those of the tests, before a plan starts it with fewer."""
    return jax.devices()


def test_bytes_are_those_of_an_engine(capsys):
    status, out, err = run(capsys, *TINY, "--target", "cpu:1", "--serve", "3x100", "--json")
    assert status == 0, err
    plan = json.loads(out)
    model = dataclasses.replace(
        decoder.tiny(), layers=2, width=32, mlp_width=128, kv_heads=2, head_dim=16
    )
    params = decoder.init(model, jax.random.key(0))
    engines = [Engine(model, params, slots=3, longest=100, cache=kind) for kind in (None, "int8")]
    assert plan["weights"]["float32"] == sum(x.nbytes for x in jax.tree.leaves(params))
    for engine, kind in zip(engines, ("float32", "int8"), strict=True):
        held = sum(x.nbytes for x in jax.tree.leaves(engine._caches))
        assert plan["position"][kind] * engine.pool.count * 64 == held
    assert plan["position"] == {"float32": 2 * 2 * 32 * 4, "int8": 2 * 2 * (32 + 2 * 4)}
    assert plan["working"] > 0
    assert plan["fits"]
    assert plan["limit"] is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "cpu:1", "--serve", "16"], "--serve is '16': give SLOTSxLENGTH"),
        (["--target", "cpu:1", "--serve", "1x8"], "of 2 slots or more"),
        (["--target", "cpu:2", "--serve", "2x8"], "give --mesh.tensor 2"),
        (["--target", "cpu:1", "--serve", "2x8", "--search"], "--search is of a train step"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, said, capsys):
    assert said in refused(capsys, *TINY, *flags)


@pytest.mark.slow
def test_8b_on_an_h100_is_what_a_count_says(capsys):
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("needs the compiler jax_cuda12_plugin: pip install 'jaxtrain[aot]'")
    line = ["plan", "experiments.gpt", "--model", "qwen3-8b", "--tokenizer", "151936"]
    line += ["--precision", "bf16", "--target", "h100:1x1", "--serve", "16x8192", "--json"]
    status, out, err = run(capsys, *line)
    assert status == 0, err
    plan = json.loads(out)
    count, table, layers = 8_190_735_360, 151936 * 4096, 36
    assert plan["weights"]["bfloat16"] == 2 * count
    assert plan["position"] == {"bfloat16": 2 * 2 * layers * 8 * 128, "int8": 2 * layers * 8 * 132}
    # All weights but the table of tokens are read, and every key of every slot.
    first, full, prompt = plan["seconds"].values()
    assert first[0] == pytest.approx(2 * (count - table) / 3352e9)
    keys = 16 * 8192 * plan["position"]["bfloat16"]
    assert full[0] == pytest.approx(first[0] + keys / 3352e9)
    products = 2 * (count - table) * 16 / 989.4e12
    assert first[1] == pytest.approx(products, rel=0.02)  # and the first page's scores
    scores = 4 * 32 * 128 * layers * 8192 * 16 / 989.4e12
    assert full[1] == pytest.approx(products + scores, rel=0.02)
    assert prompt[1] > products / 16 * 8192 * 0.9
    slot = 8192 * plan["position"]["bfloat16"] + plan["working"] // 16
    assert plan["rows"]["bfloat16, bfloat16"] == (plan["limit"] - 2 * count) // slot
    assert plan["working"] < 2**30  # the cache is written where it lies
