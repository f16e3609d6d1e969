"""Text to token ids and back: bytes as they are, or subwords (BPE, Unigram, WordPiece).

`ByteTokenizer` and all that is trained here encode any bytes whatever, and `decode_bytes` returns
exactly those. A loaded tokenizer of words or of Unicode characters may lose text: that is said.
Every document is followed by one end-of-document token, `eod`, which no text encodes to.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from etils import epath

from jaxtrain.host import extras
from jaxtrain.host.paths import as_path, is_file, is_folder, json_object, read_if_there

EOD = "<|endoftext|>"
# The tokens that end a document in the files of GPT-2 and Qwen, Llama 3 and 2, Gemma, and BERT.
_ENDS = (EOD, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Files and their fields that name the end of a text, in the order of transformers. BERT's name no
# end, so the token that they put behind a text comes last.
_END_IN = (
    *(("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")),
    *(("tokenizer_config.json", "eos_token"), ("special_tokens_map.json", "eos_token")),
    *(("tokenizer_config.json", "sep_token"), ("special_tokens_map.json", "sep_token")),
)
KINDS = ("bpe", "unigram", "wordpiece")
# Texts that tokenizers lose: white space and case; composed by NFC, replaced by NFC too, and taken
# apart by NFKC; letters, ideographs and emoji that many vocabularies have not; what SentencePiece
# takes for a space; a space that begins a text, where the tokenizer puts one in front of others.
_PROBES = ("A  probe,\n\tof 1 Line e\u0301 \u212b \ufb01", "naïve Ωмега 中文 🙂\u200d\u2581", " a")
_NEEDS = "tokens of subwords need the package tokenizers"
_library = functools.partial(extras.load, _NEEDS, "text", "tokenizers")
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")


class Tokenizer(Protocol):
    """The interface of a tokenizer that packing, generation and bits per byte need.

    Attributes:
      vocab_size: one more than the highest id.
      eod: the id of the end-of-document token.
      fingerprint: a short text, equal for two tokenizers only if they encode alike.
      special_pattern: a pattern, without groups, of the tokens that `encode` never gives; "" for
        none.
      special_ids: the id of each special token, by its spelling.
      beginning: the special tokens before a text, such as Llama's `<s>`.
    """

    vocab_size: int
    eod: int
    fingerprint: str
    special_pattern: str = ""
    special_ids: Mapping[str, int] = {}
    beginning: tuple[int, ...] = ()

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the ids of a text, int32 [T], with no end-of-document token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns `encode` of each text; may use every core."""
        ...

    def encode_inside(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the ids of texts that each follow a special token."""
        return self.encode_batch(texts)

    def decode(self, ids: Any) -> str:
        """Returns the text of some ids; bytes that are not UTF-8 become U+FFFD, `eod` nothing."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Any) -> bytes:
        """Returns the bytes of some ids, exactly; `eod` has none."""
        return b"".join(self.token_pieces(ids))

    def token_pieces(self, ids: Any) -> list[bytes]:
        """Returns the bytes that each id stands for; those of `eod` are none."""
        ...

    def special_id(self, token: bytes) -> int:
        """Returns the id of what `special_pattern` has found."""
        ...


class _BytePieces(Tokenizer):
    """The half that is common to both tokenizers: every id stands for some bytes."""

    def __init__(self, pieces: list[bytes], eod: int):
        self._pieces = pieces
        self.eod = eod

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def token_pieces(self, ids: Any) -> list[bytes]:
        return [self._pieces[each] for each in self._checked(ids).tolist()]

    def _checked(self, ids: Any) -> np.ndarray:
        ids = np.asarray(ids)
        if not ids.size:
            return np.zeros(0, np.int64)
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"token ids have dtype {ids.dtype}; give integers")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(
                f"token id {bad} is outside the vocabulary of {self.vocab_size}; "
                "mask the padded part of the logits"
            )
        return ids.reshape(-1)


