"""The sum of what clients send under masks is the sum of their integers, to the bit."""

import numpy as np
import pytest

pytest.importorskip("Crypto")

from jaxtrain.methods.secure import Client, to_integers, unmask

rng = np.random.default_rng(0)
NUMBERS = {client: rng.integers(0, 2**32, 500, np.uint32) for client in (0, 1, 2, 5, 9)}


def secure_sum(numbers, threshold, dropped=()):
    """A whole round; clients that have dropped out send no numbers."""
    clients = {number: Client(number, threshold=threshold) for number in numbers}
    publics = {number: client.public for number, client in clients.items()}
    sealed = {number: client.share(publics) for number, client in clients.items()}
    inbox = {to: {by: sealed[by][to] for by in sealed} for to in clients}
    here = [number for number in clients if number not in dropped]
    masked = {n: clients[n].mask(numbers[n], inbox[n]) for n in here}
    revealed = {n: clients[n].reveal(here) for n in here}
    return unmask(masked, publics, revealed, threshold=threshold)


@pytest.mark.parametrize("dropped", [(), (1,), (0, 9)])
def test_the_sum_is_that_of_who_stays_to_the_bit(dropped):
    found = secure_sum(NUMBERS, threshold=3, dropped=dropped)
    stayed = [x.astype(object) for client, x in NUMBERS.items() if client not in dropped]
    assert found.tolist() == (sum(stayed) % 2**32).tolist()


def test_a_round_of_changes_is_that_of_the_training_step():
    moved = rng.normal(size=(5, 300)).astype(np.float32)
    whole = np.asarray(to_integers(moved, clip=2.0, clients=5))
    found = secure_sum(dict(enumerate(whole)), threshold=3)
    assert np.array_equal(found, whole.sum(0, dtype=np.uint32))


def test_too_few_are_refused_and_nothing_is_revealed():
    with pytest.raises(ValueError, match="2 clients have sent their numbers"):
        secure_sum(NUMBERS, threshold=3, dropped=(0, 1, 2))
    with pytest.raises(ValueError, match="`threshold` is 2 and 5 clients"):
        secure_sum(NUMBERS, threshold=2)


def test_what_is_sent_tells_nothing_of_one_client():
    clients = {n: Client(n, threshold=2) for n in range(3)}
    publics = {n: client.public for n, client in clients.items()}
    sealed = {n: client.share(publics) for n, client in clients.items()}
    inbox = {to: {by: sealed[by][to] for by in sealed} for to in clients}
    zeros = np.zeros(64_000, np.uint32)
    with pytest.raises(ValueError, match="MAC check failed"):  # another's share
        clients[0].mask(zeros, {1: sealed[1][2]})
    masked = {n: clients[n].mask(zeros, inbox[n]) for n in clients}
    for sent in masked.values():  # uniform: 16 bins of 4,000, standard deviation 61
        assert abs(np.histogram(sent, 16, (0, 2**32))[0] - 4000).max() < 400
    with pytest.raises(ValueError, match="has sent numbers"):
        clients[0].mask(zeros + 1, inbox[0])
    revealed = {n: clients[n].reveal([0, 1]) for n in (0, 1)}
    with pytest.raises(ValueError, match="has revealed them"):
        clients[0].reveal([0, 1, 2])
    two = {n: masked[n] for n in (0, 1)}
    assert not unmask(two, publics, revealed, threshold=2).any()
    assert unmask(masked, publics, revealed, threshold=2).any()  # not by shares of another list
    with pytest.raises(ValueError, match="1 clients have revealed"):
        unmask(two, publics, {0: revealed[0]}, threshold=2)
