"""Mixtures: exact shares, batches by (seed, step), and phases that leave the past as it was."""

import collections
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain import data
from jaxtrain.data import Batches, Mixture, parse_data
from jaxtrain.data.loader import shuffled


class Rows:
    """Rows that say whose they are and which."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        return {"source": np.array(ord(self.name)), "row": np.array(index)}


SIZES = {"a": 5000, "b": 2300, "c": 1100}
# A permutation of few rows takes milliseconds: its cipher is of 16 bits at least.
FEW = {"a": 50, "b": 23, "c": 11}


def read(mixture, rows, *, seed=0, global_batch=8):
    """The first rows as (source, row), in order."""
    place = mixture.row_order(seed=seed, global_batch=global_batch)
    found = [mixture[place(position)] for position in range(rows)]
    return [(chr(row["source"]), int(row["row"])) for row in found]


def mixture_of(*phases, names="abc", sizes=SIZES):
    return Mixture({name: Rows(name, sizes[name]) for name in names}, phases)


@st.composite
def shares_of_three(draw):
    parts = draw(st.lists(st.integers(0, 12), min_size=3, max_size=3).filter(any))
    return {name: Fraction(n, sum(parts)) for name, n in zip("abc", parts, strict=True)}


@settings(max_examples=20, deadline=None)
@given(shares=shares_of_three(), global_batch=st.integers(1, 20))
def test_the_shares_are_exact_over_every_window(shares, global_batch):
    mixture = mixture_of((0, shares))
    (window,) = mixture.windows
    order = [name for name, _ in read(mixture, 4 * window, global_batch=global_batch)]
    for start in range(3 * window):
        counts = collections.Counter(order[start : start + window])
        assert all(counts[name] == share * window for name, share in shares.items())


@settings(max_examples=4, deadline=None)
@given(shares=shares_of_three(), later=shares_of_three(), seed=st.integers(0, 2**40))
def test_each_source_is_read_in_epochs_through_all_phases(shares, later, seed):
    mixture = mixture_of((0, shares), (5, later), (9, shares), sizes=FEW)
    order = read(mixture, 200, seed=seed)
    for name, size in FEW.items():
        rows = [row for source, row in order if source == name]
        for epoch in range(0, len(rows) - size + 1, size):
            assert sorted(rows[epoch : epoch + size]) == list(range(size))
        for step in (0, 4, 5, 7, 9, 25):
            taken = sum(source == name for source, _ in order[: 8 * step])
            assert mixture.epochs(step, 8)[name] == taken / size


def test_a_batch_depends_on_seed_and_step_alone():
    shares = {"a": Fraction(1, 2), "b": Fraction(3, 10), "c": Fraction(1, 5)}
    one = Batches(mixture_of((0, shares), (4, {"a": Fraction(1)})), global_batch=7, seed=3)
    two = Batches(mixture_of((0, shares), (4, {"a": Fraction(1)})), global_batch=7, seed=3)
    for step in (9, 0, 10**9, 3, 4):
        for name, values in one.batch(step).items():
            np.testing.assert_array_equal(values, two.batch(step)[name])
    order = read(one.source, 42, seed=3, global_batch=7)
    batch = one.batch(5)
    assert [*zip(map(chr, batch["source"]), batch["row"].tolist(), strict=True)] == order[35:]
    assert read(one.source, 50, seed=3) != read(one.source, 50, seed=4)
    rows = [row for name, row in read(one.source, 99) if name == "a"]
    assert rows != sorted(rows)


def test_a_source_added_at_a_step_leaves_what_comes_before():
    shares = {"a": Fraction(7, 10), "b": Fraction(3, 10)}
    before = read(mixture_of((0, shares), names="ab"), 400)
    more = {"a": Fraction(1, 2), "b": Fraction(1, 4), "c": Fraction(1, 4)}
    after = read(mixture_of((0, shares), (23, more), names="cab"), 400)
    assert after[: 23 * 8] == before[: 23 * 8]
    counts = collections.Counter(name for name, _ in after[23 * 8 : 23 * 8 + 40])
    assert counts == {"a": 20, "b": 10, "c": 10}
    # The old sources go on in their epochs, where they were.
    for name in "ab":
        old, new = ([row for source, row in each if source == name] for each in (before, after))
        shared = min(len(old), len(new))
        assert new[:shared] == old[:shared]
        assert shared > sum(source == name for source, _ in before[: 23 * 8])


def test_the_order_stays_what_it_was():
    """A resumed run must find the order it was started with, whatever was upgraded meanwhile."""
    shares = {"a": Fraction(7, 10), "b": Fraction(3, 10)}
    order = read(mixture_of((0, shares), names="ab"), 10)
    assert order == [
        ("a", 600),
        ("b", 977),
        ("a", 2535),
        ("a", 4751),
        ("a", 2590),
        ("b", 939),
        ("a", 3259),
        ("a", 4778),
        ("b", 1842),
        ("a", 1640),
    ]


def test_what_is_typed_is_read():
    spec = parse_data("code=0.7:/x/a=b:c, docs=0.3:d;1000:code=1/2,docs=0.5")
    assert spec.paths == {"code": "/x/a=b:c", "docs": "d"}
    assert spec.phases == (
        (0, {"code": Fraction(7, 10), "docs": Fraction(3, 10)}),
        (1000, {"code": Fraction(1, 2), "docs": Fraction(1, 2)}),
    )
    for path in ("python", "texts/", "/a=b/c", "gs://bucket/x=y"):
        assert parse_data(path).paths == {"": path}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=0.7:x,b=0.2:y", r"the shares in `data` sum to 0.9 from step 0, not to 1"),
        ("a=0.5:x,b=0.5:y;9:a=0.5,b=0.4", "sum to 0.9 from step 9, not to 1"),
        ("a=0.7:x,b=0.3", "gives source 'b' no place or two"),
        ("a=0.7:x,b=0.3:y;5:a=0.7:z,b=0.3", "gives source 'a' no place or two"),
        ("a=0.7:x,a=0.3:y", "has the source 'a=0.3:y': write each once"),
        ("a=0.7:x,b", "has the source 'b': write each once as NAME=SHARE:STORE"),
        ("a=0.7.1:x,b=0.3:y", "the share '0.7.1' is not a number"),
        ("a=1/0:x", "the share '1/0' is not a number"),
        ("a=1:x;b=1:y", "has the phase 'b=1:y': after a semicolon comes the step"),
        ("a=1:x;5:a=1;5:a=1", "has the phase '5:a=1'"),
        ("a=1:x;0:a=1", "has the phase '0:a=1'"),
    ],
)
def test_what_cannot_be_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        parse_data(text)


def test_shares_of_too_many_decimals_are_refused():
    share = Fraction("0.1234567")
    with pytest.raises(
        ValueError, match="are exact only over 10,000,000 rows: give fewer decimals"
    ):
        mixture_of((0, {"a": share, "b": 1 - share}))


def test_every_row_stands_everywhere_equally_often():
    """Over many epochs, by a chi-square test; and so does the row after a row."""
    length, epochs, buckets = 211, 40, 8
    positions = [
        [shuffled(e * length + n, length, seed=7) for n in range(length)] for e in range(epochs)
    ]
    order = np.array(positions)
    assert (np.sort(order, axis=1) == np.arange(length)).all()
    coarse = order * buckets // length
    for following in (coarse[:, 1:], (order[:, 1:] - order[:, :-1]) % length * buckets // length):
        counts = np.array([np.bincount(column, minlength=buckets) for column in following.T])
        expected = epochs / buckets
        chi_square = ((counts - expected) ** 2 / expected).sum(1)
        # Mean and variance of a chi-square variable of 7 degrees of freedom: 7 and 14.
        assert abs(chi_square.mean() - 7) < 6 * np.sqrt(14 / len(counts)) + 0.35


def test_a_permutation_of_10_to_the_12_needs_no_table():
    length = 10**12
    found = [shuffled(length + n, length, seed=1) for n in range(1000)]
    assert len(set(found)) == 1000
    assert 0.4 < np.mean(found) / length < 0.6
    assert (min(found), max(found)) >= (0, 9 * 10**11)
    assert max(found) < length


def test_a_tokenizer_of_a_mixture_is_trained_on_the_text_of_all_sources(tmp_path):
    for name, word in (("a", "theme "), ("b", "zwölf ")):
        (tmp_path / name).mkdir()
        for n in range(60):
            (tmp_path / name / f"{n}.txt").write_text(word * 20)
    spec = f"a=0.5:{tmp_path}/a,b=0.5:{tmp_path}/b"
    for each in (spec, spec + f";3:a=0.5,c=0.5:{tmp_path}/b"):
        tokenizer = data.open_data(each, tokenizer="275").tokenizer
        assert [len(tokenizer.encode(word * 8)) <= 16 for word in ("theme ", "zwölf ")] == [
            True
        ] * 2


def test_stores_are_mixed_and_must_have_one_tokenizer(tmp_path):
    def store(name, count, tokenizer):
        texts = [data.Document(str(n), f"{name} {n} ".encode() * 9) for n in range(count)]
        return data.write_store(data.Split(texts[2:], texts[:2]), tokenizer, tmp_path / name)

    tokenizer = data.SubwordTokenizer.train([b"the theme of the thesis"], 265)
    stores = {name: store(name, n, tokenizer) for name, n in (("code", 20), ("docs", 30))}
    spec = f"code=0.75:{tmp_path}/code,docs=0.25:{tmp_path}/docs"
    text = data.open_data(spec)
    assert text.tokenizer.fingerprint == tokenizer.fingerprint
    held_out = text.held_out(1000)
    assert {name: len(corpus.starts) for name, corpus in held_out.items()} == {"code": 2, "docs": 2}
    batches = Batches(text.rows(16), global_batch=8, seed=0)
    written = [tokenizer.decode(row) for row in batches.batch(5)["tokens"]]
    assert sum("code" in row or "ode" in row for row in written) == 6
    tokenizer.save(tmp_path / "t.json")
    data.open_data(spec, tokenizer=str(tmp_path / "t.json"))
    data.SubwordTokenizer.train([b"other"], 260).save(tmp_path / "o.json")
    for given_tokenizer in (str(tmp_path / "o.json"), "265"):
        with pytest.raises(
            ValueError, match=r"made with another tokenizer than '.*': leave `token"
        ):
            data.open_data(spec, tokenizer=given_tokenizer)
    store("bytes", 5, data.ByteTokenizer())
    with pytest.raises(ValueError, match=r"bytes' was made with another tokenizer than '.*code'"):
        data.open_data(f"a=0.5:{tmp_path}/code,b=0.5:{tmp_path}/bytes")
    assert stores["code"].tokenizer.vocab_size == tokenizer.vocab_size
