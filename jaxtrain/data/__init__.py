"""Text to batches on a device mesh: a batch is a function of (seed, step) and nothing else.

Four pieces, each usable without the others: documents (`python_stdlib`, `text_folder`, or any
iterable of `Document`), a tokenizer (`ByteTokenizer`, `SubwordTokenizer`), rows (`tokenize`, or
`write_store` and `open_store` for text of any size; `PackedTokens` or `FittedTokens`) and batches
(`Batches`, `eval_batches`, `whole_batches`; of several sources by a `Mixture`).

>>> tokenizer = ByteTokenizer()
>>> documents = [Document("a", b"Some text."), Document("b", b"Some more.")]
>>> rows = PackedTokens(tokenize(documents, tokenizer), 8)
>>> batches = Batches(rows, global_batch=2, seed=0)
>>> {name: array.shape for name, array in batches.batch(step=1000).items()}["tokens"]
(2, 8)
"""

from jaxtrain.data.chat import ChatTemplate, encode_prompt, load_template
from jaxtrain.data.images import Augmented, Images, LabelledImages, Normalized, open_images
from jaxtrain.data.loader import (
    ORDER_VERSION,
    Batches,
    BatchStream,
    RowSource,
    eval_batches,
    spread,
    whole_batches,
)
from jaxtrain.data.masking import (
    CorruptedSpans,
    Fragments,
    MaskedTokens,
    pair_row,
    pair_shapes,
    predictions,
)
from jaxtrain.data.mixtures import (
    Mixture,
    TextData,
    conversations_in,
    first_texts,
    holds_labels,
    holds_pairs,
    open_data,
    open_tokenizer,
    parse_data,
    tokenizer_of_stores,
)
from jaxtrain.data.ngram import ngram_bits_per_byte
from jaxtrain.data.packing import (
    Corpus,
    FittedTokens,
    PackedTokens,
    PairedTokens,
    pack,
    packed_shapes,
    waste,
)
from jaxtrain.data.sources import (
    Document,
    Documents,
    Split,
    fields_of,
    hash_fraction,
    open_text,
    python_stdlib,
    read_rows,
    text_folder,
    texts_of_rows,
)
from jaxtrain.data.store import MappedTokens, Store, is_store, open_store
from jaxtrain.data.tokenizers import (
    EOD,
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    trained_kind,
)
from jaxtrain.data.workers import WorkerRows
from jaxtrain.data.writing import cached_store, tokenize, write_store

__all__ = [
    "EOD",
    "ORDER_VERSION",
    "Augmented",
    "BatchStream",
    "Batches",
    "ByteTokenizer",
    "ChatTemplate",
    "Corpus",
    "CorruptedSpans",
    "Document",
    "Documents",
    "FittedTokens",
    "Fragments",
    "Images",
    "LabelledImages",
    "MappedTokens",
    "MaskedTokens",
    "Mixture",
    "Normalized",
    "PackedTokens",
    "PairedTokens",
    "RowSource",
    "Split",
    "Store",
    "SubwordTokenizer",
    "TextData",
    "Tokenizer",
    "WorkerRows",
    "cached_store",
    "conversations_in",
    "encode_prompt",
    "eval_batches",
    "fields_of",
    "first_texts",
    "hash_fraction",
    "holds_labels",
    "holds_pairs",
    "is_store",
    "load_template",
    "ngram_bits_per_byte",
    "open_data",
    "open_images",
    "open_store",
    "open_text",
    "open_tokenizer",
    "pack",
    "packed_shapes",
    "pair_row",
    "pair_shapes",
    "parse_data",
    "predictions",
    "python_stdlib",
    "read_rows",
    "spread",
    "text_folder",
    "texts_of_rows",
    "tokenize",
    "tokenizer_of_stores",
    "trained_kind",
    "waste",
    "whole_batches",
    "write_store",
]
