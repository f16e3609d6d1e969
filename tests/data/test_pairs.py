"""Preferences: a store of pairs, and rows that hold both sides of each whole."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain import data
from jaxtrain.data import ByteTokenizer, ChatTemplate, PairedTokens, tokenize
from jaxtrain.data.chat import TEMPLATES
from tests.commands import run as command

pytest.importorskip("jinja2")
BYTES = ByteTokenizer()
PLAIN = ChatTemplate(TEMPLATES["plain"])


def pairs_of(sizes):
    return [
        side
        for n, (prompt, chosen, rejected) in enumerate(sizes)
        for side in PLAIN.conversations(
            str(n), {"prompt": "p" * prompt, "chosen": "c" * chosen, "rejected": "r" * rejected}
        )
    ]


def sides(row):
    """The pairs of a row, as texts of inputs and of what counts."""
    found = []
    for s in range(1, row["segments"].max() + 1):
        here = row["segments"] == s
        assert (row["positions"][here] == np.concatenate([np.arange(n.sum()) for n in here])).all()
        told = lambda side, at: BYTES.decode(row["targets"][side][at & here[side]])  # noqa: B023, E731
        assert (np.diff(here.astype(int), axis=1) == 1).sum(axis=1).max() <= 1  # of one piece
        found.append([(told(i, row["mask"][i] >= 0), told(i, row["mask"][i] > 0)) for i in (0, 1)])
    assert not row["mask"][row["segments"] == 0].any()
    return found


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), min_size=1),
    T=st.integers(6, 30),
)
def test_rows_hold_both_sides_of_every_pair_that_fits_once(sizes, T):
    corpus = tokenize(pairs_of(sizes), BYTES)
    fitting = [(p, c, r) for p, c, r in sizes if p + max(c, r) <= T]
    if not fitting:
        with pytest.raises(ValueError, match=f"fits into rows of {T} tokens: the shortest needs"):
            PairedTokens(corpus, T)
        return
    rows = PairedTokens(corpus, T)
    assert rows.left_out == len(sizes) - len(fitting)
    found = [pair for row in rows for pair in sides(row)]
    wanted = [
        [("p" * (p - 1) + letter * n, letter * n) for letter, n in (("c", c), ("r", r))]
        for p, c, r in fitting
    ]
    assert sorted(found) == sorted(wanted)
    idle = 1 - sum((row["segments"] > 0).sum() for row in rows) / (2 * T * len(rows))
    assert data.waste(rows)["idle"] == pytest.approx(idle)
    shapes = data.packed_shapes(3, T, pairs=True)
    assert data.Batches(rows, global_batch=3, seed=0).shapes == shapes


def test_the_turns_that_both_sides_begin_with_do_not_count():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns += [{"role": "user", "content": "c"}]
    answers = {name: {"role": "assistant", "content": name} for name in ("chosen", "rejected")}
    chat = data.load_template("chatml")
    whole = {name: [*turns, answer] for name, answer in answers.items()}
    apart = {name: [answer] for name, answer in answers.items()} | {"prompt": turns}
    for record in (whole, apart):
        for each, name in zip(chat.conversations("x", record), answers, strict=True):
            ((start, stop),) = each.counted
            assert (each.side, each.text[start:stop].decode()) == (name, f"{name}<|im_end|>")
    for rejected in (whole["chosen"], turns[:2]):
        with pytest.raises(ValueError, match="row prefers a conversation to itself, or to its beg"):
            chat.conversations("x", {"chosen": whole["chosen"], "rejected": rejected}, "row")


def test_records_of_several_forms_are_read_as_asked_and_a_prompt_is_not_repeated():
    """As those of UltraFeedback: whole conversations, their prompt, and the chosen one again."""
    user, yes, no = (
        {"role": r, "content": c} for r, c in (("user", "q"), *2 * [("assistant", "y")])
    )
    record = {"prompt": "q", "chosen": [user, yes], "rejected": [user, no | {"content": "n"}]}
    chat = data.load_template("plain")
    alone = chat.conversations("x", record)
    assert [each.text for each in alone] == [b"qy", b"qn"]
    both = record | {"messages": [user, yes]}
    assert chat.conversations("x", both, field="chosen") == alone
    (single,) = chat.conversations("x", both, field="messages")
    assert (single.text, single.side) == (b"qy", "")
    with pytest.raises(ValueError, match="row may be read by its messages or by its chosen: say w"):
        chat.conversations("x", both, "row", field="text")
    answers = {"prompt": "q", "chosen": [yes], "rejected": "n"}
    assert [each.text for each in chat.conversations("x", answers)] == [b"qy", b"qn"]


def write(path, count):
    r = np.random.default_rng(0)
    records = [
        {"prompt": f"{n}?", "chosen": "y" * r.integers(1, 20), "rejected": "n" * r.integers(1, 20)}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def test_a_store_of_pairs_is_made_shown_held_out_and_read(tmp_path, capsys, monkeypatch):
    records = write(tmp_path / "pairs.jsonl", 120)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(records), tmp_path / "pairs.parquet", row_group_size=17
    )
    monkeypatch.setattr(data.writing, "SHARD_BYTES", 700)
    wanted = [[(f"{r['prompt']}{r[s]}"[1:], r[s]) for s in ("chosen", "rejected")] for r in records]
    stores = {}
    for kind in ("jsonl", "parquet"):
        flags = ("--data", str(tmp_path / f"pairs.{kind}"), "--out", str(tmp_path / kind))
        flags += ("--workers", "1", "--chat-template", "plain", "--held-out", "0.2")
        status, made, _ = command(capsys, "tokenize", *flags)
        assert status == 0
        store = stores[kind] = data.open_store(tmp_path / kind)
        held_out = len(store.corpus("held_out").starts) // 2
        assert f"held_out   {held_out} preferences in {2 * held_out} documents" in made
        corpora = map(store.corpus, ("train", "held_out"))
        found = [pair for each in corpora for row in PairedTokens(each, 64) for pair in sides(row)]
        assert sorted(found) == sorted(wanted)
    store = stores["jsonl"]
    both = [store.corpus(name) for name in ("train", "held_out")]
    held_out = len(both[1].starts) // 2
    assert len(store.manifest["sets"]["train"]["shards"]) > 3
    for limit in (1, 150, 10**6):
        part = store.held_out(limit)
        inside = [pair for row in PairedTokens(part, 64) for pair in sides(row)]
        assert all(pair in wanted for pair in inside)
        assert part.num_bytes == sum(len(side[0]) + 1 for pair in inside for side in pair)
        assert part.num_bytes <= max(limit, 50)
    assert len(inside) == held_out
    status, shown, _ = command(capsys, "data", str(store.path), "--seq-len", "16", "--samples", "1")
    assert status == 0
    rows = PairedTokens(both[0], 16)
    assert rows.left_out > 0
    assert f"packing pairs: {len(rows)} rows of 16 tokens" in shown
    assert f"{rows.left_out} preferences are too long and left out" in shown
    first = BYTES.decode(both[0].document(1))
    assert f"rejected 0: {first!r}" in shown
    status, shown, error = command(capsys, "data", str(store.path), "--seq-len", "1")
    assert (status, error.count("\n")) == (2, 1)
    assert "preferences fits into rows of 1 tokens" in error
    assert "rejected 0: " in shown  # and the lengths, by which to choose another
    for pack in (data.PackedTokens, data.FittedTokens):
        with pytest.raises(ValueError, match="holds preferences: make rows of it by PairedTokens"):
            pack(both[0], 16)
    text = tmp_path / "a.txt"
    text.write_text("some text\n" * 9)
    with pytest.raises(ValueError, match=r"jsonl' holds preferences and '.*a.txt' does not"):
        data.open_data(f"a=0.5:{store.path},b=0.5:{text}")
    with pytest.raises(ValueError, match="holds no preferences: make rows of it by PackedTokens"):
        PairedTokens(tokenize(data.text_folder(text).train, BYTES), 16)


def test_pairs_and_single_conversations_are_kept_apart(tmp_path, monkeypatch):
    write(tmp_path / "mixed.jsonl", 60)
    with (tmp_path / "mixed.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    split = data.text_folder(tmp_path / "mixed.jsonl", chat=PLAIN, held_out=0.0)
    for size in (1 << 20, 700):  # in one part, and in several
        monkeypatch.setattr(data.writing, "SHARD_BYTES", size)
        with pytest.raises(ValueError, match="some rows have chosen and rejected and some have no"):
            data.write_store(split, BYTES, tmp_path / f"store{size}")
        with pytest.raises(ValueError, match=r"is not complete|is no token store"):
            data.open_store(tmp_path / f"store{size}")


def test_answers_with_labels_have_the_answer_before_beside_them(tmp_path):
    records = [("aa", "bcd", True), ("e", "fg", False), ("hij", "k", "true")]
    records = [dict(zip(("prompt", "completion", "label"), each, strict=True)) for each in records]
    documents = [side for each in records for side in PLAIN.conversations("", each)]
    made = data.write_store(data.Split(documents, documents), BYTES, tmp_path / "store")
    assert data.holds_labels(data.parse_data(str(tmp_path / "store")))
    for corpus in (tokenize(documents, BYTES), made.corpus(), made.held_out(99)):
        assert corpus.unpaired
        (row,) = PairedTokens(corpus, 14)
        found = [BYTES.decode(side) for side in row["tokens"]]
        assert found == ["aabcdhijkebcd\0", "aakhijfgefg\0\0\0"]
        assert row["mask"].tolist() == [
            [0, 1, 1, 1, 1, 0, 0, 1, 1, -1, -1, -1, -1, 0],
            [0, -1, -1, 0, 0, -1, -1, -1, 1, 1, 1, 0, 0, 0],
        ]
    both = {"prompt": "a", "completion": "b", "label": True}
    assert len(PLAIN.conversations("", both, field="completion")) == 1
    with pytest.raises(ValueError, match="has the label 'good': give true or false"):
        PLAIN.conversations("", both | {"label": "good"})
