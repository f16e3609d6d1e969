"""Whether a run is well: what its log says against it, in sentences, the worst first."""

import collections
import dataclasses
import time

import numpy as np

from jaxtrain.host.memory import human_seconds
from jaxtrain.run import receipts
from jaxtrain.run.observe import alert_rules, journal
from jaxtrain.run.observe.goodput import changes_of_hosts, lost_steps
from jaxtrain.run.observe.metric import Metric
from jaxtrain.run.observe.report.convergence import diagnose
from jaxtrain.run.observe.report.records import Record
from jaxtrain.run.observe.trackers import OPENINGS

# The most serious first.
LEVELS = ("bad", "look", "good")

# A run is told to be silent after so many of its own intervals between lines, and so many seconds.
SILENT_INTERVALS, SILENT_SECONDS = 10.0, 120.0
# The last part of a run that is compared with what came before.
RECENT = 0.1
# Waiting for data above this part of a step's time is worth a look.
WAITING = 0.2
# Alerts that are more than something to look at.
ALARMING = ("divergence", "stall")
# Updates left out that are more than the ordinary course of things.
LEFT_OUT = 0.01


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how serious it is, of ``LEVELS``, and a sentence."""

    level: str
    text: str


def examine(record: Record, *, now: float | None = None) -> list[Finding]:
    """Looks at one run at a time in seconds since 1970 (None: now); returns what was found, the
    worst first, and at least one finding."""
    if not record.times.steps.size:
        return [Finding("look", "Nothing has been logged yet.")]
    now = time.time() if now is None else now
    found = [
        _progress(record, now),
        *_loss(record),
        *_left_out(record),
        *_uncounted(record),
        *_held_out(record),
        *_waiting(record),
        *_slowest(record),
        *_attempts(record),
        *_alerts(record),
        *_trackers(record),
        *_receipts(record),
        *(Finding("look", str(each)) for each in diagnose(record)),
    ]
    if record.unreadable:
        is_ = "is" if record.unreadable == 1 else "are"
        text = f"{_count(record.unreadable, 'line')} of the log {is_} damaged."
        found.append(Finding("look", text))
    return sorted(found, key=lambda each: LEVELS.index(each.level))


def _progress(record: Record, now: float) -> Finding:
    step, total, times = record.step, record.total, record.times.values
    if total is not None and step >= total:
        done = f"All {total:,} steps are" if total > 1 else "The only step is"
        return Finding("good", f"{done} done.")
    at = f"step {step:,}" + (f" of {total:,}" if total else "")
    if record.stopped is not None:
        return Finding("good", f"The run was stopped on purpose at {at}: {record.stopped}.")
    beat = record.heartbeat.get("time")
    if (ended := record.heartbeat.get("ended")) == "done" and total is None:
        return Finding("good", f"The run is done, at {at}.")
    if ended:
        return Finding("bad", f"The run ended at {at} before it was complete ({ended}).")
    if isinstance(beat, int | float) and now - beat > SILENT_SECONDS:
        doing = record.heartbeat.get("doing", "step")
        text = f"The run is not alive: its last heartbeat is {duration(now - beat)} old, at {at}"
        return Finding("bad", f"{text}, in {doing!r}.")
    if isinstance(beat, int | float) and beat - now > SILENT_SECONDS:
        text = f"The last heartbeat, at {at}, is {duration(beat - now)} ahead of this clock"
        return Finding("look", f"{text}: set the clocks to know whether the run is alive.")
    silent = now - times.max()
    interval = np.diff(times).clip(0).mean() if times.size > 1 else 0.0
    if silent > max(SILENT_SECONDS, SILENT_INTERVALS * interval):
        return Finding("bad", f"Nothing has been logged for {duration(silent)}, since {at}.")
    return Finding("good", f"The run is at {at}; its last line is {duration(silent)} old.")


def _loss(record: Record) -> list[Finding]:
    series = record.series.get("train/loss")
    if series is None:
        return []
    found, values = [], record.values("train/loss")
    # A step that was left out has no loss, and is told elsewhere.
    left_out = set(record.above_zero("train/skipped"))
    broken = [s for s in series.steps[~np.isfinite(series.values)].tolist() if s not in left_out]
    if broken:
        text = f"The loss is not finite in {_count(len(broken), 'logged step')}, first in step "
        found.append(Finding("bad", text + f"{broken[0]:,}."))
    if values.size < 20:
        return found
    n = recent(values.size)
    last = values[-n:].mean()
    text = f"The loss went from {values[0]:#.4g} to {last:#.4g} (mean of the last {n:,} lines)"
    if last > values[: max(1, n // 2)].mean():
        found.append(Finding("bad", f"{text}: the run has learned nothing."))
    else:
        found.append(Finding("good", f"{text}."))
    return found


def _left_out(record: Record) -> list[Finding]:
    found = []
    for name, what in (("train/skipped", "was not finite"), ("train/spike", "was a spike")):
        if steps := record.above_zero(name):
            many = len(steps) > LEFT_OUT * record.step
            text = f"{_count(len(steps), 'update')} left out because a step {what}, last step "
            found.append(Finding("bad" if many else "look", f"{text}{steps[-1]:,}."))
    return found


def _uncounted(record: Record) -> list[Finding]:
    weights = record.series.get("train/weight")
    if weights is None:
        return []
    left_out = record.above_zero("train/skipped")
    empty = np.setdiff1d(weights.steps[weights.values == 0], left_out).size
    if not empty:
        return []
    part = f"{empty / weights.steps.size:.0%} of those logged"
    text = f"No token counts in {_count(empty, 'step')}, {part}: they change nothing."
    return [Finding("look", text)]


def _held_out(record: Record) -> list[Finding]:
    found = []
    for name in record.held_out_losses:
        if (values := record.values(name)).size:
            text = f"{values[-1]:#.4g}; its best is {values.min():#.4g}."
            found.append(Finding("good", f"Held-out {Metric.of(name).name} is {text}"))
    return found


def recent(lines: int) -> int:
    """Returns how many of ``lines`` are the last part of a run."""
    return max(min(5, -(-lines // 4)), int(RECENT * lines))


def _waiting(record: Record) -> list[Finding]:
    waited, taken = record.values("time/data_seconds"), record.values("time/step_seconds")
    if waited.size and taken.size and waited.mean() > WAITING * taken.mean():
        part = waited.mean() / taken.mean()
        return [Finding("look", f"Waiting for data takes {part:.0%} of a step's time.")]
    return []


def _slowest(record: Record) -> list[Finding]:
    """Names the process whose wait for data holds the others up, as ``Stragglers`` logs it."""
    names = ("slowest_process", "data_seconds_spread", "step_seconds")
    process, spread, taken = (record.values(f"time/{name}") for name in names)
    if not (process.size and taken.size and spread.mean() > WAITING * taken.mean()):
        return []
    number, lines = collections.Counter(process.astype(int).tolist()).most_common(1)[0]
    text = f"Process {number} is the slowest in {lines / process.size:.0%} of the log's lines; it "
    more = f"waits {human_seconds(spread.mean())} a step longer for its data than another."
    return [Finding("look", text + more)]


def _attempts(record: Record) -> list[Finding]:
    found = []
    lost = sum(lost_steps(record.attempts))
    if (restarts := len(record.attempts) - 1) > 0:
        text = f"It was started again {_count(restarts, 'time')}; "
        found.append(Finding("look", f"{text}{_count(lost, 'step')} had to be done again."))
    hosts, seconds = changes_of_hosts(record.attempts)
    if hosts:
        text = f"It ran on {', then '.join(map(str, hosts))} hosts; "
        found.append(Finding("look", f"{text}these changes cost {duration(seconds)}."))
    if read := record.happened(journal.FROM_MEMORY):
        steps = sum(line.get("step", 0) - line.get("newest_checkpoint", 0) for line in read)
        each = sum(x.seconds.get("step", 0.0) / max(x.last, 1) for x in record.attempts[:1])
        text = f"It continued {_count(len(read), 'time')} from the memory of its hosts, not storage"
        cost = f"{text}: {_count(steps, 'step')} ({duration(steps * each)}) were not done again."
        found.append(Finding("look", cost))
    if failed := record.happened(journal.SAVE_FAILED):
        why = failed[-1].get("error", "")
        later = record.happened(journal.CHECKPOINT)
        solved = later and later[-1].get("time", "") > failed[-1].get("time", "")
        text = f"{_count(len(failed), 'save')} failed, last: {why}"
        found.append(Finding("look" if solved else "bad", text.rstrip(".") + "."))
    return found


def _alerts(record: Record) -> list[Finding]:
    """Finds the alerts that have fired, by rule, and the rules broken at the end of the log."""
    told: dict[str, list[dict]] = {}
    for line in record.happened(journal.ALERT):
        told.setdefault(str(line.get("rule")), []).append(line)
    texts = [
        (
            rule,
            f"Alert {rule}, {_count(len(lines), 'time')}, last in step {lines[-1].get('step')}: "
            f"{lines[-1].get('text')}.",
        )
        for rule, lines in told.items()
    ]
    try:
        rules = alert_rules.parse(record.config.get("run.alerts", ()))
    except (TypeError, ValueError):  # a config that is damaged, or another version's
        rules = alert_rules.parse(())
    for name, series in record.series.items():
        points = list(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        texts += [(rule, f"{text}.") for rule, text in alert_rules.standing(rules, name, points)]
    return [Finding("bad" if rule in ALARMING else "look", text) for rule, text in texts]


def _trackers(record: Record) -> list[Finding]:
    findings = []
    for line in record.happened(journal.TRACKER):
        if lost := line.get("dropped", 0):
            name, lines = line.get("tracker"), _count(lost, "line")
            text = f"Tracker {name}: {lines} dropped, last because {line.get('why')}."
            again = f" jaxtrain report {record.path} --push {name} sends the log."
            findings.append(Finding("look", text + again * (str(name) in OPENINGS)))
    return findings


def _receipts(record: Record) -> list[Finding]:
    if not record.receipts:
        return []
    if faults := receipts.check(record.receipts):
        return [Finding("bad", f"The chain of receipts is broken: {'; '.join(faults[:3])}.")]
    return [Finding("good", receipts.describe(record.receipts))]


def duration(seconds: float) -> str:
    """Writes a time in the two largest units.

    >>> duration(7.4), duration(3 * 3600 + 120), duration(200_000)
    ('7 s', '3 h 2 min', '2 d 7 h')
    """
    left, parts = round(max(0.0, seconds)), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if left >= size or parts:
            parts.append(f"{left // size} {unit}")
            left %= size
    # A zero in second place says nothing.
    return " ".join(part for part in parts[:2] if part[0] != "0" or len(parts) == 1) or "0 s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
