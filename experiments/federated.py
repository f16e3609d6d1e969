"""Train by federated rounds: ``python -m experiments.federated``.

By default 50 clients have 28 or 29 digits each (scikit-learn's, of which a fifth is held out), 5 of
them train in a round, and a step is a round. With ``--federated.epochs 5 --optimizer.learning-rate
0.2`` 95 % of the held-out digits are right after 18 rounds (9 to 23 of three seeds), seconds on 2
CPU cores. The network is McMahan et al.'s of two hidden layers.

    python -m experiments.federated --federated.partition shards --federated.epochs 5
    python -m experiments.federated --federated.clients 1 --federated.per-round 1  # central
    python -m experiments.federated --data python --federated.partition labels  # GPT, by package
    python -m experiments.federated --private.noise 1.2 --seed 8191  # private to a client
"""

import dataclasses
import fractions
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from experiments import language, vision
from jaxtrain import data
from jaxtrain.engines.private import DRAWN
from jaxtrain.host.least import check_least
from jaxtrain.methods.federated import Federated, federated
from jaxtrain.methods.privacy import private_clients
from jaxtrain.models import decoder, layers
from jaxtrain.run import options
from jaxtrain.sharding.rules import Rules

CLIENTS = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0}
CLIENTS |= {"weight_decay": 0.0, "clip_norm": None}
HELD_OUT = 200  # rows of text


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains a classifier of images, or a GPT, by rounds of clients that have rows of their own."""

    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=lambda: options.OptimizerOptions(**CLIENTS)
    )
    federated: Federated = dataclasses.field(default_factory=Federated)
    data: str = "digits"
    """Images: "digits" (scikit-learn's) or an .npz of images and labels; or text: "python" (the
    standard library's source) or a folder, whose labels are its packages and modules."""
    client_rows: int | None = None
    """Most rows of a client; further ones are left out. Default: all images, 64 rows of text."""
    steps: int = 100
    """Rounds."""
    global_batch: int = 10
    """Rows of a client's batch; 0 for all that a client has, in one batch."""
    hidden: tuple[int, ...] = (200, 200)
    """Widths of the hidden layers of the classifier of images."""
    seq_len: int = 64
    """Bytes per row of text."""


def build(config: Config) -> jt.Experiment:
    """Builds the experiment."""
    if config.optimizer.schedule != "constant" or config.optimizer.warmup_steps:
        raise ValueError(
            f"`optimizer.schedule` is {config.optimizer.schedule!r}, with `optimizer.warmup_steps` "
            f"{config.optimizer.warmup_steps}: a client's optimizer begins anew in each round, and "
            "a schedule with it; give constant and 0"
        )
    images = config.data == "digits" or config.data.endswith(".npz")
    own = config.optimizer
    for name, void in (("accumulate", 1), ("skip_spikes", None), ("plateau_factor", None)):
        if (value := getattr(own, name)) != void:
            raise ValueError(
                f"`optimizer.{name}` is {value}: a client's optimizer begins anew in each round, "
                "and remembers no step before; leave it out"
            )
    check_least(config, client_rows=1, global_batch=0)
    if any(width < 1 for width in config.hidden):
        raise ValueError(f"`hidden` is {config.hidden}: give widths from 1")
    rows, held_out, labels_N, fields = (of_images if images else of_text)(config)
    how = config.federated
    given = {"clients": how.clients, "seed": config.seed, "alpha": how.alpha}
    dealt = data.partition(labels_N, how.partition, **given)
    clients = [own[: config.client_rows] for own in dealt]
    given = {"per_round": how.per_round, "local_batch": config.global_batch}
    if config.private.is_on:
        parts = math.lcm(96, max(1, config.layout.mesh.axes["data"]))
        given |= {"leaf": DRAWN, "divisor": math.gcd(how.per_round, parts)}
    kind = data.PoissonClients if config.private.is_on else data.ClientRows
    rounds = kind(rows, clients, **given)
    count = rounds.room * rounds.size
    wide = dataclasses.replace(config, global_batch=count).batches_of(rounds, held_out)
    own = fractions.Fraction(sum(map(len, clients)) * how.per_round * how.epochs, len(clients))
    wide["steps_per_epoch"] = len(rows) / own
    sizes = sorted(map(len, clients))
    about = f"{len(clients)} with {sizes[0]} to {sizes[-1]} rows, {how.per_round} in a round"
    config = dataclasses.replace(config, global_batch=rounds.local_batch)
    facts = {"clients": about} | fields.pop("facts")
    made = config.experiment("federated", items_per_step=round(own), facts=facts, **wide, **fields)
    private = None
    if config.private.is_on:
        of = {"clients": len(clients), "drawn": how.per_round, "rounds": made.steps}
        private, fields = private_clients(config.private, **of)
        made = made.with_(**fields)
    how = dataclasses.replace(how, per_round=rounds.room)
    return federated(made, how, local_batch=rounds.local_batch, private=private)


def of_images(config: Config) -> tuple[Any, Any, np.ndarray, dict[str, Any]]:
    """Returns rows, held-out rows, the labels of rows, and the arguments of an experiment that are
    its classifier."""
    images = vision.load(config.data)
    labels_N = np.array([images.train[i]["label"] for i in range(len(images.train))])
    sizes = (int(np.prod(images.shape)), *config.hidden, len(images.classes))
    fields = {
        "init_fn": functools.partial(init, sizes),
        "loss_fn": jt.row_wise(loss_fn),
        "item": "images",
        "fingerprints": {"images": images.fingerprint},
        "facts": {"model": f"dense layers of {' '.join(map(str, sizes))}"},
        "conclude": vision.conclude,
        "best_metric": "accuracy",
        "best_mode": "max",
    }
    return images.train, images.held_out, labels_N, fields


def init(sizes: tuple[int, ...], rng: jax.Array) -> dict[str, Any]:
    """Draws dense layers of these widths, by He's law."""
    keys, pairs = jax.random.split(rng, len(sizes) - 1), itertools.pairwise(sizes)
    return {
        f"dense_{i}": {"kernel": jax.random.normal(key, pair) * (2 / pair[0]) ** 0.5}
        | {"bias": jnp.zeros(pair[1])}
        for i, (key, pair) in enumerate(zip(keys, pairs, strict=True))
    }


def loss_fn(params: Mapping[str, Any], batch: Mapping[str, jax.Array], rng: Any) -> jt.WeightedLoss:
    """The cross-entropy of images [B, H, W, C], with their accuracy."""
    del rng
    first, *rest = (params[f"dense_{i}"] for i in range(len(params)))
    x_BF = batch["image"].reshape(len(batch["image"]), -1).astype(first["kernel"].dtype)
    x_BF = x_BF @ first["kernel"] + first["bias"]
    for layer in rest:
        x_BF = jax.nn.relu(x_BF) @ layer["kernel"] + layer["bias"]
    return layers.class_loss(x_BF.astype(jnp.float32), batch)


def of_text(config: Config) -> tuple[Any, Any, np.ndarray, dict[str, Any]]:
    """Returns the same of text, whose labels are numbers of packages, and of a GPT of its bytes."""
    split = data.python_stdlib() if config.data == "python" else data.text_folder(config.data)
    packages: dict[str, list[data.Document]] = {}
    for document in split.train:
        packages.setdefault(document.name.partition("/")[0], []).append(document)
    found = [packed(texts, config, config.client_rows or 64) for texts in packages.values()]
    labels_N = np.repeat(np.arange(len(found)), [len(rows) for rows in found])
    rows, vocab = list(itertools.chain(*found)), data.ByteTokenizer().vocab_size
    model = dataclasses.replace(
        decoder.PRESETS["tiny"](), vocab_size=vocab, seq_len=config.seq_len, layers=2, width=64
    )
    digest = hashlib.sha256(b"".join(row["tokens"].tobytes() for row in rows)).hexdigest()
    fields = {
        "init_fn": functools.partial(decoder.init, model),
        "stages": decoder.stages(model),
        "rules": Rules(decoder.RULES, batch=decoder.BATCH),
        "gathers_layers": True,
        "item": "rows",
        "fingerprints": {"text": digest},
        "facts": {"text": f"{len(packages)} packages and modules, {len(rows):,} rows"},
        "derived": language.perplexity,
        "config": {"model": dataclasses.asdict(model), "form": "decoder", "tokenizer": "bytes"},
    }
    return rows, packed(split.held_out, config, HELD_OUT), labels_N, fields


def packed(texts: Iterable[data.Document], config: Config, most: int) -> list[dict[str, Any]]:
    """Returns the first rows of texts."""
    corpus = data.tokenize(texts, data.ByteTokenizer())
    return list(itertools.islice(data.PackedTokens(corpus, config.seq_len), most))


if __name__ == "__main__":
    jt.main(Config, build)
