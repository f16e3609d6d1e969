"""Stores what a trained decoder says of text, for students that learn from it:

    python -m experiments.teach --distill.teacher runs/gpt-1 --distill.temperature 1 \\
        --data STORE --seq-len 128 --top 16 --out answers/
    python -m experiments.gpt --distill.stored answers/ --distill.temperature 1 \\
        --data STORE --seq-len 128 --layers 2 --width 64

A position takes 4 bytes for each of K tokens and 2 (float16) or 4 for each of K + 1 logarithms.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments import gpt, language
from jaxtrain import data
from jaxtrain.data.taught import about_rows, write_answers
from jaxtrain.host.memory import human_bytes
from jaxtrain.models import decoder
from jaxtrain.ops.numerics import MASKED
from jaxtrain.run.main import parse
from jaxtrain.run.refusal import refusing


@dataclasses.dataclass(frozen=True)
class Config(gpt.Config):
    """Stores a teacher's log-probabilities of text, beside which students train."""

    out: str = "answers"
    """The folder to write, on a disk."""
    top: int = 16
    """K: the most probable tokens that are stored of a position; of all others, their sum."""
    dtype: Literal["float16", "float32"] = "float16"
    """Of the stored log-probabilities."""


def main(config: Config) -> None:
    """Writes the folder and prints its size."""
    if config.teacher is None:
        raise ValueError("--distill.teacher is not given: it says whose answers are stored")
    text = data.open_data(config.data, field=config.field, **language.tokenizer_options(config))
    language.check_same_tokens(config.teacher, text.tokenizer)
    model = config.teacher.model
    K, V, size = config.top, model.vocab_size, config.global_batch
    if not 1 <= K <= V:
        raise ValueError(f"`top` is {K}: give 1 to {V}, the tokens that there are")
    T, temperature = config.seq_len or model.seq_len, config.distill.numbers()["temperature"]
    model = dataclasses.replace(model, seq_len=T)
    rows = text.rows(T, config.packing)
    about = about_rows(rows, text.tokenizer.fingerprint) | {"top": K, "temperature": temperature}
    params = jax.tree.map(np.asarray, config.teacher.weights(model))
    answer = jax.jit(functools.partial(answers, model, K, temperature))

    def parts():
        for start in range(0, len(rows), size):
            indices = [min(i, len(rows) - 1) for i in range(start, start + size)]
            batch = jax.tree.map(lambda *x: np.stack(x), *(rows[i] for i in indices))
            yield tuple(x[: len(rows) - start] for x in jax.device_get(answer(params, batch)))

    written = write_answers(config.out, about, parts(), config.dtype)
    print(f"{config.out}: {len(rows):,} rows of {T} positions, {human_bytes(written)}")


def answers(model: decoder.DecoderConfig, K: int, temperature: float, params, batch):
    """The K most probable tokens [B, T, K], their log-probabilities and that of all others [B, T,
    K + 1], which lie below float16's least number where there is none."""
    given = {name: batch[name] for name in ("segments", "positions")}
    logits_BTV = decoder.logits(model, params, batch["tokens"], **given)
    log_p_BTV = jax.nn.log_softmax(logits_BTV[..., : model.vocab_size] / temperature)
    top_BTK, ids_BTK = jax.lax.top_k(log_p_BTV, K)
    others_BTV = jnp.put_along_axis(log_p_BTV, ids_BTK, MASKED, -1, inplace=False)
    rest_BT1 = jax.nn.logsumexp(others_BTV, axis=-1, keepdims=True)
    return ids_BTK, jnp.concatenate([top_BTK, jnp.maximum(rest_BT1, -6e4)], -1)


if __name__ == "__main__":
    with refusing(Config):
        main(parse(Config))
