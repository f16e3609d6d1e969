"""OpenAI's embeddings: hidden states of the served model behind its last layer, one vector of unit
length for each text."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.serve.answer import Calls, Limits, Numbers
from jaxtrain.serve.api import Reader, checked
from jaxtrain.serve.worker import Worker

# Name: what it may be, of which the first is what is left out.
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "encoding_format": ("float", "base64"),
    "pooling": ("mean", "last"),
}


class Embeddings(Calls):
    """One request for embeddings.

    Raises:
      LookupError: there is no such model.
      ValueError: what is asked cannot be done, in one sentence.
    """

    def __init__(self, worker: Worker, reader: Reader, body: Any, numbers: Numbers, limits: Limits):
        super().__init__(worker, numbers, limits)
        body = checked(body, {"model", "input", "user", *_CHOICES})
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
        self._chosen = chosen

    async def whole(self) -> dict[str, Any]:
        engine, pooling = self._worker.engine, self._chosen["pooling"]
        vectors: list[Any] = [None] * len(self._rows)

        def embed(group: Sequence[int]) -> Any:
            rows = [self._rows[index] for index in group]
            return zip(
                group, engine.embed(rows, pooling=pooling, adapter=self._adapter), strict=True
            )

        async for found in self.each(embed, engine.groups(self._rows)):
            for index, vector in found:
                vectors[index] = self._written(vector)
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
