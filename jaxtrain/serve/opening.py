"""Opens a trained decoder, wherever it lies: what generation, evaluation and serving begin with."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxtrain import hf
from jaxtrain.data import SubwordTokenizer, Tokenizer
from jaxtrain.hf import hub
from jaxtrain.host.paths import as_path, exists
from jaxtrain.layout import MeshShape
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.run import trained
from jaxtrain.sharding.mesh import make_mesh
from jaxtrain.sharding.rules import as_rules, param_shardings


class Opened(NamedTuple):
    """A model of tokens, its parameters and tokenizer, and the local folder that it lies in."""

    model: DecoderConfig | EncoderConfig
    params: Any
    tokenizer: Tokenizer
    folder: str


def open_decoder(name: str, *, mesh: Mesh, step: int | None = None) -> Opened:
    """Reads the decoder of a run, a Hugging Face folder, or a name on its hub.

    Args:
      name: such as ``runs/gpt-1`` or ``ORG/NAME``.
      mesh: what its parameters are placed on.
      step: which checkpoint of a run; left out, the best one.

    Raises:
      ValueError: there is no such model, it is no decoder, or its tokenizer is another's.
    """
    return open_model(name, mesh=mesh, step=step, forms=("decoder",))


def open_model(
    name: str, *, mesh: Mesh, step: int | None = None, forms: Sequence[str] = ("decoder", "encoder")
) -> Opened:
    """Reads a model of one of some forms (:data:`jaxtrain.run.trained.FORMS`), as
    :func:`open_decoder` a decoder."""
    folder, model, is_run = find_model(name)
    if (form := form_of(model)) not in forms:
        raise ValueError(
            f"the model in '{folder}' is of the form {form}: give a {' or '.join(forms)}"
        )
    if is_run:
        model, params, tokenizer = trained.load(folder, step, mesh=mesh)
    else:
        params = hf.open_weights(folder)
        rules = as_rules(trained.FORMS[form][1].RULES)
        params = hf.load(params, param_shardings(params, mesh, rules))
        tokenizer = SubwordTokenizer.load(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer in '{folder}' has {tokenizer.vocab_size} tokens, and the model "
            f"{model.vocab_size}: give the folder the tokenizer that the model was trained with"
        )
    # A pretrained model may have more tokens than its tokenizer, which has no text for those.
    model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    return Opened(model, params, tokenizer, folder)


def find_model(name: str) -> tuple[str, trained.Model, bool]:
    """Finds a model, having downloaded one of the hub; no weight is read.

    Returns:
      The local folder, the model's sizes, and whether the folder is a run's.

    Raises:
      ValueError: there is no such model.
    """
    folder = hub.local_folder(name)
    is_run = exists(as_path(folder) / "checkpoints")
    if not is_run and not exists(as_path(folder) / "config.json"):
        raise ValueError(
            f"'{folder}' is neither a run nor a Hugging Face folder: a run has a folder "
            "checkpoints, a Hugging Face folder has config.json and safetensors"
        )
    return folder, trained.model(folder) if is_run else hf.read_config(folder), is_run


def form_of(model: trained.Model) -> str:
    """Returns the name of a model's form, a key of :data:`jaxtrain.run.trained.FORMS`."""
    return next(name for name, (kind, _) in trained.FORMS.items() if isinstance(model, kind))


def mesh_for(shape: MeshShape) -> Mesh:
    """Makes the mesh of a model that is not trained; raises ValueError for one with a pipeline."""
    if shape.pipe != 1:
        raise ValueError(
            f"--mesh.pipe {shape.pipe} is for training, where microbatches fill a pipeline: split "
            "the weights over fsdp or tensor"
        )
    return make_mesh(**shape.sizes)
