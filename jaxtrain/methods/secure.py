"""Secure aggregation (Bonawitz et al. 2017, https://eprint.iacr.org/2017/281): a server adds up
numbers of clients, and sees the sum alone.

Numbers are whole, modulo 2^32. Client u sends x_u + b_u + sum_{v > u} m_uv - sum_{v < u} m_uv: the
mask m_uv comes of a key that u and v agree on, and b_u of a seed of u's. Masks of pairs cancel to
the bit. Every client holds a share of each other's key and seed. ``threshold`` shares give back the
seed of a client that has sent its numbers, or the key of one that has dropped out, never both.

    advertise (public) -> share -> mask -> reveal -> unmask

Keys are agreed by X25519, shares are Shamir's and sealed by ChaCha20-Poly1305, masks are ChaCha20's
stream: all by PyCryptodome (extra ``secure``). Server and clients are honest but curious: they
follow the protocol, and read all that they are sent. Messages are not signed: a server that invents
clients, or tells them different lists of who has dropped out, learns more.

Shapes: N numbers.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.host import extras

_MODULES = ("Cipher.ChaCha20", "Cipher.ChaCha20_Poly1305", "Hash.SHA256", "Protocol.DH")
_MODULES += ("Protocol.KDF", "Protocol.SecretSharing", "PublicKey.ECC", "Random")
# Bytes of a secret, of the halves that Shamir's scheme takes, and before a sealed text.
_SECRET, _HALF, _NONCE, _TAG = 32, 16, 12, 16


def to_integers(x: jax.Array, *, clip: float, clients: int) -> jax.Array:
    """Rounds numbers to whole ones modulo 2^32, uint32, so that the sum of all clients cannot wrap.

    ``clip`` is the largest magnitude, to which others are clipped. The error of a number is at most
    half of ``clip / L``, where L is 2^30 over the number of clients, or up to half of that, besides
    the rounding of float32.

    >>> to_integers(jnp.array([0.5, -2.0]), clip=1.0, clients=4).tolist()
    [134217728, 4026531840]
    """
    whole = jnp.rint(jnp.clip(x, -clip, clip) * (_levels(clients) / clip))
    return whole.astype(jnp.int32).astype(jnp.uint32)


def to_float(total: jax.Array, *, clip: float, clients: int) -> jax.Array:
    """Returns the sum that integers of :func:`to_integers` have, float32."""
    return total.astype(jnp.int32).astype(jnp.float32) * (clip / _levels(clients))


def _levels(clients: int) -> int:
    return 2 ** (30 - (clients - 1).bit_length())


class Client:
    """One client in one round, whose secrets any ``threshold`` clients together give back.

    ``public`` are its public keys: of the channel by which it is sent shares, and of its masks.
    """

    def __init__(self, number: int, *, threshold: int):
        self.number, self.threshold = number, threshold
        self._crypto = _crypto()
        self._keys = [self._crypto.PublicKey.ECC.generate(curve="Curve25519") for _ in range(2)]
        self._seed = self._crypto.Random.get_random_bytes(_SECRET)
        self.public = tuple(key.public_key().export_key(format="raw") for key in self._keys)
        self._held: dict[int, tuple[bytes, bytes]] | None = None
        self._sent = False

    def share(self, publics: Mapping[int, tuple[bytes, bytes]]) -> dict[int, bytes]:
        """Returns the shares of this client's secrets, each sealed for one client.

        ``publics`` are the public keys of all that take part, by their numbers, this client's too.
        Raises ValueError where the threshold is above their number, or at most half of it, so that
        two groups could reveal different things.
        """
        if not len(publics) < 2 * self.threshold <= 2 * len(publics):
            raise ValueError(
                f"`threshold` is {self.threshold} and {len(publics)} clients take part: give more "
                "than half of them, and at most as many"
            )
        self._publics, numbers = dict(publics), sorted(publics)
        secrets = self._keys[1].seed, self._seed
        halves = [x[i : i + _HALF] for x in secrets for i in (0, _HALF)]
        split = self._crypto.Protocol.SecretSharing.Shamir.split
        dealt = [split(self.threshold, len(numbers), half) for half in halves]
        sealed = {}
        for place, other in enumerate(numbers):
            cipher = self._channel(self.number, other)
            text, tag = cipher.encrypt_and_digest(b"".join(shares[place][1] for shares in dealt))
            sealed[other] = cipher.nonce + tag + text
        return sealed

    def mask(self, integers_N: np.ndarray, sealed: Mapping[int, bytes]) -> np.ndarray:
        """Returns this client's numbers, uint32 [N], under its masks with those who sent shares.

        ``sealed`` are the shares that were sent to it, by their senders, its own too. Raises
        ValueError for a share that its sender has not sealed, and for a second call: the same masks
        would show how numbers differ.
        """
        if self._sent:
            raise ValueError("this client has sent numbers under these masks: begin anew")
        held = {}
        for other, message in sealed.items():
            cipher = self._channel(other, self.number, message[:_NONCE])
            tag, text = message[_NONCE : _NONCE + _TAG], message[_NONCE + _TAG :]
            shares = cipher.decrypt_and_verify(text, tag)
            held[other] = shares[:_SECRET], shares[_SECRET:]
        self._held, self._sent = held, True
        masked_N = np.asarray(integers_N, np.uint32) + _stream(self._seed, len(integers_N))
        for other in sealed:
            masked_N += _pair(self._keys[1], self._publics, self.number, other, len(masked_N))
        return masked_N

    def reveal(self, sent: Collection[int]) -> dict[int, bytes]:
        """Returns the shares that this client holds: of the seeds of clients that have ``sent``
        their numbers, and of the keys of those that have dropped out.

        Raises ValueError where too few have sent, and for a second call: with another list, the
        numbers of one client could be read.
        """
        if len(sent) < self.threshold:
            raise ValueError(
                f"{len(sent)} clients have sent their numbers and the threshold is "
                f"{self.threshold}: begin the round anew"
            )
        if self._held is None:
            raise ValueError("this client holds no shares, or has revealed them: begin anew")
        held, self._held = self._held, None
        return {other: both[other in sent] for other, both in held.items()}

    def _channel(self, sender: int, receiver: int, nonce: bytes | None = None) -> Any:
        other = receiver if sender == self.number else sender
        key = _agreed(self._keys[0], self._publics[other][0])
        nonce = nonce or self._crypto.Random.get_random_bytes(_NONCE)
        cipher = self._crypto.Cipher.ChaCha20_Poly1305.new(key=key, nonce=nonce)
        cipher.update(f"{sender} to {receiver}".encode())
        return cipher


def unmask(
    masked: Mapping[int, np.ndarray],
    publics: Mapping[int, tuple[bytes, bytes]],
    revealed: Mapping[int, Mapping[int, bytes]],
    *,
    threshold: int,
) -> np.ndarray:
    """Returns the sum of the clients' numbers, uint32 [N], to the bit.

    Args:
      masked: what clients have sent, by client.
      publics: the public keys of all that share secrets.
      revealed: the shares that clients have revealed, by who reveals and of whom.
      threshold: that of the clients.

    Raises ValueError where fewer clients than the threshold have revealed their shares.
    """
    if len(revealed) < threshold:
        raise ValueError(
            f"{len(revealed)} clients have revealed their shares and the threshold is {threshold}: "
            "begin the round anew"
        )
    crypto, places = _crypto(), {number: i for i, number in enumerate(sorted(publics), 1)}
    combine = crypto.Protocol.SecretSharing.Shamir.combine
    total_N = sum(masked.values(), start=np.uint32(0))
    for client in next(iter(revealed.values())):
        shares = [(places[by], of[client]) for by, of in list(revealed.items())[:threshold]]
        secret = b"".join(
            combine([(place, text[i : i + _HALF]) for place, text in shares]) for i in (0, _HALF)
        )
        if client in masked:
            total_N = total_N - _stream(secret, len(total_N))
            continue
        key = crypto.PublicKey.ECC.construct(curve="Curve25519", seed=secret)
        for other in masked:
            total_N = total_N + _pair(key, publics, client, other, len(total_N))
    return total_N


@functools.cache
def _crypto() -> Any:
    modules = (f"Crypto.{name}" for name in _MODULES)
    return extras.load("secure aggregation needs PyCryptodome", "secure", *modules)


def _stream(seed: bytes, size: int) -> np.ndarray:
    """uint32 [size] of a seed, the same on every machine."""
    cipher = _crypto().Cipher.ChaCha20.new(key=seed, nonce=bytes(_NONCE))
    return np.frombuffer(cipher.encrypt(bytes(4 * size)), "<u4")


def _agreed(key: Any, public: bytes) -> bytes:
    crypto = _crypto()
    kdf: Callable[[bytes], bytes] = lambda secret: crypto.Protocol.KDF.HKDF(  # noqa: E731
        secret, _SECRET, b"", crypto.Hash.SHA256
    )
    theirs = crypto.Protocol.DH.import_x25519_public_key(public)
    return crypto.Protocol.DH.key_agreement(static_priv=key, static_pub=theirs, kdf=kdf)


def _pair(key: Any, publics: Mapping[int, Any], one: int, other: int, size: int) -> np.ndarray:
    """The mask that a client adds for another; that one adds its negative."""
    if one == other:
        return np.zeros(size, np.uint32)
    mask_N = _stream(_agreed(key, publics[other][1]), size)
    return mask_N if one < other else -mask_N