class ByteTokenizer(_BytePieces):
    """Every byte is its own token; 256 is the end of a document.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.vocab_size, tokenizer.eod
    (257, 256)
    >>> tokenizer.encode("né").tolist()
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169, 256])
    'né'
    """

    fingerprint = "bytes"

    def __init__(self) -> None:
        super().__init__([bytes([byte]) for byte in range(256)] + [b""], eod=256)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the bytes of a text as int32 [T]; a str is encoded as UTF-8."""
        return np.frombuffer(_as_bytes(text), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns `encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids: Any) -> bytes:
        """Returns the bytes of some ids; `eod` has none."""
        ids = self._checked(ids)
        return ids[ids != self.eod].astype(np.uint8).tobytes()


class SubwordTokenizer(_BytePieces):
    """BPE, Unigram or WordPiece by Hugging Face `tokenizers`; make it by train or load.

    Those that are trained here are byte-level (Radford et al. 2019), of any kind: each letter that
    the model sees is a byte, so none is unknown. `load` takes others too: with byte fallback, as of
    Llama 2 and Gemma, and of words, as of BERT. Bytes that are not UTF-8 become one token each.
    Text that spells a special token is encoded as the text it is, so no document can end another.

    >>> tokenizer = SubwordTokenizer.train([b"the theme of the thesis"], 260)
    >>> tokenizer.vocab_size
    260
    >>> len(tokenizer.encode("the thesis")) < 10
    True
    >>> tokenizer.decode(tokenizer.encode("the thesis"))
    'the thesis'
    """

    def __init__(self, tokenizer: Any, eod: int, name: str = "the tokenizer"):
        self._name = name  # for what is said of it
        # Files may carry a maximum length and padding for some model's sake; both lose text.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = self._inside = tokenizer
        if getattr(tokenizer.pre_tokenizer, "prepend_scheme", "") == "first":
            # Newer files of Llama: a space begins the text, but not what follows a special token.
            self._inside = _library().Tokenizer.from_str(tokenizer.to_str())
            self._inside.encode_special_tokens = True
            self._inside.pre_tokenizer.prepend_scheme = "never"
        self._decoders = _decoders(tokenizer)
        super().__init__(_pieces(tokenizer, self._decoders, eod, name), eod)
        found = tokenizer.encode("x", add_special_tokens=False).ids
        self._adds_space = super().decode_bytes(found) == b" x" or "WordPiece" in self._decoders
        single = {piece[0]: id for id, piece in enumerate(self._pieces) if len(piece) == 1}
        self._byte_ids = np.array([single.get(byte, -1) for byte in range(256)], np.int32)
        self._never = self._never_text()

    @classmethod
    def train(
        cls, documents: Iterable[str | bytes], vocab_size: int, *, kind: str = "bpe"
    ) -> "SubwordTokenizer":
        """Learns tokens from some documents; the same documents give the same tokenizer.

        Args:
          documents: texts; what is not UTF-8 in them is not learned from.
          vocab_size: how many ids, at least 257: 256 bytes, the end of a document (id 0) and the
            rest. Fewer come out when the documents have no more pairs to merge.
          kind: "bpe", "unigram" or "wordpiece".

        Raises:
          ImportError: if `tokenizers` is not installed.
          ValueError: if `vocab_size` is below 257, or there is no such kind.
        """
        library = _library()
        if vocab_size < 257:
            raise ValueError(f"vocab_size is {vocab_size}; byte-level tokens need at least 257")
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}: give one of {', '.join(KINDS)}")
        model, trainer, options = {
            "bpe": (library.models.BPE, library.trainers.BpeTrainer, {}),
            "unigram": (library.models.Unigram, library.trainers.UnigramTrainer, {}),
            "wordpiece": (
                functools.partial(
                    library.models.WordPiece, unk_token=EOD, max_input_chars_per_word=1 << 40
                ),
                library.trainers.WordPieceTrainer,
                {"continuing_subword_prefix": ""},  # of bytes, none is for beginnings of words only
            ),
        }[kind]
        tokenizer = library.Tokenizer(model(**options))
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind == "wordpiece":  # the time that a word takes is of the third power of its length
            pieces = library.pre_tokenizers.Split(library.Regex(".{1,64}"), "isolated")
            tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
                [tokenizer.pre_tokenizer, pieces]
            )
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = trainer(
            vocab_size=vocab_size,
            special_tokens=[EOD],
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
            **options,
        )
        texts = (_as_bytes(document).decode("utf-8", "ignore") for document in documents)
        tokenizer.train_from_iterator(texts, trainer)
        if kind == "unigram":
            tokenizer.model = library.models.Unigram(_ordered(tokenizer))
        return cls(tokenizer, tokenizer.token_to_id(EOD))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, eod: str | None = None) -> "SubwordTokenizer":
        """Reads a ``tokenizer.json``; nothing in it is executed.

        It warns, in one sentence, where a tokenizer that is not byte-level loses text: bits per
        byte are then too low.

        Args:
          path: the file, as Hugging Face `tokenizers` writes it, or its folder; local, or in a
            bucket.
          eod: the token that ends a document; left out, the one that a run's record or a model's
            files beside it name, in the order of transformers (of several, one of GPT-2's, Llama's,
            Gemma's and BERT's, or else the first); or else the first of these that it has.

        Raises:
          FileNotFoundError: if there is no such file.
          ImportError: if `tokenizers` is not installed.
          ValueError: if the file is of another model, is byte-level and changes text, or has no
            `eod`, and nothing names another.
        """
        library = _library()
        if is_folder(as_path(path)):
            path = as_path(path) / "tokenizer.json"
        if not is_file(as_path(path)):
            raise FileNotFoundError(f"tokenizer file '{path}' does not exist")
        try:
            tokenizer = library.Tokenizer.from_str(epath.Path(path).read_text(encoding="utf-8"))
        # tokenizers raises bare Exception for a file that it cannot parse.
        except Exception as error:
            raise ValueError(f"'{path}' is not a tokenizer.json ({error})") from None
        if (kind := type(tokenizer.model).__name__).lower() not in KINDS:
            raise ValueError(
                f"'{path}' holds a {kind} tokenizer that is not byte-level; use BPE, Unigram or "
                "WordPiece (as of GPT-2, Llama, Qwen, Gemma, T5 or BERT)"
            )
        eod = eod or _end_of(tokenizer, as_path(path))
        if tokenizer.token_to_id(eod) is None:
            special = [each.content for each in tokenizer.get_added_tokens_decoder().values()]
            raise ValueError(f"'{path}' has no token '{eod}'; pass eod=... one of {special}")
        added = tokenizer.get_added_tokens_decoder().get(tokenizer.token_to_id(eod))
        if added is not None and not added.special:  # else a text that spells it becomes it
            options = {name: getattr(added, name) for name in ("lstrip", "rstrip", "single_word")}
            tokenizer.add_special_tokens([library.AddedToken(eod, special=True, **options)])
        # Qwen's files compose characters first. Text whose characters are composed, as nearly all
        # are, encodes the same without that, and any other text keeps its bytes.
        if isinstance(tokenizer.normalizer, library.normalizers.NFC):
            tokenizer.normalizer = None
        try:
            self = cls(tokenizer, tokenizer.token_to_id(eod), f"'{path}'")
            self._check_lossless(path)
        except (ValueError, Warning):
            raise
        # tokenizers raises bare Exception for letters that a model has no token for.
        except Exception as error:
            raise ValueError(f"'{path}' cannot encode every text ({error})") from None
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as it is, a tokenizer forgets to encode what spells a special token as text.
        return self.from_json, (self.to_json(), self.eod, self._name)

    @classmethod
    def from_json(cls, text: str, eod: int, name: str = "the tokenizer") -> "SubwordTokenizer":
        """Makes the tokenizer again of what `to_json` returned and of its end-of-document id.

        Errors call it `name`.

        Raises:
          ValueError: the text is something else.
        """
        library = _library()
        try:
            return cls(library.Tokenizer.from_str(text), eod, name)
        # tokenizers raises bare Exception for a file that it cannot parse.
        except Exception as error:
            raise ValueError(f"it is not a tokenizer.json ({error})") from None

    def adding(self, *tokens: str) -> "SubwordTokenizer":
        """Returns the tokenizer with more special tokens behind its own, which no text becomes."""
        library = _library()
        tokenizer = library.Tokenizer.from_str(self.to_json())
        tokenizer.add_special_tokens([library.AddedToken(each, special=True) for each in tokens])
        return type(self)(tokenizer, self.eod, self._name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json``, readable by `load` and by Hugging Face `tokenizers`."""
        epath.Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Returns what `save` writes."""
        return self._tokenizer.to_str(pretty=True)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of what `save` writes, with the end-of-document id."""
        digest = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        kind = type(self._tokenizer.model).__name__.lower()
        return f"{kind}-{self.eod}-{digest}"

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, as the file spells it."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def eod_token(self) -> str:
        """The token of `eod`, as the file spells it."""
        return self._tokenizer.id_to_token(self.eod)

    @property
    def around(self) -> tuple[tuple[int, ...], ...]:
        """The special tokens that the file puts before a text, between it and a second, and behind
        that: of BERT's [CLS], [SEP] and [SEP], and none where it puts none."""
        found = self._tokenizer.encode("x", "y")
        of = [(id, side) for id, side in zip(found.ids, found.sequence_ids, strict=True)]
        first, last = (max(i for i, (_, side) in enumerate(of) if side == n) for n in (0, 1))
        groups = of[:first], of[first:last], of[last:]
        return tuple(tuple(id for id, side in part if side is None) for part in groups)

    @property
    def beginning(self) -> tuple[int, ...]:
        """The special tokens that the file puts before a text, such as Llama's `<s>`."""
        return self.around[0]

    @property
    def special_pattern(self) -> str:
        """A pattern of the special tokens, with the white space that they take in."""
        found = [
            each for each in self._tokenizer.get_added_tokens_decoder().values() if each.special
        ]
        return "|".join(
            r"\s*" * each.lstrip + re.escape(each.content) + r"\s*" * each.rstrip
            for each in sorted(found, key=lambda each: -len(each.content))
        )

    @functools.cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The id of each special token, by its spelling."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def special_id(self, token: bytes) -> int:
        """Returns the id of what `special_pattern` has found."""
        text = token.decode()
        id = self._tokenizer.token_to_id(text)
        return self._tokenizer.token_to_id(text.strip()) if id is None else id

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [T]; uses every core."""
        return self._encode(self._tokenizer, texts)

    def encode_inside(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the ids of texts that each follow a special token."""
        return self._encode(self._inside, texts)

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the ids of each text, int32 [T], and where in it, counted in letters, what each
        stands for begins and ends, int [T, 2]."""
        valid = [text.encode("utf-8", "replace").decode() for text in texts]
        found = []
        for encoding in self._tokenizer.encode_batch(valid, add_special_tokens=False):
            ids_T = np.array(encoding.ids, np.int32)
            letters_T2 = np.array(encoding.offsets, int).reshape(-1, 2)
            if self._never[ids_T].any():
                parts = [self._as_text(ids_T[i : i + 1]) for i in range(len(ids_T))]
                ids_T = np.concatenate(parts)
                letters_T2 = np.repeat(letters_T2, list(map(len, parts)), axis=0)
            found.append((ids_T, letters_T2))
        return found

    def _encode(self, tokenizer: Any, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        # Odd parts are the invalid bytes of a text, which UTF-8 text itself cannot contain.
        split = [
            _INVALID_UTF8.split(_as_bytes(text).decode("utf-8", "surrogateescape"))
            for text in texts
        ]
        valid = [part for parts in split for part in parts[::2]]
        try:
            encodings = tokenizer.encode_batch_fast(valid, add_special_tokens=False)
        except BaseException as error:  # what a panic of its Rust becomes is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(
                f"{self._name} cannot cut a text into words ({error}): its pattern may backtrack "
                "without end; use another tokenizer"
            ) from None
        ids = iter([self._as_text(np.array(encoding.ids, np.int32)) for encoding in encodings])
        return [
            np.concatenate(
                [self._invalid(part) if odd % 2 else next(ids) for odd, part in enumerate(parts)]
            )
            for parts in split
        ]

    def _never_text(self) -> np.ndarray:
        """Returns which ids no text becomes, bool [vocab_size]: `eod` and the special tokens, but
        not the one of unknown letters."""
        never = np.zeros(self.vocab_size, bool)
        added = self._tokenizer.get_added_tokens_decoder()
        never[[self.eod, *(id for id, each in added.items() if each.special)]] = True
        # tokenizers raises bare Exception where a model knows no such token.
        with contextlib.suppress(Exception):
            never[[each.id for each in self._tokenizer.model.tokenize("\ufdd3")]] = False
        return never

    def _as_text(self, ids: np.ndarray) -> np.ndarray:
        """Spells the special tokens among the ids of a text by letters. The vocabularies of Unigram
        and of words have them too (T5's and XLM-R's "</s>"), so that a text can become them."""
        if not self._never[ids].any():
            return ids
        parts = [self._letters(id) if self._never[id] else [id] for id in ids.tolist()]
        return np.concatenate(parts).astype(np.int32)

    def _letters(self, id: int) -> list[int]:
        token = self._tokenizer.id_to_token(id)
        ids = self._byte_ids[list(token.encode())]
        if ids.min() >= 0:
            return ids.tolist()
        return [each.id for letter in token for each in self._tokenizer.model.tokenize(letter)]

    def _invalid(self, part: str) -> np.ndarray:
        data = part.encode("utf-8", "surrogateescape")
        ids = self._byte_ids[np.frombuffer(data, np.uint8)]
        if ids.min() < 0:
            raise ValueError(
                f"byte 0x{data[int(ids.argmin())]:02x} is not UTF-8 and has no token of its own in "
                "this tokenizer; give it UTF-8 text"
            )
        return ids

    def decode_bytes(self, ids: Any) -> bytes:
        """Returns the bytes of some ids, without a space that begins every text."""
        data = super().decode_bytes(ids)
        return data.removeprefix(b" ") if self._adds_space else data

    def _check_lossless(self, path: str | os.PathLike[str]) -> None:
        for probe in _PROBES:
            got = self.decode(self.encode(probe))
            if got == probe:
                continue
            found = f"'{path}' turns {probe!r} into {got!r}, so its bits per byte would be wrong; "
            if "ByteLevel" not in self._decoders:
                warnings.warn(f"{found}byte-level tokenizers keep all text", stacklevel=3)
                return
            raise ValueError(
                f"{found}use a tokenizer that keeps text as it is (add_prefix_space=false, no "
                "normalizer)"
            )


def _end_of(tokenizer: Any, path: epath.Path) -> str:
    """Returns the token that ends a document: named by a file beside a tokenizer.json, or known."""
    names = {name for name, _ in _END_IN}
    files = {name: json_object(read_if_there(path.parent / name)) for name in names}
    added = tokenizer.get_added_tokens_decoder()

    def named(value: Any) -> list[str]:
        """The tokens of a field. An id must be of an added token: a wrong one may be of a word."""
        tokens = value if isinstance(value, list) else [value]
        tokens = [token.get("content") if isinstance(token, dict) else token for token in tokens]
        tokens = [added[x].content if type(x) is int and x in added else x for x in tokens]
        return [x for x in tokens if isinstance(x, str) and tokenizer.token_to_id(x) is not None]

    # A run goes on with the end that it began with, which its fingerprint has.
    record = files["config.json"].get("provenance")
    vocabulary = record.get("vocabulary") if isinstance(record, dict) else None
    begun = re.fullmatch(r"\w+-(\d{1,9})-[0-9a-f]+", str(vocabulary))
    if begun and (end := tokenizer.id_to_token(int(begun[1]))):
        return end
    fields = (named(files[name].get(field)) for name, field in _END_IN)
    ends = next(filter(None, fields), [])
    listed = [end for end in _ENDS if tokenizer.token_to_id(end) is not None]
    common = [end for end in listed if end in ends]
    if not (choices := common or ends or listed):
        raise ValueError(
            f"'{path}' has no known token that ends a document, and no file beside it names one: "
            'write {"eos_token": "..."} into tokenizer_config.json, with one of '
            f"{[token.content for token in added.values()]}"
        )
    return choices[0]


def special_ids_of(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Returns `special_ids`; empty for a tokenizer of your own that does not have them."""
    return getattr(tokenizer, "special_ids", {})


