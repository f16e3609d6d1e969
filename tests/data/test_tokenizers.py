"""Tokenizers: nothing is lost, and the count of bytes is exact."""

import json
import pickle
import sys
import time

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain import cli, data
from jaxtrain.data import (
    EOD,
    ByteTokenizer,
    SubwordTokenizer,
)
from jaxtrain.data.chat import Conversation, encode_marked
from jaxtrain.data.tokenizers import KINDS
from jaxtrain.hf.opening import ModelOptions, Opened
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.serve import generate_command
from jaxtrain.sharding.mesh import make_mesh

TEXT = [
    b"def f(x):\n    return x + 1\n",
    "the theme of the thesis, naïve café, 日本語".encode(),
    b"for i in range(10):\n\tprint(i)\n",
] * 5


@pytest.fixture(scope="module")
def bpe():
    return SubwordTokenizer.train(TEXT, 300)


@pytest.fixture(scope="module", params=["bytes", "bpe", "unigram", "wordpiece"])
def tokenizer(request, bpe):
    kept = {"bytes": ByteTokenizer(), "bpe": bpe}
    return kept.get(request.param) or SubwordTokenizer.train(TEXT, 300, kind=request.param)


def test_byte_ids():
    assert ByteTokenizer().encode(b"a\x00\xff").tolist() == [97, 0, 255]
    assert ByteTokenizer().encode("é").tolist() == [0xC3, 0xA9]
    assert (ByteTokenizer().vocab_size, ByteTokenizer().eod) == (257, 256)


@settings(max_examples=100, deadline=None)
@given(data=st.one_of(st.binary(), st.text().map(str.encode)))
def test_any_bytes_round_trip(tokenizer, data):
    ids = tokenizer.encode(data)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode_bytes(ids) == data
    assert sum(map(len, tokenizer.token_pieces(ids))) == len(data)
    assert sum(map(len, tokenizer.token_pieces([*ids, tokenizer.eod]))) == len(data)
    assert tokenizer.decode([*ids, tokenizer.eod]) == data.decode("utf-8", "replace")
    assert tokenizer.eod not in ids
    assert all(0 <= each < tokenizer.vocab_size for each in ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(ids, tokenizer.encode(text.encode()))


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.one_of(st.binary(max_size=20), st.text(max_size=20)), max_size=5))
def test_batch_is_each(tokenizer, texts):
    batch = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in texts]


def test_bpe_agrees_with_the_library(bpe, tmp_path):
    """Our ids, and our text from ids, are those of Hugging Face for the same file."""
    bpe.save(tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*(each.decode() for each in TEXT[:3]), "unseen  words\n"]:
        assert bpe.encode(text).tolist() == library.encode(text).ids
        assert bpe.decode(library.encode(text).ids) == library.decode(library.encode(text).ids)


def test_bpe_merges_what_is_frequent(bpe):
    assert bpe.vocab_size == 300
    assert bpe.eod == 0
    assert len(bpe.encode(TEXT[0])) < 0.7 * len(TEXT[0])


def test_bpe_training_repeats(bpe):
    again = SubwordTokenizer.train(iter(TEXT), 300)
    assert again.fingerprint == bpe.fingerprint
    assert SubwordTokenizer.train(TEXT, 290).fingerprint != bpe.fingerprint


def test_bpe_load_gives_the_same(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    loaded = SubwordTokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.vocab_size, loaded.eod) == (bpe.vocab_size, bpe.eod)
    assert loaded.fingerprint == bpe.fingerprint
    assert loaded.encode(TEXT[1]).tolist() == bpe.encode(TEXT[1]).tolist()


def test_text_cannot_spell_the_end_of_a_document(bpe):
    ids = bpe.encode(f"one{EOD}two")
    assert bpe.eod not in ids
    assert bpe.decode(ids) == f"one{EOD}two"


