"""Train a recommender on clicks that are drawn here: ``python -m experiments.recommend``.

A DLRM (Naumov et al. 2019, https://arxiv.org/abs/1906.00091): dense features pass an MLP, users,
items and each user's last items are rows of two tables, and a second MLP reads all pairwise dot
products. A step reads and updates the rows that its batch names
(:mod:`jaxtrain.methods.touched`).

    python -m experiments.recommend --simulate-devices 8 --mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2
    jaxtrain plan experiments.recommend --target v5p:2x2x1 --users 100000000 --width 128

Users and items have hidden tastes, and few of them most of the clicks (Zipf). A click is Bernoulli
of a nonlinear function of these and of the dense features, which gives the AUC of the best possible
model on the same held-out rows. Row r of step s is a function of the seed and of its number, and no
row comes twice.

Shapes: B rows, H items of a history, D width, X dense features, E edges of a histogram.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.methods.touched import touched_rows
from jaxtrain.ops.row_exchange import take_rows
from jaxtrain.run import options
from jaxtrain.sharding.rules import OptionalRules, Rules

TABLES = {"embed/users": ("user",), "embed/items": ("item", "history")}
HISTORY, DENSE, TASTES = 8, 4, 4
EDGES_E = np.linspace(-8, 8, 129, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains a DLRM on clicks. Flags of the optimizer are those of its MLPs; --optimizer.clip-norm
    limits one norm over all parameters."""

    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=lambda: options.OptimizerOptions(name="adamw", weight_decay=0.0)
    )

    users: int = 4096
    """Number of users, which are rows of a table."""
    items: int = 2048
    """Number of items, which are rows of a table."""
    width: int = 16
    """Columns of both tables; a multiple of 128 on a TPU, where narrow rows are copied."""
    hidden: tuple[int, ...] = (64, 32)
    """Widths of the hidden layers of both MLPs."""
    table_rule: Literal["adagrad", "sgd"] = "adagrad"
    """Update rule of the tables: row-wise Adagrad, or gradient descent."""
    table_rate: float = 0.1
    """Learning rate of the tables."""
    held_out_rows: int = 1 << 14
    """Number of rows to evaluate on."""
    steps: int = 3000
    global_batch: int = 2048


