"""Alerts: each fires once on its fault and never without, whenever the run was killed."""

import collections
import dataclasses
import http.server
import json
import threading
import time
import traceback
import urllib.error

import numpy as np
import pytest
from etils import epath

import jaxtrain as jt
from jaxtrain.run.folder import lock_run_dir
from jaxtrain.run.observe import alert_rules, alerts
from jaxtrain.run.observe.alerts import Alerts
from jaxtrain.run.observe.journal import Journal, read_events
from jaxtrain.run.observe.report import health, records
from tests.run.hooks.test_early_stopping import Kill, Killed
from tests.run.test_loop import make_experiment
from tests.waiting import eventually

N, FAULT = 220, 120


def clean(seed):
    """The curves of a run that is well: noise with a heavy tail, falls, and tokens/s that vary."""
    rng, step = np.random.default_rng(seed), np.arange(N)
    return {
        "train/loss": 2 + 4 * np.exp(-step / 30) + 0.1 * rng.standard_t(6, N),
        "train/grad_norm": (0.5 + 8 * np.exp(-step / 5)) * np.exp(0.3 * rng.standard_t(6, N)),
        "memory/peak_fraction": np.full(N, 0.9),
        "host/memory_fraction": 0.5 + 0.1 * rng.random(N),
        "device/temperature": 70 + 5 * rng.normal(size=N),
        "time/tokens_per_second": 1e5 * (1 + 0.05 * rng.normal(size=N)),
        "eval/code/loss": 2.5 + np.exp(-step / 30) + 0.003 * rng.normal(size=N),
    }


def faulty(rule, curves):
    """Injects what a rule looks for; returns the steps in which it may be told."""
    loss, norm, late = curves["train/loss"], curves["train/grad_norm"], slice(FAULT, None)
    if rule == "loss_spike":
        loss[FAULT] += 6
    elif rule == "divergence":
        loss[late] += 0.15 * np.arange(N - FAULT)
        return range(FAULT, FAULT + 15)
    elif rule == "plateau":
        loss[late] = loss[FAULT - 10 : FAULT].mean()
        return range(FAULT + 30, FAULT + 70)
    elif rule == "grad_norm":
        norm[FAULT : FAULT + 3] *= 500
    elif rule == "memory":
        curves["memory/peak_fraction"][late] = 0.97
    elif rule == "host_memory":
        curves["host/memory_fraction"][late] = np.linspace(0.96, 0.99, N - FAULT)
    elif rule == "temperature":
        curves["device/temperature"][late] = 95
    elif rule == "throughput":
        curves["time/tokens_per_second"][late] *= 0.4
        return [FAULT + alert_rules.SLOW_LINES - 1]
    elif rule == "held_out":
        curves["eval/code/loss"][late] *= 1.1
        return [FAULT + alert_rules.RISING_EVALUATIONS - 1]
    return [FAULT]


class Told:
    """Alerts without a run: what they say, and whether they ask for an end."""

    def __init__(self, folder, *rules, journal=None, idle=lambda: (0.0, "before")):
        self.notes, self.stops = [], []
        self.alerts = Alerts(
            alert_rules.parse(rules),
            journal=journal or Journal(),
            note=self.notes.append,
            stop=self.stops.append,
            idle=idle,
            run_dir=epath.Path(folder),
        )

    def run(self, curves, steps):
        for step in steps:
            self.alerts.write(step, {name: curve[step - 1] for name, curve in curves.items()})
        return self

    @property
    def steps(self):
        """The rules that fired, and in which step."""
        return [(n.split()[3].rstrip(":"), int(n.split()[1].rstrip(":"))) for n in self.notes]


RULES = ("loss_spike", "divergence", "plateau", "grad_norm", "memory", "host_memory")
RULES += ("temperature", "throughput", "held_out")


def test_a_clean_run_alarms_nobody(tmp_path):
    for seed in range(10):
        curves = clean(seed)
        assert Told(tmp_path).run(curves, range(1, N + 1)).notes == []
    curves["eval/code/loss"] -= 5  # below 0, as of a log-likelihood
    assert Told(tmp_path, "all:off", "held_out=0.01").run(curves, range(1, N + 1)).notes == []


