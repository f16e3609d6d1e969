"""Train a ConvNet or a vision transformer on images: ``python -m experiments.vision``.

By default BatchNorm and dropout on the 8x8 digits bundled with scikit-learn: 1,797 images, a fifth
held out. It takes seconds on 2 CPU cores and reaches 98 % or more; ``--optimizer.name lars`` does
too. ``--model vit --optimizer.name adamw`` trains a vision transformer instead, which so few images
teach less: 83.3 % with ``--steps 200``.

Others: ``--data FOLDER`` with a folder of images for each class, a .parquet, or an .npz.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.models import convnet, vit
from jaxtrain.parallel.pipeline import loss_from_stages
from jaxtrain.parallel.sharding import Rules
from jaxtrain.planning.balance import stack_for
from jaxtrain.run import options
from jaxtrain.run.provenance import SAME
from jaxtrain.state import TrainState

HELD_OUT_EVERY = 5

# LARS scales steps by its trust coefficient, 0.001.
LEARNING_RATES = {"lars": 30.0}
# Of each model, what its flags are where they are left out.
SIZES = {
    "convnet": {"channels": (32, 64), "dropout": 0.3},
    "vit": {"patch": 2, "layers": 4, "width": 64, "heads": 4, "dropout": 0.1},
}


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains a ConvNet or a vision transformer on images."""

    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=lambda: options.OptimizerOptions(name="momentum", weight_decay=1e-4)
    )

    pipeline: options.PipelineOptions = dataclasses.field(default_factory=options.PipelineOptions)

    model: Literal[tuple(SIZES)] = "convnet"  # type: ignore[valid-type]
    """A ConvNet with BatchNorm, or a vision transformer."""
    data: str = "digits"
    """Images: "digits" (scikit-learn's), a folder with a folder for each class, a .parquet file
    with columns image and label, or an .npz of images and labels."""
    image_size: int | None = None
    """Height and width that files of images are brought to; left out, all have the same."""
    workers: int = 0
    """Processes that decode images; 0 decodes them in the loader's thread."""

    steps: int = 400
    """Train steps."""
    global_batch: int = 128
    """Images per step, over all devices."""
    channels: tuple[int, ...] | None = None
    """Of the ConvNet: output channels of each convolution; left out, 32 64."""
    patch: int | None = None
    """Of the transformer: side of a patch in pixels; left out, 2."""
    layers: int | None = None
    """Of the transformer: depth; left out, 4."""
    width: int | None = None
    """Of the transformer: width of the residual stream; left out, 64."""
    heads: int | None = None
    """Of the transformer: attention heads; left out, 4."""
    dropout: float | None = None
    """Rate before the ConvNet's output, or on the transformer's embeddings and branches; left out,
    0.3 and 0.1."""
    accumulate: int = 1
    """Microbatches per step, in one scan; BatchNorm sees one at a time."""


def build(config: Config) -> jt.Experiment:
    """Builds the experiment.

    Raises:
      ValueError: for options that do not fit each other.
    """
    sizes, images = sizes_of(config), load(config)
    make = {"convnet": of_convnet, "vit": of_vit}[config.model]
    rows = data.WorkerRows(images.train, config.workers) if config.workers else images.train
    return config.experiment(
        "vision",
        **config.batches_of(rows, images.held_out),
        **make(config, image=images.shape, classes=len(images.classes), **sizes),
        fingerprints={
            "images": images.fingerprint,
            "order_of_rows": str(data.ORDER_VERSION),
        },
        # Where the images lie; what they are has a fingerprint.
        may_change={"workers": SAME, "data": SAME},
        item="images",
        facts={
            "model": f"{config.model}: "
            + ", ".join(f"{name} {value}" for name, value in sizes.items()),
            "images": f"{len(images.train):,} to train on, {len(images.held_out):,} held out, of "
            f"{len(images.classes):,} classes",
            "optimizer": f"{config.optimizer.name}, {config.optimizer.schedule} schedule",
        },
        conclude=conclude,
        best_metric="accuracy",
        best_mode="max",
    )


