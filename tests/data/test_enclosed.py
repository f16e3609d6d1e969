"""Rows of texts and questions, against those of the library tokenizers."""

import numpy as np
import pytest

from jaxtrain.data import SubwordTokenizer
from jaxtrain.data.enclosed import QuestionRows, TextRows, WordRows, row_ends

tokenizers = pytest.importorskip("tokenizers")
TEXT = "the theme of a thesis is what it says"
PROCESSORS = {
    "bert": ("[CLS]", "[SEP]", "$B:1 [SEP]:1", "[SEP]"),
    "roberta": ("<s>", "</s>", "</s>:0 $B:0 </s>:0", "</s>"),
    # Which has another token that ends documents, too.
    "modernbert": ("[CLS]", "[SEP]", "$B:1 [SEP]:1", "<|endoftext|>"),
}


def opened(name):
    """A tokenizer of a family, as its file is loaded, and the library's own."""
    first, last, pair, end = PROCESSORS[name]
    trained = SubwordTokenizer.train([TEXT.encode()], 280).adding(first, last)
    library = tokenizers.Tokenizer.from_str(trained.to_json())
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {pair}",
        special_tokens=[(each, library.token_to_id(each)) for each in {first, last}],
    )
    return SubwordTokenizer(library, library.token_to_id(end)), library


@pytest.mark.parametrize("name", PROCESSORS)
def test_rows_are_those_of_the_tokenizer_s_own_file(name):
    ours, library = opened(name)
    typed = name != "roberta"
    texts, pairs = [TEXT, "of it", TEXT], ["", "what it says", TEXT]
    rows = TextRows(ours, texts, pairs, 40, typed=typed)
    contexts = [TEXT[4:], TEXT, "it"]
    for length, stride in ((40, 13), (300, 100), (400, 128)):
        assert QuestionRows(ours, [], [], length, stride=None, typed=typed).stride == stride
    asked = QuestionRows(ours, texts, contexts, 40, stride=8, typed=typed)
    words = WordRows(ours, [TEXT.split()], 40)
    for index, (text, pair) in enumerate(zip(texts, pairs, strict=True)):
        theirs = library.encode(text, pair) if pair else library.encode(text)
        check(rows, index, theirs)
    for index, (number, start) in enumerate(asked.windows):
        if not start:
            theirs = library.encode(texts[number], contexts[number])
            check(asked, index, theirs)
    check(words, 0, library.encode(TEXT))


def check(rows, index, theirs):
    row, size = rows[index], len(theirs.ids)
    if size > rows.length:
        kept = np.array(theirs.ids[: rows.size(index)])
        assert rows.size(index) == rows.length
        assert row["tokens"][0] == kept[0]
        assert row["tokens"][-1] == theirs.ids[-1]
        return
    assert rows.size(index) == size == row["segments"].sum()
    assert row["tokens"].tolist() == theirs.ids + [0] * (rows.length - size)
    assert row["types"].tolist() == theirs.type_ids + [0] * (rows.length - size)


def test_a_tokenizer_that_puts_nothing_around_texts_has_an_end_of_document():
    ours = SubwordTokenizer.train([TEXT.encode()], 280).adding("[CLS]", "[MASK]")
    end = ours.eod
    assert row_ends(ours) == (ours.special_id(b"[CLS]"), (end,), end)
    with pytest.raises(ValueError, match=r"no token \[CLS\] or <s>"):
        row_ends(SubwordTokenizer.train([TEXT.encode()], 280))
