"""Tune a model that you have on rows that you have: ``python -m experiments.finetune``.

The model says which experiment trains it, and the fields of the rows which task that learns:

    python -m experiments.finetune --init-from MODEL --data chat.jsonl --lora.rank 16
    python -m experiments.finetune --init-from MODEL --data pairs.jsonl       # preferences
    python -m experiments.finetune --init-from BERT --data rows.csv           # text, label
    python -m experiments.finetune --init-from MODEL --data rows.csv --help   # all other flags

What is trained is the experiment that it names, with other defaults: whole weights with AdamW (or
low-rank additions, with ``--lora.rank``, at a higher rate), three epochs, an evaluation after each,
and the best weights at the end.
"""

import dataclasses
import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import tyro

import jaxtrain as jt
from experiments import language
from jaxtrain import data, hf
from jaxtrain.data.chat import FORMS
from jaxtrain.finetune.preferences import Preference
from jaxtrain.hf import hub
from jaxtrain.host.paths import as_path
from jaxtrain.run import main as run
from jaxtrain.run import trained
from jaxtrain.run.options import OptimizerOptions, RunOptions, StartOptions
from jaxtrain.run.provenance import read_record
from jaxtrain.run.refusal import refusing

# Kinds of data by the fields of a row: the first that a row has all fields of. What has no rows is
# a folder of texts, or of images.
KINDS = {
    "questions and answers": [{"question", "context"}],
    "tokens and tags": [{"tokens", "tags"}],
    "source and target": [{"source", "target"}],
    "conversations": list(FORMS.values()),
    "images": [{"image", "label"}],
    "text and label": [{"text", "label"}],
    "texts": [{"text"}],
}
# What a model of a form learns, and the flags for it. The lengths of rows are those of BERT's
# scripts for GLUE and SQuAD, and of TRL's trainer for conversations.
LEARNS = {
    "decoder": {
        "conversations": {"packing": "fit", "seq_len": 1024},
        "texts": {"packing": "fit", "seq_len": 1024},
    },
    "encoder": {
        "text and label": {"task": "classify", "seq_len": 128},
        "tokens and tags": {"task": "tags", "seq_len": 128},
        "questions and answers": {"task": "answers", "seq_len": 384},
        "texts": {"task": "mask", "seq_len": 128},
    },
    "encoder-decoder": {"source and target": {"task": "rows"}, "texts": {"task": "spans"}},
    "vit": {"images": {"model": "vit"}},
}
# The optimizer and its peak rate of whole weights, and of AdamW with additions: of Alpaca and its
# LoRA, of BERT's paper (appendix A.3), of T5's (section 3.1.2) and of PEFT's example for T5, of
# transformers' example for images, and of DPO's paper.
RATES = {
    "decoder": ("adamw", 2e-5, 2e-4),
    "encoder": ("adamw", 5e-5, 5e-4),
    "encoder-decoder": ("adafactor", 1e-3, 1e-3),
    "vit": ("adamw", 5e-5, None),
    "preferences": ("adamw", 1e-6, 1e-5),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Tunes a model on rows. All other flags are those of the experiment that trains such a model:
    give --init-from and --data with --help to see them, with the defaults that suit tuning."""

    init_from: str
    """The model: a run, a Hugging Face folder, or a name on its hub (ORG/NAME or
    ORG/NAME@REVISION)."""
    data: str
    """Rows of conversations (messages; prompt and completion, perhaps with a label that is true or
    false; chosen and rejected), of text and label, tokens and tags, question, context and answers,
    or source and target, in JSONL, CSV, TSV or Parquet; a folder of texts, a token store, or a
    folder of images."""
    field: str = "text"
    """Field of a row that holds its text, or the form of conversation to read."""


def build(config: Config) -> jt.Experiment:
    """Builds the experiment with no other flags."""
    module, chosen = defaults(config, typed=set())
    return module.build(dataclasses.replace(chosen, **dataclasses.asdict(config)))


def choose(flags: Sequence[str]) -> tuple[types.ModuleType, Any]:
    """Returns the experiment that trains the model that the flags name on their data, and a config
    that has what they leave out."""
    typed = {word.partition("=")[0].replace("_", "-") for word in flags}
    alone = "--init-from" not in typed and "--help" not in typed and "-h" not in typed
    if alone and (found := _of_run(flags)) is not None:
        return found, None  # whose own flags are complete
    given = flags
    if "--init-from" in typed:  # then the help is the experiment's
        given = [word for word in flags if word not in ("-h", "--help")]
    config, _ = tyro.cli(Config, args=given, prog=run.program_name(), return_unknown_args=True)
    return defaults(config, typed)


def defaults(config: Config, typed: set[str]) -> tuple[types.ModuleType, Any]:
    """Returns the experiment, and its config for tuning; ``typed`` are the flags that are given.

    Raises:
      ValueError: the model cannot learn such data.
    """
    model, form = model_of(config.init_from)
    if form not in LEARNS:
        raise ValueError(
            f"the model in '{config.init_from}' is of the form {form}, which is not tuned here: "
            f"give one of the form {' or '.join(LEARNS)}"
        )
    kind = kind_of(config, form)
    if kind not in LEARNS[form]:
        able = [other for other, kinds in LEARNS.items() if kind in kinds]
        raise ValueError(
            f"'{config.data}' holds {kind}, and the model in '{config.init_from}' is of the form "
            f"{form}, which learns {' or '.join(LEARNS[form])}: give it such data, or give a model "
            f"of the form {' or '.join(able)}"
        )
    module = importlib.import_module(f"experiments.{language.TRAINED_BY[form]}")
    own = dict(LEARNS[form][kind])
    if "seq_len" in own:
        own["seq_len"] = min(own["seq_len"], model.seq_len)
    pairs = kind == "conversations" and data.holds_pairs(data.parse_data(config.data), config.field)
    if pairs and data.holds_labels(data.parse_data(config.data), config.field):
        own["preference"] = Preference("kto_unpaired")
    name, whole, added = RATES["preferences" if pairs else form]
    if {"--lora.rank", "--adapter"} & typed:
        name, whole = "adamw", added
    optimizer = OptimizerOptions(name=name, learning_rate=whole, weight_decay=0.01)
    if "--optimizer.name" in typed:  # whose rate is the experiment's
        optimizer = dataclasses.replace(optimizer, learning_rate=None)
    tuned = {
        "run": RunOptions(eval_first=True, eval_epochs=1.0, save_best=True),
        "optimizer": optimizer,
    }
    return module, module.Config(epochs=3.0, **tuned, **own)


def model_of(path: str) -> tuple[trained.Model, str]:
    """Returns the model in a folder, and its form; nothing is asked of devices, which processes
    that have not met yet would not find."""
    path = hub.local_folder(path, agree=False)
    if trained.is_trained(path):
        record = read_record(as_path(path)) or {}
        model = trained.read_model(record, where=f"the config of the run in '{path}'")
    else:
        model = hf.read_config(path)
    return model, trained.form_of(model)


def kind_of(config: Config, form: str) -> str:
    """Returns which of `KINDS` the data is."""
    fields = {"text" if name == config.field else name for name in data.fields_of(config.data)}
    if not fields:
        return "images" if form == "vit" else "texts"
    for kind, sets in KINDS.items():
        if any(each <= fields for each in sets):
            return kind
    known = ", ".join(" and ".join(sorted(each)) for sets in KINDS.values() for each in sets)
    raise ValueError(
        f"'{config.data}' has rows of {', '.join(sorted(fields))}: rename fields so that rows have "
        f"those of one kind, {known}"
    )


def _of_run(flags: Sequence[str]) -> types.ModuleType | None:
    """The experiment of the run that the flags resume, if they name one."""
    options, _ = tyro.cli(StartOptions, args=flags, return_unknown_args=True, add_help=False)
    if options.run_dir is None or not (options.resume or options.auto_resume):
        return None
    name = (read_record(as_path(options.run_dir)) or {}).get("module")
    known = {f"experiments.{each}" for each in language.TRAINED_BY.values()}
    return importlib.import_module(name) if name in known else None


def main(flags: Sequence[str] | None = None) -> None:
    """Trains, as :func:`jaxtrain.main` does."""
    flags = sys.argv[1:] if flags is None else flags
    with refusing(Config):
        module, default = choose(flags)
    run.main(module.Config, module.build, flags, default=default)


if __name__ == "__main__":
    main()
