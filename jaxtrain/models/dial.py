"""One dial of a decoder's training: its depth, or a budget of FLOPs, from which the rest follows.

=============  =====================================================================================
setting        rule
=============  =====================================================================================
layers         the depth; of a budget, that whose best training costs nearest to it
width          ``ASPECT`` x layers, as the preset ``tiny`` has
heads          as many as divide the width into ``FEATURES`` or more each, as ``tiny`` has
tokens D       ``RATIO`` x the parameters in layers (proportional: Hoffmann et al. 2022,
               https://arxiv.org/abs/2203.15556); of a budget, budget / FLOPs per token
global batch   ``BATCH`` x (D / 1e6) ^ ``OF_D`` tokens, to a power of 2 of rows (a power of D alone:
               Bergsma et al. 2025, https://arxiv.org/abs/2505.13738)
steps          D / batch
learning rate  the optimizer's own x (batch / the rule's batch) ^ 0.5 (Malladi et al. 2022,
               https://arxiv.org/abs/2205.10287), the same for every width by muP
               (:mod:`jaxtrain.models.mup`)
=============  =====================================================================================

The constants are fitted to bytes of Python source; jaxtrain/study/README.md has the runs.
"""

import bisect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig

ASPECT, FEATURES, DEEPEST = 48, 96, 256
# Tokens per parameter in layers; tokens of the batch for a million tokens, and its power of tokens.
RATIO, BATCH, OF_D = 42, 1600, 0.4


class Setting(NamedTuple):
    """A setting of a training: its value, what its rule says, and the rule in words."""

    value: Any
    ruled: Any
    rule: str

    def __str__(self) -> str:
        mark = "" if self.value == self.ruled else f"given, in place of {self.ruled:,}: "
        return f"{self.value:,} ({mark}{self.rule})"


def turn(
    model_of: Callable[..., DecoderConfig],
    given: Mapping[str, Any],
    *,
    depth: int | None = None,
    budget: float | None = None,
    rate: float | None = None,
) -> dict[str, Setting]:
    """Returns every setting that follows from a depth, a budget, or both.

    Args:
      model_of: makes the model of ``layers``, ``width`` and ``heads``.
      given: settings that are decided, by name; the others follow from them.
      depth: layers.
      budget: FLOPs of the training, as :func:`jaxtrain.models.decoder.flops_per_token` counts.
      rate: the optimizer's own peak learning rate; None for none by a rule.

    Returns:
      ``layers``, ``width``, ``heads``, ``global_batch`` (rows), ``steps`` and ``learning_rate``.

    Raises:
      ValueError: the depth or the budget is not above 0.

    >>> import dataclasses, functools
    >>> made = functools.partial(dataclasses.replace, decoder.tiny(), mlp_width=None, kv_heads=None)
    >>> found = turn(made, {"steps": 9}, depth=6)
    >>> print(found["width"], found["heads"].value, found["steps"].value)
    288 (48 x layers) 3 9
    """
    for name, value in (("depth", depth), ("budget", budget)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`{name}` is {value}: give a number above 0")
    found: dict[str, Setting] = {}

    def add(name: str, ruled: Any, rule: str) -> Any:
        found[name] = Setting(given.get(name, ruled), ruled, rule)
        return found[name].value

    def sized(layers: int) -> DecoderConfig:
        width = add("width", ASPECT * layers, f"{ASPECT} x layers")
        heads = add("heads", heads_of(width), f"1, or more of {FEATURES} features each")
        return model_of(layers=layers, width=width, heads=heads)

    def cost(layers: int) -> float:
        model = sized(layers)
        return tokens_of(model) * decoder.flops_per_token(model)

    why = "depth"
    if depth is None:
        above = bisect.bisect_left(range(1, DEEPEST), budget, key=cost) + 1
        near = range(max(1, above - 1), above + 1)
        depth = min(near, key=lambda layers: abs(math.log(cost(layers) / budget)))
        why = f"whose best training costs nearest to {budget:g} FLOPs"
    model = sized(add("layers", depth, why))
    tokens, why = tokens_of(model), f"{RATIO} x {in_layers(model):,} parameters in layers"
    if budget is not None:
        per_token = decoder.flops_per_token(model)
        tokens, why = budget / per_token, f"{budget:g} FLOPs of {per_token:,} each"
    best = BATCH * (tokens / 1e6) ** OF_D
    rows = max(1, 2 ** round(math.log2(best / model.seq_len)))
    why_rows = f"{BATCH:,} tokens x ({tokens / 1e6:.3g} M) ^ {OF_D:g}"
    batch = add("global_batch", rows, why_rows) * model.seq_len
    add("steps", max(1, round(tokens / batch)), f"{tokens:,.4g} tokens, {why}")
    if rate is not None:
        why = f"{rate:g} x ({batch:,} / {best:,.0f} tokens) ^ 0.5"
        add("learning_rate", float(f"{rate * (batch / best) ** 0.5:.4g}"), why)
    return found


def in_layers(model: DecoderConfig) -> int:
    """Counts the parameters of layers: all but the table of tokens and the final norm."""
    return decoder.parameter_count(model) - model.width * (model.vocab_size + 1)


def tokens_of(model: DecoderConfig) -> int:
    """Returns the tokens of the best training: a smaller model with more of them, or a larger one
    with fewer, comes to a higher loss for the same FLOPs."""
    return RATIO * in_layers(model)


def heads_of(width: int) -> int:
    """Returns as many heads as divide a width into ``FEATURES`` or more each, an even number.

    >>> [heads_of(48 * layers) for layers in (1, 2, 3, 4, 6, 11, 12)]
    [1, 1, 1, 2, 3, 4, 6]
    """
    counts = range(max(1, width // FEATURES), 0, -1)
    return next((n for n in counts if width % (2 * n) == 0), 1)
