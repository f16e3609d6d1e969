"""A model as an ONNX file, which onnxruntime and others run: PyTorch's export of transformers',
and of a ConvNet made of PyTorch's own layers.

jax2onnx would convert without either, but needs another version of Orbax than this package.
"""

import itertools
import logging
import math
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.hf import weights
from jaxtrain.hf.families import family_for
from jaxtrain.hf.family import ModelConfig
from jaxtrain.host import extras
from jaxtrain.host.paths import read_json
from jaxtrain.models.convnet import EPSILON, GROUPS, ConvNetConfig
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.models.encoder_decoder import T5Config
from jaxtrain.models.vit import ViTConfig
from jaxtrain.ops.rotary import ByRow
from jaxtrain.tree import PyTree, named_leaves

FILE = "model.onnx"


def save(
    folder: str | Path,
    config: ModelConfig | ConvNetConfig,
    params: PyTree,
    *,
    files: Any = None,
    **options: Any,
) -> list[str]:
    """Writes a folder with a file ``model.onnx``, for any number of rows of any length, and returns
    the names of its inputs, which are those of transformers. Its output is ``logits``, or the
    ``states`` of a model without a head.

    Args:
      folder: new, or empty.
      config, params: as of :func:`jaxtrain.hf.save`, which takes ``options`` too.
      files: more text files by name, such as a tokenizer.json.

    Raises:
      ImportError: PyTorch, transformers or onnxscript is not installed.
      ValueError: the model is of no family of transformers, scores texts, or scales dynamically.
    """
    if isinstance(getattr(config, "rope_scaling", None), ByRow):
        raise ValueError(
            "rope_type is dynamic or longrope: a model of it is no ONNX file here, as transformers "
            "chooses the frequencies outside of the program; use --format stablehlo"
        )
    needs = "an ONNX file needs PyTorch, transformers and onnxscript"
    torch = extras.load(needs, "onnx", "torch.onnx")
    library = extras.load(needs, "onnx", "transformers")
    extras.load(needs, "onnx", "onnxscript")
    library.utils.logging.disable_progress_bar()
    if getattr(config, "head", "") == "score":
        raise ValueError(
            "a reward model is no ONNX file here, for transformers' needs a padding token to find "
            "the last one of a text: use --format stablehlo"
        )
    folder = Path(folder)
    weights.check_new(folder)
    tokens = torch.ones(2, 3, dtype=torch.long)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if isinstance(config, ViTConfig | ConvNetConfig):
        height, width, channels = config.image
        given = {"pixel_values": torch.zeros(2, channels, height, width)}
    elif isinstance(config, T5Config):
        given["decoder_input_ids"] = torch.ones(2, 4, dtype=torch.long)
    elif isinstance(config, EncoderConfig) and (config.token_types or 1) > 1:
        given["token_type_ids"] = torch.zeros_like(tokens)
    sizes = {name: {0: "rows", 1: f"{name}_length"} for name in given}
    sizes["attention_mask"] = sizes["token_type_ids"] = sizes.get("input_ids")
    sizes["pixel_values"] = {0: "rows"}
    headless = getattr(config, "head", "") == "none"
    cached = not isinstance(config, ViTConfig | EncoderConfig)

    class Whole(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *values: Any) -> Any:
            if isinstance(config, ConvNetConfig):
                return self.inner(*values)
            more = {"use_cache": False} if cached else {}
            found = self.inner(**dict(zip(given, values, strict=True)), **more)
            return found.last_hidden_state if headless else found.logits

    with tempfile.TemporaryDirectory() as parent, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(config, ConvNetConfig):
            model = _convnet(torch, config, params, options)
        else:
            own = Path(parent) / "model"
            weights.save(own, config, params, **options)
            kind = getattr(library, read_json(own / "config.json")["architectures"][0])
            # Its own attention: others know no soft cap.
            model = kind.from_pretrained(own, attn_implementation="eager", dtype="auto").eval()
        dtype = next(model.parameters()).dtype
        quiet = logging.getLogger("torch.onnx")
        level = quiet.level
        quiet.setLevel(logging.ERROR)
        try:
            program = torch.onnx.export(
                Whole(model),
                tuple(x.to(dtype) if x.is_floating_point() else x for x in given.values()),
                input_names=list(given),
                output_names=["states" if headless else "logits"],
                dynamic_shapes=(tuple(sizes[name] for name in given),),
                dynamo=True,
                verbose=False,
            )
        finally:
            quiet.setLevel(level)
        folder.mkdir(parents=True, exist_ok=True)
        program.save(folder / FILE)
    for name, text in (files or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(given)


def _convnet(torch: Any, config: ConvNetConfig, params: PyTree, options: Mapping[str, Any]) -> Any:
    """The model in evaluation, of PyTorch's layers, whose images have channels first."""
    if options.get("family") is not None:
        family_for(config, options["family"])  # which none is
    nn, layers = torch.nn, []
    leaves = {name: np.asarray(x, np.float32) for name, x in named_leaves(params).items()}
    shrink = 2 ** (len(config.channels) - 1)
    height, width, channels = config.image
    # Features lie by height, width and channel; there channels are first.
    shape = height // shrink, width // shrink, config.channels[-1], config.hidden
    kernel_FD = leaves["dense/kernel"]
    kernel_FD = kernel_FD.reshape(shape).transpose(2, 0, 1, 3).reshape(kernel_FD.shape)
    leaves["dense/kernel"] = kernel_FD
    for name in [name for name in leaves if name.endswith("kernel")]:
        # [..., in, out], and height and width in front, to PyTorch's [out, in, ...].
        leaves[name] = np.moveaxis(leaves[name], (-1, -2), (0, 1))

    def add(layer: Any, path: str, **names: str) -> None:
        own = {theirs: torch.tensor(leaves[f"{path}/{ours}"]) for theirs, ours in names.items()}
        layer.load_state_dict(layer.state_dict() | own)
        layers.append(layer)

    names = {"weight": "scale", "bias": "bias"}
    for i, (before, after) in enumerate(itertools.pairwise((channels, *config.channels))):
        layers += [nn.MaxPool2d(2)] if i else []
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        add(convolution, f"convolutions/{i}", weight="kernel")
        if config.norm == "batch":
            norm = nn.BatchNorm2d(after, EPSILON["batch"])
            names |= {"running_mean": "mean", "running_var": "var"}
        else:
            norm = nn.GroupNorm(math.gcd(after, GROUPS), after, EPSILON["group"])
        add(norm, f"norms/{i}", **names)
        layers.append(nn.ReLU())
    layers.append(nn.Flatten())
    add(nn.Linear(*kernel_FD.shape), "dense", weight="kernel", bias="bias")
    layers.append(nn.ReLU())
    add(nn.Linear(config.hidden, config.classes), "out", weight="kernel", bias="bias")
    dtype = np.dtype(options.get("dtype") or params["out"]["kernel"].dtype)
    return nn.Sequential(*layers).eval().to(getattr(torch, dtype.name))
