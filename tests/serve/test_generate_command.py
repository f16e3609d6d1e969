"""The command that generates, against transformers on the same folder, and against itself."""

import io
import json
import shutil

import jax
import pytest

from jaxtrain import hf
from jaxtrain.data import ByteTokenizer, SubwordTokenizer
from jaxtrain.hf.opening import Opened, ends_of
from jaxtrain.models import decoder, encoder, encoder_decoder
from jaxtrain.serve import generate_command
from tests.commands import refused, run
from tests.hf import models

SIZES = {"layers": 2, "width": 32, "heads": 4}
PROMPT = "the theme of it"


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers")
    return SubwordTokenizer.train([b"the theme of the thesis is the theme"], 280)


@pytest.fixture(scope="module")
def folder_of(tokenizer, tmp_path_factory):
    size = tokenizer.vocab_size
    t5 = {"source_len": 64, "target_len": 64, "mlp": "geglu", "tied": False}
    forms = {
        "gpt": (decoder, decoder.DecoderConfig(vocab_size=size, seq_len=96, **SIZES)),
        "t5": (encoder_decoder, encoder_decoder.T5Config(vocab_size=size, **t5, **SIZES)),
        "bert": (encoder, encoder.EncoderConfig(vocab_size=size, seq_len=32, **SIZES)),
    }

    def make(name):
        module, config = forms[name]
        folder = tmp_path_factory.getbasetemp() / f"generated-{name}"
        if not folder.exists():
            # Larger than at the start, so that the most probable token is no tie.
            params = jax.tree.map(lambda x: 3 * x, module.init(config, jax.random.key(0)))
            files = {"tokenizer.json": tokenizer.to_json()}
            fields = {"eos_token_id": tokenizer.eod}
            hf.save(folder, config, params, files=files, fields=fields)
        return str(folder)

    return make


GREEDY = ["--temperature", "0", "--max-tokens", "12", "--repetition-penalty", "1.4"]


def generated(capsys, folder, *flags):
    status, out, err = run(capsys, "generate", "--model", folder, *GREEDY, *flags)
    assert status == 0, err
    return out, err


def theirs(folder, tokenizer, prompt, is_decoder, *, own_ends=False, **given):
    """The text that transformers generates of a folder."""
    torch = pytest.importorskip("torch")

    library = models.transformers()
    kind = "AutoModelForCausalLM" if is_decoder else "T5ForConditionalGeneration"
    model = getattr(library, kind).from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.encode(prompt).tolist()
    ids = ids if is_decoder else [*ids, tokenizer.eod]
    if not own_ends:
        given["eos_token_id"] = tokenizer.eod
    found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=int),
        max_new_tokens=12,
        do_sample=False,
        repetition_penalty=1.4,
        pad_token_id=tokenizer.eod,
        **given,
    )[0]
    return tokenizer.decode(found[len(ids) if is_decoder else 1 :].numpy())


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt", []),
        pytest.param("gpt", ["--mesh.fsdp", "2", "--mesh.tensor", "2"], marks=pytest.mark.slow),
        pytest.param("t5", ["--mesh.tensor", "2"], marks=pytest.mark.slow),
        pytest.param("t5", [], marks=pytest.mark.slow),
    ],
)
def test_text_is_what_transformers_generates(name, mesh, folder_of, tokenizer, capsys, monkeypatch):
    folder, shown, whole = folder_of(name), [], generate_command.stream

    def watched(*args, **given):
        for tokens in whole(*args, **given):
            yield tokens
            shown.append(capsys.readouterr().out)  # before the next is chosen

    monkeypatch.setattr(generate_command, "stream", watched)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    end, err = generated(capsys, folder, *mesh)
    assert "".join(shown) + end == theirs(folder, tokenizer, PROMPT, name == "gpt") + "\n"
    assert sum(map(bool, shown)) > 5
    assert "12 tokens written" in err


