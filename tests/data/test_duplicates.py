"""Repeated documents and overlap, against sets of words."""

import functools
import json
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxtrain import data
from jaxtrain.data import ByteTokenizer, Document, duplicates, tokenize, writing
from tests.commands import refused
from tests.commands import run as command


@functools.cache
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


def similar(a, b):
    """Whether two texts are nearly one, of texts that clearly are or clearly are not."""
    if a == b or min(len(a), len(b)) < 200:
        return a == b
    a, b = (words_of(text.decode(), duplicates.SHINGLE) for text in (a, b))
    jaccard = len(a & b) / len(a | b)
    assert not 0.65 < jaccard < 0.9
    return jaccard > 0.8


def kept_of(texts, other=()):
    """Those that share no 13 words with others, and among these are first."""
    seen = set().union(*(words_of(text.decode(), 13) for text in other))
    texts = [text for text in texts if not seen & words_of(text.decode(), 13)]
    return [
        text
        for n, text in enumerate(texts)
        if not text or not any(similar(text, each) for each in texts[:n])
    ]


def texts_with_repeats(seed, count):
    """Fresh texts, and copies, near copies, chains of these, pieces of others, and empty ones."""
    rng, texts = np.random.default_rng(seed), []
    for _ in range(count):
        words = text_of(rng).split()
        other = texts[rng.integers(len(texts))].split() if texts else []
        kind = rng.integers(8)
        if kind == 0:
            words = other
        elif kind == 1:
            words = [*other[:-1], "ending"]
        elif kind == 2:
            words = words[:60] + other[30 : rng.integers(41, 46)]  # 11 to 15 words of another
        elif kind == 3:
            words = words[: rng.integers(3)]
        texts.append(" ".join(words))
    return texts


@pytest.fixture
def rows(tmp_path):
    """Files of rows, some of which are held out, row by row."""
    texts, folder = texts_with_repeats(5, 180), tmp_path / "rows"
    folder.mkdir()
    for n in range(4):
        lines = [json.dumps({"text": text}) for text in texts[n::4]]
        (folder / f"{n}.jsonl").write_text("\n".join(lines))
    return folder


class Threads(ThreadPoolExecutor):
    def __init__(self, workers, context, *, initializer):
        super().__init__(workers)


def files_of(path):
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*.*")}


