"""``jaxtrain serve`` as a user starts it."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import types
import urllib.request

import jax
import numpy as np
import pytest

from experiments.gpt import Config, build
from jaxtrain import hf
from jaxtrain.data import ByteTokenizer, SubwordTokenizer
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.hf import opening
from jaxtrain.hf.opening import Opened, open_model
from jaxtrain.models import decoder
from jaxtrain.models.generate import generate
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.main import main
from jaxtrain.serve import command
from jaxtrain.serve.command import listen, reader_of, template_of
from jaxtrain.sharding.mesh import make_mesh
from tests.commands import refused
from tests.experiments.test_gpt import SMALL
from tests.hf import models
from tests.serve.test_adapters import with_additions


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "text.txt").write_text("to be served or not to be served\n" * 300)
    flags = ["--data", str(folder / "text.txt"), "--run-dir", str(folder / "run")]
    main(Config, build, [*SMALL, *flags, "--sample-tokens", "0"])
    return str(folder / "run")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--slots", "1"], "--slots is 1"),
        (["--chunk", "100"], "--chunk is 100: it must be a multiple of --page"),
        (["--max-seconds", "0"], "--max-seconds is 0"),
        (["--mesh.tensor", "99"], "--mesh.tensor is 99"),
        (["--mesh.fsdp", "2"], "--mesh has more axes than tensor"),
        (["--pages", "1"], "--pages is 1: a request of 32 tokens takes 1"),
        (["--chat-template", "nowhere"], "nowhere"),
        (["--step", "77"], "77"),
        (["--draft-tokens", "0"], "--draft-tokens is 0"),
        (["--draft-tokens", "5"], "--draft-tokens is 5 without --draft"),
        (["--draft", "nowhere"], "nowhere"),
        (["--adapter", "poet"], "--adapter is 'poet': give NAME=FOLDER"),
        (["--adapter", "poet=nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_listens(run, flags, said, capsys):
    pytest.importorskip("uvicorn")
    assert said in refused(capsys, "serve", "--run", run, *flags)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_signal_that_comes_before_the_server_runs_ends_it(host, shown, monkeypatch, capsys):
    uvicorn = pytest.importorskip("uvicorn")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError:
        pytest.skip("this machine has no such address")
    ends = []

    def run(self, sockets):
        signal.raise_signal(signal.SIGTERM)
        ends.append(self.should_exit)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        listen(None, name="small", host=host, port=0, drain_seconds=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ends == [True]
    assert f"small is served on http://{shown}:" in capsys.readouterr().out


def test_a_base_model_has_no_chats_and_a_broken_template_is_told(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert template_of(None, str(tmp_path), ByteTokenizer()) is None
    with pytest.raises(FileNotFoundError, match="no chat template for conversations"):
        template_of(str(tmp_path), str(tmp_path), ByteTokenizer())
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if"}')
    with pytest.raises(ValueError, match="not Jinja"):
        template_of(None, str(tmp_path), ByteTokenizer())


def test_a_tokenizer_of_more_tokens_than_the_model_s_is_refused(tmp_path, monkeypatch):
    config = decoder.DecoderConfig(vocab_size=300, seq_len=16, layers=1, width=16, heads=2)
    hf.save(tmp_path, config, decoder.init(config, jax.random.key(0)))
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    for size, fits in ((280, True), (301, False)):
        tokenizer = types.SimpleNamespace(vocab_size=size, beginning=())
        monkeypatch.setattr(opening.SubwordTokenizer, "load", lambda _, given=tokenizer: given)
        if fits:
            assert opening.open_model(str(tmp_path), "decoder", mesh=mesh).model.vocab_size == size
        else:
            with pytest.raises(ValueError, match="has 301 tokens, and the model 300"):
                opening.open_model(str(tmp_path), "decoder", mesh=mesh)


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_kernels_are_packed_as_they_are_read(run, tensor, tmp_path, monkeypatch):
    mesh = make_mesh(tensor=tensor, devices=jax.devices()[:tensor])
    config = decoder.DecoderConfig(vocab_size=270, seq_len=64, layers=2, width=16, heads=2)
    params = decoder.init(config, jax.random.key(0))
    hf.save(tmp_path, config, jax.device_get(params))
    tokenizer = types.SimpleNamespace(vocab_size=270, beginning=())
    monkeypatch.setattr(opening.SubwordTokenizer, "load", lambda _: tokenizer)
    for folder, whole in ((str(tmp_path), params), (run, trained.load(run)[1])):
        found = open_model(folder, "decoder", mesh=mesh, quantize="int8").params
        codes = found["blocks"]["mlp"]["up"]["kernel"].codes
        assert codes.sharding.is_fully_replicated == (tensor == 1)
        expected = Quantize("int8").params(whole, jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


CHAT = (
    "{{ bos_token or '' }}{% for message in messages %}<|turn|>{{ message.role }}\n"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_tokenizer(folder, kind):
    """Files as of Llama 3 (bytes, a beginning), Llama 2 (words that begin with a space, too), and
    GPT-2 (bytes, no beginning)."""
    tokenizers = pytest.importorskip("tokenizers")
    special = ["<end>", "<s>", "</s>", "<|turn|>"]
    if kind == "llama2":
        letters = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581"]
        model = tokenizers.models.BPE(
            {each: i for i, each in enumerate(["<unk>", *letters])}, [], byte_fallback=True
        )
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
        made.decoder = tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace("\u2581", " "),
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
                tokenizers.decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE({each: i for i, each in enumerate(letters)}, [])
        )
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in special])
    if kind != "gpt2":
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    made.save(str(folder / "tokenizer.json"))
    told = {"eos_token": "</s>", "chat_template": CHAT, "add_bos_token": True}
    told["tokenizer_class"] = "PreTrainedTokenizerFast"
    told |= {} if kind == "gpt2" else {"bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def reader_for(kind, folder):
    """What reads requests for a model with such files."""
    write_tokenizer(folder, kind)
    config = decoder.DecoderConfig(vocab_size=270, seq_len=64, layers=1, width=16, heads=2)
    hf.save(folder / "model", config, decoder.init(config, jax.random.key(0)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(folder / "model" / name)
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    opened = open_model(str(folder / "model"), "decoder", mesh=mesh)
    return reader_of(opened, ("m",), None, 64)


def prompt_of(reader, **body):
    (request,) = reader.read(body, chat="messages" in body, seed=0).requests
    return request.prompt


def test_a_text_begins_with_the_token_that_a_model_has_for_it(tmp_path):
    reader = reader_for("llama3", tmp_path)
    tokens = reader.tokenizer.encode("to be").tolist()
    assert prompt_of(reader, prompt="to be") == [reader.tokenizer.special_id(b"<s>"), *tokens]
    messages = [{"role": "user", "content": "to be"}]
    assert prompt_of(reader, messages=messages).count(reader.tokenizer.special_id(b"<s>")) == 1
    assert reader.tokenizer.eod not in prompt_of(reader, messages=messages)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*bits per byte")
@pytest.mark.parametrize("kind", ["llama3", "llama2", "gpt2"])
def test_prompts_of_a_hugging_face_folder_are_transformers_tokens(kind, tmp_path):
    library, reader = models.transformers(), reader_for(kind, tmp_path)
    theirs = library.AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in ("to be", " or\nnot", "n\u00e9 <|turn|>x"):
        prompt = prompt_of(reader, prompt=text)
        assert prompt == theirs(text)["input_ids"]
    assert (prompt[0] == theirs.convert_tokens_to_ids("<s>")) == (kind != "gpt2")
    messages = [{"role": "user", "content": "to be"}]
    given = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    assert prompt_of(reader, messages=messages) == theirs.apply_chat_template(messages, **given)
    assert prompt_of(reader, prompt="") == (theirs("")["input_ids"] or [reader.tokenizer.eod])


def test_a_draft_of_other_tokens_is_refused():
    pytest.importorskip("tokenizers")
    words = SubwordTokenizer.train([b"to be"], 257)
    ours, theirs = (Opened(None, None, x, "x", ((), ())) for x in (ByteTokenizer(), words))
    command.check_tokens(ours, ours)
    with pytest.raises(ValueError, match="--draft is 'x', whose tokens are not those of"):
        command.check_tokens(theirs, ours)


def test_a_folder_that_is_no_model_is_refused(tmp_path, capsys):
    pytest.importorskip("uvicorn")
    assert "is neither a run nor" in refused(capsys, "serve", "--model", str(tmp_path))


@pytest.mark.slow
def test_a_run_is_served_until_a_signal_lets_open_requests_end(run, tmp_path):
    pytest.importorskip("uvicorn")
    openai = pytest.importorskip("openai")
    line = [sys.executable, "-m", "jaxtrain", "serve", "--run", run, "--port", "0", "--page", "8"]
    line += ["--chunk", "8", "--simulate-devices", "2", "--mesh.tensor", "2"]
    line += ["--draft", run, "--draft-tokens", "3"]  # itself: the model is right
    model, params, tokenizer = trained.load(run)
    change = LoRA(2, alpha=200.0)
    changed = with_additions(change, params, 0)
    config = json.loads(json.dumps({**trained.stored(run), **change.record}))
    with Checkpointer(tmp_path / "poet" / "checkpoints") as checkpoints:
        checkpoints.save(1, {"params": jax.device_get(changed)}, config=config)
    line += ["--adapter", f"poet={tmp_path / 'poet'}"]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            said = process.stdout.readline()
            assert "is served on http://127.0.0.1:" in said
            port = int(said.split("127.0.0.1:")[1].split("/")[0])
            prompt = [tokenizer.eod, *tokenizer.encode("to be").tolist()]
            given = {"max_new_tokens": 20, "temperature": 0, "eod": tokenizer.eod}
            expected = tokenizer.decode(generate(model, params, [prompt], **given)[0])
            other = tokenizer.decode(generate(model, changed, [prompt], **given)[0])
            assert other != expected
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            asked = {"prompt": "to be", "temperature": 0, "max_tokens": 20}
            told = client.completions.create(model="poet", **asked)
            assert (told.model, told.choices[0].text) == ("poet", other)
            assert [each.id for each in client.models.list()] == ["run", "poet"]
            client.close()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                numbers = dict(x.rsplit(" ", 1) for x in page.read().decode().splitlines())
            guessed, right = (
                int(numbers[f"jaxtrain_draft_{name}_total"]) for name in ("tokens", "right")
            )
            assert 5 < right <= guessed
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(asked | {"stream": True}))
            answer = connection.getresponse()
            process.send_signal(signal.SIGTERM)
            text = answer.read().decode()
            assert text.endswith("data: [DONE]\n\n")
            parts = [json.loads(x.removeprefix("data: ")) for x in text.split("\n\n")[:-2]]
            assert "".join(x["choices"][0]["text"] for x in parts) == expected
            assert process.wait(60) == 0
            said = process.stderr.read()
            assert re.search(r"completion: 1 choices, \d+ tokens read, \d+ written", said)
            assert "to be" not in said  # nothing of what was asked
        finally:
            process.kill()
