"""The mask of attention, as numbers from which every kernel makes what it needs.

Shapes: B batch, T queries, S keys, H query heads, O = S + T - 1 distances.
"""

import dataclasses
from collections.abc import Callable

import jax

from jaxtrain.decisions import Reason, Why


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """What a query sees of its row, and what is added to its scores; never an array [T, S].

    Masks that are equal in all layers would be computed ahead of the loop over layers and held.

    Args:
      causal: position t sees positions up to t; needs S = T.
      window: position t sees none before t - window + 1, nor, without ``causal``, after
        t + window - 1; needs S = T. None means all.
      leading: so many first positions of a row are seen from beyond the window too, and, without
        ``causal``, see all themselves (the global tokens of Longformer and BigBird,
        https://arxiv.org/abs/2007.14062; causally, attention sinks,
        https://arxiv.org/abs/2309.17453).
      segments: int32 document numbers [B, T]; a position sees only its own document. Padding,
        number 0, sees padding, so that no row is empty. Needs S = T, or ``key_segments``.
      key_segments: int32 document numbers [B, S] of the keys, where they are not those of the
        queries; the xla form alone has them.
      bias: [H, O], a number per head for every distance: query t sees key s with
        ``bias[:, s - t + T - 1]`` added to its score. It has a gradient, and is never whole as
        [T, S] but within a tile. The xla form alone has it.
      windowed: bool scalar, where it is not known while tracing whether the window holds: both
        forms are compiled, and a branch takes one; there can be no bias.
      sinks: [H], a score per head that takes part in each softmax and has no key: what attention
        adds up to falls below 1 (Xiao et al. 2023, https://arxiv.org/abs/2309.17453; GPT-OSS). The
        xla form alone has them.
      positions: int32 [T], of the queries among the keys; None means 0 .. T - 1. The xla form alone
        has them, and then no bias; they are given where a device has some of the queries.
    """

    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    bias: jax.Array | None = None
    windowed: jax.Array | None = None
    sinks: jax.Array | None = None
    positions: jax.Array | None = None
    leading: int = dataclasses.field(default=0, metadata={"static": True})

    def check(self, T: int, S: int, H: int) -> None:
        """Raises ValueError unless it fits T queries of H heads and S keys."""
        if self.window is not None and (self.window < 1 or T != S):
            raise ValueError(
                f"window={self.window} must be at least 1, and needs as many keys as queries"
            )
        own = self.segments is not None and self.key_segments is None
        if (self.causal or own) and T != S:
            raise ValueError(f"causal or segment masks need as many keys ({S}) as queries ({T})")
        if self.key_segments is not None and self.segments is None:
            raise ValueError("key_segments needs segments, the document numbers of the queries")
        if self.bias is not None and self.bias.shape != (H, S + T - 1):
            raise ValueError(
                f"bias has shape {self.bias.shape}: give ({H}, {S + T - 1}), a number per head and "
                "distance"
            )
        if self.sinks is not None and self.sinks.shape != (H,):
            raise ValueError(
                f"sinks have shape {self.sinks.shape}: give ({H},), a score per query head"
            )

    @property
    def only_xla(self) -> Reason | None:
        """What a fused kernel would need of the mask, if it lacks that."""
        if self.bias is not None:
            return Why.NO_BIAS()
        if self.sinks is not None:
            return Why.NO_SINKS()
        if self.leading:
            return Why.NO_LEADING(count=self.leading)
        return None if self.key_segments is None else Why.OWN_KEYS()

    @property
    def documents(self) -> tuple[jax.Array, jax.Array] | None:
        """The document numbers of queries and of keys."""
        if self.segments is None:
            return None
        keys = self.segments if self.key_segments is None else self.key_segments
        return self.segments, keys

    @property
    def numbers(self) -> tuple[tuple[jax.Array, jax.Array] | None, jax.Array | None]:
        """The ``documents``, and the positions of the queries."""
        return self.documents, self.positions

    def either(self, run: Callable[..., jax.Array], *qkv: jax.Array) -> jax.Array:
        """Returns ``run(*qkv, mask)`` with the window, or without where ``windowed`` is false."""
        whole = dataclasses.replace(self, windowed=None)
        if self.windowed is None:
            return run(*qkv, whole)
        sides = (whole, dataclasses.replace(whole, window=None))
        with_and_without = [lambda *qkv, mask=mask: run(*qkv, mask) for mask in sides]
        return jax.lax.cond(self.windowed, *with_and_without, *qkv)
