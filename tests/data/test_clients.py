"""Every row is dealt to one client, and a batch is a function of the seed and the round."""

import numpy as np
import pytest

from jaxtrain import data

LABELS = np.random.default_rng(0).integers(0, 10, 700)


@pytest.mark.parametrize("how", ["iid", "shards", "dirichlet", "labels"])
def test_rows_are_dealt_once_and_as_is_said(how):
    dealt = data.partition(LABELS, how, clients=20, seed=3, alpha=0.1)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(700))
    sizes, kinds = [len(x) for x in dealt], [len(set(LABELS[x])) for x in dealt]
    if how in ("iid", "shards"):
        assert set(sizes) <= {34, 35, 36}
    if how == "iid":
        assert min(kinds) >= 7
    if how == "shards":  # 17 or 18 rows of one label, or where it ends of two
        assert max(kinds) <= 4
        assert np.mean(kinds) < 3
    if how == "dirichlet":
        assert max(sizes) > 3 * min(sizes)
        assert np.mean(kinds) < 6
    if how == "labels":
        assert kinds == [1] * 10
    again = data.partition(LABELS, how, clients=20, seed=3, alpha=0.1)
    assert all(map(np.array_equal, dealt, again))
    other = data.partition(LABELS, how, clients=20, seed=4, alpha=0.1)
    assert how == "labels" or not all(map(np.array_equal, dealt, other))


def test_a_batch_has_the_rows_of_the_clients_that_are_drawn():
    rows = [{"x": np.int32(i + 1), "mask": np.float32(1)} for i in range(9)]
    clients = [np.array([0, 3, 8]), np.array([1]), np.array([2, 4, 5, 6, 7])]
    rounds = data.ClientRows(rows, clients, per_round=2, local_batch=2)
    assert rounds.size == 6
    batches = data.Batches(rounds, global_batch=12, seed=5)
    seen = set()
    for step in range(20):
        batch, drawn = batches.batch(step), rounds.drawn(5, step)
        assert len(set(drawn)) == 2
        seen |= set(drawn)
        for client, own, mask in zip(
            drawn, batch["x"].reshape(2, 6), batch["mask"].reshape(2, 6), strict=True
        ):
            held = (clients[client] + 1).tolist()
            assert own.tolist() == held + [0] * (6 - len(held))
            assert mask.tolist() == [1] * len(held) + [0] * (6 - len(held))
    assert seen == {0, 1, 2}
    whole = data.ClientRows(rows, clients, per_round=3, local_batch=0)
    assert (whole.size, whole.local_batch) == (5, 5)


@pytest.mark.parametrize(
    ("how", "clients", "why"),
    [("iid", 0, "give 1 or"), ("iid", 701, "700 rows"), ("shards", 351, "for 702 shards")],
)
def test_more_clients_than_rows_are_refused(how, clients, why):
    with pytest.raises(ValueError, match=why):
        data.partition(LABELS, how, clients=clients, seed=0)
    with pytest.raises(ValueError, match="`per_round` is 3 and 2 clients"):
        data.ClientRows([{"x": 1}], [np.array([0])] * 2, per_round=3, local_batch=1)
