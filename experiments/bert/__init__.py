"""Train an encoder on text: ``python -m experiments.bert``.

By default a small BERT learns to fill in masked tokens of the running Python's own standard
library. ``--task classify`` then trains it to tell from a fragment of source code which of the ten
largest packages it is of, beside a baseline of counted words (TF-IDF and logistic regression). The
same files are held out of both tasks, by a hash of their path. ``--task tags`` and ``--task
answers`` read rows: words with their tags (names in text), and questions with answers that stand in
a context. On two cores of an AMD EPYC the default takes 125 CPU seconds and ends at 5.66 nats per
masked token; a classification takes 87 to 104 and tells 86.8 % of the fragments, 87.4 % with
``--init-from`` (jaxtrain/data/README.md).

    python -m experiments.bert --run-dir runs/masked
    python -m experiments.bert --task classify
    python -m experiments.bert --task classify --init-from runs/masked
    python -m experiments.bert --distill.teacher runs/masked --width 64
    python -m experiments.bert --task classify --target score --init-from BERT --data pairs.csv
    python -m experiments.bert --init-from BERT --data my_texts/
    python -m experiments.bert --task tags --init-from BERT --data names.jsonl
    python -m experiments.bert --task answers --init-from BERT --data questions.jsonl
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import numpy as np

import jaxtrain as jt
from experiments import language
from experiments.bert import answers, classify, mask, tags
from experiments.bert.common import Text, row_length
from experiments.members import of_members
from jaxtrain import data
from jaxtrain.data.enclosed import FIRST, MASK, row_ends, special_id
from jaxtrain.finetune.distill import DistillTokens, student_loss
from jaxtrain.hf.encoders import label_fields
from jaxtrain.host.least import check_least
from jaxtrain.methods.group_dro import RATE
from jaxtrain.models import encoder
from jaxtrain.models.encoder import OF_ROWS, EncoderConfig
from jaxtrain.optim.rules import LEARNING_RATES

# Peak rates that suit an encoder, at random and trained (jaxtrain/data/README.md has figures).
RATES = {"muon": 2e-3}
# A published model is tuned with that of BERT's paper (Devlin et al. 2019, appendix A.3).
PUBLISHED = RATES | {"adamw": 5e-5}
# A task is a module that has the HEAD of its model, METADATA of the experiment, the axis of what
# is PREDICTED of a row (M predictions, T positions), and `open_rows`, `text_of` and `conclude`.
TASKS = {"mask": mask, "classify": classify, "tags": tags, "answers": answers}


@dataclasses.dataclass(frozen=True)
class Config(language.Config):
    """Trains an encoder on text."""

    form = "encoder"

    task: Literal[tuple(TASKS)] = "mask"  # type: ignore[valid-type]
    """Task to learn: mask fills in masked tokens; classify names the package or folder that a
    fragment is of, or the label of a row (--target); tags tells the tag of every word; answers
    finds the answer to a question in a context."""
    model: Literal[tuple(encoder.PRESETS)] = "tiny"  # type: ignore[valid-type]
    data: str = "python"
    """Text to learn: "python" (the standard library's source), or a folder of texts; to classify,
    one with a folder of texts for each class, or rows of text, label and perhaps text_pair (JSONL,
    CSV, TSV, Parquet; a file, or a folder with train.* and validation.*). Rows of tokens (words)
    and tags, or of question, context and answers (of text and answer_start, as SQuAD has them)."""
    tokenizer: str | None = None
    """A tokenizer.json with a mask, or a number: a BPE tokenizer of that many tokens is trained
    first (unigram:N and wordpiece:N: one of those); left out, 4096."""
    target: Literal[tuple(classify.TARGETS)] = "classes"  # type: ignore[valid-type]
    """Meaning of a row's label: classes, the name of one of several; score, a number, learned by
    squared error (regression); labels, any number of names, a list in JSON or a text with commas,
    each learned by itself."""
    classes: int = 10
    """Number of classes: the largest packages or folders; labelled rows have all of theirs."""
    class_weights: bool = False
    """Weigh labelled rows by their class, so that all classes count the same in training."""
    group: str | None = None
    """Field of labelled rows that names a row's group: held-out accuracy and F1 are told by group,
    and --group-weights may weigh them."""
    group_weights: str | None = None
    """How much groups count in training: equal, as if all had as many rows; fixed weights of rows,
    NAME=W,NAME=W; or dro, group DRO: those with a larger loss count more. Left out, each row
    counts the same."""
    group_rate: float = RATE
    """Rate at which the weights of group DRO follow the losses of the groups."""
    tag_names: tuple[str, ...] = ()
    """Names of the tags 0, 1 and so on, such as O B-PER I-PER, where rows have numbers; left out,
    tags are named by the rows."""
    stride: int | None = None
    """Tokens of a long context that two neighbouring rows of a question share; left out, 128, or a
    third of a row where that is less."""
    parametrization: Literal["standard", "mup"] = "standard"
    """Width that the learning rate and the initial weights are for: this model's, or by muP that of
    the preset, from which those of another --width follow; to fill in masked tokens."""
    mask_rate: float = 0.3
    """Share of the tokens that are predicted; BERT's was 0.15."""
    held_out_rows: int = 2500
    """Rows to evaluate on, at most."""
    examples: int = 8
    """Held-out tokens or fragments to show when training is over."""
    distill: DistillTokens = dataclasses.field(default_factory=DistillTokens)

    steps: int = 800
    global_batch: int = 32
    seq_len: int | None = None
    """Tokens per row; left out, the model's."""


def build(config: Config) -> jt.Experiment:
    """Builds the experiment: everything that is trained, planned or checked follows from it."""
    check_least(config, classes=2, held_out_rows=1, examples=0, stride=0)
    check_tokenizer(config)  # before rows are read
    task = TASKS[config.task]
    config, split, sides = task.open_rows(config)
    named = dict.fromkeys(("target", "class_weights", "group"), classify) | {"tag_names": tags}
    for name, of in named.items():
        of_classes = name in ("class_weights", "group")
        fits = task is of and sides is not None and (config.target == "classes" or not of_classes)
        if getattr(config, name) != getattr(Config, name) and not fits:
            target = ", and --target classes" if of_classes else ""
            raise ValueError(
                f"--{name.replace('_', '-')} is for labelled rows: give --task and --data with "
                f"rows of {of.FIELDS}{target}, or leave it out"
            )
    classify.check_groups(config)
    tokenizer = open_tokenizer(config, split)
    model = model_config(config, tokenizer.vocab_size)
    text = task.text_of(config, model, split if sides is None else sides, tokenizer)
    config, sets, prints = config.of_rows(text.train), {"": text.held_out}, dict(text.fingerprints)
    if config.also_held_out is not None:
        old = old_rows(config, model, tokenizer, text)
        sets["old"], prints["held_out_text.old"] = old.held_out, old.prints[1]
    more = dict(text.more)
    if config.teacher is not None:
        language.check_same_tokens(config.teacher, tokenizer)
        if config.teacher.model.head == model.head:
            language.check_same_labels(config.teacher, text.classes)
        if "eval_loss_fn" in more:
            more["eval_loss_fn"] = student_loss(more["eval_loss_fn"])
    step = outline(config, vocab_size=tokenizer.vocab_size)
    told = special_tokens(config, tokenizer)
    told |= label_fields(text.classes) if text.classes else {}
    return step.with_(
        **config.batches_of(text.train, sets),
        **language.text_fields(config, step, tokenizer, prints, special_tokens=told),
        facts=language.facts(config, model, facts(config, text)),
        conclude=functools.partial(task.conclude, config, model, text),
        **more,
    )


def old_rows(config: Config, model: EncoderConfig, tokenizer: Any, text: Text) -> Text:
    """The text of --also-held-out, of the same task and classes."""
    task = TASKS[config.task]
    other, split, sides = task.open_rows(dataclasses.replace(config, data=config.also_held_out))
    found = task.text_of(other, model, split if sides is None else sides, tokenizer)
    if found.classes != text.classes:
        raise ValueError(
            f"--also-held-out is {config.also_held_out}: it has other classes than --data "
            f"{config.data}; give rows of the same"
        )
    return found


def outline(config: Config, *, vocab_size: int | None = None) -> jt.Experiment:
    """Builds the experiment without its text; ``vocab_size``, left out, is what the flags say."""
    return of_members(config, functools.partial(_outline, vocab_size=vocab_size))


def _outline(config: Config, *, vocab_size: int | None) -> jt.Experiment:
    check_tokenizer(config)
    model = model_config(config, vocab_size or language.vocab_size(config, added=2))
    length = row_length(config, model)
    batch = batch_shapes(config, length)
    of_row = dict.fromkeys(OF_ROWS, 1) | {"tokens": data.predictions(length, config.mask_rate)}
    of_row = {"length": length, "predictions": of_row.get(model.head, length)}
    flops_of = functools.partial(encoder.flops_per_row, **of_row)
    rates = RATES if config.source is None or config.source.is_run else PUBLISHED
    family = "roberta" if config.model.startswith("roberta") else "bert"
    experiment = language.outline(
        config,
        "bert",
        model,
        batch,
        rates=(language.tuning_rates(LEARNING_RATES) if config.source else {}) | rates,
        stored={} if config.source else {"family": family},
        items_per_step=config.global_batch * length,
        flops_per_step=float(config.global_batch * flops_of(model)),
        **language.of_width(config, model, model_config),
        **TASKS[config.task].METADATA,
    )
    if config.target == "score" and config.distill.temperature != DistillTokens.temperature:
        raise ValueError(
            f"--distill.temperature is {config.distill.temperature}, and --target score learns a "
            "teacher's scores by their squared error, which has none: leave it out"
        )
    how = {"length": length, "flops": flops_of}
    return language.with_teacher(config, model, experiment, encoder.distillation_loss, **how)


def batch_shapes(config: Config, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a batch, without any text."""
    shapes = data.packed_shapes(config.global_batch, length)
    rows = {name: shapes[name] for name in ("tokens", "segments")}
    sizes = {"T": length, "M": data.predictions(length, config.mask_rate), "2": 2}
    sizes["C"] = config.classes
    own = classify.TARGETS[config.target] if TASKS[config.task] is classify else {}
    floats = {"mask"} | ({"label"} if config.target != "classes" else set())
    for name, axis in (TASKS[config.task].PREDICTED | own).items():
        size = (config.global_batch, *([sizes[axis]] if axis else []))
        rows[name] = jax.ShapeDtypeStruct(size, np.float32 if name in floats else np.int32)
    return rows


def model_config(config: Config, vocab_size: int) -> EncoderConfig:
    """The preset, or the model that the run begins with, changed by the flags that were given."""
    head = config.target if TASKS[config.task] is classify else TASKS[config.task].HEAD
    known = head in ("classes", "labels", "tags")
    own = {"head": head, "classes": config.classes if known else None}
    if config.source is not None:  # whose positions stay, however short the rows
        own["seq_len"] = config.source.model.seq_len
    return language.model_config(config, vocab_size, **own)


def check_tokenizer(config: Config) -> None:
    """Refuses bytes, which have no token that begins a row, as every task needs, and no mask."""
    if language.tokenizer_name(config) == "bytes":
        raise ValueError(
            "--tokenizer bytes has no token that begins a row: give a number, or a tokenizer.json"
        )


def open_tokenizer(config: Config, split: data.Split) -> data.SubwordTokenizer:
    """Loads the tokenizer, or trains it on the split and adds BERT's tokens."""
    name, kept = language.tokenizer_options(config).values()
    tokenizer = data.open_tokenizer(name, split, kept=kept)
    trained = data.trained_kind(name) and kept is None
    return tokenizer.adding(FIRST[0], MASK[0]) if trained else tokenizer


def special_tokens(config: Config, tokenizer: data.SubwordTokenizer) -> dict[str, Any]:
    """Returns an export's fields for the tokens that begin, end, pad and mask a row."""
    first, _, last = row_ends(tokenizer)
    ours = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "cls_token_id": first,
        "sep_token_id": last,
        "mask_token_id": special_id(tokenizer, MASK),
    }
    if config.source is None:
        return ours | ({"pad_token_id": 1} if config.model.startswith("roberta") else {})
    found = config.source.told("special_tokens") or {}
    return ours | {name: found[name] for name in ours.keys() & found.keys()}


def facts(config: Config, text: Text) -> dict[str, str]:
    """Returns the header's facts about the task and its text."""
    rows, files = (len(text.train), len(text.held_out)), text.files
    unread = {"not read": f"the fields {', '.join(text.unread)}"} if text.unread else {}
    if text.groups:
        unread["groups"] = ", ".join(text.groups)
    return {
        "task": text.task,
        "text": f"{language.text_name(config)}: {rows[0]:,} rows of {files[0]:,} texts to train "
        f"on, {rows[1]:,} rows of {files[1]:,} others held out",
        **unread,
    }