def sizes_of(config: Config) -> dict[str, Any]:
    """The flags of the model, with what is left out.

    Raises:
      ValueError: a flag is of the other model.
    """
    sizes = dict(SIZES[config.model])
    for name in {name for each in SIZES.values() for name in each}:
        if (given := getattr(config, name)) is not None:
            if name not in sizes:
                raise ValueError(
                    f"--{name} {given} is not for --model {config.model}: leave it out"
                )
            sizes[name] = given
    return sizes


def of_convnet(config: Config, **sizes: Any) -> dict[str, Any]:
    """The arguments of an experiment that are its model, a ConvNet."""
    model = convnet.ConvNetConfig(**sizes)
    return {
        "init_fn": functools.partial(convnet.init, model),
        "loss_fn": convnet.loss_fn(model),
        "has_model_state": True,
        "optimizer": optimizer_of(config),
    }


def of_vit(config: Config, **sizes: Any) -> dict[str, Any]:
    """The arguments of an experiment that are its model, a vision transformer."""
    model = vit.ViTConfig(**sizes)
    if config.optimizer.name == "momentum":  # the ConvNet's, with which the loss stays at log(K)
        raise ValueError(
            "--model vit needs another optimizer than momentum: give --optimizer.name adamw"
        )
    if config.mesh.tensor and model.heads % config.mesh.tensor:  # 0 is the mesh's to refuse
        raise ValueError(
            f"--mesh.tensor {config.mesh.tensor} does not divide {model.heads} heads: use a divisor"
        )
    pipeline = dataclasses.asdict(config.pipeline)
    row = {
        "image": jax.ShapeDtypeStruct((1, *model.image), np.float32),
        "label": jax.ShapeDtypeStruct((1,), np.int32),
        "mask": jax.ShapeDtypeStruct((1,), np.float32),
    }
    stack = stack_for(
        vit.stages(model),
        functools.partial(vit.init, model),
        row,
        layers=model.layers,
        pipe=config.mesh.pipe,
        virtual=config.pipeline.virtual,
        balance=pipeline.pop("balance"),
        recompute=config.pipeline.remat == "full",
    )
    stages = dataclasses.replace(vit.stages(model), stacked=stack)
    uneven = model.length % (config.mesh.tensor or 1)  # patches and one for the class often are
    return {
        "init_fn": lambda rng: stack.cut(vit.init(model, rng)),
        "loss_fn": loss_from_stages(stages),
        "rules": Rules(vit.RULES, axes={"residual": "context"} if uneven else {}),
        "gather": "model",
        "stages": stages,
        "pipeline": pipeline | {"virtual": stack.virtual},
        "optimizer": optimizer_of(config, stacked=stack.axes),
    }


def optimizer_of(config: Config, **more: Any) -> optax.GradientTransformation:
    """The chain that the flags describe."""
    return options.make_optimizer(
        config.optimizer, steps=config.steps, default_rates=LEARNING_RATES, **more
    )


def load(config: Config) -> data.LabelledImages:
    """Returns the images to train on and the held-out ones: of the digits, every fifth.

    Raises:
      ValueError: where scikit-learn is not installed, or as by :func:`jaxtrain.data.open_images`.
    """
    if config.data != "digits":
        return data.open_images(config.data, size=config.image_size)
    if config.image_size is not None:
        raise ValueError("image_size is of files of images: the digits have a size of their own")
    try:
        from sklearn import datasets
    except ImportError:
        raise ValueError(
            "the digits come with scikit-learn: install it with pip install -e '.[vision]'"
        ) from None
    digits = datasets.load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    held_out = np.arange(len(labels)) % HELD_OUT_EVERY == 0
    return data.LabelledImages(
        *(data.Images(images[side], labels[side]) for side in (~held_out, held_out)),
        tuple(map(str, digits.target_names)),
        hashlib.sha256(images[~held_out].tobytes()).hexdigest(),
    )


def conclude(state: TrainState, means: Mapping[str, float]) -> list[str]:
    """Says how many held-out images were right."""
    del state
    return [f"held-out accuracy {means['accuracy']:.2%}, loss {means['loss']:.4f}"]


if __name__ == "__main__":
    jt.main(Config, build)
