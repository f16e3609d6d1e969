"""``jaxtrain hf`` and ``--init-from``: a folder is checked, trained from and written again."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import language
from experiments.gpt import Config, build, outline, prompt_of, sample
from experiments.language import open_source, tokenizer_name
from jaxtrain import data, hf
from jaxtrain.build import make_experiment_mesh, make_state
from jaxtrain.hf import export_command, safetensors
from jaxtrain.models import decoder
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.main import main, parse
from jaxtrain.tree import named_leaves
from tests import forms
from tests.commands import run
from tests.hf import models

MISTRAL = decoder.DecoderConfig(
    vocab_size=300, seq_len=16, layers=4, width=16, heads=4, mlp_width=24, window=6, **forms.LLAMA
)
# Of a model that has learned to end its turns too.
SPECIAL = {"bos_token_id": 5, "eos_token_id": [7, 0], "pad_token_id": 0}


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers")
    trained = data.SubwordTokenizer.train([b" ".join(b"%d" % i for i in range(99))], 270)
    own = trained.to_json().replace("<|endoftext|>", "</s>")  # ends documents as Llama's does
    return data.SubwordTokenizer.from_json(own, trained.eod)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("model")
    more = {"files": {"tokenizer.json": tokenizer.to_json()}, "fields": SPECIAL}
    hf.save(path, MISTRAL, decoder.init(MISTRAL, jax.random.key(1)), **more)
    return path


def save_run(path, experiment, params=None):
    """Makes the folder of a run that has trained nothing yet."""
    if params is None:
        params = make_state(experiment, make_experiment_mesh(experiment)).params
    with Checkpointer(path / "checkpoints") as checkpoints:
        config = json.loads(json.dumps(dict(experiment.metadata.config)))
        checkpoints.save(1, {"params": jax.device_get(params)}, config=config)
    for name, text in experiment.metadata.files.items():
        (path / name).write_text(text)


def test_check_says_what_maps_where_and_finds_what_does_not_come_back(folder, capsys, monkeypatch):
    status, out, _ = run(capsys, "hf", "check", str(folder))
    assert status == 0
    head = "model.layers.0.self_attn.k_proj.weight to model.layers.3.self_attn.k_proj.weight"
    assert f"{head} (float32 8x16, transposed)\n    blocks/attn/k/kernel (4x16x8)" in out
    assert "mistral" in out.splitlines()[0]
    assert "all 39 tensors come back bit for bit, in both directions" in out
    read = safetensors.Tensor.__getitem__
    monkeypatch.setattr(
        safetensors.Tensor,
        "__getitem__",
        # As one that turns a layer's norm into another number each time it is read.
        lambda self, index: read(self, index) * (2.0 if index is ... else 1.0),
    )
    status, out, _ = run(capsys, "hf", "check", str(folder))
    assert status == 1
    assert "NOT the same bits: " in out


def test_a_run_begins_from_a_folder_and_is_exported(folder, tokenizer, tmp_path, capsys):
    text = tmp_path / "texts"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text("the theme of the thesis is the theme " * 20)
    flags = ["--init-from", str(folder), "--data", str(text), "--simulate-devices", "8"]
    flags += ["--seq-len", "8", "--global-batch", "8", "--mesh.pipe", "2", "--mesh.data", "4"]
    flags += ["--pipeline.schedule", "interleaved", "--pipeline.microbatches", "2"]
    config = parse(Config, [*flags, "--pipeline.virtual", "2"])
    experiment = build(config)
    stored = experiment.metadata.config
    assert stored["model"] == dataclasses.asdict(dataclasses.replace(MISTRAL, seq_len=8))
    assert (stored["family"], stored["tokenizer"]) == ("mistral", "tokenizer.json")
    state = make_state(experiment, make_experiment_mesh(experiment))
    params = experiment.stack.natural(state.params)
    for path, leaf in named_leaves(decoder.init(MISTRAL, jax.random.key(1))).items():
        np.testing.assert_array_equal(named_leaves(params)[path], leaf, err_msg=path)

    save_run(tmp_path / "run", experiment, params)
    out = tmp_path / "out"
    given = ["--run", str(tmp_path / "run"), "--out", str(out), "--dtype", "bfloat16"]
    status, printed, error = run(capsys, "hf", "export", *given, "--max-shard-gb", "1e-5")
    assert (status, error) == (0, "")
    assert printed == f"{out}: mistral, opened by transformers as it is\n"
    assert run(capsys, "hf", "check", str(out))[0] == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1
    library = models.transformers()
    opened = library.AutoTokenizer.from_pretrained(out)
    assert opened("the thesis")["input_ids"] == tokenizer.encode("the thesis").tolist()
    assert (opened.eos_token_id, opened.eos_token) == (tokenizer.eod, "</s>")
    written = json.loads((out / "config.json").read_text())
    assert [written[name] for name in SPECIAL] == list(SPECIAL.values())
    assert opened.bos_token is None
    tokens = models.TOKENS[:, :8]
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
    ours = decoder.logits(MISTRAL, rounded, jnp.asarray(tokens))
    np.testing.assert_allclose(ours, models.logits(out, tokens), atol=1e-4)


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONVERSATIONS = [
    [{"role": "user", "content": f"{n} ?"}, {"role": "assistant", "content": f" {n + 1}"}]
    for n in range(60)
]


@pytest.fixture
def chat_folder(folder, tmp_path):
    """A model that has learned conversations, and a store of some, made with its files."""
    pytest.importorskip("jinja2")
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    told = {"pad_token": {"__type": "AddedToken", "content": "</s>"}}
    told |= {"model_max_length": 99, "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0], "top_k": 3}))
    lines = [json.dumps({"messages": each}) for each in CONVERSATIONS]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    return path


def test_a_chat_template_comes_with_the_model_and_goes_with_it(chat_folder, tmp_path, capsys):
    store, out = str(tmp_path / "store"), tmp_path / "out"
    given = ["--data", str(tmp_path / "chat.jsonl"), "--out", store, "--workers", "1"]
    own = ["--tokenizer", str(chat_folder), "--chat-template", str(chat_folder)]
    assert run(capsys, "tokenize", *given, *own)[0] == 0
    config = Config(init_from=str(chat_folder), data=store, seq_len=8)
    experiment = build(config)
    save_run(tmp_path / "run", experiment)
    assert run(capsys, "hf", "export", "--run", str(tmp_path / "run"), "--out", str(out))[0] == 0
    # Trained on rows of 8 tokens, it has its 16 rotary positions still.
    assert hf.read_config(out).seq_len == 16
    assert open_source(str(tmp_path / "run"), "decoder").context == 16
    opened = models.transformers().AutoTokenizer.from_pretrained(out)
    theirs = models.transformers().AutoTokenizer.from_pretrained(chat_folder)
    for messages in CONVERSATIONS[:3]:
        text = opened.apply_chat_template(messages, tokenize=False)
        assert text == theirs.apply_chat_template(messages, tokenize=False)
        asked, said = (each["content"] for each in messages)
        assert text == f"<user> {asked}</s><assistant> {said}</s>"
    assert (opened.pad_token, opened.model_max_length) == ("</s>", 99)
    generation = models.transformers().GenerationConfig.from_pretrained(out)
    assert (generation.eos_token_id, generation.top_k) == ([7, 0], 3)
    held_out = data.open_store(store).held_out(9999)
    asked = data.open_store(store).tokenizer.decode(prompt_of(held_out, 99))
    assert re.fullmatch(r"<user> \d+ \?<assistant>", asked)
    assert prompt_of(held_out, 1) == prompt_of(data.open_store(store).corpus(), 0) == []


def test_a_padding_token_is_exported_by_its_name(tokenizer):
    kept = {"pad_token": {"__type": "AddedToken", "content": "<pad>"}}
    assert export_command._tokenizer_config(tokenizer, {}, kept)["pad_token"] == "<pad>"


@pytest.mark.slow
def test_conversations_are_tuned_sampled_and_answered(chat_folder, tmp_path, capsys):
    store, path = str(tmp_path / "store"), str(tmp_path / "run")
    given = ["--data", str(tmp_path / "chat.jsonl"), "--out", store, "--workers", "1"]
    run(capsys, "tokenize", *given, "--tokenizer", str(chat_folder), "--chat-template", "chatml")
    flags = ["--init-from", str(chat_folder), "--data", store, "--steps", "2", "--run-dir", path]
    main(Config, build, [*flags, "--global-batch", "8", "--seq-len", "128"])
    assert re.search(r"a sample it wrote:\n\n<.im_start.>user\n\d", capsys.readouterr().out)
    asked = ["--prompt", "3 ?", "--chat", "--max-tokens", "3"]
    for each in (path, chat_folder):
        status, answer, speed = run(capsys, "generate", "--run", str(each), *asked)
        assert (status, bool(answer)) == (0, True)
        assert re.match("[123] tokens written", speed)
    # Trained on rows of 128, it has more positions than the 16 that it came with.
    assert run(capsys, "hf", "export", "--run", path, "--out", str(tmp_path / "out"))[0] == 0
    assert hf.read_config(tmp_path / "out").seq_len == 128
    status, _, err = run(capsys, "generate", "--run", str(tmp_path))
    assert status == 2
    assert "is neither a run nor a Hugging Face folder" in err


def test_conversations_without_a_template_are_told_of_the_flag_and_who_takes_it(tmp_path):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    rows = [{"messages": each} for each in CONVERSATIONS]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    mend = "conversations need a template: give --chat-template chatml, as experiments.gpt, "
    for name in ("chat.jsonl", "chat.parquet"):
        for field in ("text", "messages"):
            with pytest.raises(ValueError, match=mend):
                list(data.open_text(str(tmp_path / name), field=field).train)


@pytest.mark.parametrize(
    ("kept", "fields", "tokens"),
    [
        # As of Llama 2, whose texts begin with another token than they end with.
        ({"bos_token_id": 1, "eos_token_id": 0}, (1, 0), ("<s>", "</s>")),
        ({"bos_token_id": None, "eos_token_id": [1, 0]}, (None, [1, 0]), (None, "</s>")),
        (None, (None, 0), (None, "</s>")),
    ],
)
def test_special_tokens_are_those_that_the_run_began_with(
    kept, fields, tokens, tokenizer, tmp_path, monkeypatch
):
    own = json.loads(tokenizer.to_json())
    begin = own["added_tokens"][0] | {"id": 1, "content": "<s>"}
    first = next(piece for piece, id in own["model"]["vocab"].items() if id == 1)
    own["model"]["vocab"] = {"<s>": 1} | {
        piece: id for piece, id in own["model"]["vocab"].items() if piece != first
    }
    own["added_tokens"].append(begin)
    own = data.SubwordTokenizer.from_json(json.dumps(own), tokenizer.eod)
    run_of = (MISTRAL, decoder.init(MISTRAL, jax.random.key(1)), own)
    monkeypatch.setattr(trained, "load", lambda run, step, member: run_of)
    monkeypatch.setattr(
        trained, "stored", lambda run: {"family": "mistral", "special_tokens": kept}
    )
    out = tmp_path / "out"
    assert export_command.run_export(export_command.ExportOptions(run="", out=out), []) == 0
    written = json.loads((out / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == fields
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert (settings.get("bos_token"), settings.get("eos_token")) == tokens


@pytest.mark.slow
def test_samples_are_of_tokens_that_have_text(folder, tokenizer):
    config = Config(init_from=str(folder), sample_tokens=60)
    experiment = outline(config)
    state = make_state(experiment, make_experiment_mesh(experiment))
    # Of 300 tokens the tokenizer has 270; one drawn from the others would be refused.
    assert tokenizer.vocab_size == 270
    assert sample(config, MISTRAL, tokenizer, state)


def test_flags_that_do_not_fit_the_folder_are_refused(folder, tokenizer, tmp_path):
    given = {"init_from": str(folder)}
    with pytest.raises(ValueError, match="--layers 2 is not for --init-from, whose folder says"):
        outline(Config(**given, layers=2))
    with pytest.raises(ValueError, match="--model gpt2-124m is not for --init-from, whose folder"):
        outline(Config(**given, model="gpt2-124m"))
    with pytest.raises(ValueError, match=r"310 tokens and the model in .* 300: the rows of others"):
        outline(Config(**given, tokenizer="310"))
    assert outline(Config(**given)).metadata.config["model"]["vocab_size"] == 300
    assert outline(Config(**given, dropout=0.5)).metadata.config["model"]["dropout"] == 0.5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "added",  # for 40 the padded table has room
    [60, pytest.param(40, marks=pytest.mark.slow)],
)
def test_added_tokens_begin_as_the_mean_of_their_pieces(tied, added, tokenizer, tmp_path, capsys):
    model = dataclasses.replace(MISTRAL, tied=tied)
    files = {"tokenizer.json": tokenizer.to_json()}
    hf.save(tmp_path / "model", model, decoder.init(model, jax.random.key(1)), files=files)
    more = tokenizer.adding(*(f"<|{n}|>" for n in range(added)))
    more.save(tmp_path / "more.json")
    (tmp_path / "text.txt").write_text("1 2 3 4 5\n" * 99)
    config = Config(
        init_from=str(tmp_path / "model"),
        tokenizer=str(tmp_path / "more.json"),
        data=str(tmp_path / "text.txt"),
    )
    save_run(tmp_path / "run", build(config))
    out, size = tmp_path / "out", 270 + added
    assert run(capsys, "hf", "export", "--run", str(tmp_path / "run"), "--out", str(out))[0] == 0
    opened = models.transformers().AutoModelForCausalLM.from_pretrained(out).state_dict()
    theirs = models.transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, was in theirs.state_dict().items():
        found = opened[name].numpy()
        np.testing.assert_array_equal(found[:270], was[:270], err_msg=name)
        if "embed_tokens" in name or "lm_head" in name:
            assert (len(was), len(found)) == (300, size)
            pieces = [tokenizer.encode(f"<|{n}|>") for n in range(added)]
            assert len(pieces[30]) > 3
            means = [was.double().numpy()[each].mean(0) for each in pieces]
            np.testing.assert_allclose(found[270:], means, atol=1e-6)
    text = models.transformers().AutoTokenizer.from_pretrained(out)
    assert text("<|39|>")["input_ids"] == [309]
    # What is begun from that run has them already.
    again = dataclasses.replace(config, init_from=str(tmp_path / "run"))
    assert outline(again).metadata.config["model"]["vocab_size"] == size


def test_another_vocabulary_is_made_of_the_pieces_of_its_tokens(tmp_path):
    """Of a model of bytes: each new token's row is the mean of its bytes'."""
    new = data.SubwordTokenizer.train([b"the cat sat on the mat " * 9], 270)
    pieces = language.pieces_of(data.ByteTokenizer(), new, 257, new.vocab_size)
    for id, text in enumerate(new.token_pieces(np.arange(new.vocab_size))):
        assert pieces[id] == ([256] if id == new.eod else list(text))
    model = dataclasses.replace(MISTRAL, vocab_size=new.vocab_size)
    old = decoder.init(dataclasses.replace(MISTRAL, vocab_size=257), jax.random.key(1))
    made = language.with_tokens(old, model, pieces, 257)
    table, was = np.asarray(made["embed"]["tokens"]), np.asarray(old["embed"]["tokens"])
    wanted = [was[list(each)].mean(0) for each in pieces]
    np.testing.assert_allclose(table[: new.vocab_size], wanted, atol=1e-6)
    assert not table[new.vocab_size :].any()
    assert language.pieces_of(new, new, 320, 320) is None
    assert max(map(len, pieces)) > 2


def test_bytes_are_read_where_that_is_said(folder, tokenizer, tmp_path):
    own = str(folder / "tokenizer.json")
    assert tokenizer_name(Config(init_from=str(folder))) == own
    assert tokenizer_name(Config(init_from=str(folder), tokenizer="bytes")) == "bytes"
    assert tokenizer_name(Config()) == "bytes"
    # As of a folder with tokenizer.model alone.
    shutil.copy(folder / "config.json", tmp_path)
    given = {"init_from": str(tmp_path)}
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: give --tokenizer, which may be"):
        tokenizer_name(Config(**given))
    assert tokenizer_name(Config(**given, tokenizer="bytes")) == "bytes"
    documents = [data.Document(str(i), b"12 34" * 9) for i in range(4)]
    data.write_store(data.Split(documents[1:], documents[:1]), tokenizer, tmp_path / "store")
    found = tokenizer_name(Config(**given, data=str(tmp_path / "store")))
    assert data.tokenizer_of_stores(data.parse_data(str(tmp_path / "store")), found) is not None


@pytest.mark.parametrize("size", ["0", "nan", "inf"])
def test_a_size_of_files_that_is_none_is_refused(size, tmp_path, capsys):
    given = ["--run", str(tmp_path), "--out", str(tmp_path / "out"), "--max-shard-gb", size]
    status, _, error = run(capsys, "hf", "export", *given)
    assert status == 2
    assert error == f"error: --max-shard-gb is {float(size)}: give a number above 0\n"