@pytest.mark.filterwarnings("ignore:.* turns .* into")
@pytest.mark.parametrize("letters", ["x/s<> ", "x/s "])  # as of XLM-R, and of T5, which has no <
def test_text_cannot_spell_a_token_that_the_vocabulary_of_unigram_has(tmp_path, letters):
    scores = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    scores += [(letter, -5.0) for letter in letters.replace(" ", "\u2581")]
    theirs = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=2))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    theirs.decoder = tokenizers.decoders.Metaspace()
    theirs.add_special_tokens(["<pad>", "</s>", "<unk>"])
    theirs.save(str(tmp_path / "t5.json"))
    ours = SubwordTokenizer.load(tmp_path / "t5.json")
    ids = ours.encode("x</s> x<pad>y").tolist()
    assert not {0, 1} & {*ids}
    assert 2 in ids  # what is unknown stays so
    assert ours.encode("x x").tolist() == theirs.encode("x x").ids
    assert "<" not in letters or ours.decode(ids[:6]) == "x</s>"
    if "<" in letters:  # and the template's is the token
        said = Conversation("x", b"</s>x</s></s>", ((4, 9),), ((9, 13),))
        ((ids, counts),) = encode_marked([said], ours)
        assert (ids.tolist().count(1), ids[-1]) == (1, 1)
        assert ours.decode(ids[counts > 0]) == "x</s>"


def test_an_end_of_documents_that_a_file_does_not_call_special_is(bpe, tmp_path):
    path = changed(bpe, tmp_path)
    content = json.loads(path.read_text())
    content["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(content))
    assert bpe.eod in tokenizers.Tokenizer.from_file(str(path)).encode(f"a{EOD}b").ids
    loaded = SubwordTokenizer.load(path)
    assert loaded.encode(f"a{EOD}b").tolist() == bpe.encode(f"a{EOD}b").tolist()
    assert loaded.special_pattern == bpe.special_pattern


def changed(bpe, tmp_path, **changes):
    bpe.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
    return tmp_path / "tokenizer.json"


def test_truncation_padding_and_added_starts_of_a_file_are_not_applied(bpe, tmp_path):
    path = changed(
        bpe,
        tmp_path,
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 99},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": EOD,
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": EOD, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {EOD: {"id": EOD, "ids": [0], "tokens": [EOD]}},
        },
    )
    library = tokenizers.Tokenizer.from_file(str(path))
    assert len(library.encode("the theme of the thesis").ids) == 99
    loaded = SubwordTokenizer.load(path)
    assert loaded.encode(TEXT[1]).tolist() == bpe.encode(TEXT[1]).tolist()


def test_added_tokens_and_holes_count_their_bytes(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 350  # No token has the ids 299 to 349.
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 351, "content": "<é>", **added})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = SubwordTokenizer.load(tmp_path / "tokenizer.json")
    (id,) = set(loaded.encode("a<é>b")) - set(loaded.encode("ab"))
    assert id not in vocabulary.values()
    assert loaded.decode(loaded.encode("a<é>b")) == "a<é>b"
    assert sum(map(len, loaded.token_pieces([id]))) == 4
    assert loaded.vocab_size > 350
    assert sum(map(len, loaded.token_pieces([350]))) == len(last)


def test_failing_documents_are_not_swallowed():
    def documents():
        yield b"text"
        raise ValueError("the third file is bad")

    with pytest.raises(ValueError, match="the third file is bad"):
        SubwordTokenizer.train(documents(), 300)


ENDS = ["<|im_end|>", "<|endoftext|>", "</s>", "<end>", "[SEP]"]


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({}, "<|endoftext|>"),
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": ENDS[1]}}, "<|im_end|>"),
        ({"tokenizer_config": {"eos_token": {"content": "<end>"}}}, "<end>"),
        ({"special_tokens_map": {"eos_token": "<end>"}}, "<end>"),
        ({"tokenizer_config": {"eos_token": None, "sep_token": "[SEP]"}}, "[SEP]"),
        ({"config": {"eos_token_id": 3}, "tokenizer_config": {"eos_token": "</s>"}}, "<end>"),
        ({"generation_config": {"eos_token_id": [2]}, "config": {"eos_token_id": 3}}, "</s>"),
        # A turn ends in one, and a document in the other, as Qwen's and Llama's files have it.
        ({"generation_config": {"eos_token_id": [0, 1]}}, "<|endoftext|>"),
        ({"generation_config": {"eos_token_id": [3, 0]}}, "<end>"),
        # The default of a config's class, which is a letter of this tokenizer, and a wrong file.
        ({"config": {"eos_token_id": 7}}, "<|endoftext|>"),
        ({"config": {"eos_token_id": "none"}, "tokenizer_config": []}, "<|endoftext|>"),
        ({"config": {"provenance": {"vocabulary": "bpe-4-0a"}, "eos_token_id": 0}}, "[SEP]"),
    ],
)
def test_the_end_is_the_token_that_the_folder_names(files, end, tmp_path):
    save_with_ends(tmp_path)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert SubwordTokenizer.load(tmp_path).eod == ENDS.index(end)


