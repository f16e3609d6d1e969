"""A decoder as a model of lm-evaluation-harness, in this process."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.chat import TOKENIZER_CONFIG, encode_prompt
from jaxtrain.data.tokenizers import Tokenizer, decode_shown, special_ids_of
from jaxtrain.evaluate.scoring import Row, Scorer, windows
from jaxtrain.host import extras
from jaxtrain.host.paths import json_object
from jaxtrain.run import trained
from jaxtrain.serve.api import Text
from jaxtrain.serve.engine import Engine, Request

# New tokens, where a task names no limit.
MOST = 256
# The names of that limit; the first one present counts, as in the harness.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# The defaults of transformers for drawn tokens, behind the task and the generation config.
DRAWING = {"top_k": 50, "top_p": 1.0, "min_p": 0.0}
# Options of transformers that are not offered, with the value that changes no text.
NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "use_cache": True,
}


def harness_model(
    tokenizer: Tokenizer,
    scorer: Scorer,
    engine: Engine,
    ends: Sequence[int],
    *,
    folder: str | None = None,
) -> Any:
    """Makes the model that ``lm_eval.simple_evaluate`` takes.

    Texts become the tokens that they are in HFLM, the harness's own model of transformers.

    Args:
      tokenizer: of the model.
      scorer: scores choices.
      engine: writes texts, many at once.
      ends: the tokens that end a text.
      folder: of the model or run, whose files declare the beginning token and the defaults of
        generation; None for none but the tokenizer's own.

    Raises:
      ImportError: lm_eval is not installed.
    """
    extras.load("tasks need lm_eval", "eval", "lm_eval", "lm_eval.api.model", "lm_eval.utils")
    from lm_eval.api.model import TemplateLM

    prefix, defaults = declared(folder, tokenizer)

    class Model(TemplateLM):
        eot_token_id, prefix_token_id = tokenizer.eod, prefix

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list:
            return encode_context(string, tokenizer, prefix, begins=add_special_tokens)

        def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm=False, **_: Any):
            del disable_tqdm
            rows = []
            for _, context, continuation in requests:
                tokens = (context + continuation)[-(scorer.longest + 1) :]
                rows.append(Row(tokens, min(len(continuation), len(tokens) - 1)))
            scores = [tuple(score) for score in scorer(rows)]
            for (key, *_), score in zip(requests, scores, strict=True):
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, score)
            return scores

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm=False) -> list[float]:
            del disable_tqdm
            # As the harness cuts them: a row scores as many tokens as it reads.
            cut = {"longest": scorer.longest, "stride": scorer.longest}
            rows, owners = [], []
            for number, request in enumerate(requests):
                parts = list(windows([prefix, *self.tok_encode(request.args[0])], **cut))
                rows += parts
                owners += [number] * len(parts)
            totals = np.zeros(len(requests))
            for owner, scored in zip(owners, scorer(rows), strict=True):
                totals[owner] += scored.logprob
            return totals.tolist()

        def generate_until(self, requests: Sequence[Any], disable_tqdm=False) -> list[str]:
            del disable_tqdm
            questions, last = [request.args for request in requests], frozenset(ends)
            return written(tokenizer, engine, questions, last, prefix=prefix, defaults=defaults)

    return Model()


def declared(folder: str | None, tokenizer: Tokenizer) -> tuple[int, dict[str, Any]]:
    """Returns the token before a text without a context, ``bos_token`` or else the end of a
    document, and the options of the generation config that change texts."""
    files = {} if folder is None else trained.beside(folder)
    tokens, config = (
        json_object(files.get(name, "")) for name in (TOKENIZER_CONFIG, trained.GENERATION)
    )
    token = tokens.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    begin, *_ = *getattr(tokenizer, "beginning", ()), tokenizer.eod
    read = {"repetition_penalty", *DRAWING, *NEUTRAL}
    defaults = {name: value for name, value in config.items() if name in read}
    return special_ids_of(tokenizer).get(token, begin), defaults


def encode_context(
    text: str, tokenizer: Tokenizer, prefix: int, *, begins: bool | None = None
) -> list[int]:
    """Returns the tokens of a text, behind those that begin one if ``begins``; None takes these
    unless the text spells ``prefix`` itself, as a rendered chat does."""
    ids = encode_prompt(text, tokenizer).tolist()
    begins = ids[:1] != [prefix] if begins is None else begins
    return [*getattr(tokenizer, "beginning", ()), *ids] if begins else ids


def written(
    tokenizer: Tokenizer,
    engine: Engine,
    questions: Sequence[tuple[str, dict]],
    ends: frozenset[int],
    *,
    prefix: int | None = None,
    defaults: Mapping[str, Any] = {},
) -> list[str]:
    """Returns the texts that a model writes, as HFLM would: special tokens have no text.

    Args:
      tokenizer, engine: of the model.
      questions: each context, and the task's generation options.
      ends: the tokens that end a text.
      prefix: stands for an empty context; None for the end of a document.
      defaults: options that the model's generation config has.

    Raises:
      ValueError: an option is not known here and would change results, or leaves no room.
    """
    prefix = tokenizer.eod if prefix is None else prefix
    # The end of a document ends a text where its letters spell it, too.
    spelled = [text for text, id in special_ids_of(tokenizer).items() if id == tokenizer.eod]
    rows: dict[int, tuple[list[int], Text, list[str]]] = {}
    for context, options in questions:
        until, limit, most, fields = generation_options({**defaults, **options})
        if limit >= engine.longest:
            raise ValueError(
                f"the task asks for {limit} new tokens, and the model has {engine.longest} "
                "positions for them and the context: lower max_gen_toks, or raise `longest`"
            )
        prompt = encode_context(context, tokenizer, prefix) or [prefix]
        prompt = prompt[limit - engine.longest :]
        limit = limit if most is None else most - len(prompt)
        number = engine.submit(Request(prompt, limit, seed=len(rows), ends=ends, **fields))
        stops = [*until, *spelled]
        rows[number] = [], Text(stops), stops
    while engine.is_busy:
        for event in engine.step():
            ids, text, _ = rows[event.number]
            if text.stopped or event.token in ends or event.token >= tokenizer.vocab_size:
                continue
            ids.append(event.token)
            text.add(*tokenizer.token_pieces([event.token]))
            if text.stopped and event.reason is None:
                engine.cancel(event.number)
    return [
        functools.reduce(
            lambda text, stop: text.split(stop)[0], stops, decode_shown(tokenizer, ids)
        )
        for ids, _, stops in rows.values()
    ]


def generation_options(
    options: Mapping[str, Any],
) -> tuple[list[str], int, int | None, dict[str, Any]]:
    """Reads generation options as HFLM does.

    Returns:
      The texts that end an answer, the most new tokens, the most tokens with the context (None for
      no such limit), and the fields of a request by which its tokens are drawn.

    Raises:
      ValueError: an option is not known here and would change results.
    """
    options = {name: value for name, value in options.items() if value is not None}
    until = options.pop("until", [])
    until = [text for text in ([until] if isinstance(until, str) else until) if text]
    limits = [options.pop(name) for name in LIMITS if name in options]
    most = options.pop("max_length", None)
    temperature = float(options.pop("temperature", 0))
    draws = options.pop("do_sample", temperature > 0)
    if draws and not temperature > 0:
        raise ValueError(
            "do_sample is true and temperature is 0 or left out: the harness's own model refuses "
            "that; give a temperature above 0, or do_sample: false"
        )
    cuts = {name: options.pop(name, value) for name, value in DRAWING.items()}
    fields = {"repetition_penalty": options.pop("repetition_penalty", 1.0), "temperature": 0.0}
    fields |= {"temperature": temperature, **cuts} if draws else {}
    unknown = {n: v for n, v in options.items() if n not in NEUTRAL or v != NEUTRAL[n]}
    if unknown:
        raise ValueError(f"the generation options {unknown} are not known here: leave them out")
    return until, int([*limits, MOST][0]), None if most is None else int(most), fields
