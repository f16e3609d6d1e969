"""``jaxtrain evaluate``: how well a trained decoder predicts texts, how it does on tasks, and how
often another model is right."""

import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Collection
from typing import Any

import numpy as np

import jaxtrain
from jaxtrain import data
from jaxtrain.data.chat import FORMS, ChatTemplate, encode_marked, forms_of
from jaxtrain.evaluate import heads, pairs
from jaxtrain.evaluate.harness import harness_model
from jaxtrain.evaluate.scoring import Row, Scorer, windows, with_all_rows
from jaxtrain.hf.opening import ModelOptions, Opened, ends_of, open_model
from jaxtrain.host import extras
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path, make_folder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.predict.heads import Model, check_read
from jaxtrain.run import trained
from jaxtrain.serve.command import template_of
from jaxtrain.serve.engine import Engine

# In the folder of a run that has been evaluated.
RESULTS = "evaluations.jsonl"
# Rows that are cut before they are sorted by length and scored.
ROWS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Evaluates a trained decoder: perplexity and bits per byte of texts, and tasks of
    lm-evaluation-harness. Of another model it says how often its classes, tags, answers or texts
    are right, with a picture of which classes are taken for which. Decoders and encoders of masked
    tokens are also asked which of two sentences is likelier.

    Results are printed. Those of a run are also added to evaluations.jsonl in its folder, with the
    command.
    """

    data: tuple[str, ...] = ()
    """Texts or conversations, as --data of an experiment names them: files and folders. A model
    that is no decoder takes files of rows as `jaxtrain predict` reads, with what is right. All of
    each is read, also what training had. Of conversations, the answers are scored."""
    field: str = "text"
    """The field of JSON lines and Parquet files that holds the text."""
    group: str | None = None
    """Field of rows to classify that names a row's group: accuracy and F1 are told by group too."""
    pairs: tuple[str, ...] = ()
    """Files of pairs of sentences, such as CrowS-Pairs: JSON lines, CSV, TSV or Parquet with more
    (the stereotype), less, and perhaps kind, by which the results are told apart."""
    stride: int | None = None
    """Tokens between the rows of a long text: less leaves every token more before it, and takes
    more time. Left out, half of a row. Of a long context, tokens that its rows share; left out,
    128, or a third of a row where that is less."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, such as hellaswag."""
    shots: int | None = None
    """Examples before each question of a task; left out, the task's own number."""
    limit: int | None = None
    """Questions of each task; left out, all."""
    task_folder: str | None = None
    """Folder of more tasks, as the harness reads them."""
    longest: int | None = None
    """Most tokens that are read at once; left out, as many as the model was trained with."""
    rows: int = 16
    """Rows of a batch."""
    out: str | None = None
    """File to add the results to as a line of JSON, in place of that of the run."""


def run_evaluate(options: EvaluateOptions, rest: list[str]) -> int:
    """Prints the results, and adds them to a file."""
    del rest
    if not (options.data or options.tasks or options.pairs):
        raise ValueError(
            "neither --data nor --tasks nor --pairs is given: name texts, tasks, or pairs"
        )
    check_least(options, stride=1, shots=0, limit=1, rows=1)
    for name in ("shots", "limit", "task_folder") if not options.tasks else ():
        if (value := getattr(options, name)) is not None:
            raise ValueError(f"`{name}` is {value}, which --tasks alone reads: leave it out")
    if options.out is not None:
        make_folder(as_path(options.out).parent)  # not when all has been computed
    if options.tasks:
        extras.load("tasks need lm_eval", "eval", "lm_eval")
    mesh, path, step = options.start(), options.out, options.step
    if step is None and trained.is_trained(options.model):
        step = trained.default_step(options.model)  # A run that still trains may get a better one.
    forms = [form for form in trained.FORMS if form not in ("clip", "llava")]
    opened = open_model(options.model, *forms, mesh=mesh, step=step)
    if path is None and trained.is_trained(opened.folder):
        path = str(as_path(opened.folder) / RESULTS)
    is_decoder = isinstance(opened.model, DecoderConfig)
    if options.group is not None and (is_decoder or not options.data):
        raise ValueError(
            f"--group is {options.group}, and there are no rows to classify: give a classifier "
            "and --data, or leave it out"
        )
    if is_decoder and (options.data or options.tasks):
        results = _decoder(options, opened, mesh)
    elif options.tasks:
        raise ValueError(f"--tasks is given, and the model in '{opened.folder}' is no decoder")
    else:
        given = options, opened, mesh, path
        results = {"rows": {name: _rows(name, *given) for name in options.data}}
    if options.pairs:
        results["pairs"] = {name: _pairs(name, opened, mesh, options) for name in options.pairs}
    if path is not None:
        about = {
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": "jaxtrain " + shlex.join(sys.argv[1:]),
            "version": jaxtrain.__version__,
        } | ({} if step is None else {"step": step})
        with as_path(path).open("a") as file:
            file.write(json.dumps(about | results) + "\n")
        print(f"added to {path}")
    return 0


def _rows(
    name: str, options: EvaluateOptions, opened: Opened, mesh: Any, path: str | None
) -> dict[str, Any]:
    """The report of a file of rows, which is printed, and drawn beside the results."""
    stride = {} if options.stride is None else {"stride": options.stride}
    given = {"rows": options.rows, "seq_len": options.longest, "field": options.field}
    model = Model(opened, mesh, **given, **stride)
    check_read(model, options, {"longest": "seq_len", "field": "field", "stride": "stride"})
    found, confusion = heads.report(model, name, options.group)
    print("\n".join(heads.lines(name, found)), flush=True)
    if path is not None and confusion is not None:
        stem = as_path(name).stem
        if [as_path(each).stem for each in options.data].count(stem) > 1:
            stem += f"-{options.data.index(name) + 1}"  # each has a picture of its own
        picture = as_path(path).parent / f"confusion-{stem}.png"
        try:
            heads.draw(list(found["classes"]), confusion, picture)
        except ImportError as error:
            print(f"there is no picture of {name}: {error}")
        else:
            print(f"drawn in {picture}")
    return found


