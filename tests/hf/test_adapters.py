"""LoRA's additions in PEFT's files: what is written is read, and PEFT computes the same with it."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.gpt import Config, outline
from jaxtrain import hf
from jaxtrain.build import make_experiment_mesh, make_state, natural
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.hf import adapters, safetensors
from jaxtrain.models import decoder
from jaxtrain.ops.linear import Dora, LowRank, merge
from jaxtrain.run.main import parse
from jaxtrain.tree import path_name
from tests.commands import run
from tests.hf import models
from tests.hf.test_command import save_run

MODEL = decoder.DecoderConfig(vocab_size=61, seq_len=16, layers=2, width=32, heads=4)
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 12))
is_low = lambda x: isinstance(x, LowRank)  # noqa: E731
is_kernel = lambda x: isinstance(x, LowRank | Dora)  # noqa: E731


def with_additions(change, params):
    """Parameters whose additions are not 0, and their kernels by path."""
    r = np.random.default_rng(0)
    params = change.params(params, jax.random.key(1))
    draw = lambda x: dataclasses.replace(x, b=r.normal(0, 0.1, x.b.shape).astype("f"))  # noqa: E731
    params = jax.tree.map(lambda x: draw(x) if is_low(x) else x, params, is_leaf=is_low)
    is_dora = lambda x: isinstance(x, Dora)  # noqa: E731
    own = lambda x: Dora(x.low, 1.2 * x.magnitude) if is_dora(x) else x  # noqa: E731
    params = jax.tree.map(own, params, is_leaf=is_dora)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_kernel)
    return params, {path_name(path): x for path, x in leaves if is_kernel(x)}


# Of c_attn alone v and q have additions, of different ranks and so of different scales.
CHANGES = [
    LoRA(4, alpha=6.0),
    LoRA(4, ("/q/kernel=2", "/v/kernel", "mlp/down"), alpha=3.0, rank_stabilized=True),
    LoRA(4, ("/(q|k|v)/kernel", "mlp/down"), alpha=6.0, dora=True),
]


@pytest.mark.parametrize("change", CHANGES, ids=["all", "some", "dora"])
def test_what_is_written_is_read(change, tmp_path):
    plain = decoder.init(MODEL, jax.random.key(0))
    params, kernels = with_additions(change, plain)
    adapters.save(tmp_path, MODEL, kernels)
    again, found = adapters.read(tmp_path, MODEL)
    expected, read = merge(params), adapters.placed(again.params(plain), found)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(close, merge(read), expected)


def test_a_run_writes_its_additions_and_another_begins_with_them(tmp_path, capsys):
    model = dataclasses.replace(MODEL, vocab_size=257)
    hf.save(tmp_path / "base", model, decoder.init(model, jax.random.key(0)))
    begin = ["--tokenizer", "bytes", "--init-from", str(tmp_path / "base")]
    experiment = outline(parse(Config, [*begin, "--lora.rank", "3", "--lora.targets", "attn"]))
    change = LoRA.of(experiment.metadata.config)
    params, _ = with_additions(change, decoder.init(model, jax.random.key(0)))
    save_run(tmp_path / "run", experiment, params)
    out = str(tmp_path / "out")
    status, printed, error = run(
        capsys, "hf", "export", "--run", str(tmp_path / "run"), "--out", out, "--adapter"
    )
    assert (status, "4 kernels, opened by peft over " in printed) == (0, True), printed + error
    more = ["--adapter", out, "--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    experiment = outline(parse(Config, [*begin, *more]))
    state = natural(experiment, make_state(experiment, make_experiment_mesh(experiment)))
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(close, state.params, merge(params))
    for given, message in (
        (["--adapter", out], "--adapter is .*: it has its own ranks, over a model; give that with"),
        ([*begin, "--adapter", out, "--lora.rank", "2"], "leave --lora.rank and the like out"),
    ):
        with pytest.raises(ValueError, match=message):
            outline(parse(Config, given))


def test_what_is_no_lora_of_ours_is_refused(tmp_path):
    kernels = with_additions(CHANGES[1], decoder.init(MODEL, jax.random.key(0)))[1]
    adapters.save(tmp_path, MODEL, kernels)
    with pytest.raises(ValueError, match="no place"):
        adapters.read(tmp_path, dataclasses.replace(MODEL, layers=1))
    with pytest.raises(ValueError, match=r"no addition to 'transformer.h.2.attn.c_attn'"):
        adapters.read(tmp_path, dataclasses.replace(MODEL, layers=3))
    config = tmp_path / "adapter_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"use_qalora": True}))
    with pytest.raises(ValueError, match="use_qalora True, which is not read here: merge the ad"):
        adapters.read(tmp_path, MODEL)
    change = dataclasses.replace(CHANGES[1], dora=True)
    kernels = with_additions(change, decoder.init(MODEL, jax.random.key(0)))[1]
    with pytest.raises(ValueError, match=r"attn/k/kernel' has no magnitude, and other parts of"):
        adapters.save(tmp_path / "dora", MODEL, kernels)


TARGETS = {
    "gpt2": ["c_attn", "mlp.c_proj"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "phi3": ["qkv_proj", "down_proj"],
}
NAMES = ["gpt2", "llama", pytest.param("phi3", marks=pytest.mark.slow)]
OPTIONS = [{}, {"use_rslora": True}, {"rank_pattern": {"X": 2}, "alpha_pattern": {"X": 32}}]
OPTIONS += [{"use_dora": True}]
# X of layer 1 alone.
OPTIONS += [{"use_rslora": True, "rank_pattern": {"1.X": 7}, "alpha_pattern": {"1.X": 64}}]


def logits(params, config):
    return np.asarray(decoder.logits(config, params, TOKENS))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_their_adapters_have_their_logits_here(name, options, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    models.save(name, tmp_path / "base")
    base = models.transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    last = TARGETS[name][-1].removeprefix("mlp.")
    options = {
        k: x if x is True else {key.replace("X", f"(mlp[.])?{last}"): n for key, n in x.items()}
        for k, x in options.items()
    }
    how = peft.LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS[name], **options)
    theirs = peft.get_peft_model(base, how).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for path, x in theirs.named_parameters():
            if "lora_" in path:
                x.add_(0.2 * torch.randn(x.shape))
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
        theirs.save_pretrained(tmp_path / "adapter")
    config, plain = hf.read_config(tmp_path / "base"), hf.load(hf.open_weights(tmp_path / "base"))
    change, found = adapters.read(tmp_path / "adapter", config, family=name)
    params = adapters.placed(change.params(plain), found)
    np.testing.assert_allclose(logits(params, config), expected, atol=1e-4)
    if "use_dora" in options:
        theirs(torch.tensor(TOKENS)).logits.square().sum().backward()
        loss = lambda params: (decoder.logits(config, params, TOKENS) ** 2).sum()  # noqa: E731
        grads = jax.grad(loss)(params)["blocks"]["mlp"]["down"]["kernel"]
        for part, end in (
            (grads.magnitude, "lora_magnitude_vector.default.weight"),
            (grads.low.a.swapaxes(1, 2), "lora_A.default.weight"),
            (grads.low.b.swapaxes(1, 2), "lora_B.default.weight"),
        ):
            named = [
                x.grad
                for path, x in theirs.named_parameters()
                if "mlp." + last in path and end in path
            ]
            grad = torch.stack(named)
            np.testing.assert_allclose(part, grad, rtol=1e-3, atol=1e-4 * float(abs(grad).max()))
    assert np.abs(expected - logits(plain, config)).max() > 0.1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES, ids=["all", "some", "dora"])
def test_our_adapters_have_our_logits_there(name, change, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    models.save(name, tmp_path / "base")
    config, plain = hf.read_config(tmp_path / "base"), hf.load(hf.open_weights(tmp_path / "base"))
    params, kernels = with_additions(change, plain)
    adapters.save(tmp_path / "adapter", config, kernels, family=name, base=str(tmp_path / "base"))
    with torch.no_grad():
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        got = theirs(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(got, logits(params, config), atol=1e-4)
    assert np.abs(got - logits(plain, config)).max() > 0.1


def test_an_adapter_of_attention_is_read_over_experts(tmp_path):
    sizes = {"positions": "rope", "norm": "rmsnorm", "bias": False, "mlp": "swiglu", "tied": False}
    model = dataclasses.replace(MODEL, **sizes, experts=3, routing="softmax_normalised")
    r = np.random.default_rng(0)
    a, b, c, d = (r.normal(size=s).astype("f") for s in ((2, 32, 4), (2, 4, 32), (32, 4), (4, 64)))
    kernels = {"blocks/attn/q/kernel": LowRank(None, a, b, 2.0)}
    kernels["head/kernel"] = LowRank(None, c, d, 2.0)  # three more outputs than tokens
    adapters.save(tmp_path / "a", model, kernels, family="mixtral")
    _, additions = adapters.read(tmp_path / "a", model, family="mixtral")
    np.testing.assert_array_equal(additions["blocks/attn/q/kernel"][1], b)
    np.testing.assert_array_equal(additions["head/kernel"][1], d * (np.arange(64) < 61))
    with pytest.raises(ValueError, match=r"q_proj', which has 64 inputs and 64 outputs"):
        adapters.read(tmp_path / "a", dataclasses.replace(model, width=64), family="mixtral")
    part = "base_model.model.model.layers.0.block_sparse_moe.experts.2.w1.lora_A.weight"
    one, options = c[:4].T.copy(), {"max_shard_bytes": 1 << 20, "stem": adapters.WEIGHTS}
    safetensors.write(tmp_path / "a", {part: (one.shape, one.dtype)}, [(part, one)], **options)
    with pytest.raises(ValueError, match="additions to experts are not read here"):
        adapters.read(tmp_path / "a", model, family="mixtral")


MIXTURES = ["mixtral", "olmoe", "qwen3 moe", "qwen3 next", "gpt oss", "deepseek v3"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_adapters_of_models_with_experts_go_both_ways(name, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    models.save(name, base := tmp_path / "base")
    config, plain = hf.read_config(base), hf.load(hf.open_weights(base))
    family = hf.family_name(base)
    # Kernels of one name have another rank in the layers before the stack.
    first = "dense/0/attn/out" if name == "deepseek v3" else "attn/out"
    targets = (f"{first}/kernel=2", "attn/[^/]*/kernel$", "head/kernel")
    params, kernels = with_additions(LoRA(4, targets, alpha=6.0), plain)
    adapters.save(tmp_path / "adapter", config, kernels, family=family, base=str(base))
    with torch.no_grad():
        adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        got = adapted(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(got, logits(params, config), atol=2e-4)
    again, additions = adapters.read(tmp_path / "adapter", config, family=family)
    read = adapters.placed(again.params(plain), additions)
    np.testing.assert_allclose(logits(read, config), logits(params, config), atol=1e-4)
    assert np.abs(got - logits(plain, config)).max() > 0.1
    if "mlp" in params["blocks"]:
        _, kernels = with_additions(LoRA(4, ("mlp/down",)), plain)
        with pytest.raises(ValueError, match="PEFT takes that name for the experts'"):
            adapters.save(tmp_path / "b", config, kernels, family=family)
