"""What the experiments on text share: each begins from a run or a folder, and refuses alike."""

import dataclasses
import math
import re
import types

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments import bert, gpt, language, t5
from jaxtrain import data, hf
from jaxtrain.models import decoder
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.tree import named_leaves

SIZES = {"layers": 2, "width": 16, "heads": 2}
MODELS = {
    "gpt": (gpt, {"vocab_size": 400, "seq_len": 32, "mlp": "gelu"}),
    "bert": (bert, {"vocab_size": 400, "seq_len": 32}),
    "t5": (t5, {"vocab_size": 400, "source_len": 40, "target_len": 24}),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Of each experiment a run and a Hugging Face folder with the same model."""
    found = {}
    for name, (experiment, sizes) in MODELS.items():
        kind, module = trained.FORMS[experiment.Config.form]
        model = kind(**SIZES, **sizes)
        params = module.init(model, jax.random.key(1))
        run, folder = (tmp_path_factory.mktemp(name) / each for each in ("run", "folder"))
        config = {"model": dataclasses.asdict(model), "form": experiment.Config.form}
        config |= {"tokenizer": "bytes", "family": "own", "special_tokens": {"eos_token_id": 3}}
        with Checkpointer(run / "checkpoints") as checkpoints:
            checkpoints.save(1, {"params": params}, config=config)
        hf.save(folder, model, params)
        found[name] = types.SimpleNamespace(run=str(run), folder=str(folder), params=params)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_run_and_a_folder_begin_with_the_same_weights(name, begun):
    experiment, _ = MODELS[name]
    own = named_leaves(begun[name].params)
    tokenizer = "300" if name == "bert" else "bytes"
    # A decoder's table of positions is cut to its rows; an encoder's stays.
    rows = {} if name == "t5" else {"seq_len": 20}
    for path in (begun[name].run, begun[name].folder):
        planned = experiment.outline(experiment.Config(init_from=path, tokenizer=tokenizer, **rows))
        found = named_leaves(planned.task.params())
        assert found.keys() == own.keys()
        for leaf, value in found.items():
            cut = own[leaf][:20] if name == "gpt" and leaf == "embed/positions" else own[leaf]
            np.testing.assert_array_equal(np.asarray(value), cut, err_msg=leaf)
        shapes = jax.eval_shape(planned.task.init_fn, jax.random.key(0))
        assert {n: x.shape for n, x in named_leaves(shapes).items()} == {
            n: x.shape for n, x in found.items()
        }
    planned = experiment.outline(
        experiment.Config(init_from=begun[name].run, tokenizer=tokenizer)
    ).metadata.config
    assert language.tokenizer_name(experiment.Config(init_from=begun[name].run)) == "bytes"
    assert (planned["family"], planned["special_tokens"]) == ("own", {"eos_token_id": 3})


@pytest.mark.parametrize("name", MODELS)
def test_the_perplexity_is_of_the_mean_loss_of_a_token_and_of_no_class(name):
    experiment, _ = MODELS[name]
    derived = experiment.outline(experiment.Config(tokenizer="300")).metadata.derived
    assert derived({"loss": 5.0, "z_loss": 0.5}) == {"perplexity": pytest.approx(math.exp(4.5))}
    assert derived({"loss": 1e4}) == {"perplexity": math.inf}
    if name == "bert":
        assert (
            experiment.outline(experiment.Config(task="classify")).metadata.derived({"loss": 1.0})
            == {}
        )


@pytest.mark.parametrize("name", MODELS)
def test_equal_mistakes_get_equal_sentences(name, begun, tmp_path):
    experiment, _ = MODELS[name]
    run, other = begun[name].run, {"gpt": "bert", "bert": "t5", "t5": "gpt"}[name]
    three = jt.Layout.parse("tensor=3")
    for given, sentence in (
        ({"init_from": str(tmp_path)}, f"'{tmp_path}' is neither a run nor a Hugging Face fold"),
        ({"init_from": begun[other].run}, f": train it with experiments.{other}"),
        ({"init_from": begun[other].folder}, f": train it with experiments.{other}"),
        ({"init_from": run, "width": 32}, "--width 32 is not for --init-from, whose folder says"),
        (
            {"init_from": run, "tokenizer": "410"},
            f"has {410 + 2 * (name == 'bert')} tokens and the",
        ),
        ({"init_from": begun[name].folder, "tokenizer": None}, "has no tokenizer.json: give --tok"),
        ({"layout": three, "heads": 4, "width": 16}, "--mesh.tensor 3 does not divide 4 heads and"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            experiment.outline(experiment.Config(**{"tokenizer": "300", **given}))
    if name == "gpt":
        with pytest.raises(ValueError, match="--kv-heads 1 is not for --init-from, whose folder"):
            experiment.outline(experiment.Config(init_from=run, tokenizer="300", kv_heads=1))
    if name != "t5":
        with pytest.raises(ValueError, match="--seq-len 33 is more than the 32 positions that the"):
            experiment.outline(experiment.Config(init_from=run, tokenizer="300", seq_len=33))


def test_a_store_has_its_own_tokenizer(tmp_path):
    documents = [data.Document(str(i), b"12 34" * 99) for i in range(4)]
    split = data.Split(documents[1:], documents[:1])
    data.write_store(split, data.ByteTokenizer(), tmp_path / "store")
    model = t5.outline(t5.Config(data=str(tmp_path / "store"))).metadata.config["model"]
    assert model["vocab_size"] == 257 + t5.SENTINELS


def test_the_fingerprint_of_a_model_is_of_what_its_weights_mean():
    sizes = {"vocab_size": 400, "seq_len": 32, "layers": 2, "width": 16, "heads": 2}
    plain = decoder.DecoderConfig(**sizes)
    same = [{"remat": "full", "scan_unroll": 2, "attention": "xla", "dropout": 0.1}, {}]
    other = [{"width": 32}, {"norm_eps": 1e-6}, {"window": 8}]
    of = language.fingerprint_of
    assert {of(dataclasses.replace(plain, **fields)) for fields in same} == {of(plain)}
    assert len({of(dataclasses.replace(plain, **fields)) for fields in [*same, *other]}) == 4

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(decoder.DecoderConfig):
        added: bool = False

    assert of(Later(**sizes)) == of(plain) != of(Later(**sizes, added=True))
