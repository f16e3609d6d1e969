"""What each kind of model predicts: records of a file in, values for lines of JSON out.

Shapes: B rows of a batch, T positions of a row, C classes, W words, V vocabulary.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain import data, hf
from jaxtrain.data.enclosed import QuestionRows, TextRows, WordRows, best_answers
from jaxtrain.data.images import SUFFIXES
from jaxtrain.data.sources import find_files, rows_in
from jaxtrain.data.tokenizers import decode_shown
from jaxtrain.hf.opening import Opened, ends_of, labels_of
from jaxtrain.host import least
from jaxtrain.host.paths import as_path, is_folder
from jaxtrain.models.decoding import check_positions, unscaled
from jaxtrain.models.encoder import OF_ROWS
from jaxtrain.models.generate import beam_search, by_length, generate, padded_length, whole_rows
from jaxtrain.run import trained
from jaxtrain.sharding.placement import UnevenWarning

# Records that are read before they are sorted by length and predicted.
RECORDS = 4096
Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that is open, and how its rows are read.

    Args:
      mesh: where its parameters lie.
      rows: rows of a batch; rounded up to what splits over the mesh.
      seq_len: most tokens of a row; None for the model's own.
      field: of a text to classify.
      stride: tokens of a long context that two neighbouring rows of a question share; None takes
        128, or a third of a row where that is less.
      unanswerable: whether a question may have no answer.
      max_tokens, beams: of a target that is written.
    """

    opened: Opened
    mesh: Mesh
    rows: int = 16
    seq_len: int | None = None
    field: str = "text"
    stride: int | None = None
    unanswerable: bool = False
    max_tokens: int | None = None
    beams: int = 1

    @property
    def kind(self) -> str | None:
        """The kind of head; None of a model that has one kind alone."""
        return getattr(self.opened.model, "head", None)

    @property
    def size(self) -> int:
        """Rows of a batch."""
        return whole_rows(self.rows, self.mesh)

    @property
    def length(self) -> int:
        """Most tokens of a row."""
        model = self.opened.model
        longest = getattr(model, "source_len", None) or model.seq_len
        if (self.seq_len or 0) > longest and model.positions == "learned":
            raise ValueError(
                f"rows of {self.seq_len} tokens are asked for, and the model has {longest} "
                "positions: ask for no more"
            )
        check_positions(model, self.seq_len or 0)
        return self.seq_len or unscaled(model, longest)

    @functools.cached_property
    def classes(self) -> list[str]:
        """The names of classes, labels or tags; of those that have none, numbers."""
        return labels_of(self.opened.folder, self.opened.model)

    @functools.cached_property
    def run(self) -> Callable:
        """The compiled ``(params, batch) -> logits``."""
        _, module = trained.FORMS[trained.form_of(self.opened.model)]
        return jax.jit(functools.partial(module.logits, self.opened.model))


class Head(NamedTuple):
    """What a kind of model predicts.

    Args:
      fields: what a record must have.
      gold: the field of what is right, where that is known.
      predict: ``(model, records) -> a value for each``.
      options: the fields of a :class:`Model` that this reads and others do not.
    """

    fields: tuple[str, ...]
    gold: str
    predict: Callable[[Model, Sequence[Record]], Iterable[dict[str, Any]]]
    options: tuple[str, ...] = ("seq_len",)


def head_of(model: Model) -> Head:
    """Returns what a model predicts; raises ValueError where it predicts nothing of rows."""
    config = model.opened.model
    kind = trained.form_of(config)
    kind = getattr(config, "head", kind) if kind != "vit" or config.head == "none" else kind
    of_answers = "seq_len", "stride", "unanswerable"
    known = {
        **dict.fromkeys(OF_ROWS, Head((model.field,), "label", classify, ("seq_len", "field"))),
        "tags": Head(("tokens",), "tags", tag),
        "spans": Head(("question", "context"), "answers", answer, of_answers),
        "encoder-decoder": Head(("source",), "target", write, ("seq_len", "max_tokens", "beams")),
        **dict.fromkeys(("vit", "convnet"), Head(("image",), "label", classify_images, ())),
    }
    if kind not in known:
        raise ValueError(
            f"the model in '{model.opened.folder}' has the head {kind!r}, which predicts nothing "
            f"of a row: give one of {', '.join(OF_ROWS)}, tags or spans, an encoder-decoder, or "
            "images' classes"
        )
    return known[kind]


def check_read(model: Model, options: Any, fields: Mapping[str, str]) -> None:
    """Refuses options of a command that the head of its model does not read: ``fields`` has by the
    name of each the field of the :class:`Model` that it gives."""
    read = head_of(model).options
    for name, value in least.given(options).items():
        if name in fields and fields[name] not in read:
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}, which the head of the model in "
                f"'{model.opened.folder}' does not read: leave it out"
            )


