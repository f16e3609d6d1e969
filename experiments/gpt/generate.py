"""Write text with a trained GPT: ``python -m experiments.gpt.generate --run runs/gpt-1``.

On several devices ``--mesh.fsdp 4 --mesh.tensor 2`` splits the weights and the cache.
"""

import dataclasses
from collections.abc import Sequence

import jax

from experiments import language
from jaxtrain.data import encode_prompt, load_template
from jaxtrain.host import output, quiet
from jaxtrain.host.least import check_least
from jaxtrain.layout import MeshShape
from jaxtrain.models import decoder
from jaxtrain.run.main import parse
from jaxtrain.run.refusal import refusing
from jaxtrain.serve.opening import mesh_for, open_decoder


@dataclasses.dataclass(frozen=True)
class Config:
    """Writes text with a trained GPT."""

    run: str
    """Folder of a run, a Hugging Face folder, or a name on its hub (ORG/NAME[@REVISION])."""
    prompt: str = ""
    """Text to continue; default: the beginning of a document. It may spell out special tokens of
    the tokenizer, such as those of a chat template."""
    chat: bool = False
    """Render the prompt as a user's message by the chat template of the run or the model."""
    tokens: int = 200
    """Most tokens to write; a text ends earlier if the model ends its document."""
    samples: int = 1
    """Number of texts to write."""
    beams: int = 1
    """Number of texts that a search for the most probable text follows; 1 searches for none."""
    temperature: float = 0.8
    """0 always takes the most probable token."""
    top_k: int | None = None
    """Draw from the k most probable tokens."""
    top_p: float | None = 0.95
    """Draw from the smallest set of tokens with this much probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have occurred become less probable."""
    seed: int = 0
    """Seed for sampling."""
    step: int | None = None
    """Which checkpoint; by default the best one."""
    mesh: MeshShape = dataclasses.field(default_factory=MeshShape)
    simulate_devices: int = 0
    """Write on this many simulated CPU devices; 0 on the real ones."""


@output.ending_unread()
def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the flags, and prints what the model writes."""
    config = parse(Config, arguments)
    with refusing(Config):
        check_least(config, samples=1, beams=1, tokens=1)
        quiet.start()
        mesh = mesh_for(config.mesh)
        for name in ("samples", "temperature", "top_k", "top_p") if config.beams > 1 else ():
            if (value := getattr(config, name)) not in (0, getattr(Config, name)):
                raise ValueError(
                    f"--{name.replace('_', '-')} {value} is for texts that are drawn, and --beams "
                    f"{config.beams} searches for one: leave either out"
                )
        opened, asked = open_decoder(config.run, mesh=mesh, step=config.step), config.prompt
        model, params, tokenizer, folder, begin = opened
        if config.chat:
            messages = [{"role": "user", "content": asked}]
            asked = load_template(folder).render(messages, add_generation_prompt=True)
        prompt = [*begin[config.chat], *encode_prompt(asked, tokenizer).tolist()]
        prompt = prompt or [tokenizer.eod]
        written = language.write(
            model,
            params,
            [prompt] * config.samples,
            rules=decoder.RULES,
            max_new_tokens=config.tokens,
            beams=config.beams,
            rng=jax.random.key(config.seed),
            temperature=config.temperature if config.beams == 1 else 0.0,
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
