"""Write text with a trained GPT: ``python -m experiments.gpt.generate --run runs/gpt-1``."""

import dataclasses
from collections.abc import Sequence

import jax
import tyro

from jaxtrain.data import encode_prompt
from jaxtrain.host import quiet
from jaxtrain.models.config import GPTConfig
from jaxtrain.models.generate import generate
from jaxtrain.run.main import program_name
from jaxtrain.run.refusal import refusing
from jaxtrain.run.trained import load


@dataclasses.dataclass(frozen=True)
class Config:
    """Writes text with a trained GPT."""

    run: str
    """Folder of the run."""
    prompt: str = ""
    """What the text begins with; by default the beginning of a document. The tokenizer's special
    tokens may be spelled in it, such as those of a chat template."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the flags, and prints what the model writes."""
    config = tyro.cli(Config, args=arguments, prog=program_name())
    with refusing():
        quiet.start()
        model, params, tokenizer = load(config.run, config.step)
        if not isinstance(model, GPTConfig):
            raise ValueError(
                f"'{config.run}' is no run of experiments.gpt: its model is no decoder"
            )
        # A pretrained model may have more tokens than its tokenizer, which has no text for those.
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
        prompt = [tokenizer.eod, *encode_prompt(config.prompt, tokenizer).tolist()]
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
        # Together: some tokenizers drop the space that begins a text.
        print(tokenizer.decode([*prompt, *row.tolist()]))
        if config.samples > 1:
            print("-" * 40)


if __name__ == "__main__":
    main()