@pytest.mark.parametrize("drop", ["repeats", "all"])
@pytest.mark.parametrize("pool", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_what_is_left_out_is_what_the_report_counts(drop, pool, rows, tmp_path, monkeypatch):
    """The kept documents are those of a few lines of Python, whatever the parts and workers; of
    them the report counts none."""
    split = data.text_folder(rows, held_out=0.3)
    texts = {name: [each.text for each in side] for name, side in split._asdict().items()}
    held_out = kept_of(texts["held_out"])
    expected = {"train": kept_of(texts["train"], held_out if drop == "all" else ())}
    expected["held_out"] = held_out
    if pool == "threads":
        monkeypatch.setattr(writing, "ProcessPoolExecutor", Threads)
    stores = []
    for size, workers in ((1 << 26, 1), (8000, 1), (8000, 3)):
        monkeypatch.setattr(writing, "SHARD_BYTES", size)
        out = tmp_path / f"{size}-{workers}"
        split = data.text_folder(rows, held_out=0.3)
        stores.append(data.write_store(split, ByteTokenizer(), out, workers=workers, drop=drop))
    assert files_of(stores[1].path) == files_of(stores[2].path)
    assert len(stores[1].corpus().tokens._paths) > 3
    for store in stores:
        for name, kept in expected.items():
            about = store.manifest["sets"][name]
            sides = [Document("", text) for text in kept], store.corpus(name)
            corpus = tokenize(sides[0], ByteTokenizer())
            np.testing.assert_array_equal(corpus.tokens, sides[1].tokens[:])
            assert len(texts[name]) - len(kept) == sum(about["dropped"].values())
            assert min(about["dropped"].values()) > 0
            found = duplicates.repeated(sides[1].documents(ByteTokenizer()))
            assert (found["exact"], found["near"]) == (0, 0)
        train, held = (store.corpus(name).documents(ByteTokenizer()) for name in expected)
        shared = any(duplicates.overlapping(train, held).values())
        assert shared == (drop == "repeats")
    report = duplicates.repeated(split.held_out)
    assert stores[0].manifest["sets"]["held_out"]["dropped"] == {
        name: report[name] for name in ("exact", "near")
    }


def test_what_is_left_out_for_one_reason_is_no_reason_for_another(tmp_path):
    """A near copy stays where the first was contaminated, and what a held-out copy alone has in
    common with a text contaminates nothing."""
    rng = np.random.default_rng(3)
    first, fresh, other, piece = (text_of(rng, count) for count in (400, 400, 40, 13))
    own = " ".join(first.split()[100:113])
    sides = [fresh + " " + own, fresh, other + " " + piece], [first, first + " " + piece]
    split = data.Split(*([Document("", text.encode()) for text in side] for side in sides))
    store = data.write_store(split, ByteTokenizer(), tmp_path / "s", drop="all")
    kept = [document.text.decode() for document in store.corpus().documents(ByteTokenizer())]
    assert kept == sides[0][1:]
    assert store.manifest["sets"]["train"]["dropped"] == {"exact": 0, "near": 0, "overlap": 1}
    assert store.manifest["sets"]["held_out"]["dropped"] == {"exact": 0, "near": 1}


def test_leaving_out_goes_on_after_a_kill_and_follows_the_text(tmp_path, monkeypatch):
    folder, read, real = tmp_path / "texts", [], writing.notes_on
    folder.mkdir()
    for n, text in enumerate(texts_with_repeats(6, 40)):
        (folder / f"{n}.txt").write_text(text)

    def make(name, drop="all"):
        split = data.text_folder(folder, held_out=0.3)
        return data.write_store(split, ByteTokenizer(), tmp_path / name, drop=drop)

    def killed():
        with monkeypatch.context() as patch:
            patch.setattr(writing, "_join", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                make("s")

    monkeypatch.setattr(writing, "SHARD_BYTES", 4000)
    monkeypatch.setattr(writing, "notes_on", lambda *args: read.append(args) or real(*args))
    killed()
    done = len(read)
    killed()
    assert len(read) == done > 4  # nothing is read again
    train, held_out = map(list, data.text_folder(folder, held_out=0.3))
    kept = kept_of(*([each.text for each in side] for side in (train, held_out)))
    assert len(kept[-1]) > 500
    (folder / held_out[-1].name).write_bytes(kept[-1])  # which is not to be trained on from now on
    assert files_of(make("s").path) == files_of(make("t").path)
    with pytest.raises(
        ValueError, match="was made with --drop-duplicates all, not repeats: give the"
    ):
        make("s", drop="repeats")
    with pytest.raises(ValueError, match=r"was made without duplicates .all., and text to append"):
        data.append_store(data.text_folder(folder), tmp_path / "s")


def test_a_store_of_which_nothing_would_be_left_is_refused_and_leaves_nothing(tmp_path):
    text = Document("", text_of(np.random.default_rng(0), 40).encode())
    said = (
        "leaves none of 2 documents to train on, of which 2 share 13 words with held-out ones: give"
    )
    with pytest.raises(ValueError, match=said):
        data.write_store(
            data.Split([text] * 2, [text]), ByteTokenizer(), tmp_path / "s", drop="all"
        )
    assert list(tmp_path.iterdir()) == []
    store = data.write_store(
        data.Split([text] * 2, [text]), ByteTokenizer(), tmp_path / "s", drop="repeats"
    )
    assert store.manifest["sets"]["train"]["dropped"] == {"exact": 1, "near": 0}


def test_sketches_take_a_bounded_memory():
    """80 bytes a document beside the 273 of its sketch, while it is found which repeat others."""
    N = 1_000
    sketches = np.zeros(N, duplicates.SKETCH)
    rng = np.random.default_rng(0)
    sketches["signature"] = rng.integers(0, 2**32, (N, 64), np.uint32)
    sketches["digest"], sketches["words"] = np.frombuffer(rng.bytes(16 * N), "S16"), True
    sketches["signature"][N // 2 :, :60] = sketches["signature"][: N // 2, :60]
    tracemalloc.start()
    exact, near = duplicates.repeats(sketches)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(near[N // 2 :], np.arange(N // 2))
    assert duplicates.SKETCH.itemsize == 273
    assert most < 80 * N
    assert not exact.any()


def test_the_command_leaves_duplicates_out(rows, tmp_path, capsys):
    make = ["tokenize", "--data", str(rows), "--held-out", "0.3", "--workers", "1"]
    make += ["--out", str(tmp_path / "s")]
    status, told, _ = command(capsys, *make, "--drop-duplicates", "all")
    left = data.open_store(tmp_path / "s").manifest["sets"]["train"]["dropped"]
    assert status == 0
    assert (
        f"left out {left['exact']} that are an earlier one again, {left['near']} that nearly are, "
        f"{left['overlap']} that share 13 words with held-out ones"
    ) in told
    told = command(capsys, "data", str(tmp_path / "s"), "--duplicates")[1]
    assert "train: of" in told
    assert told.count(" 0 are an earlier one again, and 0 more are nearly one") == 2
    assert "overlap: 0 of" in told
    flags = [*make, "--append", "--drop-duplicates", "repeats"]
    assert "--drop-duplicates is repeats, and text to append is not compared" in refused(
        capsys, *flags
    )
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 9)
    flags = ["tokenize", "--data", str(pairs), "--chat-template", "plain", "--out"]
    flags += [str(tmp_path / "p"), "--drop-duplicates", "repeats"]
    assert "these are preferences" in refused(capsys, *flags)
