"""Alerts: what the lines of a log, and their absence, say against a run, and what is done then."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping

import numpy as np
from etils import epath

from jaxtrain.run.hook import Value
from jaxtrain.run.observe.alert_rules import REARM, Condition, Setting, Spike, conditions
from jaxtrain.run.observe.journal import ALERT, ALERT_NOT_POSTED, Journal, read_events
from jaxtrain.run.observe.metric import defined
from jaxtrain.run.observe.report.records import read_run

logger = logging.getLogger(__name__)

# Where alerts are posted to. Such an address is a secret, so it is no flag: flags are written down.
WEBHOOK = "JAXTRAIN_ALERT_WEBHOOK"
# Seconds before each try of a post, for how long it is tried, and how long the end of a run waits.
POST_PAUSES, POST_SECONDS, CLOSE_SECONDS = (0.0, 1.0, 3.0), 10.0, 10.0
# The metrics in which a single step may be a spike.
PER_STEP = ("loss", "grad_norm")
# Between two looks at whether anything moves.
LOOK_SECONDS = 5.0


class Alerts:
    """A writer that looks at what is logged, in the first process, and acts on it.

    A rule fires once when what it looks for begins, and again when it had ceased for a while. What
    the rules know is in the log, from which :meth:`recall` takes it; that an alert was told is in
    the journal, so that steps which are done again tell it no second time.

    Args:
      webhook: where alerts are posted as JSON; None for nowhere.

    Attributes:
      wanted: what alerts have asked others to do ("save", "trace"); whoever does it takes it out.
      stopped_for: the reason for which an alert has asked for the end of the run.
    """

    def __init__(
        self,
        rules: Mapping[str, Setting],
        *,
        journal: Journal,
        note: Callable[[str], None],
        stop: Callable[[str], None],
        idle: Callable[[], tuple[float, str]],
        run_dir: epath.Path,
        webhook: str | None = None,
    ):
        self.wanted: set[str] = set()
        self.stopped_for: str | None = None
        self._rules, self._journal, self._run_dir = dict(rules), journal, run_dir
        self._note, self._stop, self._idle = note, stop, idle
        self._webhook = webhook
        self._conditions: dict[str, list[tuple[str, Condition]]] = {}
        self._spikes = [
            (name, condition)
            for name in PER_STEP
            for _, condition in self._watching(f"train/{name}")
            if isinstance(condition, Spike)
        ]
        self._reasonless: dict[tuple[str, str], int] = {}
        self._told: set[tuple[str, int]] = set()
        # Of a run that is recalled, the first step of which an alert is still to be acted upon.
        self._acts_from: float | None = None
        self._closed, self._threads = threading.Event(), []

    def __enter__(self) -> "Alerts":
        if "stall" in self._rules:
            self._in_thread(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for what is being posted, for at most ``CLOSE_SECONDS``."""
        self._closed.set()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _in_thread(self, act: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=act, args=args, name="jaxtrain-alerts", daemon=True)
        thread.start()
        self._threads.append(thread)

    def recall(self, start: int, *, acts_from: float) -> None:
        """Learns what the log holds of the steps up to ``start``, without a word. The run goes on
        from there; an alert from step ``acts_from`` on may have asked for an end that never came.
        """
        if not self._rules or not start:
            return
        told = read_events(self._run_dir)
        # Nothing that stands still does so again by itself.
        self._told = {
            (x.get("rule"), x.get("step"))
            for x in told
            if x.get("event") == ALERT and x.get("rule") != "stall"
        }
        self._acts_from = acts_from
        for name, series in read_run(self._run_dir, "").series.items():
            if self._watching(name):
                for step, value in zip(series.steps.tolist(), series.values, strict=True):
                    self.write(step, {name: float(value)})
        self._acts_from = None

    def is_urgent(self, metrics: Mapping[str, Value]) -> bool:
        """Whether a step is to be logged although it is not its turn: a rule would fire."""
        urgent = False
        for name, spike in self._spikes:  # In every step, so without a generator.
            urgent |= metrics.get(name, 0.0) > spike.limit
        return urgent

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Looks at the values of a line."""
        for name, value in defined(values).items():
            for rule, condition in self._watching(name):
                text = None if np.ndim(value) else condition(step, float(value))
                before = self._reasonless.get((rule, name), REARM)
                self._reasonless[rule, name] = 0 if text else before + 1
                if text and before >= REARM:
                    self._fire(rule, step, text)

    def _watching(self, name: str) -> list[tuple[str, Condition]]:
        """The conditions on a metric, with the names of their rules."""
        if name not in self._conditions:
            self._conditions[name] = conditions(self._rules, name)
        return self._conditions[name]

    def _fire(self, rule: str, step: int, text: str) -> None:
        actions = self._rules[rule].actions
        if self._acts_from is not None:
            if "stop" in actions and step >= self._acts_from:
                self._end(f"alert {rule}: {text}")
            return
        if (rule, step) not in self._told:
            self._note(f"step {step}: alert {rule}: {text}")
            self._journal.event(ALERT, rule=rule, step=step, text=text, actions=list(actions))
            if self._webhook:
                # Each in a thread of its own: one that is never answered holds up no other.
                self._in_thread(self._post, self._message(rule, step, text))
        self.wanted |= {"save", "trace"} & set(actions)
        if "stop" in actions:
            self._end(f"alert {rule}: {text}")

    def _end(self, reason: str) -> None:
        self.stopped_for = self.stopped_for or reason  # as the first one that is asked for counts
        self._stop(reason)

    def _message(self, rule: str, step: int, text: str) -> dict:
        """Returns the message to post; chat services show its ``text``."""
        host, run = socket.gethostname(), str(self._run_dir)
        whole = f"{run} on {host}: alert {rule} in step {step}: {text}"
        return {"text": whole, "run": run, "host": host, "rule": rule, "step": step}

    def _watch(self) -> None:
        """The thread's: sees whether anything moves."""
        stalled, seconds = False, self._rules["stall"].level
        while not self._closed.wait(min(LOOK_SECONDS, seconds / 4)):
            idle, doing = self._idle()
            was, stalled = stalled, idle > seconds
            if stalled and not was:
                text = f"nothing has ended for {idle:.0f} s, {doing}"
                self._fire("stall", self._journal.step, text)

    def _post(self, message: Mapping[str, object]) -> None:
        data, headers = json.dumps(message).encode(), {"Content-Type": "application/json"}
        for pause in POST_PAUSES:
            time.sleep(pause)
            try:
                request = urllib.request.Request(self._webhook, data, headers)
                with urllib.request.urlopen(request, timeout=POST_SECONDS):
                    return
            except Exception as error:  # whatever it is, the run goes on
                # Not its words, which may quote the address.
                cause = getattr(error, "reason", None)
                why = type(cause if isinstance(cause, Exception) else error).__name__
                why += f" {error.code}" if isinstance(error, urllib.error.HTTPError) else ""
        logger.warning("an alert cannot be posted to $%s (%s); the run goes on", WEBHOOK, why)
        self._journal.event(ALERT_NOT_POSTED, rule=message["rule"], why=why)


def webhook() -> str | None:
    """The address that alerts are posted to, from the environment. Raises ValueError where it is
    none of HTTP, or has what nothing can be posted to; it is a secret, and is not quoted."""
    url = os.environ.get(WEBHOOK) or None
    if url is None:
        return None
    sound = all("!" <= letter <= "~" for letter in url)
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        sound &= parts.scheme in ("http", "https") and "@" not in parts.netloc
        if sound and parts.hostname and parts.port != 0:  # a port that is none is a ValueError
            return url
    raise ValueError(
        f"${WEBHOOK} is no address of http:// or https:// that can be posted to: give one without "
        "a user or password, without spaces, and with a port from 1 to 65535 if any"
    )
