"""Text to batches on a device mesh: a batch is a function of (seed, step) and nothing else.

Four pieces, each usable without the others: documents (`python_stdlib`, `text_folder`, or any
iterable of `Document`), a tokenizer (`ByteTokenizer`, `BPETokenizer`), rows (`tokenize`,
`PackedTokens`) and batches (`Batches`, `eval_batches`).

>>> tokenizer = ByteTokenizer()
>>> documents = [Document("a", b"Some text."), Document("b", b"Some more.")]
>>> rows = PackedTokens(tokenize(documents, tokenizer), 8)
>>> batches = Batches(rows, global_batch=2, seed=0)
>>> {name: array.shape for name, array in batches.batch(step=1000).items()}["tokens"]
(2, 8)
"""

from jaxtrain.data.loader import (
    ORDER_VERSION,
    Batches,
    BatchStream,
    RowSource,
    eval_batches,
)
from jaxtrain.data.ngram import ngram_bits_per_byte
from jaxtrain.data.packing import Corpus, PackedTokens, packed_shapes, tokenize
from jaxtrain.data.sources import (
    Document,
    Documents,
    Split,
    hash_fraction,
    python_stdlib,
    text_folder,
)
from jaxtrain.data.tokenizers import EOD, BPETokenizer, ByteTokenizer, Tokenizer

__all__ = [
    "EOD",
    "ORDER_VERSION",
    "BPETokenizer",
    "BatchStream",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "Documents",
    "PackedTokens",
    "RowSource",
    "Split",
    "Tokenizer",
    "eval_batches",
    "hash_fraction",
    "ngram_bits_per_byte",
    "packed_shapes",
    "python_stdlib",
    "text_folder",
    "tokenize",
]
