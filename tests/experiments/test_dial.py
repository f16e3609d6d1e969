"""One dial: what follows from --depth and --budget, what is kept, and what is refused."""

import json
import math
import re
import subprocess
import sys

import pytest

from experiments import dial as flags_of_dial
from experiments import gpt
from jaxtrain.models import decoder, dial
from jaxtrain.run import provenance
from jaxtrain.run.main import load_config, main, parse, run_to_resume


def config(*flags):
    return load_config("experiments.gpt", flags, command="plan")[1]


def test_every_depth_has_heads_that_divide_its_width_into_even_numbers_of_features():
    for layers in range(1, dial.DEEPEST + 1):
        width = dial.ASPECT * layers
        features = width / dial.heads_of(width)
        assert features % 2 == 0
        assert features >= dial.FEATURES or layers == 1
    base = decoder.tiny()  # and the preset's are those of its depth
    assert (dial.ASPECT * base.layers, dial.heads_of(base.width)) == (base.width, base.heads)


def test_the_depth_alone_decides_a_whole_training_of_the_model_that_it_names():
    found = config("--depth", "6")
    N = 6 * 12 * 288**2 + 12 * 288  # kernels by hand, and two norms a layer
    tokens = dial.RATIO * N
    assert (found.layers, found.width, found.heads) == (6, 288, 3)
    assert found.steps * found.global_batch * 256 == pytest.approx(tokens, rel=1e-2)
    ideal = dial.BATCH / 256 * (tokens / 1e6) ** dial.OF_D
    assert abs(math.log2(found.global_batch / ideal)) <= 0.5
    assert found.parametrization == "mup"
    told = flags_of_dial.facts(found)["dial"]
    assert "given" not in told
    assert f"steps {found.steps:,} (" in told
    # A config that no command line has read comes to the same.
    assert gpt.outline(gpt.Config(depth=6)).steps == found.steps


def test_a_budget_is_spent_to_the_step_and_deepens_the_model():
    depths = []
    for budget in (1e11, 1e13, 1e15):
        found = config("--budget", str(budget))
        cost = gpt.outline(found).task.flops_per_step
        assert abs(cost * found.steps - budget) <= cost / 2
        depths.append(found.layers)
    assert depths[0] < depths[1] < depths[2]
    both = config("--budget", "1e13", "--depth", "2")
    assert both.layers == 2
    assert both.steps == pytest.approx(config("--depth=2", "--budget=2e13").steps / 2, abs=1)


def test_a_flag_that_is_typed_is_kept_and_the_others_follow_it():
    plain = config("--depth", "4")
    rows = 4 * plain.global_batch
    more = config("--depth=4", f"--global_batch={rows}")
    assert more.global_batch == rows
    assert more.optimizer.learning_rate == pytest.approx(2 * plain.optimizer.learning_rate, 1e-3)
    assert more.steps == pytest.approx(plain.steps / 4, abs=1)
    # Though it is the default, and though the rule says otherwise.
    typed = config("--depth", "4", "--steps", "250", "--width", "96", "--parametrization=standard")
    assert (typed.steps, typed.width, typed.heads) == (250, 96, 1)
    assert typed.parametrization == "standard"
    told = flags_of_dial.facts(typed)["dial"]
    assert "steps 250 (given, in place of" in told
    assert "width 96 (given, in place of 192" in told
    assert config("--depth", "4", "--epochs", "2").steps == gpt.Config.steps  # which counts them
    # No rule is fitted for the rates of others.
    assert config("--depth", "2", "--optimizer.name", "sgd").optimizer.learning_rate is None
    assert config() == gpt.Config()


def test_a_run_keeps_what_it_began_with_though_the_rules_change(tmp_path, monkeypatch):
    begun = config("--depth", "2", "--run-dir", str(tmp_path))
    plain = lambda config: json.loads(json.dumps(provenance.flags_of(config)))  # noqa: E731
    record = {"module": "experiments.gpt", "flags": plain(begun)}
    (tmp_path / "config.json").write_text(json.dumps(record))
    monkeypatch.setattr(dial, "RATIO", 2 * dial.RATIO)
    assert config("--depth", "2").steps > begun.steps

    def resumed(*flags):
        flags = ["--resume", "--run-dir", str(tmp_path), *flags]
        return parse(gpt.Config, flags, default=run_to_resume(gpt.Config, flags))

    for flags in ([], ["--depth", "2"]):
        assert plain(resumed(*flags)) | {"run": 0} == record["flags"] | {"run": 0}
    assert f"steps {begun.steps:,} (given, in place of" in flags_of_dial.facts(resumed())["dial"]
    with pytest.raises(ValueError, match="`depth` is 3 and `layers` is 2"):
        resumed("--depth", "3")
    other = {"flags": plain(resumed("--budget", "1e12"))}
    changed = {each.name: each.meaning for each in provenance.compare(record, other, {})}
    assert changed["budget"] is None  # which is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--depth", "2", "--layers", "3"],
            "--depth is 2 and --layers is 3: the depth is the number",
        ),
        (["--depth", "2", "--model", "gpt2-124m"], "--depth is 2 and --model is gpt2-124m"),
        (
            ["--budget", "1e12", "--init-from", "M"],
            "--budget is 1000000000000.0 and --init-from is M: both say what the model is",
        ),
        (["--depth", "0"], "--depth is 0: give a number above 0"),
        (["--budget", "inf"], "--budget is inf: give a number above 0"),
    ],
)
def test_what_contradicts_the_dial_is_refused_in_a_sentence(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(gpt.Config, gpt.build, flags)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
def test_a_budget_alone_on_two_devices_beats_an_order_2_byte_model(tmp_path):
    # A process of its own: flags are read before JAX may be asked for the devices to simulate.
    flags = ["--budget", "1e12", "--simulate-devices", "2", "--run-dir", str(tmp_path / "run")]
    words = [sys.executable, "-m", "experiments.gpt", *flags, "--sample-tokens", "0"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert re.search(r"dial +.*layers 1 \(whose best training costs nearest to", done.stdout)
    assert "which beats the order-2 byte model's" in done.stdout
