"""The flags of optimizers follow from the rules."""

import dataclasses
import inspect
import re

import pytest

import jaxtrain as jt
from experiments import gpt, vision
from jaxtrain import optim
from jaxtrain.optim.options import keywords
from jaxtrain.run import options
from jaxtrain.run.main import parse


def test_every_option_of_every_rule_is_a_flag_but_masks():
    flags = inspect.signature(options.OptimizerOptions).parameters.keys()
    taken = {name for rule in optim.rules.RULES.values() for name in keywords(rule)}
    assert taken - flags == {"trust_mask", "muon_mask"}
    assert optim.rules.OPTIONS.keys() <= taken & flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("muon --optimizer.ns-steps 0", "ns_steps is 0; it must be at least 1"),
        ("lamb --optimizer.nesterov True", "'lamb' has no option nesterov (given True)"),
        ("rmsprop --optimizer.nesterov True", "no effect on 'rmsprop' with momentum 0"),
    ],
)
def test_flags_reach_the_rule(flags, message):
    config = parse(gpt.Config, ["--optimizer.name", *flags.split()])
    with pytest.raises(ValueError, match=re.escape(message)):
        options.make_optimizer(config.optimizer, steps=4)


def test_a_rate_that_cannot_be_is_named_as_its_flag():
    config = parse(gpt.Config, ["--optimizer.learning-rate", "-1"])
    with pytest.raises(ValueError, match="learning_rate is -1; it must be at least 0"):
        options.make_optimizer(config.optimizer, steps=4)


def test_the_rate_is_the_rules_unless_the_experiment_or_a_flag_says_another():
    def rate(name, **more):
        chosen = options.OptimizerOptions(name=name, schedule="constant", warmup_steps=0, **more)
        tx = options.make_optimizer(chosen, steps=4, default_rates=vision.LEARNING_RATES)
        return float(optim.current_learning_rate(tx.init({"w": 1.0})))

    assert rate("lion") == pytest.approx(3e-4)
    assert rate("lars") == pytest.approx(30.0)
    assert rate("lars", learning_rate=2.0) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["keep", "coordinator", "experiment"])
def test_a_field_that_every_config_has_is_refused_where_it_is_named(name):
    with pytest.raises(ValueError, match=f"Own has a field '{name}', .*; give it another name"):
        dataclasses.make_dataclass("Own", [(name, int, 1)], bases=(jt.Config,), frozen=True)
    dataclasses.make_dataclass("Own", [("steps", int, 7)], bases=(jt.Config,), frozen=True)
