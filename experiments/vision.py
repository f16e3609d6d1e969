"""Train a ConvNet or a vision transformer on images: ``python -m experiments.vision``.

By default BatchNorm and dropout on the 8x8 digits bundled with scikit-learn: 1,797 images, a fifth
held out. It takes seconds on 2 CPU cores and reaches 98 % or more; ``--optimizer.name lars`` does
too. ``--model vit --optimizer.name adamw`` trains a vision transformer instead, which so few images
teach less: 83.3 % with ``--steps 200``.

Others: ``--data FOLDER`` with a folder of images for each class, a .parquet, or an .npz. And
``--model vit --init-from VIT`` begins with a run, a Hugging Face folder or a name on its hub:

    python -m experiments.vision --model vit --optimizer.name adamw --data FOLDER --init-from VIT

A trained ConvNet or transformer may teach a transformer of the same classes:

    python -m experiments.vision --run-dir runs/convnet
    python -m experiments.vision --model vit --optimizer.name adamw --distill.teacher runs/convnet
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

import jaxtrain as jt
from experiments import language
from jaxtrain import data, optim
from jaxtrain.finetune.distill import Distill
from jaxtrain.hf.encoders import label_fields
from jaxtrain.host import extras
from jaxtrain.layout import Effect
from jaxtrain.models import convnet, vit
from jaxtrain.run import options
from jaxtrain.sharding.rules import Rules
from jaxtrain.state import TrainState

HELD_OUT_EVERY = 5
# Held-out images of which a picture says what they are taken for.
CONFUSED = 1000
_SIDES = ("train", "held_out")

# LARS scales steps by its trust coefficient, 0.001.
LEARNING_RATES = {"lars": 30.0}
TUNING_RATES = language.tuning_rates(optim.rules.LEARNING_RATES | LEARNING_RATES)
# Of each model, what its flags are where they are left out.
SIZES = {
    "convnet": {"channels": (32, 64), "dropout": 0.3, "norm": "batch"},
    "vit": {"patch": 2, "layers": 4, "width": 64, "heads": 4, "dropout": 0.1},
}


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains a ConvNet or a vision transformer on images."""

    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=lambda: options.OptimizerOptions(name="momentum", weight_decay=1e-4)
    )

    model: Literal[tuple(SIZES)] = "convnet"  # type: ignore[valid-type]
    """A ConvNet, or a vision transformer."""
    init_from: str | None = None
    """Transformer to start from, with --model vit: a run, a Hugging Face folder, or a name on its
    hub (ORG/NAME or ORG/NAME@REVISION). Its head is new if the number of classes differs."""
    data: str = "digits"
    """Images: "digits" (scikit-learn's), a folder with a folder for each class, a .parquet file
    with columns image and label, or an .npz of images and labels."""
    image_size: int | None = None
    """Height and width that files of images are brought to; left out, those of the model that the
    run begins with, or all have the same."""
    crop: int = 0
    """Largest move of a training image along each axis, in pixels, drawn anew in every epoch."""
    flip: bool = False
    """Mirror half of the training images left to right, drawn anew in every epoch."""
    mixup: float = 0.0
    """Mix pairs of training images by a share from a Beta distribution with this parameter, and
    draw the label by the share; 0 mixes none."""
    decoders: int = 0
    """Processes that decode images; 0 decodes them in the loader's thread."""

    steps: int = 400
    global_batch: int = 128
    """Images per step, over all devices."""
    channels: tuple[int, ...] | None = None
    """Output channels of each convolution of the ConvNet; default 32 64."""
    norm: Literal["batch", "group"] | None = None
    """Norm of the ConvNet: batch, or group, whose statistics are of each image alone, as private
    training needs; default batch."""
    patch: int | None = None
    """Side of the transformer's patches in pixels; default 2."""
    layers: int | None = None
    """Number of the transformer's layers; default 4."""
    width: int | None = None
    """Width of the transformer's residual stream; default 64."""
    heads: int | None = None
    """Number of the transformer's attention heads; default 4."""
    dropout: float | None = None
    """Rate before the ConvNet's output, or on the transformer's embeddings and branches; left out,
    0.3 and 0.1."""
    distill: Distill = dataclasses.field(default_factory=Distill)
    models = vit  # whose layers may lie in a pipeline

    @functools.cached_property
    def source(self) -> language.Source | None:
        """The model that the run starts from; None for random weights."""
        if self.init_from is None:
            return None
        if self.model != "vit":
            raise ValueError(f"--init-from is not for --model {self.model}: give --model vit")
        return language.open_source(self.init_from, "vit")

    @functools.cached_property
    def teacher(self) -> language.Source | None:
        """The model to learn from; None for the images alone."""
        if self.model != "vit" and self.distill != Distill():
            raise ValueError(
                f"--distill.teacher is not for --model {self.model}, whose layers are no stack: "
                "give --model vit, which a ConvNet may teach too"
            )
        return language.open_teacher(self.distill, "vit", "convnet")


