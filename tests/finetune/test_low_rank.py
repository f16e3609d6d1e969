"""LoRA's additions alone train, on what a run begins with, and are merged where it is used."""

import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jaxtrain as jt
from experiments import bert, gpt, t5
from jaxtrain import hf
from jaxtrain.build import make_abstract_state, make_experiment_mesh, make_state, natural
from jaxtrain.finetune import preferences
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.models import decoder, encoder
from jaxtrain.optim import frozen
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.main import parse
from jaxtrain.sharding.rules import param_shardings
from jaxtrain.tree import map_named, named_leaves

MODEL = decoder.DecoderConfig(vocab_size=257, seq_len=16, layers=2, width=16, heads=2)
TARGETS = ["--lora.targets", "/(q|v)/kernel$", "mlp=2"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    hf.save(folder, MODEL, decoder.init(MODEL, jax.random.key(1)))
    return str(folder)


def flags(base, *more):
    return ["--tokenizer", "bytes", "--init-from", base, "--lora.rank", "4", *TARGETS, *more]


def moved(params, by=0.1):
    """Additions that are not 0."""
    r = np.random.default_rng(0)
    move = lambda name, x: x + by * r.normal(size=x.shape).astype("f") if name[-2:] == "/b" else x  # noqa: E731
    return map_named(move, params)


def test_additions_begin_as_nothing_and_have_all_of_the_optimizer_state(base):
    layout = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    experiment = gpt.outline(parse(gpt.Config, flags(base, *layout, "--optimizer.name", "adamw")))
    state = make_state(experiment, make_experiment_mesh(experiment))
    given, plain = hf.load(hf.open_weights(base)), natural(experiment, state).params
    assert jax.tree.structure(plain) == jax.tree.structure(given)
    jax.tree.map(np.testing.assert_array_equal, plain, given)
    sizes = {name: x.shape for name, x in named_leaves(state.params).items() if name[-2] == "/"}
    assert sizes["blocks/attn/q/kernel/a"] == (2, 16, 4)
    assert sizes["blocks/mlp/up/kernel/b"] == (2, 2, 64)
    assert len(sizes) == 8
    assert named_leaves(state.params).keys() - frozen(state.opt_state) == sizes.keys()
    moments = [x for x in named_leaves(state.opt_state) if re.search("/[mn]u/", x)]
    assert len(moments) == 16
    assert all(x[-2:] in ("/a", "/b") for x in moments)


@pytest.mark.parametrize(("stabilized", "scale"), [(False, 3 / 4), (True, 3 / 2)])
def test_merged_weights_have_the_logits_of_the_additions(stabilized, scale):
    change = LoRA(rank=4, alpha=3.0, rank_stabilized=stabilized)
    params = moved(change.params(decoder.init(MODEL, jax.random.key(0)), jax.random.key(1)))
    kernel = params["blocks"]["attn"]["q"]["kernel"]
    whole = kernel.base + scale * np.einsum("lir,lro->lio", kernel.a, kernel.b)
    merged = change.back(params)
    np.testing.assert_allclose(merged["blocks"]["attn"]["q"]["kernel"], whole, rtol=1e-5, atol=1e-6)
    tokens = np.arange(32).reshape(2, 16)
    found, expected = (decoder.logits(MODEL, each, tokens) for each in (params, merged))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_run_is_loaded_merged(base, tmp_path):
    experiment = gpt.outline(parse(gpt.Config, flags(base, "--lora.rank-stabilized")))
    state = make_state(experiment, make_experiment_mesh(experiment))
    params, config = moved(jax.device_get(state.params)), dict(experiment.metadata.config)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        config = json.loads(json.dumps(config | {"tokenizer": "bytes"}))
        checkpoints.save(1, {"params": params}, config=config)
    expected, given = experiment.task.back(params), hf.load(hf.open_weights(base))
    for mesh in (None, jt.make_mesh(fsdp=4, tensor=2)):
        model, found, _ = trained.load(str(tmp_path), mesh=mesh)
        close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)  # noqa: E731
        jax.tree.map(close, found, expected)
    assert "tensor" in found["blocks"]["mlp"]["up"]["kernel"].sharding.spec
    changed = named_leaves(jax.tree.map(lambda x, y: bool((x != y).any()), expected, given))
    assert changed == {x: bool(re.search("/(q|v)/kernel|mlp/.*kernel", x)) for x in changed}
    assert model == MODEL


def trains(experiment):
    state = make_abstract_state(experiment, make_experiment_mesh(experiment, jax.devices()[:1]))
    return named_leaves(state.params).keys() - frozen(state.opt_state)


