"""Train a GPT by rewards of its own answers: ``python -m experiments.grpo --init-from runs/gpt-1``.

By default it completes lines of the standard library's source that end at an opening bracket, and
an answer's reward is 1 where the line is Python by ``ast``, and 0 elsewhere. Of a GPT of 2 layers
that 600 small steps have taught, 27 % of the held-out lines are right, and 73 % after 40 steps of
64 answers (three seeds; ``python -m experiments.studies samplers``), a minute each on 2 CPU cores.
With ``--data sums`` it adds numbers of two digits, "47+38=", and the reward is 1 for the right sum.

    python -m experiments.gpt
    python -m experiments.grpo --init-from runs/gpt-1
    python -m experiments.grpo --init-from runs/gpt-1 --sampler bfloat16 --grpo.cap 2
    python -m experiments.grpo --data sums --init-from RUN  # of experiments.gpt --data sums
"""

import ast
import dataclasses
import functools
import itertools
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import jaxtrain as jt
from experiments import language
from jaxtrain import data
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.group_policy import GroupPolicy, Rewarded
from jaxtrain.finetune.preferences import policy_and_reference
from jaxtrain.host.least import check_least
from jaxtrain.methods.population import Population
from jaxtrain.methods.rollouts import SAMPLERS, Rollouts, rollouts
from jaxtrain.models import decoder, decoding, exact
from jaxtrain.models.generate import whole_rows
from jaxtrain.run import options
from jaxtrain.state import TrainState

HELD_OUT, MOST, SHOWN = 256, 20_000, 6
NEWLINE = ord("\n")
# Devices judge at the same time, and filters of warnings are the process's.
_PARSING = threading.Lock()
# Of a line, up to an opening bracket outside of strings and comments, and the rest.
OPENED = re.compile(rb"^([ \t]*[^\n#'\"]*?[\(\[\{])([^\n]+)$", re.M)
ASKED = re.compile(rb"^\d+\+\d+=", re.M)


@dataclasses.dataclass(frozen=True)
class Config(language.Config):
    """Trains a GPT by rewards of its own answers to prompts."""

    form = "decoder"
    default_tokenizer = "bytes"

    model: Literal[tuple(decoder.PRESETS)] = "tiny"  # type: ignore[valid-type]

    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=lambda: options.OptimizerOptions(
            name="adamw", learning_rate=1e-4, schedule="constant", weight_decay=0.0
        )
    )
    grpo: GroupPolicy = dataclasses.field(default_factory=GroupPolicy)
    data: str = "python"
    """Text that prompts are taken from: lines of Python up to an opening bracket, which the answer
    has to complete so that they parse, or "sums", which it has to add."""
    sampler: Literal[SAMPLERS] = "same"  # type: ignore[valid-type]
    """The model that answers: the same as trains; exact, whose log-probabilities have the bits of
    training's; or the same with its parameters rounded to bfloat16."""
    held_out_bytes: int = 300_000
    """Bytes of held-out text to take prompts from, in whole documents."""
    prompt_tokens: int = 64
    """Bytes of a prompt, at most."""
    new_tokens: int = 32
    """Bytes of an answer, at most; a line's end ends it."""

    steps: int = 60
    global_batch: int = 8
    """Prompts per step, each of which is answered several times (--grpo.size)."""


class Asked(NamedTuple):
    """A task: prompts made of a corpus, and the verdict of a line."""

    prompts: Callable[[Config, Iterable[bytes]], Iterator[bytes]]
    is_right: Callable[[str], bool]


