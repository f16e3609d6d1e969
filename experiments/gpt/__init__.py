"""Train a GPT on text: ``python -m experiments.gpt``.

By default a byte-level GPT learns the source code of the running Python's own standard library:
real text, found on every machine, files split into train and held-out by a hash of their path. On 2
CPU cores that takes under 6 minutes and ends at or below 2.15 bits per held-out byte.

    python -m experiments.gpt --help
    python -m experiments.gpt --model gpt2-124m --data my_texts/ --tokenizer tokenizer.json
    python -m experiments.gpt --simulate-devices 8 --mesh.data 4 --mesh.tensor 2 --steps 20
    jaxtrain generate --run runs/gpt-1 --prompt "def "
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import jax
import numpy as np

import jaxtrain as jt
from experiments import dial, language, measures
from experiments.measures import Measures
from experiments.members import of_members
from jaxtrain import data
from jaxtrain.data.taught import Taught, read_about
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.distill import DistillText, StoredDistillation
from jaxtrain.finetune.preferences import Preference, Preferences
from jaxtrain.host.least import check_least
from jaxtrain.models import decoder, decoding
from jaxtrain.sharding.rules import Rules
from jaxtrain.state import TrainState

# Of the text to train on, what the byte model to compare with counts: seconds, of any corpus.
BASELINE_BYTES = 40_000_000
# Of a held-out document, what is continued where text has no prompts: tokens.
BEGINNING = 32


@dataclasses.dataclass(frozen=True)
class Config(language.Config):
    """Trains a GPT on text."""

    form = "decoder"
    default_tokenizer = "bytes"

    model: Literal[tuple(decoder.PRESETS)] = "tiny"  # type: ignore[valid-type]
    depth: int | None = None
    """Layers, from which width, heads, batch, steps and learning rate follow by fitted rules; a
    flag of those that is typed is kept, and the others follow from it."""
    budget: float | None = None
    """FLOPs of the training, from which depth and all else follows; with --depth only the length
    of the training."""
    parametrization: Literal["standard", "mup"] = "standard"
    """Width that the learning rate and the initial weights are for: this model's, or by muP that of
    the preset, from which those of another --width follow, so that the best rate stays."""
    kv_heads: int | None = None
    """Heads that have keys and values of their own, which as many query heads each share; left out,
    the preset's, or with --width or --heads as many as those."""
    experts: int | None = None
    """Experts in the place of each layer's MLP, of its width, of which a token goes through two.
    With --init-from of a model that has none, each begins as its MLP."""
    z_loss: float | None = None
    """Coefficient of the squared log of the softmax's normaliser in the loss."""

    data: str = "python"
    """Text to learn: "python" (the standard library's source), "sums" (of numbers of two digits), a
    folder or file (text, JSONL, Parquet, Arrow; rows of conversations too), a store that `jaxtrain
    tokenize` has made, or several of those by shares: code=0.7:STORE1,docs=0.3:STORE2, and
    ;1000:code=0.5,docs=0.5 behind it from step 1000 on."""
    tokenizer: str | None = None
    """"bytes", as where it is left out; a tokenizer.json, or the folder of one; a number trains a
    BPE tokenizer of that many tokens first, and unigram:N or wordpiece:N one of those. Stores have
    their own."""
    chat_template: str | None = None
    """Chat template for rows of conversations (messages; prompt and completion; chosen and
    rejected): chatml, plain, a Jinja file, or the folder of a model; left out, that of
    --init-from."""
    packing: Literal["cut", "fit"] = "cut"
    """Rows to train on: the text cut every seq-len tokens, or whole documents, as many as fit. Of
    preferences whole pairs are placed, chosen and rejected side by side."""
    grow_every: int = 0
    """Steps between watermarks: looks at what `jaxtrain tokenize --append` has added to the store
    of --data, which is read from that step on. 0 reads the store as it is at the start."""
    preference: Preference = dataclasses.field(default_factory=Preference)
    distill: DistillText = dataclasses.field(default_factory=DistillText)
    held_out_bytes: int = 300_000
    """Bytes of held-out text to evaluate on, in whole documents, of each source."""

    steps: int = 250
    global_batch: int = 16
    seq_len: int | None = None
    """Tokens per row; left out, the preset's."""
    sample_tokens: int = 250
    """Length of the text written when training is over; 0 writes none."""
    measures: Measures = ()
    """Measures of what the trained model writes for held-out rows, which the conclusion has."""
    measured_rows: int = 100
    """Held-out conversations whose answers are written for --measures, at most."""

    def filled(self, typed: Collection[str]) -> "Config":
        """Returns the config with what follows from its depth or budget."""
        return dial.fill(self, typed)