def predictions(model: Model, path: str) -> Iterator[dict[str, Any]]:
    """Yields what a model predicts of each row of a file; some of the rows are in memory."""
    head = head_of(model)
    records, folder = records_of(path, head.fields), as_path(path)
    named = "image" in head.fields and is_folder(folder)
    while part := list(itertools.islice(records, RECORDS)):
        for row, found in zip(part, head.predict(model, part), strict=True):
            yield ({"image": row["image"].relative_to(folder).as_posix()} if named else {}) | found


def records_of(path: str, fields: Sequence[str]) -> Iterator[Record]:
    """Yields the records of a file, which have some fields; each image of an .npz is one, and each
    below a folder, whose class is the folder that it is in."""
    if "image" in fields and is_folder(folder := as_path(path)):
        if not (names := find_files(folder, SUFFIXES)):
            raise ValueError(f"'{path}' holds no images: give a folder of some, or a file of rows")
        for name in names:
            yield {"image": folder / name, "label": name.rpartition("/")[0].partition("/")[0]}
        return
    if path.endswith(".npz") and "image" in fields:
        images, labels_N = data.read_images(path)
        if "label" in fields and labels_N is None:
            raise ValueError(f"'{path}' has no labels: give an .npz with images and labels")
        labels = [None] * len(images) if labels_N is None else labels_N.tolist()
        for image, label in zip(images, labels, strict=True):
            yield {"image": image, "label": label}
        return
    for row in rows_in(path, fields):
        # A path in a file is one from the file's folder.
        is_path = "image" in fields and isinstance(row["image"], str)
        yield row | ({"image": as_path(path).parent / row["image"]} if is_path else {})