def check_crop(crop: int, images: data.LabelledImages) -> None:
    """Refuses a move of images that is none, or moves all of one out of sight."""
    height, width = images.shape[:2]
    if crop < 0:
        raise ValueError(f"--crop is {crop}: give 0 or more")
    if crop >= min(height, width):
        raise ValueError(f"--crop is {crop}: images have {height}x{width} pixels; give less")


def build(config: Config) -> jt.Experiment:
    """Builds the experiment."""
    if not 0 <= config.mixup < math.inf:
        raise ValueError(f"--mixup is {config.mixup}: give 0 or more")
    sizes = sizes_of(config)
    images = load(config.data, config.image_size, config.source, config.teacher)
    check_crop(config.crop, images)
    make = {"convnet": convnet_fields, "vit": vit_fields}[config.model]
    rows = images.train
    if config.crop or config.flip or config.mixup:
        rows = data.Augmented(rows, config.seed, config.crop, config.flip, config.mixup)
    rows = data.WorkerRows(rows, config.decoders) if config.decoders else rows
    config = config.of_rows(rows)
    experiment = config.experiment(
        "vision",
        rates=LEARNING_RATES if config.source is None else TUNING_RATES,
        **config.batches_of(rows, images.held_out),
        **make(config, images, **sizes),
        # Where the images lie; what they are has a fingerprint.
        may_change=dict.fromkeys(("decoders", "data", "init_from", "distill.teacher"), Effect.SAME),
        item="images",
        fingerprints={"images": images.fingerprint} | language.origin(config),
        facts={
            "model": about(config, images, sizes),
            "images": f"{len(images.train):,} to train on, {len(images.held_out):,} held out, of "
            f"{len(images.classes):,} classes",
        },
        conclude=conclude,
        best_metric="accuracy",
        best_mode="max",
    )
    if config.teacher is not None:
        language.check_same_labels(config.teacher, images.classes)
    if config.model != "vit":
        return experiment
    return language.with_teacher(config, vit_model(config, images, **sizes), experiment, taught)


def taught(
    model: vit.ViTConfig, teacher: vit.ViTConfig | convnet.ConvNetConfig, **share: float
) -> Callable[..., jt.WeightedLoss]:
    """Returns the last stage of a vision transformer that learns from a teacher."""
    answers = lambda params, x, batch: vit.head_logits(teacher, params, x)  # noqa: E731
    if isinstance(teacher, convnet.ConvNetConfig):
        answers = lambda params, x, batch: convnet.logits(teacher, params, batch)  # noqa: E731
    return vit.distillation_loss(model, answers, **share)


def sizes_of(config: Config) -> dict[str, Any]:
    """The flags of the model, with what is left out."""
    sizes = dict(SIZES[config.model]) if config.source is None else {"dropout": None}
    for name in {name for each in SIZES.values() for name in each}:
        if (given := getattr(config, name)) is not None:
            if name not in sizes:
                of = "--init-from" if name in SIZES[config.model] else f"--model {config.model}"
                raise ValueError(f"--{name} {given} is not for {of}: leave it out")
            sizes[name] = given
    return {name: value for name, value in sizes.items() if value is not None}


def about(config: Config, images: data.LabelledImages, sizes: Mapping[str, Any]) -> str:
    """Returns the header's description of the model."""
    told = ", ".join(f"{name} {value}" for name, value in sizes.items())
    if config.source is None:
        return f"{config.model}: {told}"
    had, classes = config.source.model.classes, len(images.classes)
    head = f"its head of {classes} classes"
    if had != classes:
        head = f"a new head of {classes} classes, where it had {had or 'none'}"
    return f"{config.init_from} with {head}" + (f", {told}" if told else "")


def convnet_fields(config: Config, images: data.LabelledImages, **sizes: Any) -> dict[str, Any]:
    """The arguments of an experiment that are its model, a ConvNet."""
    model = convnet.ConvNetConfig(image=images.shape, classes=len(images.classes), **sizes)

    def logits(state: TrainState, batch: Mapping[str, Any]) -> jax.Array:
        return convnet.logits(model, state.params, batch, state.model_state)

    init_fn, loss = functools.partial(convnet.init, model), convnet.loss_fn(model)
    made = {"init_fn": init_fn, "loss_fn": loss, "has_model_state": True}
    if model.norm == "group":
        made["init_fn"] = lambda rng: init_fn(rng)[0]
        made["loss_fn"] = jt.row_wise(lambda params, batch, rng: loss(params, {}, batch, rng)[0])
        made["has_model_state"] = False
    stored = {"model": dataclasses.asdict(model), "form": "convnet"}
    stored |= {"special_tokens": label_fields(images.classes)}
    return made | {"config": stored, "pictures": functools.partial(confusion, images, logits)}


def vit_model(config: Config, images: data.LabelledImages, **sizes: Any) -> vit.ViTConfig:
    """The vision transformer that the flags say."""
    shape = {"classes": len(images.classes), **sizes}
    if config.source is None:
        return vit.ViTConfig(image=images.shape, **shape)
    return dataclasses.replace(config.source.model, **shape)


