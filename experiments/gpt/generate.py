"""Write text with a trained GPT: ``python -m experiments.gpt.generate --run runs/gpt-1``."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import tyro

from experiments.gpt import TOKENIZER_FILE
from jaxtrain import data
from jaxtrain.host import quiet
from jaxtrain.host.paths import as_path
from jaxtrain.models import gpt
from jaxtrain.models.generate import generate
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.main import program_name
from jaxtrain.run.refusal import refusing


@dataclasses.dataclass(frozen=True)
class Config:
    """Writes text with a trained GPT."""

    run: str
    """Folder of the run."""
    prompt: str = ""
    """What the text begins with; by default the beginning of a document."""
    tokens: int = 200
    """How many tokens to write; it ends earlier where the model ends its document."""
    samples: int = 1
    """How many texts to write."""
    temperature: float = 0.8
    """0 always takes the most probable token."""
    top_k: int | None = None
    """Draw from the k most probable tokens."""
    top_p: float | None = 0.95
    """Draw from the smallest set of tokens with this much probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have occurred become less probable."""
    seed: int = 0
    """Of the draws."""
    step: int | None = None
    """Which checkpoint; by default the best one."""


def load(run: str, step: int | None = None) -> tuple[gpt.GPTConfig, dict, data.Tokenizer]:
    """Reads a run's model, parameters and tokenizer.

    Args:
      run: the run's folder.
      step: which checkpoint; by default the best one.

    Raises:
      FileNotFoundError: where there is no checkpoint.
    """
    folder = as_path(run)
    with Checkpointer(folder / "checkpoints") as checkpoints:
        step = checkpoints.best_step() if step is None else step
        stored = checkpoints.config(step)
        model = read_model(stored, where=f"the config of a checkpoint in {checkpoints.directory}")
        shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
        params = checkpoints.restore_params(shapes, step)
    # Never a path from the config: the tokenizer is one of two, and the second is in the run.
    if stored.get("tokenizer") == "bytes":
        return model, params, data.ByteTokenizer()
    return model, params, data.SubwordTokenizer.load(folder / TOKENIZER_FILE)


def read_model(stored: Mapping[str, Any], *, where: str) -> gpt.GPTConfig:
    """Makes the model's sizes of what a checkpoint's config says.

    Raises:
      ValueError: where that is no model's.
    """
    sizes = stored.get("model")
    known = {field.name for field in dataclasses.fields(gpt.GPTConfig)}
    if not isinstance(sizes, dict) or not sizes.keys() <= known:
        raise ValueError(f"{where} has no model with the sizes of a GPT")
    try:
        return gpt.GPTConfig(**sizes)
    except TypeError as error:  # one is missing
        raise ValueError(f"{where} has no whole model ({error})") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the flags, and prints what the model writes."""
    config = tyro.cli(Config, args=arguments, prog=program_name())
    with refusing():
        quiet.start()
        model, params, tokenizer = load(config.run, config.step)
        prompt = [tokenizer.eod, *tokenizer.encode(config.prompt).tolist()]
        written = generate(
            model,
            params,
            [prompt] * config.samples,
            max_new_tokens=config.tokens,
            rng=jax.random.key(config.seed),
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            repetition_penalty=config.repetition_penalty,
            eod=tokenizer.eod,
        )
    for row in written:
        print(config.prompt + tokenizer.decode(row))
        if config.samples > 1:
            print("-" * 40)


if __name__ == "__main__":
    main()
