"""``jaxtrain predict``: what a trained model says of each row of a file."""

import contextlib
import dataclasses
import itertools
import json
import sys
import time

from jaxtrain.hf.opening import ModelOptions
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import absolute, make_folder
from jaxtrain.predict.heads import Model, check_read, predictions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions(ModelOptions):
    """Predicts with a trained model: classes of texts or images, tags of words, answers to
    questions, or the text that an encoder-decoder writes. Each row gives one line of JSON, in the
    order of the rows.
    """

    data: str
    """Rows (JSONL, CSV, TSV, Parquet) with the fields that training reads: text and perhaps
    text_pair; tokens; question and context; source; or image, a path from the folder of the file.
    Or an .npz of images, or a folder of image files."""
    out: str | None = None
    """File to write; left out, standard output."""
    field: str = "text"
    """The field of a text to classify."""
    seq_len: int | None = None
    """Most tokens of a row; left out, the model's."""
    stride: int | None = None
    """Tokens of a long context that two neighbouring rows of a question share; left out, 128, or a
    third of a row where that is less."""
    unanswerable: bool = False
    """A question may have no answer: its text is empty where that is more probable."""
    max_tokens: int | None = None
    """Most tokens of a text that is written; left out, the model's."""
    beams: int = 1
    """Texts that are followed at a time; 1 always takes the most probable token."""
    rows: int = 16
    """Rows of a batch."""


def run_predict(options: PredictOptions, rest: list[str]) -> int:
    """Writes a line for each row."""
    del rest
    check_least(options, seq_len=8, stride=0, max_tokens=1, beams=1, rows=1)
    if options.out is not None:
        out = absolute(options.out)
        if out == absolute(options.data):
            raise ValueError(f"--out is '{out}', the file of the rows: give another")
        make_folder(out.parent)
    opened, mesh = options.open("encoder", "encoder-decoder", "vit", "convnet")
    names = {field.name for field in dataclasses.fields(Model)} - {"mesh"}
    given = {name: value for name, value in vars(options).items() if name in names}
    model = Model(opened, mesh, **given)
    check_read(model, options, {name: name for name in names - {"rows"}})
    start, count, said = time.monotonic(), 0, predictions(model, options.data)
    first = list(itertools.islice(said, 1))  # before an older file is replaced
    with contextlib.nullcontext(sys.stdout) if options.out is None else out.open("w") as file:
        for count, found in enumerate(itertools.chain(first, said), 1):  # noqa: B007
            file.write(json.dumps(found, ensure_ascii=False) + "\n")
    seconds = time.monotonic() - start
    print(f"{count} rows in {seconds:.1f} s, with compiling", file=sys.stderr)
    return 0
