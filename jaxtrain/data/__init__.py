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

from jaxtrain.data.chat import ChatTemplate as ChatTemplate
from jaxtrain.data.chat import encode_prompt as encode_prompt
from jaxtrain.data.chat import load_template as load_template
from jaxtrain.data.clients import ClientRows as ClientRows
from jaxtrain.data.clients import PoissonClients as PoissonClients
from jaxtrain.data.clients import partition as partition
from jaxtrain.data.growing import GrowingRows as GrowingRows
from jaxtrain.data.growing import Watermarks as Watermarks
from jaxtrain.data.images import Augmented as Augmented
from jaxtrain.data.images import Images as Images
from jaxtrain.data.images import LabelledImages as LabelledImages
from jaxtrain.data.images import Normalized as Normalized
from jaxtrain.data.images import images_of as images_of
from jaxtrain.data.images import open_images as open_images
from jaxtrain.data.images import read_images as read_images
from jaxtrain.data.loader import ORDER_VERSION as ORDER_VERSION
from jaxtrain.data.loader import Batches as Batches
from jaxtrain.data.loader import BatchStream as BatchStream
from jaxtrain.data.loader import RowSource as RowSource
from jaxtrain.data.loader import eval_batches as eval_batches
from jaxtrain.data.loader import spread as spread
from jaxtrain.data.loader import whole_batches as whole_batches
from jaxtrain.data.masking import CorruptedSpans as CorruptedSpans
from jaxtrain.data.masking import Fragments as Fragments
from jaxtrain.data.masking import MaskedTokens as MaskedTokens
from jaxtrain.data.masking import pair_row as pair_row
from jaxtrain.data.masking import pair_shapes as pair_shapes
from jaxtrain.data.masking import predictions as predictions
from jaxtrain.data.mixtures import Mixture as Mixture
from jaxtrain.data.mixtures import TextData as TextData
from jaxtrain.data.mixtures import conversations_in as conversations_in
from jaxtrain.data.mixtures import first_texts as first_texts
from jaxtrain.data.mixtures import holds_labels as holds_labels
from jaxtrain.data.mixtures import holds_pairs as holds_pairs
from jaxtrain.data.mixtures import open_data as open_data
from jaxtrain.data.mixtures import open_tokenizer as open_tokenizer
from jaxtrain.data.mixtures import parse_data as parse_data
from jaxtrain.data.mixtures import tokenizer_of_stores as tokenizer_of_stores
from jaxtrain.data.ngram import ngram_bits_per_byte as ngram_bits_per_byte
from jaxtrain.data.packing import Corpus as Corpus
from jaxtrain.data.packing import FittedTokens as FittedTokens
from jaxtrain.data.packing import PackedTokens as PackedTokens
from jaxtrain.data.packing import PairedTokens as PairedTokens
from jaxtrain.data.packing import pack as pack
from jaxtrain.data.packing import packed_shapes as packed_shapes
from jaxtrain.data.packing import waste as waste
from jaxtrain.data.poisson import PoissonBatches as PoissonBatches
from jaxtrain.data.rows import RowStream as RowStream
from jaxtrain.data.rows import as_rows as as_rows
from jaxtrain.data.sources import Document as Document
from jaxtrain.data.sources import Documents as Documents
from jaxtrain.data.sources import Split as Split
from jaxtrain.data.sources import fields_of as fields_of
from jaxtrain.data.sources import hash_fraction as hash_fraction
from jaxtrain.data.sources import open_text as open_text
from jaxtrain.data.sources import python_stdlib as python_stdlib
from jaxtrain.data.sources import read_rows as read_rows
from jaxtrain.data.sources import rows_in as rows_in
from jaxtrain.data.sources import text_folder as text_folder
from jaxtrain.data.sources import texts_of_rows as texts_of_rows
from jaxtrain.data.store import MappedTokens as MappedTokens
from jaxtrain.data.store import Store as Store
from jaxtrain.data.store import is_store as is_store
from jaxtrain.data.store import open_store as open_store
from jaxtrain.data.tokenizers import EOD as EOD
from jaxtrain.data.tokenizers import ByteTokenizer as ByteTokenizer
from jaxtrain.data.tokenizers import SubwordTokenizer as SubwordTokenizer
from jaxtrain.data.tokenizers import Tokenizer as Tokenizer
from jaxtrain.data.tokenizers import trained_kind as trained_kind
from jaxtrain.data.workers import WorkerRows as WorkerRows
from jaxtrain.data.writing import append_store as append_store
from jaxtrain.data.writing import cached_store as cached_store
from jaxtrain.data.writing import tokenize as tokenize
from jaxtrain.data.writing import write_store as write_store
