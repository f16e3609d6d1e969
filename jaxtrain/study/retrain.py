"""``jaxtrain retrain``: new text starts the next training, which replaces the best run or not."""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tyro
from etils import epath

from jaxtrain import data
from jaxtrain.data.sources import BUILT_IN
from jaxtrain.data.store import count_parts
from jaxtrain.evaluate import drift
from jaxtrain.evaluate.intervals import interval
from jaxtrain.evaluate.scoring import Scorer, windows, with_all_rows
from jaxtrain.hf.opening import ModelOptions
from jaxtrain.host import exit_codes
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path, exists, is_remote, read_if_there, write_whole
from jaxtrain.host.signals import SignalWatch
from jaxtrain.planning.targets import stay_on_cpu
from jaxtrain.run.folder import PROMOTED, RETRAININGS, WATERMARKS
from jaxtrain.run.main import load_config
from jaxtrain.run.provenance import read_record
from jaxtrain.run.trained import TOKENIZER_FILE
from jaxtrain.study.command import refuse_start

# In the folder of the first run, those of the trainings that follow.
RETRAINED = "retrained"
# Held-out text of a source that models are compared on, where a config does not say how much.
HELD_OUT_BYTES = 300_000
# A source, and the range of those stores that it consists of: its own, and what was appended.
Text = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class RetrainOptions:
    """Trains a decoder further on new text, and promotes the result where it is better: on new
    held-out text surely, and on old held-out text not surely worse.

    All other flags go to the training. One call is one decision, to be made by cron or a
    Kubernetes CronJob; a call that was interrupted is finished by the same command.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config), such as experiments.gpt."""
    run: str
    """Folder of the first run, which keeps what is promoted and every decision."""
    data: str
    """New text, as --data of the experiment; or the store of the run, to which parts have been
    appended since."""
    drift: float | None = None
    """Train only where the population stability index of tokens or of losses is at least this (0.1
    is usual, 0.25 a large shift) and above what chance makes. New is then the text that no decision
    has looked at. Left out, train always."""
    may_forget: float = 0.0
    """Nats per token by which the loss on old held-out text may rise."""


def run_retrain(options: RetrainOptions, rest: list[str]) -> int:
    """Makes one decision, and writes it down; a training that fails leaves nothing decided."""
    check_least(options, drift=0.0, may_forget=0.0)
    stay_on_cpu()
    flags = ["--data", options.data, *rest]
    _, config = load_config(options.experiment, flags, command="retrain", own=type(options))
    refuse_start(config, "is given, and retrain says where a training lies: leave it out")
    new, folder = place(options.data), as_path(options.run)
    size = getattr(config, "held_out_bytes", HELD_OUT_BYTES)
    history = [json.loads(line) for line in read_if_there(folder / RETRAININGS).splitlines()]
    seen = seen_by(folder) | {each["data"]: each["parts"] for each in history if each["promoted"]}
    best = _point(folder, history)  # which a call before may have been killed before it did
    parts = count_parts(new) if data.is_store(new) else 0
    past = {each["data"]: each["parts"] for each in history}
    looked = (seen | (past if options.drift is not None else {})).get(new, -1)
    texts: dict[str, list[Text]] = {
        "old": [(name, 0, parts + 1) for name, parts in seen.items()],
        "new": [(new, looked + 1, parts + 1)],
    }
    if looked >= parts:
        print(f"kept         {best}: there is nothing new in '{new}'")
        return exit_codes.DONE
    before = _alone(best, texts, size)
    told: dict[str, Any] = {"data": new, "parts": parts, "promoted": False}
    told["drift"] = found = drifts(before)
    counts = [len(before[name][0]) for name in ("old", "new")]
    print("held out     {:,} old documents and {:,} new ones".format(*counts))
    for name, each in found.items():
        print(f"drift        of {name}: PSI {each.psi:.3f}, by chance up to {each.chance:.3f}")
    if options.drift is not None and not any(d.exceeds(options.drift) for d in found.values()):
        why = f"no drift is at least {options.drift:g} and more than chance"
        return _decided(folder, history, told | {"why": why})
    run_dir = _next_run(folder, options.data, {each.get("run") for each in history})
    line = [sys.executable, "-m", options.experiment, "--init-from", best, *flags]
    line += ["--run-dir", str(run_dir), "--auto-resume"]
    print(f"training     {shlex.join(line[1:])}", flush=True)
    if code := _trained(line):
        return exit_codes.of_run([code])
    changes = compare(before, _alone(str(run_dir), texts, size))
    promote, why = verdict(changes, may_forget=options.may_forget)
    told |= {"run": str(run_dir), "promoted": promote, "changes": changes, "why": why}
    return _decided(folder, history, told)


def _trained(line: Sequence[str]) -> int:
    """Runs a training to its end and returns its exit code; a request to end is handed on to it, so
    that it saves first."""
    with subprocess.Popen(line) as training, SignalWatch(training.send_signal):
        return training.wait()


def _next_run(folder: epath.Path, name: str, decided: set[str | None]) -> epath.Path:
    """The folder of the next training: one that was interrupted on the same data, or a new one."""
    for number in itertools.count(1):
        run_dir = folder / RETRAINED / f"{number:04d}"
        record = read_record(run_dir) or {"flags": {"data": name}}
        if str(run_dir) not in decided and record["flags"]["data"] == name:
            return run_dir