def opened_lines(config: Config, texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields what stands before and with the first opening bracket of lines that are Python by
    themselves, with no more bytes behind it than an answer may have."""
    for text in texts:
        for found in OPENED.finditer(text):
            begin, end = found.start() - 1, found.end(1)
            fits = begin >= 0 and end - begin <= config.prompt_tokens
            if fits and len(found[2]) < config.new_tokens and is_python(_text(found[0])):
                yield text[max(0, end - config.prompt_tokens) : end]


def is_python(line: str) -> bool:
    """Whether a line is a statement, or begins a block, by itself.

    >>> [is_python(line) for line in ("  f(1)", "if f(1):", "f(1", "# f(1)", "else:")]
    [True, True, False, False, False]
    """
    line = line.strip()
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes
        try:
            return bool(ast.parse(line + " pass" * line.endswith(":")).body)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return False


def sums(config: Config, texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields lines of additions up to their result, behind the end of another line."""
    del config
    for text in texts:
        yield from (b"\n" + found[0] for found in ASKED.finditer(text))


def is_sum(line: str) -> bool:
    """Whether a line is a right addition.

    >>> [is_sum(line) for line in ("47+38=85", "47+38=8", "47+38=", "x")]
    [True, False, False, False]
    """
    found = re.fullmatch(r"(\d+)\+(\d+)=(\d+)", line)
    return found is not None and int(found[1]) + int(found[2]) == int(found[3])


def task(config: Config) -> Asked:
    """Returns the task that the data asks for."""
    return Asked(sums, is_sum) if config.data == "sums" else Asked(opened_lines, is_python)


def build(config: Config) -> jt.Experiment:
    """Builds the experiment."""
    text = data.open_data(config.data, field=config.field, **language.tokenizer_options(config))
    tokenizer = text.tokenizer
    if not isinstance(tokenizer, data.ByteTokenizer) or list(text.stores) != [""]:
        raise ValueError(
            f"--data is {config.data}: prompts are bytes of one source; leave --tokenizer out, and "
            "give --data one text and --init-from a model of bytes"
        )
    rows, train = {}, text.stores[""].corpus()
    for name, corpus, most in (
        ("train", train, MOST),
        ("held_out", text.held_out(config.held_out_bytes)[""], HELD_OUT),
    ):
        texts = (document.text for document in corpus.documents(tokenizer))
        rng = np.random.default_rng([config.seed, name == "train"])
        rows[name] = prompts(config, texts, rng, most)
        if len(rows[name]) < config.global_batch:
            raise ValueError(
                f"--data {config.data} has {len(rows[name])} prompts ({name}), and a batch "
                f"{config.global_batch}: give more text, or a smaller --global-batch"
            )
    config = config.of_rows(rows["train"])
    step = outline(config, vocab_size=tokenizer.vocab_size)
    about = f"{len(rows['train']):,} to train on, {len(rows['held_out']):,} held out"
    fingerprints = {"text": train.fingerprint}
    model = _model(config, tokenizer.vocab_size)
    how = _rollouts(config, model, step.policy)
    return step.with_(
        **config.batches_of(rows["train"], rows["held_out"]),
        **language.text_fields(config, step, tokenizer, fingerprints),
        facts=language.facts(config, model, {"prompts": f"{config.data}: {about}"}),
        conclude=functools.partial(conclude, config, how, rows["held_out"]),
    )


def outline(config: Config, *, vocab_size: int | None = None) -> jt.Experiment:
    """Builds the experiment without its prompts."""
    config.grpo.checked()
    check_least(config, prompt_tokens=2, new_tokens=1)
    for name in ("population", "dropout", "attention_dropout", "also_held_out"):
        if (value := getattr(config, name)) not in (None, Population()):
            raise ValueError(
                f"`{name}` is {value}, and a run that learns from rewards has none: leave it out"
            )
    if config.sampler == "exact" and config.quantize is not None:
        raise ValueError(
            f"--quantize is {config.quantize} and --sampler exact: the gradient beside exact "
            "log-probabilities does not go through packed kernels; leave one of them out"
        )
    model = _model(config, vocab_size or language.vocab_size(config))
    longest = config.prompt_tokens + config.new_tokens
    if (most := decoding.longest_row(model)) is not None and longest > most:
        raise ValueError(
            f"--prompt-tokens {config.prompt_tokens} and --new-tokens {config.new_tokens} exceed "
            f"the {most} positions in which the model writes: give less of either"
        )
    count = config.global_batch * config.grpo.size
    kind = jax.ShapeDtypeStruct
    batch = {
        "tokens": kind((config.global_batch, config.prompt_tokens), np.int32),
        "lengths": kind((config.global_batch,), np.int32),
    }
    flops = decoder.flops_per_token(dataclasses.replace(model, seq_len=longest)) * longest
    experiment = language.outline(
        config,
        "grpo",
        model,
        batch,
        items_per_step=count * config.new_tokens,
        flops_per_step=float(count * flops),
        derived=lambda means: {},
        beside_loss=("reward", "sampler_gap"),
        best_metric="reward",
        best_mode="max",
    )
    change = Rewarded(
        functools.partial(decoder.log_probs, model),
        config.grpo,
        frozen=experiment.task.freeze,
        longest=config.new_tokens,
    )
    how = _rollouts(config, model, experiment.policy)
    changed = apply(experiment, change, method=rollouts(how, config.grpo))
    if config.sampler == "exact":
        changed = changed.with_(stages=None, loss_fn=exact_loss(change, model))
    return changed


def exact_loss(change: Rewarded, model: decoder.DecoderConfig) -> Callable[..., jt.WeightedLoss]:
    """Makes the loss whose log-probabilities have the bits of an exact sampler's."""

    def loss_fn(params: Any, batch: Mapping[str, jax.Array], rng: Any) -> jt.WeightedLoss:
        ours, theirs = policy_and_reference(params)
        still = None
        if change.how.has_reference:
            x = decoder.run(model, theirs, batch)
            still = jax.lax.stop_gradient(decoder.log_probs(model, theirs, x, batch))
        return change.loss(exact.log_probs(model, ours, batch), still, batch)

    return loss_fn


def prompts(
    config: Config, texts: Iterable[bytes], rng: np.random.Generator, most: int
) -> list[dict[str, np.ndarray]]:
    """Returns rows of prompts: at most so many, drawn from those of a task."""
    every, rows = list(task(config).prompts(config, texts)), []
    for i in sorted(rng.choice(len(every), min(most, len(every)), replace=False)):
        prompt = every[i]
        tokens = np.zeros(config.prompt_tokens, np.int32)
        tokens[: len(prompt)] = np.frombuffer(prompt, np.uint8)
        rows.append({"tokens": tokens, "lengths": np.int32(len(prompt))})
    return rows


def _model(config: Config, vocab_size: int) -> decoder.DecoderConfig:
    """The model without dropout, which one to begin with may have been trained with: what answers
    has none, and what learns would be another policy."""
    return language.model_config(config, vocab_size, dropout=0.0, attention_dropout=0.0)


def _rollouts(config: Config, model: decoder.DecoderConfig, policy: jt.Policy) -> Rollouts:
    reward = functools.partial(rewards, task(config).is_right)
    given = {"sampler": config.sampler, "policy": policy}
    return Rollouts(model, reward, end=NEWLINE, longest=config.new_tokens, **given)


def rewards(
    is_right: Callable[[str], bool],
    tokens_BP: np.ndarray,
    lengths_B: np.ndarray,
    new_BN: np.ndarray,
) -> np.ndarray:
    """Returns 1 for each answer that has ended and with which the prompt's last line is right."""
    rows = zip(tokens_BP, lengths_B, new_BN, strict=True)
    lines = (line_of(prompt[:length], new) for prompt, length, new in rows)
    return np.array([line is not None and is_right(line) for line in lines], np.float32)


def line_of(prompt_P: np.ndarray, new_N: np.ndarray) -> str | None:
    """Returns the line that a prompt begins and an answer ends; None where it does not end."""
    ends = np.flatnonzero(new_N == NEWLINE)
    if not len(ends) or new_N[: ends[0]].max(initial=0) > 255:
        return None
    both = np.concatenate([prompt_P, new_N[: ends[0]]]).astype(np.uint8).tobytes()
    return _text(both.rpartition(b"\n")[2])


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")


def conclude(
    config: Config, how: Rollouts, rows: list, state: TrainState, means: Mapping[str, float]
) -> list[str]:
    """Says how many answers to held-out prompts are right, and shows some."""
    shown, mesh = rows[:SHOWN], jax.tree.leaves(state.params)[0].sharding.mesh
    # All devices that split rows have some.
    asked = list(itertools.islice(itertools.cycle(shown), whole_rows(len(shown), mesh)))
    batch = {name: np.stack([row[name] for row in asked]) for name in shown[0]}
    write = lambda *given: how.answer(*given, jax.random.key(0)).tokens  # noqa: E731
    with jax.set_mesh(mesh):
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        new = jax.jit(write, out_shardings=whole)(state.params, batch)
    lines = [f"held-out answers that are right: {means['reward']:.1%}", "", "some of them:", ""]
    is_right = task(config).is_right
    for row, answer in zip(shown, np.asarray(new)[: len(shown)], strict=True):
        line = line_of(row["tokens"][: row["lengths"]], answer)
        if line is None:
            lines.append("  - (an answer that does not end)")
        else:
            lines.append(f"  {'+' if is_right(line) else '-'} {line!r}")
    return lines


if __name__ == "__main__":
    jt.main(Config, build)
