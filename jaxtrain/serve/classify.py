"""Classes, scores and labels of texts, and of pairs of them, over REST, in vLLM's form: a label and
the probabilities of each."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxtrain.models.generate import SHORTEST
from jaxtrain.predict.heads import Model, classes_of, run_batch, text_rows
from jaxtrain.serve.answer import Calls, Limits, Numbers
from jaxtrain.serve.api import MOST, check_model, checked
from jaxtrain.serve.worker import Worker


class Classifier:
    """What a worker owns where it writes nothing: a model with a head of rows."""

    is_busy = False

    def __init__(self, model: Model):
        self.model = model

    def warm_up(self) -> None:
        """Compiles the program of each length that texts are padded to."""
        (row,) = text_rows(self.model, ["."], [""])
        length = SHORTEST
        while length < 2 * self.model.length:
            run_batch(self.model, [row] * self.model.size, length)
            length *= 2

    def classify(self, given: Sequence[tuple[str, str]]) -> tuple[list[dict[str, Any]], int]:
        """Returns the class, score or labels of each text and second text, which may be empty, and
        the tokens that were read."""
        rows = text_rows(self.model, *zip(*given, strict=True))
        return list(classes_of(self.model, rows)), sum(map(rows.size, range(len(rows))))


class Classification(Calls):
    """One request for the classes of texts or pairs.

    Raises:
      LookupError: there is no such model.
      ValueError: what is asked cannot be done, in one sentence.
    """

    def __init__(self, worker: Worker, name: str, body: Any, numbers: Numbers, limits: Limits):
        super().__init__(worker, numbers, limits)
        body = checked(body, {"model", "input", "user"})
        check_model(body, (name,))
        given = body.get("input")
        given = given if isinstance(given, list) else [given]
        if not 1 <= len(given) <= MOST:
            raise ValueError(f"input has {len(given)} texts: give from 1 to {MOST}")
        self._given, self._name = list(map(_text_and_pair, given)), name

    async def whole(self) -> dict[str, Any]:
        model, read, data = self._worker.engine.model, 0, []
        starts = range(0, len(self._given), model.size)
        parts = [self._given[start : start + model.size] for start in starts]
        async for found, tokens in self.each(self._worker.engine.classify, parts):
            read += tokens
            for each in found:
                told = {n: x for n, x in each.items() if n in ("label", "labels", "score")}
                if (shares := each.get("probabilities")) is not None:
                    told |= {"probs": [*shares.values()], "num_classes": len(shares)}
                data.append({"index": len(data)} | told)
        self._numbers.read += read
        return {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self._name,
            "labels": model.classes,
            "data": data,
            "usage": {"prompt_tokens": read, "completion_tokens": 0, "total_tokens": read},
        }


def _text_and_pair(given: Any) -> tuple[str, str]:
    """A text and a second one, "" where there is none, as rows of a file name them."""
    row = {"text": given} if isinstance(given, str) else given
    names = {"text", "text_pair"}
    if not isinstance(row, dict) or "text" not in row or row.keys() - names:
        raise ValueError(
            "input must be a text, an object with text and text_pair, or a list of such"
        )
    if not all(isinstance(each, str) for each in row.values()):
        raise ValueError("text and text_pair must be texts")
    return row["text"], row.get("text_pair", "")