def save_with_ends(folder):
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*ENDS, *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(ENDS)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_runs_and_stores_keep_the_end_that_they_began_with(tmp_path):
    """They were begun before the tokenizer's folder named an end, or named it to anybody."""
    model, run, texts = (tmp_path / name for name in ("model", "run", "texts"))
    for folder in (model, run, texts):
        folder.mkdir()
    save_with_ends(model)
    begun = data.open_tokenizer(str(model))
    (texts / "a.txt").write_text("a\n" * 40)
    data.write_store(data.text_folder(texts / "a.txt"), begun, tmp_path / "store")
    begun.save(run / "tokenizer.json")
    record = {"provenance": {"vocabulary": begun.fingerprint}}
    (run / "config.json").write_text(json.dumps(record))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    resumed = data.open_tokenizer(str(model), kept=run / "tokenizer.json")
    of_store = data.tokenizer_of_stores(data.parse_data(str(tmp_path / "store")), str(model))
    assert resumed.fingerprint == of_store.fingerprint == begun.fingerprint
    assert data.open_tokenizer(str(model)).eod_token == "<|im_end|>"


def test_a_folder_that_names_no_end_is_one_sentence(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"<end>": 0}, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ValueError, match=r"write \{.eos_token.*tokenizer_config.json, with .*<end>"
    ):
        SubwordTokenizer.load(tmp_path)