class Clicks:
    """Rows of users, items and clicks, each a function of the seed and of its number from ``first``
    on."""

    block: ClassVar[int] = 4096

    def __init__(self, config: Config, rows: int, first: int = 0) -> None:
        self.config, self.rows, self.first = config, rows, first
        self.drawn = functools.lru_cache(maxsize=4)(self._drawn)

    def __len__(self) -> int:
        return self.rows

    def row_order(self, **_: int) -> Any:
        return lambda position: position

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        block, row = divmod(self.first + index, self.block)
        return {name: x[row] for name, x in self.drawn(block).items()}

    def _drawn(self, block: int) -> dict[str, np.ndarray]:
        r, B = np.random.default_rng((self.config.seed, block)), self.block
        user_B, item_B = self.popular(r, 0, B), self.popular(r, 1, B)
        history_BH = self.popular(r, 1, (B, HISTORY))
        history_BH[np.arange(HISTORY) >= r.integers(0, HISTORY + 1, (B, 1))] = -1
        dense_BX = r.normal(size=(B, DENSE)).astype(np.float32)
        likes_B, item_BT = self.tastes(0, user_B), self.tastes(1, item_B)
        seen_BHT = self.tastes(1, history_BH) * (history_BH >= 0)[..., None]
        mean_BT = seen_BHT.sum(1) / np.maximum((history_BH >= 0).sum(1, keepdims=True), 1)
        logit_B = (likes_B * item_BT).sum(1) + 1.5 * np.tanh((mean_BT * item_BT).sum(1))
        logit_B += np.tanh(dense_BX[:, 0] * dense_BX[:, 1]) + 0.5 * dense_BX[:, 2] - 1
        click_B = r.random(B) < 1 / (1 + np.exp(-logit_B))
        rows = {"user": user_B, "item": item_B, "history": history_BH, "dense": dense_BX}
        floats = {"click": click_B, "logit": logit_B, "mask": np.ones(B)}
        return rows | {name: x.astype(np.float32) for name, x in floats.items()}

    def popular(self, r: np.random.Generator, kind: int, shape: Any) -> np.ndarray:
        """Ids whose ranks are Zipf's, with exponent 1.05, spread over the rows of a table."""
        count = (self.config.users, self.config.items)[kind]
        rank = ((count**-0.05 - 1) * r.random(shape) + 1) ** -20
        return (rank.astype(np.uint64) * np.uint64(2654435761) % np.uint64(count)).astype(np.int32)

    def tastes(self, kind: int, ids: np.ndarray) -> np.ndarray:
        """Hidden features [..., TASTES] of users or items, uniform with variance 1: a hash."""
        x = (ids[..., None].astype(np.uint64) * 2 + kind) * TASTES + np.arange(TASTES, dtype="u8")
        x += np.uint64((self.config.seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return np.sqrt(3) * (x / 2.0**63 - 1)


def build(config: Config) -> jt.Experiment:
    """Builds the experiment."""
    if config.private.is_on:
        raise ValueError(
            "training is private and experiment 'recommend' updates tables by rows, which would "
            "tell whose rows a batch has: leave the flags of --private out"
        )
    train, held_out = Clicks(config, 1 << 30), Clicks(config, config.held_out_rows, first=1 << 40)
    chosen = config.optimizer
    for text in (*chosen.rate_multipliers, *chosen.decay_multipliers):
        if any(re.search(text.rpartition("=")[0], table) for table in TABLES):
            raise ValueError(
                f"a multiplier is {text!r}, which finds tables: their rate is `table_rate`, and "
                "they have no decay; name MLPs alone, such as ^top/"
            )

    def optimizer_of(stack: Any, **numbers: Any) -> Any:
        of_mlps = dataclasses.replace(chosen, **numbers, clip_norm=None, clip_order=2.0, freeze=())
        how = {"steps": config.steps, "global_batch": config.global_batch, "stacked": ()}
        clip = {"clip_norm": chosen.clip_norm, "clip_order": chosen.clip_order}
        given = {"rule": config.table_rule, **clip}
        mlps = options.make_optimizer(of_mlps, **how)
        return optim.by_rows(mlps, ("^embed/",), config.table_rate, **given)

    made = config.experiment(
        "recommend",
        **config.batches_of(train, held_out) | {"steps_per_epoch": None},
        init_fn=functools.partial(init, config),
        loss_fn=loss,
        eval_loss_fn=functools.partial(loss, counts=True),
        rules=Rules(OptionalRules([("^embed/", ("rows", None))])),
        gathers_layers=True,
        method=touched_rows(TABLES),
        optimizer=optimizer_of,
        freeze=chosen.freeze or None,
        item="clicks",
        facts={
            "model": f"DLRM with tables of {config.users:,} and {config.items:,} rows of "
            f"{config.width}, and MLPs with hidden layers of {config.hidden}",
            "optimizer": f"{chosen.name} for the MLPs, row-wise {config.table_rule} for the tables",
        },
        derived=aucs,
        best_metric="auc",
        best_mode="max",
        conclude=lambda state, means: [
            "held-out AUC {auc:.4f}, of the best possible model {best_auc:.4f}".format(
                **aucs(means)
            )
        ],
        pictures=lambda state, means: {"roc": curves(means)},
    )
    # An evaluation would cast whole tables.
    return made.with_(policy=dataclasses.replace(made.policy, keep="^embed/"))


def init(config: Config, rng: jax.Array) -> dict[str, Any]:
    """Draws float32 parameters: tables N(0, 1 / D), kernels N(0, 2 / inputs)."""
    rngs, D = iter(jax.random.split(rng, 3 + 2 * len(config.hidden) + 2)), config.width

    def mlp(*sizes: int) -> dict[str, Any]:
        layers = {}
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            kernel = (2 / inputs) ** 0.5 * jax.random.normal(next(rngs), (inputs, outputs))
            layers[str(i)] = {"kernel": kernel, "bias": jnp.zeros(outputs)}
        return layers

    sizes = {"users": config.users, "items": config.items}
    tables = {n: D**-0.5 * jax.random.normal(next(rngs), (V, D)) for n, V in sizes.items()}
    bottom, top = mlp(DENSE, *config.hidden, D), mlp(D + 6, *config.hidden, 1)
    return {"embed": tables, "bottom": bottom, "top": top}


def logits(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the float32 logits [B] of clicks."""
    dtype = params["bottom"]["0"]["kernel"].dtype

    def mlp(name: str, x_BF: jax.Array) -> jax.Array:
        layers = jt.gather(params[name], name)
        for i in range(len(layers)):
            x_BF = x_BF @ layers[str(i)]["kernel"] + layers[str(i)]["bias"]
            x_BF = jax.nn.relu(x_BF) if i + 1 < len(layers) else x_BF
        return jt.constrain(x_BF, "batch", None)

    def rows(table: str, ids: jax.Array) -> jax.Array:
        rows = take_rows(params["embed"][table], ids)
        return jt.constrain(rows, "batch", *[None] * (rows.ndim - 1))

    dense_BD = mlp("bottom", batch["dense"].astype(dtype))
    count_B1 = jnp.maximum((batch["history"] >= 0).sum(1, keepdims=True), 1)
    found = [rows("users", batch["user"]), rows("items", batch["item"])]
    found += [rows("items", batch["history"]).sum(1) / count_B1]
    all_B4D = jnp.stack([dense_BD, *(x.astype(dtype) for x in found)], axis=1)
    dots_B44 = jnp.einsum("bnd,bmd->bnm", all_B4D, all_B4D)
    pairs_BP = jnp.stack([dots_B44[:, n, m] for n in range(4) for m in range(n)], axis=1)
    return mlp("top", jnp.concatenate([dense_BD, pairs_BP], axis=1))[:, 0].astype(jnp.float32)


def loss(
    params: Any, batch: Mapping[str, jax.Array], rng: jax.Array | None, counts: bool = False
) -> jt.WeightedLoss:
    """The log loss; with ``counts`` also histograms of the logits of rows with and without a click,
    the model's and the true ones, each row shared by the two nearest edges."""
    del rng
    logit_B, click_B, mask_B = logits(params, batch), batch["click"], batch["mask"]
    metrics = {}
    for name, x_B in {"": logit_B, "best_": batch["logit"]}.items() if counts else ():
        place_B = (jnp.clip(x_B, EDGES_E[0], EDGES_E[-1]) - EDGES_E[0]) / (EDGES_E[1] - EDGES_E[0])
        near_BE = jnp.maximum(1 - jnp.abs(place_B[:, None] - jnp.arange(len(EDGES_E))), 0)
        sides_BS = jnp.stack([click_B, 1 - click_B], axis=1) * mask_B[:, None]
        metrics[f"{name}counts"] = jt.Sum(jnp.einsum("be,bs->se", near_BE, sides_BS))
    losses_B = jax.nn.softplus(logit_B) - click_B * logit_B
    return jt.WeightedLoss((losses_B * mask_B).sum(), mask_B.sum(), metrics)


def shares(counts_SE: np.ndarray) -> np.ndarray:
    """The shares of rows with and without a click [S, E + 1] above each edge, from the last on."""
    sums_SE = np.cumsum(np.asarray(counts_SE, np.float64)[:, ::-1], axis=1)
    return np.pad(sums_SE, [(0, 0), (1, 0)]) / np.maximum(sums_SE[:, -1:], 1e-9)


def aucs(means: Mapping[str, Any]) -> dict[str, float]:
    """The AUC of the model and of the best possible one, where there are counts."""
    sides = {n: shares(means[f"{n}counts"]) for n in ("", "best_") if f"{n}counts" in means}
    return {f"{name}auc": float(np.trapezoid(*shares)) for name, shares in sides.items()}


def curves(means: Mapping[str, Any], side: int = 256) -> np.ndarray:
    """Draws the share of clicks that are found against that of other rows that are taken for them:
    the model's in blue, the best possible in red."""
    image = np.full((side, side, 3), 255, np.uint8)
    for name, color in (("best_", (200, 40, 40)), ("", (30, 80, 200))):
        found, taken = shares(means[f"{name}counts"])
        places = np.linspace(0, 2, 8 * side)  # along the curve
        down, right = (np.interp(places, found + taken, x) for x in (1 - found, taken))
        image[(down * (side - 1)).astype(int), (right * (side - 1)).astype(int)] = color
    return image


if __name__ == "__main__":
    jt.main(Config, build)
