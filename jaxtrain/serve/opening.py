"""Opens a trained decoder, wherever it lies: what generation, evaluation and serving begin with."""

import dataclasses
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxtrain import hf
from jaxtrain.data import SubwordTokenizer, Tokenizer
from jaxtrain.hf import hub
from jaxtrain.host.paths import as_path, exists
from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.run import trained
from jaxtrain.sharding.rules import param_shardings


class Opened(NamedTuple):
    """A decoder, its parameters and tokenizer, and the local folder that it lies in."""

    model: DecoderConfig
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
    folder = hub.local_folder(name)
    if exists(as_path(folder) / "checkpoints"):
        check_decoder(trained.model(folder), folder)
        model, params, tokenizer = trained.load(folder, step, mesh=mesh)
    elif exists(as_path(folder) / "config.json"):
        model = check_decoder(hf.read_config(folder), folder)
        params = hf.open_weights(folder)
        params = hf.load(params, param_shardings(params, mesh, decoder.RULES))
        tokenizer = SubwordTokenizer.load(folder)
    else:
        raise ValueError(
            f"'{folder}' is neither a run nor a Hugging Face folder: a run has a folder "
            "checkpoints, a Hugging Face folder has config.json and safetensors"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer in '{folder}' has {tokenizer.vocab_size} tokens, and the model "
            f"{model.vocab_size}: give the folder the tokenizer that the model was trained with"
        )
    # A pretrained model may have more tokens than its tokenizer, which has no text for those.
    model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    return Opened(model, params, tokenizer, folder)


def check_decoder(model: trained.Model, folder: str) -> DecoderConfig:
    """Returns a model that is a decoder; raises ValueError for another."""
    if not isinstance(model, DecoderConfig):
        form = next(name for name, (kind, _) in trained.FORMS.items() if isinstance(model, kind))
        raise ValueError(f"the model in '{folder}' is of the form {form}: give a decoder")
    return model
