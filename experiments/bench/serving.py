"""Serving: requests that share an engine, against the same ones answered one after another."""

import dataclasses

import jax
import numpy as np

from experiments.bench import Rounds, Variant, row
from jaxtrain.models import decoder
from jaxtrain.serve.engine import Engine, Request


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """An engine with requests one by one and all at once."""

    model: str = "tiny"
    """A preset of the GPT."""
    slots: tuple[int, ...] = (16, 32)
    """Slots of the engines that have all requests at once."""
    requests: int = 32
    """Requests of each round."""
    tokens: int = 48
    """Tokens that each request receives."""
    rounds: int = 5


def main(config: Config) -> None:
    """Runs the row and prints it."""
    model = decoder.PRESETS[config.model]()
    params = decoder.init(model, jax.random.key(0))
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 120, config.requests)
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
    asked = [Request(prompt, config.tokens, temperature=0) for prompt in prompts]

    def variant(slots: int, *, one_by_one: bool) -> Variant:
        engine = Engine(model, params, slots=slots, readers=8 if slots > 2 else 2)
        engine.warm_up()

        def run() -> None:
            # Nothing that a round before has read.
            engine.pool.forget()
            for request in asked:
                engine.submit(request)
                while one_by_one and engine.is_busy:
                    engine.step()
            while engine.is_busy:
                engine.step()

        return Variant(run, {"slots": slots, "programs": engine.programs})

    variants = {"one by one": variant(2, one_by_one=True)}
    variants |= {f"{n} slots": variant(n, one_by_one=False) for n in config.slots}
    shape = {"model": dataclasses.asdict(model), "prompt_tokens": lengths.tolist()}
    row("serve", config, variants, shape)
