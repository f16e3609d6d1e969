"""A decoder as a model of lm-evaluation-harness, in this process."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.data.tokenizers import Tokenizer
from jaxtrain.evaluate.scoring import Row, Scorer, windows
from jaxtrain.host import extras
from jaxtrain.serve.api import Text
from jaxtrain.serve.engine import Engine, Request

# Tokens to write where a task does not say.
MOST = 256


def harness_model(tokenizer: Tokenizer, scorer: Scorer, engine: Engine, ends: Sequence[int]) -> Any:
    """Makes the model that ``lm_eval.simple_evaluate`` takes.

    Choices are scored by ``scorer``, and texts are written by ``engine``, many at once, up to
    one of ``ends``.

    Raises:
      ImportError: lm_eval is not installed.
    """
    extras.load("tasks need lm_eval", "eval", "lm_eval", "lm_eval.api.model", "lm_eval.utils")
    from lm_eval.api.model import TemplateLM

    class Model(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return tokenizer.eod

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list:
            del add_special_tokens
            return tokenizer.encode(string).tolist()

        def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm=False, **_: Any):
            del disable_tqdm
            rows = []
            for _, context, continuation in requests:
                tokens = (context + continuation)[-(scorer.longest + 1) :]
                rows.append(Row(tokens, min(len(continuation), len(tokens) - 1)))
            found = [tuple(each) for each in scorer(rows)]
            for (key, *_), each in zip(requests, found, strict=True):
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, each)
            return found

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm=False) -> list[float]:
            del disable_tqdm
            # As the harness cuts them: a row scores as many tokens as it reads.
            cut = {"longest": scorer.longest, "stride": scorer.longest}
            rows, owners = [], []
            for number, request in enumerate(requests):
                tokens = [tokenizer.eod, *self.tok_encode(request.args[0])]
                those = list(windows(tokens, **cut))
                rows += those
                owners += [number] * len(those)
            totals = np.zeros(len(requests))
            for owner, scored in zip(owners, scorer(rows), strict=True):
                totals[owner] += scored.logprob
            return totals.tolist()

        def generate_until(self, requests: Sequence[Any], disable_tqdm=False) -> list[str]:
            del disable_tqdm
            asked = [request.args for request in requests]
            return written(tokenizer, engine, asked, frozenset(ends))

    return Model()


def written(
    tokenizer: Tokenizer, engine: Engine, asked: Sequence[tuple[str, dict]], ends: frozenset[int]
) -> list[str]:
    """Returns what the model writes after each context, by the harness's options, up to
    one of ``ends``.

    Raises:
      ValueError: for an option that is not known here, which would change results.
    """
    texts, found = {}, {}
    for context, options in asked:
        options = dict(options)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else [each for each in until if each]
        most = options.pop("max_gen_toks", None) or options.pop("max_tokens", None) or MOST
        drawn = options.pop("do_sample", False)
        temperature = float(options.pop("temperature", 1.0 if drawn else 0.0)) if drawn else 0.0
        options.pop("temperature", None)
        cuts = {name: options.pop(name) for name in ("top_k", "top_p", "min_p") if name in options}
        if options:
            raise ValueError(f"the task's generation options {sorted(options)} are not known here")
        most = min(int(most), engine.longest - 1)
        prompt = tokenizer.encode(context).tolist() or [tokenizer.eod]
        prompt = prompt[-(engine.longest - most) :]
        request = Request(prompt, most, temperature, seed=len(found), ends=ends, **cuts)
        number = engine.submit(request)
        texts[number], found[number] = Text(until), ""
    while engine.is_busy:
        for event in engine.step():
            text = texts[event.number]
            if text.stopped:
                continue
            (piece,) = tokenizer.token_pieces([event.token])
            piece = b"" if event.token in ends else piece
            found[event.number] += text.add(piece, last=event.reason is not None)
            if text.stopped and event.reason is None:
                engine.cancel(event.number)
    return list(found.values())