def test_bpe_load_refusals(bpe, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json' does not exist"):
        SubwordTokenizer.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad.json' is not a tokenizer.json \("):
        SubwordTokenizer.load(tmp_path / "bad.json")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save(str(tmp_path / "word.json"))
    with pytest.raises(ValueError, match="holds a WordLevel tokenizer that is not byte-level"):
        SubwordTokenizer.load(tmp_path / "word.json")
    with pytest.raises(ValueError, match=r"no token '<end>'; pass eod=... one of \['<\|endoftext"):
        SubwordTokenizer.load(changed(bpe, tmp_path), eod="<end>")
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("</s>", 0.0), ("x", -1.0)]))
    unigram.save(str(tmp_path / "unigram.json"))  # without an id of what is unknown
    with pytest.raises(ValueError, match=r"unigram.json' cannot encode every text \(.*unk_id"):
        SubwordTokenizer.load(tmp_path / "unigram.json")
    content = json.loads(changed(bpe, tmp_path).read_text())
    content["model"]["vocab"]["zz"] = 4_294_967_294  # a list of so many pieces takes 34 GB
    (tmp_path / "bomb.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"bomb.json' has 3\d\d tokens and an id of 4,294,967,294"):
        SubwordTokenizer.load(tmp_path / "bomb.json")
    for kind in ("Lowercase", "NFKC", "NFD", "NFKD"):
        path = changed(bpe, tmp_path, normalizer={"type": kind})
        with pytest.raises(ValueError, match=r"of 1 Line .* into .*no normalizer"):
            SubwordTokenizer.load(path)


def test_a_pattern_that_backtracks_without_end_is_one_sentence_in_every_process(bpe, tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = False
    both = {"type": "Sequence", "pretokenizers": [split | {"invert": False}, byte_level]}
    loaded = SubwordTokenizer.load(changed(bpe, tmp_path, pre_tokenizer=both))
    for each in (loaded, pickle.loads(pickle.dumps(loaded))):
        with pytest.raises(ValueError, match=r"\.json' cannot cut a text into words \(.*another"):
            each.encode("a" * 60 + "b")


def test_a_space_in_front_of_texts_without_one_is_refused(bpe, tmp_path):
    path = changed(bpe, tmp_path)
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"turns ' a' into 'a'.*add_prefix_space=false"):
        SubwordTokenizer.load(path)


def test_a_normalizer_that_composes_characters_is_left_out(bpe, tmp_path):
    """As Qwen's: composed text encodes as before, and no other text is lost."""
    path = changed(bpe, tmp_path, normalizer={"type": "NFC"})
    theirs, ours = tokenizers.Tokenizer.from_file(str(path)), SubwordTokenizer.load(path)
    assert ours.encode("né à l'été").tolist() == theirs.encode("né à l'été").ids
    assert ours.decode(ours.encode("ne\u0301")) == "ne\u0301"


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_other_kinds_are_trained_alike_every_time_and_kept(kind, tmp_path):
    first, again = (SubwordTokenizer.train(TEXT, 300, kind=kind) for _ in range(2))
    assert again.fingerprint == first.fingerprint
    first.save(tmp_path / "tokenizer.json")
    assert SubwordTokenizer.load(tmp_path / "tokenizer.json").fingerprint == first.fingerprint
    assert len(first.encode("the theme")) < 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_word_takes_time_in_proportion(kind):
    word = "thesisé" * 800 + "\n" * 200
    tokenizer = SubwordTokenizer.train(TEXT, 300, kind=kind)
    begun = time.perf_counter()
    assert tokenizer.decode(tokenizer.encode(word)) == word
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize("spaces", ["every", "first"])
def test_byte_fallback_is_the_library_s_and_its_loss_is_said(tmp_path, spaces):
    """As of Llama 2: a space begins a text, unknown letters are bytes, and one is a space."""
    letters = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abc"]
    merges = [("\u2581", "a"), ("b", "c")]
    vocabulary = {token: id for id, token in enumerate([*letters, "\u2581a", "bc"])}
    models, normalizers, decoders = tokenizers.models, tokenizers.normalizers, tokenizers.decoders
    theirs = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if spaces == "every":
        theirs.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
    theirs.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    theirs.add_special_tokens(["</s>"])
    theirs.save(str(tmp_path / "llama.json"))
    with pytest.warns(
        UserWarning, match=r"llama.json' turns .* into .*byte-level .* keep all text"
    ):
        ours = SubwordTokenizer.load(tmp_path / "llama.json")
    assert ours.eod == theirs.token_to_id("</s>")
    for text in ("a bc", " é 中🙂\n", "", "x  y"):
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        kept = text if spaces == "every" else text.removeprefix(" ")  # which it takes for its own
        assert ours.decode(ids) == theirs.decode(ids) == kept
    assert ours.decode_bytes(ours.encode(b"a\xff")) == b"a\xff"
    ((_, counts),) = encode_marked([Conversation("x", b"aba", ((2, 3),), ())], ours)
    assert counts.tolist() == [0, 0, 1]
    special = Conversation("x", b"</s>bc a</s>a", ((12, 13),), ((0, 4), (8, 12)))
    ((ids, _),) = encode_marked([special], ours)
    assert ids.tolist() == theirs.encode("</s>bc a</s>a", add_special_tokens=False).ids


def test_words_are_the_library_s_and_their_loss_is_said(tmp_path):
    """As of BERT."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s", ","]
    theirs = tokenizers.BertWordPieceTokenizer({word: id for id, word in enumerate(words)})
    theirs.save(str(tmp_path / "bert.json"))
    with pytest.warns(UserWarning, match=r"bert.json' turns .* into .*\[UNK\].* would be wrong"):
        ours = SubwordTokenizer.load(tmp_path / "bert.json")
    text = "Hello, worlds"
    assert ours.encode(text).tolist() == [3, 6, 4, 5]
    assert ours.decode(ours.encode(text)) == "hello , worlds"
    assert ours.eod == words.index("[SEP]")
    with pytest.raises(ValueError, match="x: this tokenizer loses text, so what counts"):
        list(encode_marked([Conversation("x", b"hello you", ((6, 9),), ())], ours))


def test_text_of_another_length_by_chance_is_refused():
    """A space is added in front and another is lost: the lengths agree, the text does not."""
    scores = [("<unk>", 0.0), *((letter, -1.0) for letter in "\u2581abcdog")]
    theirs = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=0))
    theirs.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(" +"), " ")
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    theirs.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    ours = SubwordTokenizer(theirs, 0)
    ((ids, counts),) = encode_marked([Conversation("x", b"a b dog", ((4, 7),), ())], ours)
    assert ours.decode(ids[counts > 0]) == "dog"
    with pytest.raises(ValueError, match="x: this tokenizer loses text, so what counts"):
        list(encode_marked([Conversation("x", b"a b  dog", ((5, 8),), ())], ours))


def test_what_a_model_writes_keeps_the_space_after_its_prompt(monkeypatch, capsys, tmp_path):
    """Of vocabularies in which a space begins each word, and of which `decode` drops the first."""
    scores = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        *((each, -1.0) for each in ("\u2581a", "\u2581x", "b")),
    ]
    theirs = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=0))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    theirs.decoder = tokenizers.decoders.Metaspace()
    ours, model = (
        SubwordTokenizer(theirs, 1),
        DecoderConfig(width=8, heads=1, vocab_size=5, seq_len=8, layers=1),
    )
    (tmp_path / "config.json").write_text("{}")
    opened = Opened(model, {}, ours, str(tmp_path), ((), ()))
    monkeypatch.setattr(
        ModelOptions, "open", lambda *_: (opened, make_mesh(devices=[jax.devices()[0]]))
    )
    monkeypatch.setattr(generate_command, "stream", lambda *_, **on: iter([[2, 4], [4, 2], [1, 1]]))
    flags = ["--run", "x", "--prompt", "ab a", "--samples", "2", "--max-tokens", "3"]
    assert cli.main(["generate", *flags]) == 0
    texts = [line for line in capsys.readouterr().out.splitlines() if "-" not in line]
    assert texts == [" ab", "b a"]


def test_a_kind_that_is_none():
    with pytest.raises(ValueError, match="kind is 'words': give one of bpe, unigram, wordpiece"):
        SubwordTokenizer.train(TEXT, 300, kind="words")


def test_bad_sizes_and_ids(tokenizer):
    with pytest.raises(ValueError, match="vocab_size is 256"):
        SubwordTokenizer.train(TEXT, 256)
    size = tokenizer.vocab_size
    for method in (tokenizer.decode, tokenizer.decode_bytes, tokenizer.token_pieces):
        with pytest.raises(
            ValueError, match=f"token id {size} is outside the vocabulary of {size}"
        ):
            method([1, size])
        with pytest.raises(ValueError, match="token id -1 is outside"):
            method([-1, 1])
        with pytest.raises(TypeError, match="dtype float64"):
            method([0.5])
    assert tokenizer.decode([]) == ""


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[text\]'"):
        SubwordTokenizer.train(TEXT, 300)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[text\]'"):
        SubwordTokenizer.load("any.json")


def test_the_kind_of_a_decoder_is_not_read_from_what_it_replaces():
    decoders, words = tokenizers.decoders, {"[UNK]": 0, "\u0120a": 1, "b": 2, "##c": 3}
    unknown = {"unk_token": "[UNK]"}
    for decoder, spelled in (
        (decoders.Replace("ByteLevel", "WordPiece"), "\u0120a"),
        (decoders.ByteLevel(), " a"),
        (decoders.Sequence([decoders.Sequence([decoders.WordPiece("##")])]), " \u0120a"),
    ):
        theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, **unknown))
        theirs.decoder = decoder
        pieces = SubwordTokenizer(theirs, 0).token_pieces([1, 3])
        assert pieces == [spelled.encode(), b"c" if spelled[:2] == " \u0120" else b"##c"]
