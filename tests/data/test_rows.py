"""Rows of your own: each form gives the rows that a list of dicts gives, or one sentence."""

import collections
import itertools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.data import Batches, RowStream, as_rows, whole_batches

X, Y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6, dtype=np.int32)
ROWS = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
Row = collections.namedtuple("Row", "x y")


def forms(folder):
    np.savez(folder / "rows.npz", x=X, y=Y)
    yield {"x": X, "y": Y}
    yield {"x": jax.numpy.asarray(X), "y": Y}
    yield np.load(folder / "rows.npz")
    yield str(folder / "rows.npz")
    yield folder / "rows.npz"
    yield [Row(x, y) for x, y in zip(X, Y, strict=True)]
    yield collections.deque(ROWS)
    yield dict(enumerate(ROWS))


def test_every_form_has_the_batches_of_a_list_of_dicts(tmp_path):
    expected = [Batches(ROWS, global_batch=4, seed=3).batch(step) for step in range(4)]
    passes = [batch for batch, _ in whole_batches(ROWS, 4)]
    for rows in forms(tmp_path):
        batches = Batches(rows, global_batch=4, seed=3)
        assert batches.shapes == Batches(ROWS, global_batch=4, seed=3).shapes
        jax.tree.map(np.testing.assert_array_equal, [batches.batch(n) for n in range(4)], expected)
        held_out = [batch for batch, _ in whole_batches(rows, 4)]
        jax.tree.map(np.testing.assert_array_equal, held_out, passes)


def test_tensors_in_rows_are_read():
    torch = pytest.importorskip("torch")
    x, y = torch.tensor(X), torch.tensor(Y)
    expected = Batches(ROWS, global_batch=4, seed=3).batch(1)
    for rows in ({"x": x, "y": y}, [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]):
        got = Batches(rows, global_batch=4, seed=3).batch(1)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    with pytest.raises(ValueError, match=r"'x', a torch.Tensor, which NumPy cannot read .*float"):
        Batches({"x": x.bfloat16()}, global_batch=4, seed=3)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)
    with pytest.raises(ValueError, match=r"rows are a torch\.\S*DataLoader: batches need rows by"):
        as_rows(loader)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((row for row in ROWS), "the rows are a generator: batches need rows by their number"),
        (iter(ROWS), "the rows are a list_iterator: "),
        (lambda: ROWS, "the rows are a function: "),
        (set(Y.tolist()), "the rows are a set: "),
        ("rows.jsonl", "the rows are a str: "),
        ({"train": ROWS}, "the rows are a dict of other things than arrays: "),
        ({"x": X, "y": Y[:3]}, r"shapes {'x': \(6, 2\), 'y': \(3,\)}: give as many rows of each"),
        ({}, "the rows are a dict of other things than arrays: "),
        ([], "has no rows"),
        ([(x, y) for x, y in zip(X, Y, strict=True)], "row 0 is a tuple: give a dict or a named"),
        (X, "row 0 is a numpy.ndarray: give a dict or a named tuple"),
        ([{"x": X[:1]}, {"x": X}], "rows of a batch are unlike in 'x' .*same shape"),
        ([{"x": 1, "y": 2}, {"x": 1}], "rows of a batch are unlike in 'y' "),
    ],
)
def test_other_data_is_refused_in_one_sentence(rows, message):
    with pytest.raises(ValueError, match=message) as error:
        Batches(rows, global_batch=2, seed=0).batch(0)
    assert "\n" not in str(error.value)


def test_a_table_of_columns_is_refused():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"the rows are a pandas.*DataFrame: batches need rows"):
        Batches(pandas.DataFrame({"x": Y}), global_batch=2, seed=0)
    batches = Batches({"y": pandas.Series(Y, index=Y[::-1])}, global_batch=6, seed=0, shuffle=False)
    np.testing.assert_array_equal(batches.batch(0)["y"], Y)
    table = pandas.DataFrame({"x": X[:, 0], "y": Y})
    rows = [table.iloc[number] for number in range(len(Y))]  # each a Series with names
    batches = Batches(rows, global_batch=6, seed=0, shuffle=False)
    np.testing.assert_array_equal(batches.batch(0)["y"], Y)


def endless(opened):
    def open(position):
        opened.append(position)
        return ({"x": np.int32(number)} for number in itertools.count(position))

    return RowStream(open)


