"""Train an encoder-decoder on text: ``python -m experiments.t5``.

By default a small T5 learns to fill in spans that are cut out of the Python standard library's
source, as T5 is pretrained. With ``--task name`` it reads the body of a function, without its name
and docstring, and writes both: the name and, where there is one, the first line of the docstring.
Files are split into train and held-out by a hash of their path. On two cores of an AMD EPYC spans
take 391 CPU seconds and end at 3.58 nats per token; names take 369, with 13.4 % of them exact from
scratch (jaxtrain/data/README.md).

    python -m experiments.t5 --run-dir runs/spans
    python -m experiments.t5 --task name --init-from runs/spans
    python -m experiments.t5 --task name --init-from FLAN-T5
"""

import ast
import collections
import dataclasses
import functools
import hashlib
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

import jaxtrain as jt
from experiments import language, measures
from experiments.measures import Measures
from experiments.members import of_members
from jaxtrain import data
from jaxtrain.evaluate.answers import word_f1
from jaxtrain.host.least import check_least
from jaxtrain.layout import Layout, PipelineLayout
from jaxtrain.models import encoder_decoder as t5
from jaxtrain.models.generate import generate_step
from jaxtrain.run.options import LayoutFlags, OptimizerOptions
from jaxtrain.sharding.rules import Rules
from jaxtrain.state import TrainState

# Tokens that stand for spans, where the tokenizer has none.
SENTINELS = 100
# What a T5 begins with is of very different sizes: its token table has deviation 1, its queries
# 1 / (8 sqrt(D)). Adafactor's steps are shares of each parameter; one size for all, as AdamW's, is
# too small for the one and too large for the others. A published model is tuned with that of its
# paper (Raffel et al. 2020, section 3.1.2).
RATES, PUBLISHED = {"adafactor": 0.03}, {"adafactor": 1e-3}
# Of the standard library's packages one that is larger than all others, and says little of names.
NO_PACKAGE = "test/"


@dataclasses.dataclass(frozen=True)
class Config(language.Config):
    """Trains an encoder-decoder on text."""

    form = "encoder-decoder"
    default_tokenizer = "2048"

    optimizer: OptimizerOptions = dataclasses.field(
        default_factory=lambda: OptimizerOptions(name="adafactor")
    )
    layout: LayoutFlags = dataclasses.field(
        default_factory=lambda: Layout(pipeline=PipelineLayout(schedule="interleaved"))
    )

    task: Literal["spans", "name", "rows"] = "spans"
    """Task to learn: spans fills in spans of text, name names functions of Python, and rows writes
    the target of each source (translations, summaries)."""
    model: Literal[tuple(t5.PRESETS)] = "tiny"  # type: ignore[valid-type]
    z_loss: float | None = None
    """Coefficient of the squared log of the softmax's normaliser in the loss."""
    source_len: int | None = None
    """Tokens that the encoder reads, at most; left out, the preset's."""
    target_len: int | None = None
    """Tokens that the decoder writes, at most; left out, the preset's."""

    data: str = "python"
    """Text: "python" (the standard library's source), or a folder or file of text; for spans a
    store that `jaxtrain tokenize` has made too; for rows JSONL, CSV, TSV or Parquet, a file, or a
    folder with train.* and validation.*."""
    tokenizer: str | None = None
    """"bytes"; a tokenizer.json; a number trains a BPE tokenizer of that many tokens first, which
    is what is done where it is left out, with 2,048. Stores have their own."""
    held_out_bytes: int = 200_000
    """Bytes of held-out text to evaluate the filling of spans on."""

    steps: int = 1600
    global_batch: int = 32
    measures: Measures = ()
    """Measures of what the trained model writes for held-out rows, which the conclusion has."""
    examples: int = 1000
    """Held-out rows that targets are written for when training is over; 0 writes none."""
    beams: int = 1
    """Targets that are followed at a time; 1 always takes the most probable token."""


class Pair(NamedTuple):
    """A source text, and the target text to be written from it."""

    source: str
    target: str


