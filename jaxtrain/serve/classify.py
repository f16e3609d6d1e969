"""Classes of texts over REST, in vLLM's form: a label and the probabilities of each text."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxtrain.models.generate import SHORTEST
from jaxtrain.predict.heads import Model, classes_of, run_batch, text_rows
from jaxtrain.serve.answer import Calls, Limits, Numbers
from jaxtrain.serve.api import MOST, checked
from jaxtrain.serve.worker import Worker


class Classifier:
    """What a worker owns where it writes nothing: a model with a head of classes."""

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

    def classify(self, texts: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
        """Returns the class of each text, and the tokens that were read."""
        rows = text_rows(self.model, texts, [""] * len(texts))
        return list(classes_of(self.model, rows)), sum(map(rows.size, range(len(rows))))


class Classification(Calls):
    """One request for the classes of texts.

    Raises:
      LookupError: there is no such model.
      ValueError: what is asked cannot be done, in one sentence.
    """

    def __init__(self, worker: Worker, name: str, body: Any, numbers: Numbers, limits: Limits):
        super().__init__(worker, numbers, limits)
        body = checked(body, {"model", "input", "user"})
        if body.get("model", name) != name:
            raise LookupError(f"model is {body['model']!r}: ask for {name}")
        texts = body.get("input")
        self._texts, self._name = [texts] if isinstance(texts, str) else texts, name
        is_list = isinstance(self._texts, list) and 1 <= len(self._texts) <= MOST
        if not is_list or not all(isinstance(text, str) for text in self._texts):
            raise ValueError(f"input must be a text, or a list of at most {MOST} texts")

    async def whole(self) -> dict[str, Any]:
        model, read, data = self._worker.engine.model, 0, []
        starts = range(0, len(self._texts), model.size)
        parts = [self._texts[start : start + model.size] for start in starts]
        async for found, tokens in self.each(self._worker.engine.classify, parts):
            read += tokens
            for each in found:
                shares = list(each["probabilities"].values())
                told = {"index": len(data), "label": each["label"], "probs": shares}
                data.append(told | {"num_classes": len(shares)})
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