@pytest.mark.parametrize("rule", RULES)
def test_a_fault_fires_its_rule_once_whenever_the_run_was_killed(tmp_path, rule):
    curves = clean(0)
    expected = [i + 1 for i in faulty(rule, curves)]
    level = 60 if rule == "plateau" else alert_rules.RULES[rule].level
    only = ["all:off", f"{rule}={level}:stop"]
    whole = Told(tmp_path, *only).run(curves, range(1, N + 1))
    ((name, at),) = whole.steps
    assert (name, at in expected, len(whole.stops)) == (rule, True, 1)
    # No other rule fires; but one of these is off, and the other begins as spikes.
    if rule not in ("plateau", "divergence"):
        both = Told(tmp_path).run(curves, range(1, N + 1))
        assert both.steps == whole.steps
    for killed in (at - 40, at - 1, at, at + 1, at + 20):
        log = [
            {"step": s, **{n: c[s - 1] for n, c in curves.items()}} for s in range(1, killed + 1)
        ]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
        resumed = Told(tmp_path, *only)
        resumed.alerts.recall(killed, acts_from=killed - 1)
        # An end that was asked for in the last two steps is asked for again, and told no second
        # time.
        assert (resumed.steps, len(resumed.stops)) == ([], int(0 <= killed - at <= 1))
        resumed.run(curves, range(killed + 1, N + 1))
        assert resumed.steps == (whole.steps if killed < at else [])


def test_steps_in_which_no_token_counts_break_no_rule(tmp_path):
    curves, late = clean(0), slice(FAULT, N)
    curves |= {"train/weight": np.ones(N), "train/skipped": np.zeros(N)}
    curves["train/loss"][late], curves["train/weight"][late] = np.nan, 0
    rules = ["all:off", "divergence=0.2:stop"]
    for skipped, stops in ((0, 0), (1, 1)):  # A step that was left out has weight 0 too.
        curves["train/skipped"][late] = skipped
        with (tmp_path / "log.jsonl").open("w") as log:
            for i in range(N):
                values = {name: curve[i] for name, curve in curves.items()}
                values["train/loss"] = values["train/loss"] if i < FAULT else "nan"
                when = {"step": i + 1, "time": "2026-01-01T00:00:00+00:00"}
                log.write(json.dumps(when | values) + "\n")
        assert len(Told(tmp_path, *rules).run(curves, range(1, N + 1)).stops) == stops
        recalled = Told(tmp_path, *rules)
        recalled.alerts.recall(N, acts_from=1)
        assert len(recalled.stops) == stops
        texts = [finding.text for finding in health.examine(records.read([tmp_path])[0])]
        sentence = f"No token counts in {N - FAULT:,} steps, {(N - FAULT) / N:.0%} of those logged"
        assert any(text.startswith(sentence) for text in texts) == (not stops)
        assert not any("loss is not finite" in text for text in texts)


def test_an_evaluation_of_minus_infinity_is_no_best_to_rise_above(tmp_path):
    told = Told(tmp_path, "all:off", "held-out=0.01")
    for step, loss in enumerate([2.0, -np.inf, 2.0, 2.0, 2.0, 2.0]):
        told.alerts.write(step, {"eval/loss": loss})
    assert told.notes == []


def test_an_alert_comes_again_when_its_reason_had_ceased(tmp_path):
    curves = clean(1)
    for at in (60, 64, 150):
        curves["train/loss"][at - 1] += 9
    assert Told(tmp_path).run(curves, range(1, N + 1)).steps == [
        ("loss_spike", 60),
        ("loss_spike", 150),
    ]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("loss", "there is no alert 'loss': give one of all, loss_spike, divergence"),
        ("plateau", "alert 'plateau' has no level: give plateau=N, in steps without an impr"),
        ("memory=no", "alert 'memory=no': the level 'no' is no number"),
        ("stall=nan", "alert 'stall=nan': the level is seconds in which nothing has ended; give"),
        ("stall:ring", "alert 'stall:ring' has no action 'ring': give off, or of warn, save, tra"),
        ("all=3", "alert 'all=3': a level is of one rule"),
    ],
)
def test_an_alert_that_cannot_be_is_refused(asked, words):
    with pytest.raises(ValueError, match=words):
        jt.RunOptions(alerts=(asked,))