def build(config: Config) -> jt.Experiment:
    """Builds the experiment: everything that is trained, planned or checked follows from it."""
    check_least(config, held_out_bytes=0, examples=0, beams=1)
    if config.measures and (config.task == "spans" or not config.examples):
        raise ValueError(
            "--measures is given, and no targets are written: give --task rows, and --examples"
        )
    measures.check(config.measures)
    open_text = open_rows if config.task == "rows" else data.open_data
    options = language.tokenizer_options(config)
    text = open_text(config.data, field=config.field, **options)
    if "" not in text.found:
        raise ValueError(f"--data {config.data} names several sources: give one")
    model = model_config(config, text.tokenizer.vocab_size)
    # Refuses beams that a search cannot have before anything is trained.
    generate_step(model, max_new_tokens=model.target_len, beams=config.beams)
    rows_of, conclude = {
        "spans": (span_rows, conclude_spans),
        "name": (name_rows, conclude_names),
        "rows": (pair_rows, conclude_names),
    }[config.task]
    train, held_out, own = rows_of(config, model, text)
    config, sets = config.of_rows(train), {"": held_out}
    step = outline(config, vocab_size=text.tokenizer.vocab_size)
    fingerprints = {"text": train.fingerprint, "held_out_text": held_out.fingerprint}
    if (path := config.also_held_out) is not None:
        old = open_text(path, field=config.field, **options)
        language.check_old(config, old.tokenizer, text.tokenizer)
        _, sets["old"], _ = rows_of(dataclasses.replace(config, data=path), model, old)
        fingerprints["held_out_text.old"] = sets["old"].fingerprint
    return step.with_(
        **config.batches_of(train, sets),
        **language.text_fields(config, step, text.tokenizer, fingerprints),
        facts=language.facts(config, model, own),
        conclude=functools.partial(conclude, config, model, text.tokenizer, train, held_out),
    )


def outline(config: Config, *, vocab_size: int | None = None) -> jt.Experiment:
    """Builds the experiment without its text; ``vocab_size``, left out, is what the flags say."""
    return of_members(config, functools.partial(_outline, vocab_size=vocab_size))


def _outline(config: Config, *, vocab_size: int | None) -> jt.Experiment:
    model = model_config(config, vocab_size or language.vocab_size(config))
    return language.outline(
        config,
        "t5",
        model,
        data.pair_shapes(config.global_batch, model.source_len, model.target_len),
        rates=RATES if config.source is None or config.source.is_run else PUBLISHED,
        items_per_step=config.global_batch * (model.source_len + model.target_len),
        flops_per_step=float(t5.flops_per_row(model) * config.global_batch),
    )


def model_config(config: Config, vocab_size: int) -> t5.T5Config:
    """The preset, or the model that the run begins with, changed by the flags that were given."""
    own = {}
    if config.source is None:
        own["vocab_size"] = vocab_size + SENTINELS
        if config.layers is not None:
            own["decoder_layers"] = None
    else:  # whose lengths are no part of the model
        for name in ("source_len", "target_len"):
            given = getattr(config, name)
            own[name] = getattr(t5.tiny(), name) if given is None else given
    return language.model_config(config, vocab_size, **own)


def span_rows(config: Config, model: t5.T5Config, text: data.TextData) -> tuple[Any, ...]:
    """Rows to train on and held out, and facts for the header."""
    corpora = text.stores[""].corpus(), text.held_out(config.held_out_bytes)[""]
    marks = sentinels(text.tokenizer)
    if marks[0] >= model.vocab_size:
        raise ValueError(
            f"the tokenizer has no <extra_id_0> to stand for a span, and '{config.init_from}' no "
            "token behind the tokenizer's: give --tokenizer one made of it by adding <extra_id_0> "
            "to <extra_id_99>"
        )
    options = {"sentinels": marks[marks < model.vocab_size], "eod": text.tokenizer.eod}
    train, held_out = (
        data.CorruptedSpans(corpus, model.source_len, model.target_len, **options)
        for corpus in corpora
    )
    sizes = [corpus.num_bytes / 1e6 for corpus in corpora]
    facts = {
        "text": f"{language.text_name(config)}: {sizes[0]:.1f} MB to train on, {sizes[1]:.2f} MB "
        "held out",
        "task": f"{train.spans} spans, {train.cut} tokens of {train.length}, to be filled in",
    }
    return train, held_out, facts