def build(config: Config) -> jt.Experiment:
    """Builds the experiment: everything that is trained, planned or checked follows from it."""
    config = dial.fill(config)
    check_least(config, held_out_bytes=0, sample_tokens=0, measured_rows=1, grow_every=0)
    measures.check(config.measures)
    options = language.tokenizer_options(config)
    chat = config.chat_template or (config.source and config.source.path)
    marks = language.watermarks(config, config.grow_every)
    options["parts"] = marks.first.parts if marks else language.parts_begun(config)
    text = data.open_data(config.data, field=config.field, chat=chat, **options)
    if config.chat_template and not (text.has_conversations or config.also_held_out):
        raise ValueError(
            f"`chat_template` is {config.chat_template!r}, and --data {config.data} has no rows of "
            "conversations that it could render: leave it out"
        )
    tokenizer = text.tokenizer
    model = model_config(config, tokenizer.vocab_size)
    if config.teacher is not None:
        language.check_same_tokens(config.teacher, tokenizer)
    rows = text.rows(model.seq_len, config.packing)
    if marks is not None:
        cut = functools.partial(data.pack, seq_len=model.seq_len, packing=config.packing)
        rows = data.GrowingRows(marks, cut)
    if config.distill.stored is not None:
        rows = Taught(rows, config.distill.stored, tokenizer.fingerprint)
    config = config.of_rows(rows)
    step = outline(config, vocab_size=tokenizer.vocab_size)
    texts = {
        name: (text.stores[name].corpus(), held_out)
        for name, held_out in text.held_out(config.held_out_bytes).items()
    }
    held_out_rows = {
        name: data.pack(held_out, model.seq_len) for name, (_, held_out) in texts.items()
    }
    if config.measures and not any(
        each.counts is not None and not each.pairs for _, each in texts.values()
    ):
        raise ValueError(
            f"--measures is given and --data {config.data} has no answers to compare with: give "
            "conversations, such as rows of prompt and completion"
        )
    old = old_text(config, text, chat) if config.also_held_out else {}
    held_out_rows |= {name: data.pack(each, model.seq_len) for name, (_, each) in old.items()}
    beginning = functools.partial(asked, texts, model.seq_len // 2)
    fingerprints, mixture = {}, {}
    for name, (train, held_out) in (texts | old).items():
        of = f".{name}" if name else ""  # the only one has no name
        fingerprints |= {f"text{of}": train.fingerprint, f"held_out_text{of}": held_out.fingerprint}
    if isinstance(rows, data.Mixture):
        fingerprints["shares"] = text.spec.described()
        mixture = {
            "best_metric": f"{next(iter(texts))}/loss",
            "counts": lambda step: {
                f"data/epochs/{name}": n
                for name, n in rows.epochs(step, config.global_batch).items()
            },
        }
    if marks is not None:
        mixture = {
            "watermarks": marks,
            "counts": lambda step: {"data/visible_tokens": marks.at(step - 1).tokens},
        }
    return step.with_(
        **config.batches_of(rows, held_out_rows),
        **mixture,
        **language.text_fields(
            config, step, tokenizer, fingerprints, chat_template=text.chat_template
        ),
        facts=language.facts(config, model, facts(config, texts, rows)),
        conclude=functools.partial(conclude, config, model, tokenizer, texts | old),
        show=lambda state, means: (
            {"sample": "\n".join(sample(config, model, tokenizer, state, prompt=beginning()))}
            if config.sample_tokens and model.head == "tokens"
            else {}
        ),
    )


def outline(config: Config, *, vocab_size: int | None = None) -> jt.Experiment:
    """Builds the experiment without its text; ``vocab_size``, left out, is what the flags say."""
    return of_members(dial.fill(config), functools.partial(_outline, vocab_size=vocab_size))


def _outline(config: Config, *, vocab_size: int | None) -> jt.Experiment:
    model = model_config(config, vocab_size or language.vocab_size(config))
    pairs = data.holds_pairs(data.parse_data(config.data), config.field)
    tokens = config.global_batch * model.seq_len * (2 if pairs else 1)
    experiment = language.outline(
        config,
        "gpt",
        model,
        data.packed_shapes(config.global_batch, model.seq_len),
        items_per_step=tokens,
        flops_per_step=float(decoder.flops_per_token(model) * tokens),
        **language.of_width(config, model, model_config),
    )
    if config.preference != Preference() and not pairs:
        raise ValueError("--preference.loss and the like are for preferences, and --data has none")
    if config.distill.stored is not None:
        return with_answers(config, model, experiment, pairs=pairs)
    for found, what in ((pairs, "preferences"), (model.z_loss, f"--z-loss {model.z_loss}")):
        if found and config.teacher is not None:
            raise ValueError(f"{what} and --distill.teacher are losses of their own: leave one out")
    sizes = {"length": model.seq_len, "seq_len": model.seq_len}
    how = sizes | {"flops": decoder.flops_per_token}
    taught = language.with_teacher(config, model, experiment, decoder.distillation_loss, **how)
    return preference_task(config, model, experiment) if pairs else taught


def model_config(config: Config, vocab_size: int) -> decoder.DecoderConfig:
    """The model; a reward model has a head of its own."""
    own = {}
    if config.preference.loss == "reward":
        own["head"] = "score"
    elif config.source is not None and config.source.model.head == "score":
        raise ValueError(
            f"--init-from is {config.init_from}: it is a reward model, which predicts no tokens; "
            "give --preference.loss reward and preferences, or another model"
        )
    return language.model_config(config, vocab_size, **own)


def with_answers(
    config: Config, model: decoder.DecoderConfig, experiment: jt.Experiment, *, pairs: bool
) -> jt.Experiment:
    """Makes of the experiment the one whose model learns from a teacher's stored answers too."""
    distill, numbers = config.distill, config.distill.numbers()
    for found, what in (
        (distill.teacher, f"--distill.teacher {distill.teacher}"),
        (pairs, "preferences"),
        (model.z_loss, f"--z-loss {model.z_loss}"),
    ):
        if found:
            raise ValueError(f"{what} and --distill.stored are losses of their own: leave one out")
    if numbers.pop("hidden"):
        raise ValueError(
            f"--distill.hidden is {distill.hidden}, and stored answers have no hidden states: give "
            "--distill.teacher, or leave it out"
        )
    about = read_about(distill.stored)
    if about["temperature"] != distill.temperature:
        raise ValueError(
            f"--distill.temperature is {distill.temperature} and the answers in '{distill.stored}' "
            f"are of {about['temperature']}: give that"
        )
    kind = jax.ShapeDtypeStruct
    shape = (config.global_batch, model.seq_len, about["top"])
    batch = experiment.data.batch | {"teacher_ids": kind(shape, np.int32)}
    shape = (*shape[:2], about["top"] + 1)
    batch["teacher_log_probs"] = kind(shape, about["dtype"])
    loss = decoder.stored_distillation_loss(model, **numbers)
    return apply(experiment, StoredDistillation(loss), batch=batch)


def old_text(
    config: Config, text: data.TextData, chat: str | None
) -> dict[str, tuple[data.Corpus, data.Corpus]]:
    """The text of --also-held-out, under the name of its evaluation set."""
    own = data.open_data(
        config.also_held_out, field=config.field, chat=chat, **language.tokenizer_options(config)
    )
    told = f"--also-held-out is {config.also_held_out}: it must have"
    if list(own.found) != [""] or "old" in text.found:
        raise ValueError(f"{told} one source, and --data none of the name old; give those")
    language.check_old(config, own.tokenizer, text.tokenizer)
    corpora = own.stores[""].corpus(), own.held_out(config.held_out_bytes)[""]
    if corpora[0].pairs != next(iter(text.stores.values())).pairs:
        raise ValueError(
            f"{told} preferences where --data has, and text where that has; give those"
        )
    return {"old": corpora}


def preference_task(
    config: Config, model: decoder.DecoderConfig, experiment: jt.Experiment
) -> jt.Experiment:
    """Makes of the experiment the one that learns preferences, against what it begins with."""
    if experiment.task.params is None:
        raise ValueError("preferences refine a trained model: give it with --init-from")
    if model.z_loss:
        raise ValueError(f"--z-loss {model.z_loss} is not for preferences, whose loss has none")
    if (labels := data.holds_labels(data.parse_data(config.data), config.field)) != (
        config.preference.loss == "kto_unpaired"
    ):
        has, mend = ("answers with labels", "") if labels else ("pairs", "another than ")
        raise ValueError(
            f"--preference.loss is {config.preference.loss} and --data has {has}: give "
            f"{mend}kto_unpaired"
        )
    of_tokens = decoder.scores if model.head == "score" else decoder.log_probs
    of_tokens = functools.partial(of_tokens, model)
    change = Preferences(of_tokens, config.preference, frozen=experiment.task.freeze)
    batch = data.packed_shapes(config.global_batch, model.seq_len, pairs=True)
    # The loss is of a preference.
    return apply(experiment, change, batch=batch, derived=lambda means: {})


def conclude(
    config: Config,
    model: decoder.DecoderConfig,
    tokenizer: data.Tokenizer,
    texts: Mapping[str, tuple[data.Corpus, data.Corpus]],
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says what the loss is in bits per byte, next to a byte model's, and shows a sample."""
    lines = []
    for name, (train, held_out) in texts.items() if jax.process_index() == 0 else ():
        of, source = (f"{name}/", f"{name}: ") if name else ("", "")
        if held_out.pairs:
            lines.append(
                f"{source}held-out loss {means[f'{of}loss']:.3f} nats per "
                f"preference, of which {means[f'{of}accuracy']:.1%} are as the text has them"
            )
            continue
        counted = len(held_out.tokens) - len(held_out.starts)
        nats = language.nats_of(means, of)
        bits = nats * counted / math.log(2) / held_out.num_bytes
        if held_out.counts is not None:
            lines.append(
                f"{source}held-out loss {nats:.3f} nats per token of the assistant's, "
                f"{held_out.counts.sum():,} of {counted:,}"
            )
            continue
        counts = data.first_texts(train.documents(tokenizer), BASELINE_BYTES)
        baseline = data.ngram_bits_per_byte(
            counts, (document.text for document in held_out.documents(tokenizer))
        )
        verdict = "beats" if bits < baseline else "does not beat"
        lines.append(
            f"{source}held-out loss {bits:.3f} bits per byte, which {verdict} the order-2 byte "
            f"model's {baseline:.3f} on the same {held_out.num_bytes:,} bytes"
        )
    for name, (_, held_out) in texts.items() if config.measures else ():
        if held_out.counts is not None and not held_out.pairs:
            found = answers(config, model, tokenizer, held_out, state)
            lines += [f"{name}: " * bool(name) + x for x in measures.lines(config.measures, *found)]
    if config.sample_tokens and model.head == "tokens":
        learned = {name: each for name, each in texts.items() if name != "old"}
        written = sample(config, model, tokenizer, state, prompt=asked(learned, model.seq_len // 2))
        lines += ["", "a sample it wrote:", "", *written]
    return lines


def asked(texts: Mapping[str, tuple[data.Corpus, data.Corpus]], longest: int) -> list[int]:
    """The longest of what held-out texts ask to be continued, of at most so many tokens."""
    return max((prompt_of(held_out, longest) for _, held_out in texts.values()), key=len)


def prompt_of(held_out: data.Corpus, longest: int) -> list[int]:
    """The first held-out prompt that is no longer than so many tokens; of text without prompts the
    beginning of a document, since nothing is learnt of what follows the end of another."""
    if held_out.pairs or not len(held_out.starts):
        return []
    if held_out.counts is None:
        return held_out.document(0)[:-1][: min(longest, BEGINNING)].tolist()
    for index, start in enumerate(held_out.starts.tolist()):
        document = held_out.document(index)
        size = int(np.argmax(held_out.counts[start : start + len(document)]))
        if size <= longest:
            return document[:size].tolist()
    return []


def answers(
    config: Config,
    model: decoder.DecoderConfig,
    tokenizer: data.Tokenizer,
    held_out: data.Corpus,
    state: TrainState,
) -> tuple[list[str], list[str]]:
    """What the model answers to held-out prompts, taking the most probable token each time, and
    what the text has there: the first answer of each conversation that fits."""
    prompts, wanted = [], []
    for index, start in enumerate(held_out.starts.tolist()):
        document = held_out.document(index)
        counts = held_out.counts[start : start + len(document)]
        begin = int(np.argmax(counts))
        end = begin + int(np.argmin(np.append(counts[begin:], 0)))
        if begin and end <= model.seq_len:
            prompts.append(document[:begin].tolist())
            wanted.append(language.until(document[begin:end], tokenizer.eod))
    chosen = data.spread(range(len(prompts)), config.measured_rows)
    prompts, wanted = ([each[i] for i in chosen] for each in (prompts, wanted))
    if not prompts:
        raise ValueError("--measures is given, and no held-out answer fits a row: raise --seq-len")
    written = language.write(
        dataclasses.replace(model, vocab_size=tokenizer.vocab_size),
        state.params,
        prompts,
        lengths=list(map(len, prompts)),
        rules=Rules(decoder.RULES),
        max_new_tokens=max(map(len, wanted)) + 1,
        size=config.global_batch,
        temperature=0.0,
        eod=tokenizer.eod,
    )
    written = [language.until(each, tokenizer.eod) for each in written]
    return [[tokenizer.decode(x).strip() for x in each] for each in (written, wanted)]


def sample(
    config: Config,
    model: decoder.DecoderConfig,
    tokenizer: data.Tokenizer,
    state: TrainState,
    *,
    prompt: Sequence[int] = (),
) -> list[str]:
    """Writes on from an end of document and a prompt, and returns the lines of both."""
    # A pretrained model may have more tokens than its tokenizer, which has no text for those.
    model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    most = decoding.longest_row(model)
    room = config.sample_tokens if most is None else most - 1 - len(prompt)
    count = min(config.sample_tokens, room)
    (written,) = language.write(
        model,
        state.params,
        [[tokenizer.eod, *prompt]],
        rules=Rules(decoder.RULES),
        max_new_tokens=count,
        rng=jax.random.key(config.seed),
        temperature=0.8,
        top_p=0.95,
    )
    return tokenizer.decode([*prompt, *written.tolist()]).splitlines()


def facts(
    config: Config, texts: Mapping[str, tuple[data.Corpus, data.Corpus]], rows: data.RowSource
) -> dict[str, str]:
    """Returns the header's facts about the text."""
    train, held_out = (sum(each[i].num_bytes for each in texts.values()) for i in (0, 1))
    mixture = {}
    if isinstance(rows, data.Mixture):
        epochs = rows.epochs(config.steps, config.global_batch)
        mixture["epochs"] = ", ".join(f"{name} {n:.2f}" for name, n in epochs.items())
        windows = ", ".join(f"{window:,}" for window in rows.windows)
        mixture["epochs"] += f"; the shares are exact over any {windows} rows"
    sources = rows.rows.values() if isinstance(rows, data.Mixture) else [rows]
    if left_out := sum(getattr(each, "left_out", 0) for each in sources):
        mixture["left out"] = f"{left_out:,} preferences that are longer than a row"
    return {
        "text": f"{language.text_name(config)}: {train / 1e6:.1f} MB to train on, "
        f"{held_out / 1e6:.2f} MB held out",
        **mixture,
        **dial.facts(config),
    }
