"""Train a ConvNet on images: ``python -m experiments.vision``.

By default BatchNorm and dropout on the 8x8 digits bundled with scikit-learn: 1,797 images, a fifth
held out. It takes seconds on 2 CPU cores and reaches 98 % or more; ``--optimizer.name lars`` does
too. Others: ``--data FOLDER`` with a folder of images for each class, a .parquet, or an .npz.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping

import numpy as np

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.models import convnet
from jaxtrain.run import options
from jaxtrain.run.provenance import SAME
from jaxtrain.state import TrainState

HELD_OUT_EVERY = 5

# LARS scales steps by its trust coefficient, 0.001.
LEARNING_RATES = {"lars": 30.0}


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains a ConvNet on images."""

    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=lambda: options.OptimizerOptions(name="momentum", weight_decay=1e-4)
    )

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
    channels: tuple[int, ...] = (32, 64)
    """Output channels of each convolution."""
    dropout: float = 0.3
    """Rate before the output."""
    accumulate: int = 1
    """Microbatches per step, in one scan; BatchNorm sees one at a time."""


def build(config: Config) -> jt.Experiment:
    """Builds the experiment.

    Raises:
      ValueError: for options that do not fit each other.
    """
    images = load(config)
    model = convnet.ConvNetConfig(
        image=images.shape,
        classes=len(images.classes),
        channels=config.channels,
        dropout=config.dropout,
    )
    rows = data.WorkerRows(images.train, config.workers) if config.workers else images.train
    return config.experiment(
        "vision",
        **config.batches_of(rows, images.held_out),
        init_fn=functools.partial(convnet.init, model),
        loss_fn=convnet.loss_fn(model),
        has_model_state=True,
        optimizer=options.make_optimizer(
            config.optimizer, steps=config.steps, default_rates=LEARNING_RATES
        ),
        fingerprints={
            "images": images.fingerprint,
            "order_of_rows": str(data.ORDER_VERSION),
        },
        # Where the images lie; what they are has a fingerprint.
        may_change={"workers": SAME, "data": SAME},
        item="images",
        facts={
            "model": f"ConvNet, channels {', '.join(map(str, config.channels))}, BatchNorm, "
            f"dropout {config.dropout}",
            "images": f"{len(images.train):,} to train on, {len(images.held_out):,} held out, of "
            f"{len(images.classes):,} classes",
            "optimizer": f"{config.optimizer.name}, {config.optimizer.schedule} schedule",
        },
        conclude=conclude,
        best_metric="accuracy",
        best_mode="max",
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