def test_a_stream_has_the_same_rows_from_every_step_on():
    opened = []
    batches = Batches(endless(opened), global_batch=4, seed=0)
    with batches.stream() as stream:
        steps = [next(stream)["x"].tolist() for _ in range(5)]
    assert steps == [[4 * step + row for row in range(4)] for step in range(5)]
    assert opened == [0, 0]  # the shapes, and the run
    with Batches(endless(opened), global_batch=4, seed=7).stream(3) as stream:
        assert [next(stream)["x"].tolist() for _ in range(2)] == steps[3:]
    assert opened[2:] == [0, 12]
    # The second of two processes reads what the first takes, and drops it.
    half = Batches(endless(opened), global_batch=4, seed=0)
    assert [half.rows(step, slice(2, 4))["x"].tolist() for step in (1, 2)] == [[6, 7], [10, 11]]
    assert half.batch(0)["x"].tolist() == steps[0]


def test_the_streams_of_the_readme_have_the_rows_of_their_position(tmp_path):
    datasets = pytest.importorskip("datasets")
    text = (Path(data.__file__).parent / "README.md").read_text()
    names = {
        "jt": jt,
        "itertools": itertools,
        "make": lambda: ({"x": n} for n in itertools.count()),
    }
    names["dataset"] = datasets.Dataset.from_dict({"x": range(40)}).to_iterable_dataset(
        num_shards=3
    )
    calls = [
        call for call in re.findall(r"`(jt.data.RowStream\(.*\))`", text) if "numpy" not in call
    ]
    assert len(calls) == 2
    for call in calls:
        batches = Batches(eval(call, names), global_batch=4, seed=0)
        assert batches.batch(5)["x"].tolist() == [20, 21, 22, 23]


def test_a_stream_that_ends_or_fails_says_so():
    stream = RowStream(lambda position: ROWS[position:])
    assert Batches(stream, global_batch=3, seed=0).batch(1)["y"].tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match=r"the stream ended before row 6: let open.position. beg"):
        Batches(stream, global_batch=4, seed=0).batch(1)
    with pytest.raises(ValueError, match="are a RowStream, which has no end: give a list"):
        list(data.eval_batches(stream, 2))

    failures = [OSError(5, "gone")]

    def failing(position):
        for number in itertools.count(position):
            if number == 5 and failures:
                raise failures.pop()
            yield {"x": number}

    batches = Batches(RowStream(failing), global_batch=4, seed=0)
    with pytest.raises(OSError, match="gone"):
        batches.source[5]
    assert batches.batch(1)["x"].tolist() == [4, 5, 6, 7]


def test_a_config_takes_them_and_tells_sets_from_arrays():
    config = jt.Config(global_batch=4, steps=3, seed=3)
    of_arrays = config.batches_of({"x": X, "y": Y}, {"x": X, "y": Y})
    assert of_arrays["batch"] == Batches(ROWS, global_batch=4, seed=3).shapes
    assert of_arrays["steps_per_epoch"] == 1.5
    assert list(of_arrays["eval_batches"]) == [""]
    two = config.batches_of(RowStream(lambda position: ROWS[position:]), {"a": ROWS, "b": {"x": X}})
    assert (two["steps_per_epoch"], list(two["eval_batches"])) == (None, ["a", "b"])
    with pytest.raises(ValueError, match="the rows are a generator: "):
        config.batches_of(row for row in ROWS)
    with pytest.raises(ValueError, match="the rows are a generator: "):
        config.batches_of(ROWS, (row for row in ROWS))


def test_texts_of_rows_are_for_a_loop_of_your_own_and_no_step():
    batch = Batches([{"x": "text"}], global_batch=2, seed=0).batch(0)
    assert batch["x"].tolist() == ["text", "text"]
    with pytest.raises(ValueError, match="batch leaf 'x' has dtype <U4, and a step computes with"):
        jt.compile_step(lambda state, batch: (state, {}), {}, batch)


def test_a_tensor_in_the_batch_of_a_compiled_step_is_named():
    torch = pytest.importorskip("torch")
    batch = {"x": jax.numpy.ones(4)}
    step = jt.compile_step(lambda state, batch: (state, batch["x"].sum()), batch, batch)
    for call in (step, lambda *trees: jt.compile_step(step, *trees)):
        with pytest.raises(ValueError, match=r"batch leaf 'x' is a torch.Tensor: give x.numpy\(\)"):
            call({"x": jax.numpy.ones(4)}, {"x": torch.ones(4)})
