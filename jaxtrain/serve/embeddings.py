"""OpenAI's embeddings: hidden states of the served model behind its last layer, one vector of unit
length for each text."""

import asyncio
import base64
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.serve.answer import Limits, Numbers
from jaxtrain.serve.api import Reader
from jaxtrain.serve.worker import Worker

# Name: what it may be, of which the first is what is left out.
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "encoding_format": ("float", "base64"),
    "pooling": ("mean", "last"),
}


class Embeddings:
    """One request for embeddings.

    Raises:
      LookupError: there is no such model.
      ValueError: what is asked cannot be done, in one sentence.
    """

    streams = False

    def __init__(self, worker: Worker, reader: Reader, body: Any, numbers: Numbers, limits: Limits):
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        body = {name: value for name, value in body.items() if value is not None}
        if unknown := sorted(body.keys() - {"model", "input", "user", *_CHOICES}):
            raise ValueError(f"{unknown[0]} is not known here: leave it out")
        chosen = {name: body.get(name, known[0]) for name, known in _CHOICES.items()}
        for name, known in _CHOICES.items():
            if chosen[name] not in known:
                raise ValueError(f"{name} is {chosen[name]!r}: give {' or '.join(known)}")
        self._model, self._adapter = reader.model_of(body)
        self._rows = reader.rows(body, "input")
        if (most := max(map(len, self._rows))) > reader.longest:
            raise ValueError(
                f"input has a text of {most} tokens, which exceeds the {reader.longest} of this "
                "server"
            )
        self._chosen, self._worker, self._numbers = chosen, worker, numbers
        self._ends = time.monotonic() + limits.seconds

    async def whole(self) -> dict[str, Any]:
        engine, pooling = self._worker.engine, self._chosen["pooling"]
        vectors: list[Any] = [None] * len(self._rows)
        self._numbers.live += 1
        try:
            # A call for each group: others are answered meanwhile.
            for group in engine.groups(self._rows):
                rows = [self._rows[index] for index in group]
                call = self._worker.call(
                    lambda rows=rows: engine.embed(rows, pooling=pooling, adapter=self._adapter)
                )
                left = self._ends - time.monotonic()
                found = await asyncio.wait_for(asyncio.wrap_future(call), left)
                for index, vector in zip(group, found, strict=True):
                    vectors[index] = self._written(vector)
        finally:
            self._numbers.live -= 1
        read = sum(map(len, self._rows))
        self._numbers.read += read
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": read, "total_tokens": read}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _written(self, vector: np.ndarray) -> list[float] | str:
        if self._chosen["encoding_format"] == "float":
            return vector.tolist()
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
