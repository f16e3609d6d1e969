"""Rows of encoders: every token is in one fragment, and masks are a function of seed and step; of
encoder-decoders: spans put back are the text."""

import numpy as np
import pytest

from jaxtrain import data
from jaxtrain.data import Batches, Document, Fragments, MaskedTokens

FIRST, LAST, MASK = 300, 256, 301
MARKS = range(257, 297)


def fragments(T=8, lengths=(11, 6, 0, 1), **options):
    texts = [bytes(range(40 * i, 40 * i + n)) for i, n in enumerate(lengths)]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    corpus = data.tokenize(documents, data.ByteTokenizer())
    return Fragments(corpus, T, first=FIRST, last=LAST, **options), texts


def test_every_token_of_a_document_is_in_one_row_between_its_ends():
    rows, texts = fragments(labels=[3, 4, 5, 6])
    found = {3: b"", 4: b"", 6: b""}
    for row in rows:
        inside = row["tokens"][row["segments"] > 0]
        assert (inside[0], inside[-1]) == (FIRST, LAST)
        assert not row["tokens"][len(inside) :].any()
        found[int(row["label"])] += bytes(inside[1:-1].tolist())
    assert found == {3: texts[0], 4: texts[1], 6: texts[3]}
    assert len(rows) == 4  # of 6 tokens each, at most


def masked(rate=0.4, seed=0, T=64):
    rows, _ = fragments(T, (200, 200, 33))
    return MaskedTokens(rows, mask=MASK, vocab_size=256, rate=rate, seed=seed), rows


def test_a_batch_is_a_function_of_the_seed_and_the_step():
    batches = Batches(masked()[0], global_batch=3, seed=5)
    first, again = batches.batch(1), Batches(masked()[0], global_batch=3, seed=5).batch(1)
    for name, x in first.items():
        np.testing.assert_array_equal(again[name], x)
    whole = np.concatenate([batches.rows(1, slice(i, i + 1))["tokens"] for i in range(3)])
    np.testing.assert_array_equal(whole, first["tokens"])
    other = Batches(masked(seed=1)[0], global_batch=3, seed=5).batch(1)
    assert (other["places"] != first["places"]).any()


def test_every_epoch_has_every_row_once_and_masks_other_tokens():
    source, rows = masked()
    order = source.row_order(seed=0, global_batch=1)
    n = len(rows)
    epochs = [[order(i) for i in range(n * e, n * e + n)] for e in range(2)]
    assert [sorted(i % n for i in epoch) for epoch in epochs] == [list(range(n))] * 2
    first, second = (source[next(i for i in epoch if i % n == 0)]["places"] for epoch in epochs)
    assert (first != second).any()


def test_what_is_chosen_is_masked_replaced_or_left_in_the_shares_of_bert():
    source, rows = masked()
    kinds, counts = [], []
    for i in range(300 * len(rows)):
        row, whole = source[i], rows[i % len(rows)]["tokens"]
        count = int(row["mask"].sum())
        places = row["places"][:count]
        inside = int(row["segments"].sum()) - 2
        counts.append(count - round(0.4 * inside))
        assert len(set(places)) == count
        assert places.min() >= 1
        assert places.max() <= inside
        np.testing.assert_array_equal(row["targets"][:count], whole[places])
        now, untouched = row["tokens"][places], np.delete(np.arange(64), places)
        np.testing.assert_array_equal(row["tokens"][untouched], whole[untouched])
        kinds += np.where(now == MASK, 0, np.where(now == whole[places], 2, 1)).tolist()
    shares = np.bincount(kinds) / len(kinds)
    # A token at random is the same one once in 256 times.
    np.testing.assert_allclose(shares, [0.8, 0.1 * 255 / 256, 0.1 * 257 / 256], atol=0.01)
    assert set(counts) == {0}


def test_rates_and_lengths_that_are_none_are_refused():
    for rate in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"`mask_rate` is .*; give a share above 0"):
            masked(rate)
    with pytest.raises(ValueError, match="`seq_len` is 2; give at least 3"):
        fragments(2)
    with pytest.raises(ValueError, match="hold no text at all"):
        fragments(8, (0, 0))


def test_spans_put_back_are_the_text():
    tokenizer = data.ByteTokenizer()
    text = bytes(np.random.default_rng(0).integers(97, 123, 500).astype(np.uint8))
    rows = data.CorruptedSpans(
        data.tokenize([Document("a", text)], tokenizer), 40, 24, sentinels=MARKS, eod=256
    )
    whole = tokenizer.encode(text)
    seen = set()
    assert len(rows) == 4 * (501 // rows.length)
    for index in range(len(rows)):
        found = rows[index]
        source = found["source"][found["source_segments"] > 0].tolist()
        target = found["targets"][found["mask"] > 0].tolist()
        assert (source[-1], target[-1]) == (256, 256)
        assert found["tokens"].tolist() == [0, *found["targets"][:-1]]
        parts = {}
        for token in target[:-1]:
            parts.setdefault(token, []) if token in MARKS else parts[max(parts)].append(token)
        filled = [t for token in source[:-1] for t in parts.get(token, [token])]
        place = index % (len(rows) // 4) * rows.length
        assert filled == whole[place : place + rows.length].tolist()[: len(filled)]
        assert len(filled) == rows.length
        seen.add(tuple(source))
    assert len(seen) > 0.9 * len(rows)
    assert abs(rows.cut / rows.length - 0.15) < 0.02