def classify(model: Model, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """The class, score or labels of each text, or pair of texts."""
    parts = ([str(row.get(name) or "") for row in records] for name in (model.field, "text_pair"))
    return classes_of(model, text_rows(model, *parts))


def text_rows(model: Model, texts: Sequence[str], pairs: Sequence[str]) -> TextRows:
    """Texts, or pairs of them, as the model reads them."""
    typed = _is_typed(model)
    return TextRows(model.opened.tokenizer, texts, pairs, model.length, typed=typed)


def classes_of(model: Model, rows: Any) -> Iterator[dict[str, Any]]:
    """The class of each row of texts or images; the score or the labels of each row of texts."""
    return (_class(model, logits_C) for logits_C in outputs(model, rows))


def classify_images(model: Model, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """The class of each image: an array, a file, or the bytes of one."""
    found, folder = [row["image"] for row in records], model.opened.folder
    images, shape = found, model.opened.model.image
    if not isinstance(found[0], np.ndarray):
        images = data.images_of(found, [f"'{each}'"[:200] for each in found], shape)
    elif found[0].shape != shape:
        own, wanted = ("x".join(map(str, each)) for each in (found[0].shape, shape))
        raise ValueError(f"the images are {own}, and the model's are {wanted}: give such")
    pixels = hf.pixels(folder)
    if trained.is_trained(folder):
        pixels = trained.stored(folder).get("pixels")
    rows = data.Images(images, np.zeros(len(found), np.int32))
    rows = rows if pixels is None else data.Normalized(rows, **pixels)
    return classes_of(model, rows)


def tag(model: Model, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """The tag of each word, None for one beyond the row; and spans, where tags begin with B-."""
    for row in records:
        if not isinstance(row["tokens"], list) or not all(
            isinstance(x, str) for x in row["tokens"]
        ):
            raise ValueError(f"the row {str(row)[:80]} has tokens that are no list of words")
    rows = WordRows(model.opened.tokenizer, [row["tokens"] for row in records], model.length)
    for index, logits_TC in enumerate(outputs(model, rows)):
        words, shares_WC = records[index]["tokens"], softmax(logits_TC[rows.places[index]])
        tags, shares = [None] * len(words), [None] * len(words)
        for word, shares_C in zip(rows.words[index].tolist(), shares_WC, strict=True):
            tags[word], shares[word] = model.classes[shares_C.argmax()], float(shares_C.max())
        found = {"tags": tags, "probabilities": shares}
        if any(name.startswith("B-") for name in model.classes):
            spans = spans_of(tags)
            told = [
                each | {"text": " ".join(words[each["first"] : each["last"] + 1])} for each in spans
            ]
            found["spans"] = told
        yield found


def spans_of(tags: Sequence[str | None]) -> list[dict[str, Any]]:
    """The spans of tags: their kind, first and last word. Words without a tag are passed over.

    >>> spans_of(["B-A", "I-A", "B-A", None, "I-A", "I-B", "O"])[1:]
    [{'kind': 'A', 'first': 2, 'last': 4}, {'kind': 'B', 'first': 5, 'last': 5}]
    """
    found, before = [], ""
    for word, name in enumerate(tags):
        if name is None:
            continue
        kind = name[2:] if name[:2] in ("B-", "I-") else ""
        if kind and (kind != before or name.startswith("B-")):
            found.append({"kind": kind, "first": word, "last": word})
        elif kind:
            found[-1]["last"] = word
        before = kind
    return found


def answer(model: Model, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """The answer to each question, where it stands in the context in letters, and how probable it
    is, and that there is none."""
    parts = ([str(row[name]) for row in records] for name in ("question", "context"))
    given = {"stride": model.stride, "typed": _is_typed(model)}
    rows = QuestionRows(model.opened.tokenizer, *parts, model.length, **given)
    for each in best_answers(rows, outputs(model, rows)):
        found = each._asdict()
        if model.unanswerable and found.pop("is_none"):
            found |= {"text": "", "start": 0, "stop": 0}
        yield {name: found[name] for name in ("text", "start", "stop", "probability", "none")}


def write(model: Model, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """The target of each source: the most probable tokens, or the text that beams find."""
    config, params, tokenizer, folder, *_ = model.opened
    ends = ends_of(folder, tokenizer)
    rows = tokenizer.encode_batch([str(row["source"]) for row in records])
    rows = [[*row[: model.length - 1].tolist(), tokenizer.eod] for row in rows]
    options = {"max_new_tokens": model.max_tokens or config.target_len, "eod": ends}
    found = [""] * len(rows)
    for part in batches(model, list(map(len, rows))):
        size = padded_length(len(rows[part[0]]))
        tokens = np.array([rows[i] + [0] * (size - len(rows[i])) for i in part], np.int32)
        given = {"prompt_lengths": [len(rows[i]) for i in part], **options}
        with jax.set_mesh(model.mesh):
            if model.beams == 1:
                new = generate(config, params, tokens, temperature=0.0, **given)
            else:
                new, _ = beam_search(config, params, tokens, beams=model.beams, **given)
        for index, ids in zip(part, np.asarray(new).tolist(), strict=True):
            stop = next((at for at, id in enumerate(ids) if id in ends), len(ids))
            found[index] = decode_shown(tokenizer, ids[:stop])
    return ({"text": text} for text in found)


def outputs(model: Model, rows: Any) -> list[np.ndarray]:
    """The logits of each row, in their order; rows of texts are cut to the longest of a batch."""
    size = getattr(rows, "size", None)
    found: list[Any] = [None] * len(rows)
    for part in batches(model, [size(i) if size else 1 for i in range(len(rows))]):
        stop = padded_length(size(part[0])) if size else None
        logits = run_batch(model, [rows[index] for index in part], stop)
        for index, each in zip(part, logits, strict=True):
            found[index] = each
    return found


def run_batch(model: Model, rows: Sequence[Record], stop: int | None) -> np.ndarray:
    """The logits of a whole batch of rows, cut behind ``stop`` tokens."""
    names = rows[0].keys() & {"tokens", "segments", "types", "image"}
    batch = {name: np.stack([row[name][:stop] for row in rows]) for name in names}
    with jax.set_mesh(model.mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenWarning)  # Memory is for those who train.
        return jax.device_get(model.run(model.opened.params, batch))


def batches(model: Model, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields the numbers of rows by length, as many as a batch has; the last one is filled with its
    last row."""
    for part in by_length(sizes, model.size):
        yield part + part[-1:] * (model.size - len(part))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities along the last axis, in float64.

    >>> softmax(np.array([0.0, 0.0])).tolist()
    [0.5, 0.5]
    """
    logits = np.float64(logits) - logits.max(-1, keepdims=True)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def _class(model: Model, logits_C: np.ndarray) -> dict[str, Any]:
    if model.kind == "score":
        return {"score": float(logits_C[0])}
    if model.kind == "labels":  # a sigmoid is the softmax of a logit and 0
        logits_C2 = np.stack([logits_C, np.zeros_like(logits_C)], -1)
        found = dict(zip(model.classes, softmax(logits_C2)[:, 0].tolist(), strict=True))
        return {"labels": [x for x in found if found[x] > 0.5], "probabilities": found}
    shares = softmax(logits_C).tolist()
    found = dict(zip(model.classes, shares, strict=True))
    best = int(logits_C.argmax())
    return {"label": model.classes[best], "probability": shares[best], "probabilities": found}


def _is_typed(model: Model) -> bool:
    return (model.opened.model.token_types or 1) > 1
