"""Repeated documents and overlap, against sets of words."""

import re

import numpy as np

from jaxtrain import data
from jaxtrain.data import Document, duplicates
from tests.commands import run as command


def words_of(text, count):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + count]) for i in range(len(words) - count + 1)}


def text_of(rng, count=120, vocabulary=4000):
    return " ".join(f"w{n}" for n in rng.integers(0, vocabulary, count))


def test_near_duplicates_are_those_of_the_sets_of_shingles():
    """Every pair above 0.9 is found and none below 0.65, by the Jaccard index of the sets."""
    rng, texts = np.random.default_rng(0), []
    for _ in range(40):
        texts.append(text_of(rng))
        changed = texts[-1].split()
        for place in rng.choice(120, rng.integers(0, 9), replace=False):
            changed[place] = "other"
        texts.append(" ".join(changed).upper() + "!")
    sets = [words_of(text, duplicates.SHINGLE) for text in texts]
    near, far = 0, 0
    for index, (a, b) in enumerate(zip(sets[::2], sets[1::2], strict=True)):
        jaccard = len(a & b) / len(a | b)
        pair = [Document(str(n), texts[2 * index + n].encode()) for n in range(2)]
        found = duplicates.repeated(pair)["near"]
        near, far = near + (jaccard > 0.9), far + (jaccard < 0.65)
        assert found == 1 if jaccard > 0.9 else found == 0 if jaccard < 0.65 else True
    assert near > 5 < far
    found = duplicates.repeated(
        Document(str(n), text.encode()) for n, text in enumerate(["", *texts, *texts, ""])
    )
    assert (found["documents"], found["exact"]) == (160, 80)


def test_overlap_is_that_of_the_sets():
    rng = np.random.default_rng(1)
    train = [text_of(rng) for _ in range(9)]
    held_out = [text_of(rng), train[2], text_of(rng, 50) + " " + train[5].upper()[:200], "a b"]
    seen = set().union(*(words_of(text, 13) for text in train))
    sets = [words_of(text, 13) for text in held_out]
    expected = {str(n): len(own & seen) / len(own) for n, own in enumerate(sets) if own}
    sides = [
        [Document(str(n), text.encode()) for n, text in enumerate(x)] for x in (train, held_out)
    ]
    assert duplicates.overlapping(*sides) == expected
    assert expected["0"] == 0
    assert expected["1"] == 1
    assert 0 < expected["2"] < 1


def test_the_report_of_a_store(tmp_path, capsys):
    rng = np.random.default_rng(2)
    texts = [text_of(rng) for _ in range(4)]
    train = [*texts, texts[0], texts[1] + " more", ""]
    sides = [
        data.Documents(lambda x=x: iter([Document("", t.encode()) for t in x]))
        for x in (train, [texts[3], text_of(rng)])
    ]
    data.write_store(data.Split(*sides), data.ByteTokenizer(), tmp_path / "s")
    told = command(capsys, "data", str(tmp_path / "s"), "--duplicates")[1]
    assert "train: of 6 documents 1 are an earlier one again, and 1 more are nearly one" in told
    assert "document 5 is nearly document 1" in told
    assert "overlap: 1 of 2 held-out documents" in told
    assert "document 0: 100.0% of its stretches" in told