def decode_shown(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Returns the text of some ids without special tokens, as transformers does with
    ``skip_special_tokens``; an id beyond the vocabulary has no text."""
    special = set(special_ids_of(tokenizer).values())
    return tokenizer.decode([id for id in ids if id < tokenizer.vocab_size and id not in special])


def trained_kind(name: str) -> tuple[str, int] | None:
    """Reads what a tokenizer to train is called: its kind and its size; None for other names.

    >>> trained_kind("32000"), trained_kind("unigram:8000"), trained_kind("tokenizer.json")
    (('bpe', 32000), ('unigram', 8000), None)
    """
    found = re.fullmatch(rf"(?:({'|'.join(KINDS)}):)?([0-9]+)", name)
    return (found[1] or KINDS[0], int(found[2])) if found else None


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8") if isinstance(text, str) else text


def _decoders(tokenizer: Any) -> dict[str, Any]:
    """Returns what a tokenizer decodes with, by type; of a sequence, its parts too."""
    # What it is pickled as is its part of the JSON, without a vocabulary that may be long.
    decoders = [json.loads(tokenizer.decoder.__getstate__())] if tokenizer.decoder else []
    for each in decoders:  # to which its parts are added
        decoders += each.get("decoders", [])
    return {each["type"]: each for each in decoders}


def _pieces(tokenizer: Any, decoders: Mapping[str, Any], eod: int, name: str) -> list[bytes]:
    """Returns the bytes each id stands for; ids that no token has, and `eod`, stand for none."""
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_of = byte_alphabet() if "ByteLevel" in decoders else {}
    prefix = decoders.get("WordPiece", {}).get("prefix")
    most = max(vocabulary.values())
    if most >= 4 * len(vocabulary) + 100_000:  # a few may be left out, and tables have rows for all
        raise ValueError(
            f"{name} has {len(vocabulary):,} tokens and an id of {most:,}, for which a model would "
            "need as many rows: number them from 0"
        )
    pieces = [b""] * (most + 1)
    for token, id in vocabulary.items():
        if id in added:
            pieces[id] = token.encode("utf-8")
        elif byte_of and all(letter in byte_of for letter in token):
            pieces[id] = bytes(byte_of[letter] for letter in token)
        elif prefix is not None:
            text = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
            pieces[id] = text.encode("utf-8")
        elif "ByteFallback" in decoders and (byte := _BYTE.fullmatch(token)):
            pieces[id] = bytes.fromhex(byte[1])
        else:
            # SentencePiece's space, which byte-level vocabularies have for itself.
            pieces[id] = (token if byte_of else token.replace("\u2581", " ")).encode("utf-8")
    pieces[eod] = b""
    return pieces


def _ordered(tokenizer: Any) -> list[tuple[str, float]]:
    """Returns a trained Unigram vocabulary with what is by chance in it taken out.

    Bytes that were never seen have the lowest scores, 10^-4 apart, in the order of a hash table:
    they get the lowest of all, tokens of the same score the order of their letters, and the last
    digits, which are of the order of a sum, are cut."""
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    lowest = min(score for _, score in vocabulary)
    scores = [
        (token, round(lowest if score < lowest + 0.026 else score, 9))
        for token, score in vocabulary
    ]
    first, *rest = scores
    return [first, *sorted(rest, key=lambda each: (-each[1], each[0]))]


def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each GPT-2 letter: printable Latin-1 is itself, the rest is 256+."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + order): byte for order, byte in enumerate(others)}
