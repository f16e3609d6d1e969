"""Many adapters over one base, against the engine of each alone, and against PEFT."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import hf
from jaxtrain.data import ByteTokenizer
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.hf.opening import Opened, open_adapter
from jaxtrain.models import decoder
from jaxtrain.ops.linear import Dora, LowRank, kernel_rules, merge
from jaxtrain.ops.row_adapters import with_adapters
from jaxtrain.serve.engine import Engine, Request
from jaxtrain.sharding.rules import param_shardings
from jaxtrain.tree import is_a, map_kind, path_name
from tests.hf import models
from tests.serve.test_engine import SIZES, answers, engine_of, model_of, prompts

# Of other ranks, kernels and kinds.
CHANGES = {
    "all": LoRA(4, alpha=6.0),
    "some": LoRA(2, ("/q/kernel=3", "mlp/down"), alpha=3.0, rank_stabilized=True),
    "dora": LoRA(2, ("/(q|v)/kernel",), alpha=6.0, dora=True),
}


def with_additions(change, params, seed):
    """Parameters with additions that change what a model says."""
    r = np.random.default_rng(seed)
    params = change.params(params, jax.random.key(seed))
    draw = lambda x: dataclasses.replace(x, b=r.normal(0, 0.3, x.b.shape).astype("f"))  # noqa: E731
    params = map_kind(LowRank, draw, params)
    return map_kind(Dora, lambda x: Dora(x.low, 1.2 * x.magnitude), params)


@functools.cache
def adapted():
    """The parameters of each adapter, and its kernels by path."""
    _, plain = model_of("llama")
    whole, kernels = {}, {}
    for seed, (name, change) in enumerate(CHANGES.items()):
        whole[name] = with_additions(change, plain, seed)
        found = jax.tree_util.tree_leaves_with_path(whole[name], is_leaf=is_a(LowRank | Dora))
        kernels[name] = {path_name(p): x for p, x in found if isinstance(x, LowRank | Dora)}
    return whole, kernels


def asked(prompt, adapter, **more):
    more = {"temperature": 0.0, "top_logprobs": 3} | more
    return Request(prompt, 8, adapter=adapter, **more)


def told(engine, requests):
    found = answers(engine, requests)
    return [tokens for tokens, _ in found], [np.frombuffer(x, np.float32) for _, x in found]


def test_rows_of_one_batch_have_their_own_adapters(monkeypatch):
    config, plain = model_of("llama")
    whole, kernels = adapted()
    engine = Engine(config, plain, **SIZES, adapters=kernels)
    beginning = prompts(2, 20)[0]  # alike in all: keys and values are not
    alone = engine_of("llama")
    names = [None, *CHANGES]
    together = [asked(beginning, name) for name in names] * 2
    tokens, logprobs = told(engine, together)
    bits = answers(engine, together)
    for at, name in enumerate(names):
        # In other company, and from pages that another has read, the same bits.
        assert bits[at] == bits[at + 4] == answers(engine, [asked(beginning, name)])[0]
        monkeypatch.setattr(alone, "_params", [merge(whole[name]) if name else plain])
        alone.pool.forget()
        ((expected,), (likely,)) = told(alone, [asked(beginning, None)])
        assert tokens[at] == expected
        np.testing.assert_allclose(logprobs[at], likely, atol=1e-4)
        if name is None:
            assert bits[at] == answers(alone, [asked(beginning, None)])[0]
    assert len({x[0] for x in logprobs}) == 4
    assert engine.programs == 2
    assert engine.pool.free == engine.pool.count - 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_company_of_other_adapters_changes_no_bit(dtype):
    config, plain = model_of("llama", dtype)
    engine = Engine(config, plain, **SIZES, adapters=adapted()[1])
    names, rng = [None, *CHANGES], np.random.default_rng(0)
    own = [
        asked(prompt, names[i % 4], temperature=0.9 * (i % 2), seed=i)
        for i, prompt in enumerate(prompts(1, 1, 5, 8, 17, 16, 20, 9, 3))
    ]
    alone = [answers(engine, [request])[0] for request in own]
    if dtype == jnp.float32:
        without = engine_of("llama")
        assert [answers(without, [each])[0] for each in own[::4]] == alone[::4]
    for trial in range(30):
        others = [
            asked(prompt, names[rng.integers(4)], temperature=1.0, seed=trial)
            for prompt in prompts(trial, *rng.integers(1, 28, 6))
        ]
        everyone = own + others
        order = rng.permutation(len(everyone))
        found = answers(engine, [everyone[i] for i in order])
        for place, who in enumerate(order):
            assert who >= len(own) or found[place] == alone[who]
    assert engine.programs == 2


@pytest.mark.slow
def test_a_mesh_writes_the_adapters_same_tokens():
    config, plain = model_of("llama")
    kernels = adapted()[1]
    mesh = jt.make_mesh(tensor=4, devices=jax.devices()[:4])
    rules = kernel_rules(decoder.RULES, plain)
    placed = jax.device_put(plain, param_shardings(plain, mesh, rules))
    requests = [asked(prompts(3, 11)[0], name) for name in (None, *CHANGES)]
    split = Engine(config, placed, **SIZES, adapters=kernels, mesh=mesh)
    assert not split._params[0]["blocks"]["attn"]["q"]["kernel"].b.sharding.is_fully_replicated
    whole = Engine(config, plain, **SIZES, adapters=kernels)
    assert told(split, requests)[0] == told(whole, requests)[0]


def test_what_is_of_another_model_is_refused():
    config, plain = model_of("llama")
    kernels = adapted()[1]["all"]
    other = {"blocks/attn/q/other": kernels["blocks/attn/q/kernel"]}
    with pytest.raises(ValueError, match="'x' adds to 'blocks/attn/q/other', which the model lac"):
        with_adapters(plain, {"x": other})
    other = {"blocks/attn/q/kernel": kernels["blocks/mlp/up/kernel"]}
    with pytest.raises(ValueError, match=r"'x' adds 16 x \d+ to 'blocks/attn/q/kernel', which is"):
        with_adapters(plain, {"x": other})
    engine = Engine(config, plain, **SIZES, adapters={"all": kernels})
    with pytest.raises(ValueError, match="the adapter is 'x': there are all"):
        engine.submit(asked([1], "x"))


@pytest.mark.slow
def test_peft_s_files_have_its_logits(tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    models.save("llama", tmp_path / "base")
    tokens = np.random.default_rng(0).integers(0, 61, 12).tolist()
    config, plain = hf.read_config(tmp_path / "base"), hf.load(hf.open_weights(tmp_path / "base"))
    opened = Opened(config, plain, ByteTokenizer(), str(tmp_path / "base"), ((), ()))
    expected, kernels = {}, {}
    options = {"r": 4, "rank_pattern": {"down_proj": 2}}, {"r": 2, "use_dora": True}
    for name, own in zip("ab", options, strict=True):
        base = models.transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        how = peft.LoraConfig(lora_alpha=12, target_modules=["q_proj", "down_proj"], **own)
        theirs = peft.get_peft_model(base, how).eval()
        torch.manual_seed(len(expected))
        with torch.no_grad():
            for path, x in theirs.named_parameters():
                if "lora_" in path:
                    x.add_(0.2 * torch.randn(x.shape))
            logits = theirs(torch.tensor([tokens])).logits[0, :-1]
            expected[name] = logits.log_softmax(-1)[range(11), tokens[1:]].numpy()
        theirs.save_pretrained(tmp_path / name)
        kernels[name] = open_adapter(str(tmp_path / name), opened)
    engine = Engine(config, plain, slots=4, chunk=8, page=4, adapters=kernels)
    for name in "ab":
        found = [x for x, _ in engine.score(tokens, adapter=name)]
        np.testing.assert_allclose(found, expected[name], atol=1e-4)
    assert np.abs(expected["a"] - expected["b"]).max() > 0.1