def test_an_address_that_is_none_is_refused_without_being_shown(monkeypatch, tmp_path):
    monkeypatch.setenv(alerts.WEBHOOK, "hooks.example/secret")
    with pytest.raises(ValueError, match=r"^\$JAXTRAIN_ALERT_WEBHOOK is no address of http:// or"):
        jt.fit(make_experiment(), jt.RunOptions(str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


class Hub(http.server.BaseHTTPRequestHandler):
    """Takes what is posted, but for the first, which it answers with an error."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append(json.loads(body))
        self.send_response(503 if len(self.server.posts) == 1 else 200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.posts = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv(alerts.WEBHOOK, f"http://127.0.0.1:{server.server_port}/secret")
        yield server
        server.shutdown()
        thread.join()


class Spiked:
    """Batches of which one has targets that are far off."""

    def __init__(self, batches, step, at):
        self.batches, self.step, self.at = batches, step, at

    def __enter__(self):
        self.stream = self.batches.__enter__()
        return self

    def __exit__(self, *error):
        return self.batches.__exit__(*error)

    def __iter__(self):
        return self

    def __next__(self):
        batch, self.step = next(self.stream), self.step + 1
        return batch | {"y": batch["y"] * 100.0} if self.step == self.at else batch


def spiky(at):
    experiment = make_experiment(50)
    return experiment.with_(
        train_batches=lambda start, sharding: Spiked(
            experiment.data.train_batches(start, sharding), start, at
        ),
    )


@pytest.mark.slow
def test_a_run_alarms_saves_and_stops_in_a_step_that_is_not_logged_and_again_when_killed(
    tmp_path, hub, capsys
):
    # Logged every second step; the fault is in one that is not.
    options = jt.RunOptions(
        str(tmp_path / "a"),
        auto_resume=True,
        log_every=2,
        save_every=10,
        alerts=("loss_spike:save", "grad_norm:off", "throughput:off"),
    )
    jt.fit(spiky(45), options)
    (told,) = [x for x in read_events(epath.Path(tmp_path / "a")) if x["event"] == "alert"]
    assert (told["rule"], told["step"], told["actions"]) == ("loss_spike", 45, ["warn", "save"])
    assert f"step 45: alert loss_spike: {told['text']}" in capsys.readouterr().out
    saved = [
        x["step"] for x in read_events(epath.Path(tmp_path / "a")) if x["event"] == "checkpoint"
    ]
    assert saved == [10, 20, 30, 40, 46, 50]  # after the step whose metrics told it
    first, second = hub.posts  # tried again after its 503
    assert (first, first["rule"], first["step"]) == (second, "loss_spike", 45)
    found = [x.text for x in health.examine(records.read_run(epath.Path(tmp_path / "a"), "a"))]
    assert f"Alert loss_spike, 1 time, last in step 45: {told['text']}." in found
    assert "secret" not in "".join(
        p.read_text(errors="replace") for p in (tmp_path / "a").glob("*") if p.is_file()
    )
    stopping = dataclasses.replace(
        options,
        run_dir=str(tmp_path / "b"),
        save_every=23,  # step 46 is saved, and the alert of step 45 is not to come again
        alerts=("loss_spike:stop", "grad_norm:off", "throughput:off"),
    )
    with pytest.raises(Killed):  # as the run is about to end for the alert
        jt.fit(spiky(45), stopping, hooks=[Kill(46)])
    resumed = jt.fit(spiky(45), stopping)
    assert resumed.stopped == f"alert loss_spike: {told['text']}"
    assert (resumed.code, jt.fit(spiky(45), stopping).code) == (81, 81)  # and whenever it is asked
    assert int(resumed.state.step) == 47
    told = [x["attempt"] for x in read_events(epath.Path(tmp_path / "b")) if x["event"] == "alert"]
    assert told == [1]
    assert [x["run"][-1] for x in hub.posts] == ["a", "a", "b"]


@pytest.mark.parametrize(
    "address",
    [
        "https://user:s3cret@hooks.example.com/T",
        "https://hooks.example.com/s3cret token",
        "https://hooks.example.com/s3cret\n",
        "https://hooks.example.com:s3cret/T",
        "https://hooks.example.com:99999/s3cret",
        "https://[s3cret/T",
        "ftp://hooks.example.com/s3cret",
    ],
)
def test_an_address_that_cannot_be_posted_to_is_refused_and_not_quoted(address, monkeypatch):
    monkeypatch.setenv(alerts.WEBHOOK, address)
    with pytest.raises(ValueError, match=r"^\$JAXTRAIN_ALERT_WEBHOOK is no address of") as refused:
        alerts.webhook()
    text = "".join(traceback.format_exception(refused.value))
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("unknown url type: s3cret"), "ValueError"),
        (urllib.error.URLError(ConnectionRefusedError("s3cret")), "ConnectionRefusedError"),
        (urllib.error.HTTPError("http://s3cret", 403, "s3cret", {}, None), "HTTPError 403"),
    ],
)
def test_what_is_said_of_a_failed_post_has_nothing_of_its_address(
    error, why, tmp_path, monkeypatch, caplog
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(alerts.urllib.request, "urlopen", fail)
    monkeypatch.setattr(alerts, "POST_PAUSES", (0.0,))
    journal = Journal()
    journal.open(lock_run_dir(epath.Path(tmp_path / "run")))
    told = Told(tmp_path / "run", "host_memory=0.5", journal=journal)
    told.alerts._webhook = "http://localhost:1/s3cret"
    with told.alerts:
        told.alerts.write(1, {"host/memory_fraction": 0.9})
    (event,) = [x for x in journal_of(tmp_path / "run") if x["event"] == "alert not posted"]
    assert event["why"] == why
    assert f"({why})" in caplog.text
    assert "s3cret" not in caplog.text + (tmp_path / "run" / "events.jsonl").read_text()


def journal_of(folder):
    return read_events(epath.Path(folder))


def test_an_address_that_drips_hides_no_standstill(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts, "CLOSE_SECONDS", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(alerts.urllib.request, "urlopen", lambda *_, **__: ended.wait(60))
    idle = [(0.0, "")]
    told = Told(tmp_path, "stall=1", "host_memory=0.5", idle=lambda: idle[0])
    told.alerts._webhook = "http://localhost:1/"
    with told.alerts:
        told.alerts.write(1, {"host/memory_fraction": 0.9})
        idle[0] = (5.0, "after the dispatch of step 2")
        eventually(lambda: len(told.notes) >= 2)
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    ended.set()
    assert "alert stall" in told.notes[1]


@pytest.mark.parametrize(
    ("steps_per_call", "at", "acts"),
    [
        (1, 45, True),  # everyday: the test of a whole run above
        (1, 44, False),
        (2, 43, True),
        (2, 42, False),
    ],
)
@pytest.mark.slow
def test_an_end_is_awaited_of_the_last_two_calls_alone(steps_per_call, at, acts, tmp_path):
    """Metrics are read a call late: what ends step 46 is an alert of the call before, not of one
    before that, whose end came or was declined."""
    options = jt.RunOptions(
        str(tmp_path),
        auto_resume=True,
        log_every=steps_per_call,
        save_every=46,
        alerts=("all:off", "loss_spike=10"),
    )
    experiment = spiky(at).with_(layout=jt.Layout(steps_per_call=steps_per_call))
    with pytest.raises(Killed):
        jt.fit(experiment, options, hooks=[Kill(46)])
    stopping = dataclasses.replace(options, alerts=("all:off", "loss_spike=10:stop"))
    resumed = jt.fit(experiment, stopping)
    assert int(resumed.state.step) == (46 + steps_per_call if acts else 50)


def test_a_run_in_which_nothing_moves_alarms_once(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts, "LOOK_SECONDS", 0.01)
    idle = [(0.0, "")]
    journal = Journal()
    journal.open(lock_run_dir(epath.Path(tmp_path / "run")))
    told = Told(tmp_path / "run", "stall=30:save", journal=journal, idle=lambda: idle[0])

    with told.alerts:
        journal.step = 7
        idle[0] = (31.0, "after the dispatch of step 8")
        eventually(lambda: told.notes)
        time.sleep(0.1)
        assert told.steps == [("stall", 7)]
        idle[0] = (0.5, "after the dispatch of step 9")
        time.sleep(0.1)
        idle[0] = (99.0, "after the dispatch of step 9")
        eventually(lambda: len(told.notes) == 2)
    assert told.alerts.wanted == {"save"}
    assert told.notes[0].endswith("nothing has ended for 31 s, after the dispatch of step 8")
    events = read_events(epath.Path(tmp_path / "run"))
    assert collections.Counter(x["event"] for x in events)["alert"] == 2