def sentinels(tokenizer: data.Tokenizer) -> np.ndarray:
    """The tokens that stand for spans: T5's own tokenizers have them, behind others they follow."""
    if isinstance(tokenizer, data.SubwordTokenizer):
        own = [tokenizer.special_id(b"<extra_id_%d>" % n) for n in range(SENTINELS)]
        if None not in own:
            return np.array(own)
    return tokenizer.vocab_size + np.arange(SENTINELS)


def conclude_spans(
    config: Config,
    model: t5.T5Config,
    tokenizer: data.Tokenizer,
    train: data.CorruptedSpans,
    held_out: data.CorruptedSpans,
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says how many tokens of spans were right, next to the most frequent one, and shows some."""
    first = np.asarray(train.corpus.tokens[:1_000_000])
    frequent = int(np.bincount(first).argmax())
    right = weight = 0.0
    for index in range(min(len(held_out), 1000)):
        found = held_out[index]
        right += float(((found["targets"] == frequent) * found["mask"]).sum())
        weight += float(found["mask"].sum())
    lines = [
        f"held-out tokens of spans: {means['accuracy']:.1%} right, given those before them; always "
        f"the most frequent token: {right / weight:.1%}"
    ]
    if not config.examples:
        return lines
    shown = held_out[len(held_out) // 2]
    (written,) = write(config, model, state, [shown], eod=tokenizer.eod)
    names = {int(id): f"<{n}>" for n, id in enumerate(held_out.sentinels)}
    parts = {
        "the text": shown["source"][shown["source_segments"] > 0][:-1],
        "the spans": shown["targets"][shown["mask"] > 0][:-1],
        "it wrote": language.until(written, tokenizer.eod),
    }
    for name, tokens in parts.items():
        lines += ["", f"{name}:", "", *spelled(tokenizer, tokens, names).splitlines()]
    return lines


def spelled(tokenizer: data.Tokenizer, tokens: Iterable[int], names: Mapping[int, str]) -> str:
    """The text of tokens, some of which have names."""
    out, held = [], []
    for token in map(int, tokens):
        if token in names or token >= tokenizer.vocab_size:
            out += [tokenizer.decode(held), names.get(token, "<?>")]
            held = []
        else:
            held.append(token)
    return "".join([*out, tokenizer.decode(held)])


class NameRows:
    """Sources and targets, such as functions and their names: rows for batches."""

    def __init__(self, pairs: list[Pair], tokenizer: data.Tokenizer, model: t5.T5Config):
        self.pairs, self.model, self.eod = pairs, model, tokenizer.eod
        digest = hashlib.sha256(repr([tuple(pair) for pair in pairs]).encode())
        self.fingerprint = digest.hexdigest()
        self._tokens = [
            tokenizer.encode_batch([getattr(pair, side) for pair in pairs]) for side in Pair._fields
        ]
        lengths = model.source_len, model.target_len
        # Of each side how many are cut, for they are longer than a row with its end.
        self.cut = np.array(
            [sum(len(x) >= T for x in side) for side, T in zip(self._tokens, lengths, strict=True)]
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        source, target = (side[index].tolist() for side in self._tokens)
        ends = [*source, self.eod], [*target, self.eod]
        return data.pair_row(*ends, self.model.source_len, self.model.target_len)


def name_rows(config: Config, model: t5.T5Config, text: data.TextData) -> tuple[Any, ...]:
    """Returns rows of functions to train on and held out, and facts for the header."""
    found = text.found[""]
    if isinstance(found, data.Store):
        raise ValueError(f"--task name reads files of Python, and '{config.data}' is a token store")
    passed = NO_PACKAGE if config.data == "python" else "\0"
    pairs = [list(functions(d for d in side if not d.name.startswith(passed))) for side in found]
    known = {pair.source for pair in pairs[0]}
    pairs[1] = [pair for pair in pairs[1] if pair.source not in known]
    for side, of in zip(pairs, ("to train on", "held out"), strict=True):
        if not side:
            raise ValueError(
                f"--task name finds no function of Python in the files {of} of '{config.data}'"
            )
    train, held_out = (NameRows(side, text.tokenizer, model) for side in pairs)
    facts = {
        "text": f"{len(train):,} functions to train on, {len(held_out):,} held out, of other files",
        "task": "the name of a function and the first line of its docstring, of its body",
    }
    return train, held_out, facts | told_cut(train, held_out)


def open_rows(path: str, *, field: str, tokenizer: str, kept: Any) -> data.TextData:
    """Opens rows of source and target, and the tokenizer that they are read with."""
    sides = data.read_rows(path, Pair._fields)
    if sides is None:
        raise ValueError(
            f"--task rows reads rows of source and target, and '{path}' is no JSONL, CSV, TSV or "
            "Parquet, and no folder of such: give one"
        )
    pairs = [[Pair(str(row["source"]), str(row["target"])) for row in side] for side in sides]
    made = data.open_tokenizer(tokenizer, data.texts_of_rows(sides, Pair._fields), kept=kept)
    return data.TextData(data.parse_data(path), made, {"": pairs}, field)


def pair_rows(config: Config, model: t5.T5Config, text: data.TextData) -> tuple[Any, ...]:
    """Returns rows of source and target to train on and held out, and facts for the header."""
    train, held_out = (NameRows(side, text.tokenizer, model) for side in text.found[""])
    rows = f"{config.data}: {len(train):,} rows to train on, {len(held_out):,} held out"
    facts = {"text": rows, "task": "the target of a row, of its source"}
    return train, held_out, facts | told_cut(train, held_out)


def told_cut(train: NameRows, held_out: NameRows) -> dict[str, str]:
    """Returns a fact for the header where rows are too short for some texts."""
    sources, targets = (train.cut + held_out.cut).tolist()
    told = f"{sources:,} sources and {targets:,} targets, which are longer than their rows"
    return {"cut": told} if sources or targets else {}


def functions(documents: Iterable[data.Document]) -> Iterator[Pair]:
    """Yields the functions with a body in files of Python; what is no Python 3 is left out."""
    for document in documents:
        if b"def " not in document.text:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are deprecated, in others' code
            try:
                tree = ast.parse(document.text)
            except (SyntaxError, ValueError):
                continue
        lines = document.text.decode("utf-8", "replace").splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = (ast.get_docstring(node) or "").strip()
                if len(node.body) > bool(docstring) and not isinstance(node.body[-1], ast.Pass):
                    yield as_pair(node, docstring, lines)


def as_pair(node: Any, docstring: str, lines: Sequence[str]) -> Pair:
    """A function's body without its name (``_`` wherever it stands), and what it is called; where
    a docstring is wanted too, the source says so.

    >>> text = 'def half(x):\\n    "Halves."\\n    return x / 2'
    >>> as_pair(ast.parse(text).body[0], "Halves.", text.splitlines())
    Pair(source='doc: (x)\\nreturn x / 2', target='half: Halves.')
    """
    first = node.body[0].end_lineno if docstring else node.body[0].lineno - 1
    body = textwrap.dedent("\n".join(lines[first : node.end_lineno]))
    body = re.sub(rf"\b{re.escape(node.name)}\b", "_", body)
    source, told = f"({ast.unparse(node.args)})\n{body}", docstring.partition("\n")[0].strip()
    return Pair(f"doc: {source}", f"{node.name}: {told}") if docstring else Pair(source, node.name)


def conclude_names(
    config: Config,
    model: t5.T5Config,
    tokenizer: data.Tokenizer,
    train: NameRows,
    held_out: NameRows,
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says how well held-out functions were named, or targets written, next to the most frequent
    one, with samples."""
    del means
    if not config.examples:
        return []
    rows = data.spread(held_out, config.examples)
    written = write(config, model, state, rows, eod=tokenizer.eod)
    texts = [spelled(tokenizer, language.until(tokens, tokenizer.eod), {}) for tokens in written]
    wanted = [pair.target for pair in data.spread(held_out.pairs, config.examples)]
    of_names = config.task == "name"
    parts_of = name_and_docstring if of_names else lambda target: (target, "")
    told = zip(*(parts_of(pair.target) for pair in train.pairs), strict=True)
    parts = [collections.Counter(filter(None, part)) for part in told]
    frequent = [part.most_common(1)[0][0] if part else "" for part in parts]
    count = sum(bool(parts_of(target)[1]) for target in wanted)
    title = f"{len(rows)} held-out functions, {count} with a docstring"
    lines = [f"{title:<48} exact name    name F1  docstring F1"]
    if not of_names:
        lines = [f"{f'{len(rows)} held-out targets':<48} exact text    text F1"]
    near = token_f1 if of_names else word_f1  # that of `jaxtrain evaluate`
    for told, found in (
        ("the model", map(parts_of, texts)),
        (f"always {': '.join(frequent[: 1 + of_names])[:36]}", [frequent] * len(rows)),
    ):
        lines.append(f"  {told:<46} {score(found, map(parts_of, wanted), near)}")
    lines += [*measures.lines(config.measures, texts, wanted), "", "some of them:"]
    for target, text in data.spread(list(zip(wanted, texts, strict=True)), 8):
        lines += ["", f"  it is     {target}", f"  it wrote  {text}"]
    return lines


def name_and_docstring(target: str) -> tuple[str, str]:
    """The name in a target, and what it says of the docstring.

    >>> name_and_docstring("half: Halves."), name_and_docstring("half")
    (('half', 'Halves.'), ('half', ''))
    """
    name, _, told = target.partition(":")
    return name.strip(), told.strip()


def score(
    found: Iterable[tuple[str, str]],
    wanted: Iterable[tuple[str, str]],
    near: Callable[[str, str], float],
) -> str:
    """Returns the share of exact names, and the mean F1, ``near``, of names and of docstrings,
    where there is one.

    >>> score([("half", ""), ("get", "Gets it.")], [("halves", ""), ("get", "Reads it.")], token_f1)
    '      50.0%      50.0%         50.0%'
    """
    pairs = list(zip(found, wanted, strict=True))
    exact = [a[0] == b[0] for a, b in pairs]
    names = [near(a[0], b[0]) for a, b in pairs]
    told = [near(a[1], b[1]) for a, b in pairs if b[1]]
    docstrings = f" {np.mean(told):13.1%}" if told else ""
    return f"{np.mean(exact):11.1%} {np.mean(names):10.1%}{docstrings}"


def token_f1(found: str, wanted: str) -> float:
    """Returns the harmonic mean of precision and recall of words, those within names too.

    >>> token_f1("getName: Returns it.", "set_name: Returns it.")
    0.75
    """
    a, b = map(_words, (found, wanted))
    both = (a & b).total()
    return 2 * both / (a.total() + b.total()) if both else 0.0


def _words(text: str) -> collections.Counter:
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", text)
    return collections.Counter(part.lower() for part in parts)


def write(
    config: Config, model: t5.T5Config, state: TrainState, rows: list, *, eod: int
) -> np.ndarray:
    """Writes the targets of rows, a batch at a time: int32 [rows, target_len]."""
    return language.write(
        model,
        state.params,
        [row["source"] for row in rows],
        lengths=[int(row["source_segments"].sum()) for row in rows],
        rules=Rules(t5.RULES),
        max_new_tokens=model.target_len,
        size=config.global_batch,
        beams=config.beams,
        temperature=0.0,
        eod=eod,
    )


if __name__ == "__main__":
    jt.main(Config, build)
