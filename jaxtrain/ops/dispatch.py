"""How tokens meet the experts of other devices: all are gathered, or each is sent to the devices of
its experts.

Gathering receives (EP - 1) N D numbers, of N tokens on each of EP devices. Sending takes as many
waves as the most wanted device needs: in a wave a device sends at most N / EP tokens to each
device, and receives N at most, so that nothing is dropped and no buffer is larger than those of its
own tokens, wherever they go. A token is sent once to a device, however many of its experts are
there. What comes back is added wave by wave and device by device, in that order.

Shapes: B batch, T positions, N tokens of a device, D width, E experts, J experts of a token, P
devices along the axis of the experts, C tokens from one device to another in a wave, M = P C.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.decisions import Dispatched, Why

DISPATCHES = ("gather", "exchange")

# Entered with how tokens meet experts; None chooses.
dispatch = jax.make_user_context(None)


def devices_of_a_token(places: int, here: int, each: int) -> float:
    """The mean number of devices that a token's ``each`` experts are on, of ``places`` devices with
    ``here`` experts each, where any choice is as likely as any other.

    >>> devices_of_a_token(8, 1, 2), round(devices_of_a_token(64, 4, 8), 2)
    (2.0, 7.68)
    """
    experts = places * here
    return places * (1 - math.comb(experts - here, each) / math.comb(experts, each))


def dispatched(places: int, here: int, each: int) -> Dispatched:
    """Returns how tokens meet experts, and why: they are sent where that takes at most half the
    numbers of gathering, with one wave more than where routes are even.

    Args:
      places: P, along the axis of the experts.
      here: experts of a device.
      each: J.
    """
    mean = devices_of_a_token(places, here, each)
    if (asked := dispatch.value) is not None:
        return Dispatched(asked, Why.ASKED())
    how = "exchange" if 2 * (math.ceil(mean) + 1) <= places else "gather"
    return Dispatched(how, Why.SPREAD(mean=f"{mean:.1f}", places=places))


class Waves:
    """Tokens of a device in the queues for the devices of their experts.

    Args:
      experts_NJ: int32; ``places * here`` or more is no expert.
      axes: of the mesh, which number the devices.
      here: experts of a device.
    """

    def __init__(self, experts_NJ: jax.Array, axes: tuple[str, ...], here: int) -> None:
        self.tokens, each = experts_NJ.shape
        self.axes, self.places = axes, math.prod(jax.lax.axis_size(a) for a in axes)
        self.cell = -(-self.tokens // self.places)
        goes_PN = (experts_NJ // here == jnp.arange(self.places)[:, None, None]).any(-1)
        self.queue_PN = jnp.argsort(~goes_PN, axis=1, stable=True)
        self.counts_P1 = goes_PN.sum(1, keepdims=True)
        # All devices that exchange anything take part in as many waves.
        self.count = jax.lax.pmax(-(-self.counts_P1.max() // self.cell), axes)
        share = devices_of_a_token(self.places, here, each)
        self.mean_count = math.ceil(share * self.tokens / (self.places * self.cell))
        # Choices of an expert in a wave, where routes are even.
        self.even = math.ceil(self.tokens * each / (here * self.mean_count))

    def members(self, wave: jax.Array) -> jax.Array:
        """The tokens that a wave sends to each device, int32 [P, C]; N for none."""
        at_C = wave * self.cell + jnp.arange(self.cell)
        token_PC = self.queue_PN.at[:, at_C].get(mode="clip")
        return jnp.where(at_C < self.counts_P1, token_PC, self.tokens)

    def sent(self, x_ND: jax.Array, token_PC: jax.Array, fill: float = 0) -> jax.Array:
        """Returns what arrives of all devices' tokens, [M, D]; ``fill`` for none."""
        x_PCD = x_ND.at[token_PC].get(mode="fill", fill_value=fill)
        return self._swap(x_PCD).reshape(-1, x_ND.shape[-1])

    def add_back(self, sums: list, found: list, token_PC: jax.Array) -> list:
        """Adds what other devices made [M, D] of this one's tokens to sums [N, D]."""
        back = [self._swap(y_MD.reshape(*token_PC.shape, -1)) for y_MD in found]

        def from_device(sums, given):  # each token once, so that the order of additions is fixed
            token_C, parts = given
            return [
                x_ND.at[token_C].add(y_CD.astype(x_ND.dtype), mode="drop")
                for x_ND, y_CD in zip(sums, parts, strict=True)
            ], None

        return jax.lax.scan(from_device, sums, (token_PC, back))[0]

    def loop(self, wave: Callable, start: object, scope: str) -> object:
        """Applies ``wave(w, x)`` for all waves; ``scope`` says how many there are in the mean."""
        with jax.named_scope(scope):
            return jax.lax.fori_loop(0, self.count, wave, start)

    def _swap(self, x_PCD: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x_PCD, self.axes, 0, 0)