def test_a_text_ends_at_what_stops_it_and_draws_follow_the_seed(folder_of, capsys):
    folder = folder_of("gpt")
    text, _ = generated(capsys, folder, "--prompt", PROMPT)
    stop = text[4:6]
    cut, _ = generated(capsys, folder, "--prompt", PROMPT, "--stop", "nowhere", stop)
    assert cut == text[: text.index(stop)] + "\n"
    drawn = ["--prompt", PROMPT, "--temperature", "3", "--seed"]
    texts = [generated(capsys, folder, *drawn, seed)[0] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert generated(capsys, folder, "--prompt", "")[1].startswith("12 tokens written")


@pytest.mark.slow
def test_samples_are_several_and_a_text_ends_where_positions_do(folder_of, capsys):
    folder = folder_of("gpt")
    drawn = ["--prompt", PROMPT, "--temperature", "3", "--seed", "1"]
    several = generated(capsys, folder, *drawn, "--samples", "3")[0]
    first, *others = several.split("-" * 40 + "\n")
    assert first == generated(capsys, folder, *drawn)[0]
    assert len({first, *others}) == 3
    few = ["--prompt", "x" * 91, "--temperature", "0"]  # of 96 positions
    status, _, err = run(capsys, "generate", "--run", folder, *few)
    assert status == 0
    assert err.startswith("5 tokens written")


def test_a_text_ends_where_the_config_of_a_model_says(folder_of, tokenizer, capsys, tmp_path):
    folder = shutil.copytree(folder_of("gpt"), tmp_path / "model")
    text, _ = generated(capsys, str(folder), "--prompt", PROMPT)
    config = json.loads((folder / "config.json").read_text())
    end = tokenizer.encode(text[:-1]).tolist()[2]
    config["eos_token_id"] = [tokenizer.eod, end]
    (folder / "config.json").write_text(json.dumps(config))
    cut, _ = generated(capsys, str(folder), "--prompt", PROMPT)
    found = theirs(folder, tokenizer, PROMPT, True, own_ends=True)
    assert cut == found.removesuffix(tokenizer.decode([end])) + "\n"
    assert len(cut) < len(text)


@pytest.mark.slow
def test_beams_find_what_transformers_finds(folder_of, tokenizer, capsys):
    folder = folder_of("t5")
    found, _ = generated(capsys, folder, "--prompt", PROMPT, "--beams", "3")
    assert found == theirs(folder, tokenizer, PROMPT, False, num_beams=3) + "\n"
    assert found != generated(capsys, folder, "--prompt", PROMPT)[0]


def test_a_chat_answers_each_line_after_all_before_it(folder_of, capsys, monkeypatch):
    chat = [folder_of("gpt"), "--chat", "--chat-template", "plain", "--max-tokens", "6"]
    monkeypatch.setattr("sys.stdin", io.StringIO("the thesis\n\nof it\n"))
    both, err = generated(capsys, *chat, "--system", "the ")
    first, _ = generated(capsys, *chat, "--prompt", "the the thesis")
    assert both.startswith(first)
    before = f"the the thesis{first[:-1]}of it"
    second, _ = generated(capsys, folder_of("gpt"), "--max-tokens", "6", "--prompt", before)
    assert both == first + second
    assert "12 tokens written" in err


def test_what_cannot_generate_is_refused(folder_of, capsys):
    assert "of the form encoder: give one of the form decoder or encoder-decoder" in refused(
        capsys, "generate", "--model", folder_of("bert"), "--prompt", ""
    )
    asked = ["generate", "--run", folder_of("gpt"), "--prompt", "x"]
    assert "no chat template" in refused(capsys, *asked, "--chat")
    assert "--system is given without --chat" in refused(capsys, *asked, "--system", "x")
    assert "--stop has an empty text" in refused(capsys, *asked, "--stop", "")
    assert "from 0 to 2^32 - 1" in refused(capsys, *asked, "--seed", str(2**64))
    assert "a prompt of 1 tokens and 96 new" in refused(capsys, *asked, "--max-tokens", "96")


def test_only_the_first_space_of_an_answer_is_left_out(tmp_path):
    library = pytest.importorskip("tokenizers")
    known = {"</s>": 0, "▁x": 1, "▁b": 2, "▁": 3, "x": 4, "b": 5}
    words = library.models.BPE(known, [("▁", "x"), ("▁", "b")])
    tokenizer = library.Tokenizer(words)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
    tokenizer.decoder = library.decoders.Metaspace()
    (tmp_path / "config.json").write_text("{}")
    opened = Opened(None, None, SubwordTokenizer(tokenizer, 0), str(tmp_path), ((), ()))
    options = generate_command.GenerateOptions("nowhere", chat=True, stop=("x x",))
    show = generate_command.Writer(options, opened, None)._show
    assert show([1, 2, 0]) == "x b"  # "x" is held back, for it begins what stops
    assert show([3, 2, 0]) == " b"


def test_special_tokens_have_no_text_and_end_one_if_a_stop_spells_them(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = SubwordTokenizer.train([b"a"], 257).adding("<turn>")
    (tmp_path / "config.json").write_text("{}")
    opened = Opened(None, None, tokenizer, str(tmp_path), ((), ()))
    a, turn = *tokenizer.encode("a").tolist(), tokenizer.special_ids["<turn>"]
    for stop, text in (((), "aa"), (("<turn>",), "a")):
        options = generate_command.GenerateOptions("nowhere", stop=stop)
        assert generate_command.Writer(options, opened, None)._show([a, turn, a]) == text


def test_an_end_that_no_program_reads_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 2147483648]}')
    with pytest.raises(ValueError, match="has eos_token_id 2147483648: no token has such an id"):
        ends_of(str(tmp_path), ByteTokenizer())
