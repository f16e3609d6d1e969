"""The row ``throughput``: its search, its processes, and what it prints."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest

from experiments.bench import Variant, throughput, trial
from experiments.bench.throughput import Config
from jaxtrain.models import decoder

TINY = Config(model="tiny", seq_len=16, precision="f32", timings=2, calls=1)


def tiny_trial(framework):
    return trial.Trial(
        framework, throughput.make_model(TINY), "f32", "adamw", "cpu", 1e9, calls=1, timings=2
    )


class Device:
    """A device on which batches fit up to a number of rows, with tokens per second by rows."""

    def __init__(self, rates, most=None):
        self.rates, self.most, self.tried = rates, most, []

    def __call__(self, rows):
        self.tried.append(rows)
        if self.most is not None and rows > self.most:
            return {"rows": rows, "out_of_memory": True}
        return {"rows": rows, "tokens_per_second": self.rates(rows)}


def fake_runs(monkeypatch, result):
    """Has trials answered by ``result(trial)`` and returns the list of those that were run."""
    run = []

    def answer(its_trial, environment):
        run.append((its_trial, environment))
        return result(its_trial)

    monkeypatch.setattr(trial, "run", answer)
    monkeypatch.setattr(trial, "last_json_line", lambda command, environment: ["cpu", 1e12])
    return run


def rates_of(rate):
    return {
        "tokens_per_second": rate,
        "step_ms": 1e3 / rate,
        "mfu": rate / 1e4,
    }


@pytest.mark.slow
def test_the_row_measures_in_processes_and_prints_the_best_batch(capsys, monkeypatch):
    monkeypatch.setattr(throughput, "why_not_torch", lambda *_: "not here")
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles quickest
    throughput.main(dataclasses.replace(TINY, rows=(32, 1, 32), rounds=1, optimizer="sgd"))
    row = json.loads(capsys.readouterr().out)
    (variant,) = row["variants"].values()
    assert row["variants"].keys() == {"jaxtrain, remat none"}
    assert [batch["rows"] for batch in variant["batches"]] == [1, 32]
    assert row["flags"]["XLA_FLAGS"] == "--xla_backend_optimization_level=0"
    for batch in variant["batches"]:
        # 16 tokens a row; compare both with what they say of each other.
        tokens = 16 * batch["rows"]
        assert batch["tokens_per_second"] == pytest.approx(
            1e3 * tokens / batch["step_ms"], rel=0.01
        )
        flops = row["flops_per_token"] * batch["tokens_per_second"]
        assert batch["mfu"] == pytest.approx(flops / row["products_flops_per_second"], rel=0.02)
        assert batch["compile_seconds"] > 0
        assert batch["measured_peak_bytes"] is None  # which a CPU does not count
        assert batch["host_peak_bytes"] > batch["compiled_bytes"] > 0
    best = row["best"]["jaxtrain"]
    fastest = max(variant["batches"], key=lambda batch: batch["tokens_per_second"])
    assert best["rows"] == fastest["rows"]
    assert best["compiled_bytes"] == fastest["compiled_bytes"]
    assert best["tokens_per_second"] == best["tokens_per_second_rounds"][0]
    assert row["torch"] is None
    assert row["torch_skipped"] == "not here"
    assert "ratio" not in row
    assert row["best"].keys() == {"jaxtrain"}


def test_the_search_ends_where_memory_does():
    device = Device(lambda rows: 100 * rows, most=8)
    found = throughput.search(device, throughput.batches(Config()))
    assert device.tried == [1, 2, 4, 8, 16]
    assert found[-1] == {"rows": 16, "out_of_memory": True}
    assert throughput.fastest(found)["rows"] == 8


@pytest.mark.parametrize(
    ("rates", "tried"),
    [
        ({1: 100, 2: 200, 4: 180, 8: 170, 16: 999}, 8),
        # One fall, or small ones, and the search goes on.
        ({1: 100, 2: 200, 4: 180, 8: 210, 16: 199, 32: 190}, 32),
        ({1: 100, 2: 99, 4: 98, 8: 97}, 8),
        # Slowly downhill is downhill.
        ({1: 100, 2: 94, 4: 93, 8: 999}, 4),
    ],
)
def test_the_search_ends_after_two_falls(rates, tried):
    device = Device(rates.__getitem__)
    throughput.search(device, rates)
    assert device.tried[-1] == tried


def test_the_search_is_bounded():
    assert list(throughput.batches(Config(most_rows=9))) == [1, 2, 4, 8]


def test_running_out_of_memory_is_a_result_and_other_failures_are_not(monkeypatch):
    tiny = tiny_trial("jaxtrain")

    def too_large(_):
        return jnp.zeros(2**47).block_until_ready()

    monkeypatch.setattr(trial, "_jaxtrain", too_large)
    assert trial.measure(tiny) == {"out_of_memory": True}

    def wrong(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(trial, "_jaxtrain", wrong)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: no"):
        trial.measure(tiny)


def test_an_error_in_torch_compile_s_wrapping_is_unwrapped(monkeypatch):
    tiny = tiny_trial("torch")

    class OutOfMemoryError(RuntimeError):
        pass

    cuda = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))

    def wrapped(_):
        raise RuntimeError("backend failed") from OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial, "_torch", wrapped)
    assert trial.measure(tiny) == {"out_of_memory": True}


def test_a_step_is_timed_alone():
    tiny = dataclasses.replace(tiny_trial("torch"), calls=4, timings=3, rows=2, compiled=True)
    order = []

    def run():
        order.append("step")
        time.sleep(0.3 if len(order) == 1 else 0.02)  # the first compiles

    found = trial.timed(tiny, Variant(run))
    assert order == ["step"] * 4
    # Of 4 steps in 20 ms or, on a busy machine, somewhat more, on 2 rows of 16 tokens.
    assert 5 <= found["step_ms"] < 20
    assert found["tokens_per_second"] == pytest.approx(32e3 / found["step_ms"], rel=0.01)
    assert 0.1 < found["compile_seconds"] < 0.4


def test_a_failed_process_is_an_error_with_its_last_lines():
    tiny = tiny_trial("jaxtrain")
    with pytest.raises(SystemExit, match=r"(?s)ended with 1:.*'float33' is not known"):
        trial.run(dataclasses.replace(tiny, precision="float33"), {})


def test_a_trial_survives_the_command_line():
    model = throughput.make_model(Config(model="llama-1b", seq_len=8192))
    sent = dataclasses.replace(tiny_trial("jaxtrain"), model=model)
    assert trial.Trial.from_json(sent.to_json()) == sent


def test_each_side_is_repeated_at_its_best_batch_turn_by_turn(capsys, monkeypatch):
    # Tokens per second by variant and rows; each further run of the same is 1 faster.
    rates = {
        ("jaxtrain", False): {1: 100, 2: 300, 4: None},
        ("torch", False): {1: 100, 2: 150, 4: 120},
        ("torch", True): {1: 150, 2: 160, 4: 200},
    }
    counts = {}

    def result(its_trial):
        key = its_trial.framework, its_trial.compiled, its_trial.rows
        counts[key] = counts.get(key, -1) + 1
        rate = rates[key[:2]][its_trial.rows]
        return {"out_of_memory": True} if rate is None else rates_of(rate + counts[key])

    run = fake_runs(monkeypatch, result)
    monkeypatch.setattr(throughput, "why_not_torch", lambda *_: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9")
    throughput.main(dataclasses.replace(TINY, rows=(1, 2, 4), rounds=3))
    row = json.loads(capsys.readouterr().out)
    repeated = [(t.framework, t.compiled, t.rows) for t, _ in run[9:]]
    assert repeated == [("jaxtrain", False, 2), ("torch", True, 4)] * 3
    assert row["best"]["jaxtrain"]["tokens_per_second_rounds"] == [301, 302, 303]
    assert row["best"]["torch"]["variant"] == "torch, compiled"
    assert row["ratio"] == pytest.approx(302 / 202, abs=1e-3)
    variables = {t.framework: environment for t, environment in run}
    assert variables["torch"]["JAX_PLATFORMS"] == "cpu"  # the device is PyTorch's alone
    assert "JAX_PLATFORMS" not in variables["jaxtrain"]


def test_rematerialisation_is_tried_where_nothing_fits_without(capsys, monkeypatch):
    def result(its_trial):
        fits = its_trial.model.remat != "none"
        return rates_of(100) if fits else {"out_of_memory": True}

    fake_runs(monkeypatch, result)
    config = dataclasses.replace(TINY, model="llama-1b", seq_len=8192, rows=(1, 2))
    throughput.main(config)
    row = json.loads(capsys.readouterr().out)
    assert list(row["variants"]) == ["jaxtrain, remat none", "jaxtrain, remat dots"]
    assert row["best"]["jaxtrain"]["variant"] == "jaxtrain, remat dots"
    assert "GPT-2 form" in row["torch_skipped"]


def test_a_gpu_is_jax_s_as_far_as_it_is_pytorch_s(monkeypatch):
    monkeypatch.delenv(throughput.MEM_FRACTION, raising=False)
    assert throughput.environment("x", "gpu")[throughput.MEM_FRACTION] == "0.95"
    assert throughput.MEM_FRACTION not in throughput.environment("x", "cpu")
    monkeypatch.setenv(throughput.MEM_FRACTION, "0.5")
    assert throughput.environment("x", "gpu")[throughput.MEM_FRACTION] == "0.5"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": (4, 0)}, "--rows has 0"),
        ({"seq_len": 65}, "--seq-len 65 is longer than the 64 learned positions of tiny"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"precision": "bf17"}, "precision 'bf17' is not known"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"timings": 1}, "--timings is 1"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(change, sentence, capsys, monkeypatch):
    run = fake_runs(monkeypatch, lambda _: pytest.fail("a process was started"))
    with pytest.raises(SystemExit) as stopped:
        throughput.main(dataclasses.replace(TINY, **change))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not run


def test_pytorch_takes_part_where_it_has_the_same_step(monkeypatch):
    model = throughput.make_model(TINY)

    def why(**change):
        return throughput.why_not_torch(dataclasses.replace(TINY, **change), model, "cpu")

    assert "adafactor" in why(optimizer="adafactor")
    assert "pure_bf16" in why(precision="pure_bf16")
    assert "tpu" in throughput.why_not_torch(TINY, model, "tpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in why()


def test_both_sides_have_the_same_model():
    pytest.importorskip("torch")
    tiny = tiny_trial("torch")
    found = trial.measure(dataclasses.replace(tiny, rows=2, model=small()))
    assert found["tokens_per_second"] > 0
    assert found["measured_peak_bytes"] is None
    assert found["mfu"] > 0
    assert statistics.fmean(found["step_ms_quartiles"]) > 0


def small():
    return decoder.DecoderConfig(
        vocab_size=65, seq_len=16, layers=1, width=32, heads=2, vocab_multiple=1
    )