def test_a_new_head_trains_and_both_stacks_of_t5_have_additions(tmp_path):
    pytest.importorskip("tokenizers")
    model = encoder.EncoderConfig(vocab_size=302, seq_len=16, layers=1, width=16, heads=2)
    hf.save(tmp_path, model, encoder.init(model, jax.random.key(0)))
    given = ["--init-from", str(tmp_path), "--lora.rank", "2", "--tokenizer", "300"]
    heads = [[x for x in trains(bert.outline(parse(bert.Config, [*given, *more]))) if "head" in x]
             for more in ([], ["--task", "classify"])]  # fmt: skip
    assert [bool(names) for names in heads] == [False, True]
    small = ["--layers", "2", "--width", "16", "--heads", "2", "--tokenizer", "bytes"]
    names = trains(apply(t5.outline(parse(t5.Config, small)), LoRA(rank=2)))
    assert {name.split("/")[0] for name in names} == {"encoder", "decoder"}
    assert any("/cross/" in name for name in names)


def test_with_preferences_the_additions_of_the_policy_train_alone(base):
    experiment = gpt.outline(parse(gpt.Config, flags(base)))
    alone = trains(experiment)
    frozen = experiment.task.freeze
    both = apply(experiment, preferences.Preferences(lambda params, x, batch: x, frozen=frozen))
    assert trains(both) == alone
    params = both.task.init_fn(jax.random.key(0))
    plain = jax.eval_shape(lambda: decoder.init(MODEL, jax.random.key(0)))
    assert jax.tree.structure(both.task.back(params)) == jax.tree.structure(plain)


def test_a_plan_needs_no_weights_and_a_run_does(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    given = ["--tokenizer", "bytes", "--data", str(tmp_path), "--layers", "1", "--width", "16"]
    config = parse(gpt.Config, [*given, "--heads", "2", "--seq-len", "16", "--lora.rank", "4"])
    assert len(trains(gpt.outline(config))) == 12
    with pytest.raises(ValueError, match=r"--lora.rank is 4: weights .* --init-from"):
        gpt.build(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lora.alpha", "4"], "--lora.rank is not given, and other flags of --lora are"),
        ([None, "--lora.rank", "0"], "`rank` is 0: use 1 or more"),
        (
            [None, "--lora.rank", "2", "--lora.targets", "typo"],
            "'typo', which finds none of the model's k",
        ),
        ([None, "--lora.rank", "2", "--lora.targets", "q", "q/kernel"], "'q/kernel', which finds"),
        ([None, "--lora.rank", "2", "--lora.train", "typo"], "'typo' matches no parameter"),
    ],
)
def test_what_cannot_be_is_refused(base, given, message):
    begun = ["--init-from", base, *given[1:]] if given[0] is None else given
    with pytest.raises(ValueError, match=message):
        trains(gpt.outline(parse(gpt.Config, ["--tokenizer", "bytes", *begun])))


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("kind", [None, "nf4", *slow("nf4-double", "int8")])
@pytest.mark.parametrize("rank", [16, *slow(8, 64)])
@pytest.mark.parametrize("name", ["llama-7b", *slow("llama-1b", "llama-70b", "olmoe-1b-7b")])
def test_additions_to_large_models_fit_every_mesh(name, rank, kind):
    """Shapes alone: nothing is refused, and devices split the additions as they do the model."""
    config = decoder.PRESETS[name]()
    dense = ("/mlp/.*kernel$",) if not config.experts else ()
    lora = LoRA(rank=rank, targets=("/attn/.*kernel$", "^head/kernel$", "^embed/tokens$", *dense))

    def init(key):
        group = 32 if kind and kind.startswith("nf4") else None
        return Quantize(kind, group).params(lora.params(decoder.init(config, key), key), key)

    params = jax.eval_shape(init, jax.random.key(0))
    rules = lora.rules(decoder.RULES, params)
    for sizes, zero in (
        ({"fsdp": 8}, 0),
        ({"fsdp": 64}, 0),
        ({"fsdp": 4, "data": 2}, 0),
        ({"fsdp": 4, "tensor": 2}, 0),
        ({"fsdp": 8, "tensor": 8}, 0),
        ({"data": 8}, 3),
        *([] if config.experts else [({"tensor": 8}, 0)]),
    ):
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        shardings = named_leaves(param_shardings(params, mesh, rules, zero=zero))
        added = {n: x for n, x in named_leaves(params).items() if n[-2:] in ("/a", "/b")}
        total = sum(x.size for x in added.values())
        local = sum(np.prod(shardings[n].shard_shape(x.shape)) for n, x in added.items())
        # Each factor is split by one of the axes at least, or by the one that there is.
        parts = min(sizes[axis] for axis in ("fsdp", "tensor", *(["data"] * zero)) if axis in sizes)
        if "tensor" not in sizes or "fsdp" in sizes:
            assert local <= 1.001 * total / parts, (sizes, zero)
