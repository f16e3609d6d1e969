"""Filling in masked tokens of text."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import language
from experiments.bert import common
from jaxtrain import data
from jaxtrain.data.enclosed import MASK, special_id
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.state import TrainState

HEAD, METADATA = "tokens", {}
PREDICTED = {"places": "M", "targets": "M", "mask": "M"}


def open_rows(config: Any) -> tuple[Any, data.Split, None]:
    """The config, and the text."""
    return config, common.split_of(config), None


def text_of(
    config: Any, model: EncoderConfig, split: data.Split, tokenizer: data.SubwordTokenizer
) -> common.Text:
    """Rows with masked tokens: held-out ones always with the same."""
    store = data.cached_store(split, tokenizer)
    corpora = store.corpus("train"), store.corpus("held_out")
    train, held_out = (common.fragments(config, model, tokenizer, corpus) for corpus in corpora)
    masking = {
        "mask": special_id(tokenizer, MASK),
        "vocab_size": tokenizer.vocab_size,
    }
    masking["rate"] = config.mask_rate
    return common.Text(
        tokenizer,
        data.MaskedTokens(train, **masking, seed=config.seed),
        data.MaskedTokens(data.spread(held_out, config.held_out_rows), **masking, seed=0),
        tuple(len(corpus.starts) for corpus in corpora),
        tuple(corpus.fingerprint for corpus in corpora),
        f"{config.mask_rate:.0%} of the tokens are to be filled in",
    )


def conclude(
    config: Any,
    model: EncoderConfig,
    text: common.Text,
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says how many masked tokens were right, beside always the same guess, and shows some."""
    rows = [text.held_out[i] for i in range(len(text.held_out))]
    targets = np.concatenate([row["targets"][row["mask"] > 0] for row in rows])
    often = np.bincount(targets).max() / len(targets)
    lines = [
        f"held-out: {means['accuracy']:.1%} of {len(targets):,} masked tokens right, loss "
        f"{language.nats_of(means):.3f} nats; always the most frequent token is right in "
        f"{often:.1%}"
    ]
    if not config.examples:
        return lines
    lines += ["", "masked in held-out text, what stood there, and what it guessed:", ""]
    for row, guess_T in common.guesses(config, model, text, state):
        place, target = int(row["places"][0]), int(row["targets"][0])
        before, after, was, said = (
            text.tokenizer.decode(ids)
            for ids in (
                row["tokens"][max(1, place - 10) : place],
                row["tokens"][place + 1 : min(place + 8, int(row["segments"].sum()) - 1)],
                [target],
                [int(guess_T[place])],
            )
        )
        context = " ".join(f"{before}____{after}".split())
        lines.append(f"  {context[:68]:68}  {was.strip()!r:14} {said.strip()!r}")
    return lines