def seen_by(run: epath.Path) -> dict[str, int]:
    """Returns the data that a run was trained on, and how many appended parts of it it has seen:
    by its last watermark, or by its fingerprint of the text."""
    record = read_record(run) or {}
    if (name := record.get("flags", {}).get("data")) is None:
        raise ValueError(f"'{run}' is not a run of text with --data: give the folder of one")
    if not data.is_store(name := place(name)):
        return {name: 0}
    if lines := read_if_there(run / WATERMARKS).splitlines():
        return {name: json.loads(lines[-1])["parts"]}
    if (
        parts := data.open_store(name).parts_with(record.get("provenance", {}).get("text"))
    ) is None:
        raise ValueError(f"the token store '{name}' is not as '{run}' has read it: copy it back")
    return {name: parts}


def place(name: str) -> str:
    """Returns the whole path of a store, file or folder on this disk, so that no other spelling is
    taken for other text; any other data as it is."""
    elsewhere = name in BUILT_IN or is_remote(name) or not exists(as_path(name))
    return name if elsewhere else os.path.realpath(name)


def measure(
    run: str, texts: Mapping[str, Sequence[Text]], num_bytes: int
) -> dict[str, tuple[list[np.ndarray], np.ndarray]]:
    """Returns by name the tokens of held-out documents, and the loss of each in nats, by the best
    checkpoint of a run; raises ValueError where there is no document, or another tokenizer."""
    opened, mesh = ModelOptions(run).open("decoder")
    scorer = Scorer(with_all_rows(opened), opened.params, mesh=mesh)
    tokenizer = opened.tokenizer
    path, found = as_path(opened.folder) / TOKENIZER_FILE, {}
    given = {"tokenizer": str(path) if exists(path) else "bytes"}
    for name, sources in texts.items():
        documents = []
        for source, first, last in sources:
            text = data.open_data(source, **given)
            if text.tokenizer.fingerprint != tokenizer.fingerprint:
                raise ValueError(f"'{source}' has another tokenizer than '{run}': make it by that")
            whole = data.is_store(source) and text.stores[""].each[first:last]
            for corpus in (each.held_out(num_bytes) for each in whole or text.stores.values()):
                documents += [corpus.document(n)[:-1] for n in range(len(corpus.starts))]
        documents = [each for each in documents if len(each)]
        stride = -(-scorer.longest // 2)
        rows = [
            list(windows([tokenizer.eod, *each.tolist()], longest=scorer.longest, stride=stride))
            for each in documents
        ]
        scores = iter(scorer([row for each in rows for row in each]))
        nats = [-math.fsum(next(scores).logprob for _ in each) for each in rows]
        found[name] = documents, np.array(nats)
    return found


def _alone(*given: Any) -> dict[str, tuple[list[np.ndarray], np.ndarray]]:
    """:func:`measure` in a process of its own, which leaves its devices to the training."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, *given).result()


def drifts(found: Mapping[str, tuple[list[np.ndarray], np.ndarray]]) -> dict[str, drift.Drift]:
    """Returns the drift from old to new documents, of their tokens and of their losses."""
    (old, old_N), (new, new_N) = found["old"], found["new"]
    means = [nats_N / [*map(len, each)] for each, nats_N in ((old, old_N), (new, new_N))]
    return {"tokens": drift.of_tokens(old, new), "losses": drift.of_numbers(*means)}


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns the change of the loss on each text, in nats per token, and the bounds of its 95 %
    interval, by documents that both models have scored."""
    changes = {}
    for name, (documents, nats_N) in before.items():
        mean = lambda nats, tokens: float(nats.sum() / tokens.sum())  # noqa: E731
        columns = after[name][1] - nats_N, np.array([*map(len, documents)])
        changes[name] = [mean(*columns), *interval(mean, *columns)]
    return changes


def verdict(changes: Mapping[str, Sequence[float]], *, may_forget: float) -> tuple[bool, str]:
    """Returns whether the new run is promoted, and why.

    >>> verdict({"new": [-0.2, -0.3, -0.1], "old": [0.1, -0.1, 0.2]}, may_forget=0.0)[0]
    True
    """
    (gain, *_, bound), (loss, low, high) = changes["new"], changes["old"]
    told = f"the loss on new text changed by {gain:+.4f} nats per token ({changes['new'][1]:+.4f} "
    told += f"to {bound:+.4f}), and on old text by {loss:+.4f} ({low:+.4f} to {high:+.4f})"
    if not bound < 0:
        return False, f"{told}: not surely better on new text"
    if low > may_forget:
        return False, f"{told}: surely worse on old text than the {may_forget:g} that it may be"
    return True, f"{told}: better on new text, and not surely worse on old text"


def _decided(folder: epath.Path, history: list[dict[str, Any]], told: Mapping[str, Any]) -> int:
    """Writes a decision down, and then points to the best run, which follows from all of them."""
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    history.append(now | dict(told) | {"drift": {n: x._asdict() for n, x in told["drift"].items()}})
    write_whole(folder / RETRAININGS, "".join(json.dumps(line) + "\n" for line in history))
    print(
        f"{'promoted' if told['promoted'] else 'kept':12} {_point(folder, history)}: {told['why']}"
    )
    return exit_codes.DONE


def _point(folder: epath.Path, history: Sequence[Mapping[str, Any]]) -> str:
    """Returns the folder of the best run, which the pointer names from now on."""
    last = next((each for each in reversed(history) if each["promoted"]), {"run": str(folder)})
    pointer = {name: last[name] for name in ("run", "time", "why") if name in last}
    write_whole(folder / PROMOTED, json.dumps(pointer) + "\n")
    return last["run"]