def _pairs(name: str, opened: Opened, mesh: Any, options: EvaluateOptions) -> dict[str, Any]:
    """The preferences of a file of pairs, which are printed."""
    found = pairs.preferences(name, opened, mesh=mesh, rows=options.rows)
    print(f"{name}: how often `more` is likelier than `less`, with intervals of 95 %")
    print("\n".join(pairs.table_lines(found)), flush=True)
    return found


def _decoder(options: EvaluateOptions, opened: Opened, mesh: Any) -> dict[str, Any]:
    """The results of texts and tasks, which are printed."""
    given = {"rows": options.rows, "longest": options.longest}
    scorer = Scorer(with_all_rows(opened), opened.params, mesh=mesh, **given)
    results: dict[str, Any] = {"texts": {}, "tasks": {}}
    for name in options.data:
        found = perplexity(name, opened, scorer, stride=options.stride, field=options.field)
        results["texts"][name] = found
        print(
            f"{name}: {found['bits_per_byte']:.4f} bits per byte, perplexity "
            f"{found['perplexity']:.4g} per token ({found['documents']:,} documents, "
            f"{found['tokens']:,} tokens, {found['bytes']:,} bytes)",
            flush=True,
        )
    if options.tasks:
        results["tasks"] = _tasks(options, opened, scorer, mesh)
    return results


def perplexity(
    name: str, opened: Opened, scorer: Scorer, *, stride: int | None = None, field: str = "text"
) -> dict[str, float]:
    """Returns how well a model predicts a text: ``perplexity`` per token, ``bits_per_byte`` of the
    text, and the counts of ``documents``, ``tokens`` and ``bytes``.

    Each document follows the end of another, as in training, or what begins one for a pretrained
    model; its own end is not scored. Conversations are read by the model's chat template, and only
    the tokens of answers are scored and counted.

    Raises:
      ValueError: there is no text, or conversations are preferences or have no template.
    """
    fields = data.fields_of(name)
    is_chat = bool(forms := forms_of(fields)) and (field not in fields or field in FORMS)
    chat = _template(name, forms, opened) if is_chat else None
    stride = stride or -(-scorer.longest // 2)
    if stride > scorer.longest:
        raise ValueError(f"`stride` is {stride}: rows have {scorer.longest} tokens")
    tokenizer, nats, counts = opened.tokenizer, 0.0, {"documents": 0, "tokens": 0, "bytes": 0}
    rows: list[Row] = []
    begin = opened.begin[1] if is_chat else opened.begin[0][-1:] or (tokenizer.eod,)

    def scored() -> float:
        total = -math.fsum(each.logprob for each in scorer(rows))
        rows.clear()
        return total

    for side in data.open_text(name, field=field, held_out=0.0, chat=chat):
        for document in side:
            ((ids, marks),) = encode_marked([document], tokenizer)
            tokens = [*begin, *ids.tolist()]
            counted = np.zeros(len(tokens), bool)
            counted[len(begin) :] = True if marks is None else marks == 1
            position = 1
            for row in windows(tokens, longest=scorer.longest, stride=stride):
                mask = counted[position : position + row.counted]
                position += row.counted
                if not mask.any():
                    continue
                rows.append(row._replace(mask=mask))
                if len(rows) == ROWS:
                    nats += scored()
            counts["documents"] += 1
            counts["tokens"] += int(counted[1:].sum())
            spans = [(0, len(document.text))] if marks is None else document.counted
            counts["bytes"] += sum(stop - start for start, stop in spans)
    nats += scored()
    if not counts["tokens"]:
        raise ValueError(f"'{name}' has no text: name a file or a folder of texts")
    return {
        "perplexity": math.exp(nats / counts["tokens"]),
        "bits_per_byte": nats / math.log(2) / counts["bytes"],
        **counts,
    }


def _template(name: str, forms: Collection[str], opened: Opened) -> ChatTemplate:
    """Returns the chat template by which a model reads the conversations in a file."""
    if not {"chosen", "label"}.isdisjoint(forms):
        raise ValueError(
            f"'{name}' has preferences: give rows of messages, or of prompt and completion alone, "
            "whose answers have a loss"
        )
    if (template := template_of(None, opened.folder, opened.tokenizer)) is None:
        raise ValueError(
            f"'{name}' has conversations, and '{opened.folder}' has no chat template to read them "
            "by: give rows with a text, and name it by --field"
        )
    return template


def _tasks(options: EvaluateOptions, opened: Opened, scorer: Scorer, mesh: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    sizes = {"slots": max(2, options.rows), "longest": scorer.longest, "mesh": mesh}
    engine = Engine(with_all_rows(opened), opened.params, **sizes)
    ends = ends_of(opened.folder, opened.tokenizer)
    found = lm_eval.simple_evaluate(
        harness_model(opened.tokenizer, scorer, engine, ends, folder=opened.folder),
        tasks=list(options.tasks),
        num_fewshot=options.shots,
        limit=options.limit,
        task_manager=TaskManager(include_path=options.task_folder),
        bootstrap_iters=1000,
        log_samples=False,
    )
    print(make_table(found))
    keep = lambda x: {k: v for k, v in x.items() if isinstance(v, int | float | str)}  # noqa: E731
    return {task: keep(values) for task, values in found["results"].items()}
