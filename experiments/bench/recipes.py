"""Low-precision recipes: the signal of each kernel's gradient over what rounding adds to it.

A GPT of the default text is trained for some steps in bf16. The gradient of the next batch is then
taken in float32 and by every recipe, for the same weights: 20 log10 of |g| / |g - g'| in decibels,
of the layer that has least of them.
"""

import dataclasses
import itertools
import json

import jax

import jaxtrain as jt
from experiments import gpt
from experiments.bench import Rounds, machine
from jaxtrain.build import compile_train, make_abstract_state, make_experiment_mesh, make_state
from jaxtrain.compare.rounding import decibels, gradients, signal_and_noise
from jaxtrain.ops.scaled import RECIPES
from jaxtrain.sharding.rules import batch_sharding


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """The signal-to-noise ratio of gradients by recipe."""

    rounds: int = 1
    """Batches whose gradients are compared."""
    steps: int = 50
    """Train steps before."""
    seq_len: int = 128
    """Tokens per row."""


def main(config: Config) -> None:
    """Prints the least ratio over layers of each kind of kernel, by recipe."""
    flags = gpt.Config(seq_len=config.seq_len, steps=config.steps + config.rounds, precision="bf16")
    experiment = gpt.build(flags)
    mesh = make_experiment_mesh(experiment, jax.devices()[:1])
    state = make_state(experiment, mesh)
    train = compile_train(experiment, make_abstract_state(experiment, mesh), mesh)
    with experiment.train_batches(0, batch_sharding(mesh)) as stream:
        for batch in itertools.islice(stream, config.steps):
            state, _ = train(state, batch)
        batches = list(itertools.islice(stream, config.rounds))
    of, found = gradients(experiment, jax.device_get(state)), {}
    exact = [of(jt.Policy(), batch) for batch in batches]
    for name in ("bf16", *RECIPES):
        given = [of(jt.Policy.named(name), batch) for batch in batches]
        pairs = zip(exact, given, strict=True)
        each = [signal_and_noise(*pair, experiment.stack) for pair in pairs]
        found[name] = {
            path: round(float(min(decibels(one[path]).min() for one in each)), 1)
            for path in each[0]
            if path.startswith("blocks/") and path.endswith("kernel")
        }
    about = {
        "model": flags.model,
        "steps": config.steps,
        "tokens": config.rounds * flags.global_batch * config.seq_len,
    }
    print(json.dumps({"row": "recipes", **machine.facts(), **about, "least_decibels": found}))