def vit_fields(config: Config, images: data.LabelledImages, **sizes: Any) -> dict[str, Any]:
    """The arguments of an experiment that are its model, a vision transformer."""
    model, begun = vit_model(config, images, **sizes), config.source or config.teacher
    if config.optimizer.name == "momentum":  # the ConvNet's, with which the loss stays at log(K)
        raise ValueError("--model vit cannot use momentum: give --optimizer.name adamw")
    tensor = config.layout.mesh.tensor or 1  # 0 is the mesh's to refuse
    if model.heads % tensor:
        raise ValueError(
            f"--mesh.tensor {tensor} does not divide {model.heads} heads: use a divisor"
        )
    both = (model, config.teacher.model) if config.teacher else (model,)
    # Patches and one for the class often are.
    uneven = any(getattr(each, "length", 0) % tensor for each in both)
    logits = lambda state, batch: vit.logits(model, state.params, batch)  # noqa: E731
    stored = {"model": dataclasses.asdict(model), "form": "vit", "family": "vit"}
    stored |= {"special_tokens": label_fields(images.classes)}
    return language.of_layers(config, model) | {
        "config": stored | {"pixels": begun and begun.told("pixels")},
        "pictures": functools.partial(confusion, images, logits),
        "rules": Rules(vit.RULES, axes={"residual": "context"} if uneven else {}),
    }


def confusion(
    images: data.LabelledImages,
    logits: Callable[[TrainState, Mapping[str, Any]], jax.Array],
    state: TrainState,
    means: Mapping[str, float],
) -> dict[str, np.ndarray]:
    """Draws what held-out images are taken for: a row for each class, dark where many are."""
    del means
    rows = data.spread(images.held_out, CONFUSED)
    batch = {name: np.stack([row[name] for row in rows]) for name in ("image", "label")}
    guess = np.asarray(jax.jit(lambda *given: logits(*given).argmax(-1))(state, batch))
    counts = np.zeros(2 * [len(images.classes)])
    np.add.at(counts, (batch["label"], guess), 1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    large = np.kron(1 - shares, np.ones((16, 16)))
    return {"confusion": np.repeat((255 * large).astype(np.uint8)[..., None], 3, axis=-1)}


def load(
    name: str = "digits",
    size: int | None = None,
    source: language.Source | None = None,
    teacher: language.Source | None = None,
) -> data.LabelledImages:
    """Returns the images to train on and the held-out ones, as the model that a run begins with and
    its teacher take them."""
    begun = source or teacher
    if name != "digits" and size is None and begun is not None and not name.endswith(".npz"):
        height, width, _ = begun.image
        size = height if height == width else None
    images = _digits(size) if name == "digits" else data.open_images(name, size=size)
    return images if begun is None else _normalized(images, begun, teacher)


def _digits(size: int | None) -> data.LabelledImages:
    """The digits, of which every fifth is held out."""
    if size is not None:
        raise ValueError("`image_size` is of files of images: the digits have a size of their own")
    sklearn = extras.load("the digits come with scikit-learn", "vision", "sklearn.datasets")
    digits = sklearn.datasets.load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    held_out = np.arange(len(labels)) % HELD_OUT_EVERY == 0
    return data.LabelledImages(
        *(data.Images(images[side], labels[side]) for side in (~held_out, held_out)),
        tuple(map(str, digits.target_names)),
        hashlib.sha256(images[~held_out].tobytes()).hexdigest(),
    )


def _normalized(
    images: data.LabelledImages, begun: language.Source, teacher: language.Source | None
) -> data.LabelledImages:
    shape, pixels = begun.image, begun.told("pixels")
    for each in filter(None, (begun, teacher)):
        if images.shape != each.image:
            own, wanted = ("x".join(map(str, sizes)) for sizes in (images.shape, each.image))
            raise ValueError(
                f"the images are {own} and the model in '{each.path}' is of images of "
                f"{wanted}: give images of {wanted}, or image files without --image-size"
            )
        if each.told("pixels") != pixels:
            raise ValueError(
                f"the teacher in '{each.path}' normalizes pixels by {each.told('pixels')}, and the "
                f"model in '{begun.path}' by {pixels}: give a teacher of the same"
            )
    if pixels is None:
        return images
    if {len(each) for each in pixels.values()} != {shape[-1]}:
        raise ValueError(
            f"the images of the model in '{begun.path}' have {shape[-1]} channels, and it "
            f"normalizes {len(pixels['mean'])}"
        )
    sides = {side: data.Normalized(getattr(images, side), **pixels) for side in _SIDES}
    return dataclasses.replace(images, **sides)


def conclude(state: TrainState, means: Mapping[str, float]) -> list[str]:
    """Says how many held-out images were right."""
    del state
    loss = language.nats_of(means)
    return [f"held-out accuracy {means['accuracy']:.2%}, loss {loss:.4f}"]


if __name__ == "__main__":
    jt.main(Config, build)
