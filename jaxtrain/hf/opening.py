"""Opens a trained model, wherever it lies: what generation, prediction, evaluation and serving
begin with."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import tyro
from jax.sharding import Mesh

from jaxtrain import hf
from jaxtrain.data import SubwordTokenizer, Tokenizer
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.hf import hub
from jaxtrain.hf.weights import check_token_ids
from jaxtrain.host import quiet
from jaxtrain.host.paths import as_path, exists, read_json
from jaxtrain.host.simulated import simulate_devices
from jaxtrain.layout import MeshShape
from jaxtrain.models import decoder
from jaxtrain.ops.linear import Dora, LowRank, kernel_rules
from jaxtrain.ops.packed import Kind
from jaxtrain.ops.row_adapters import Additions
from jaxtrain.run import trained
from jaxtrain.sharding.mesh import make_mesh
from jaxtrain.sharding.rules import param_shardings
from jaxtrain.tree import named_nodes


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """A trained model, and the devices that it is opened on: the flags that commands share."""

    model: Annotated[str, tyro.conf.arg(aliases=["--run"])]
    """Folder of a run, a Hugging Face folder, or a name on its hub (ORG/NAME[@REVISION])."""
    step: int | None = None
    """Which checkpoint of a run; left out, the best one."""
    mesh: MeshShape = dataclasses.field(default_factory=MeshShape)
    simulate_devices: int = 0
    """Simulated CPU devices to compute on; 0 for the real ones."""

    def start(self) -> Mesh:
        """Has JAX find the devices, and makes the mesh; raises ValueError for one with a
        pipeline."""
        if self.simulate_devices:
            simulate_devices(self.simulate_devices)
        quiet.start()
        if self.mesh.pipe != 1:
            raise ValueError(
                f"--mesh.pipe {self.mesh.pipe} is for training, where microbatches fill a "
                "pipeline: split the weights over fsdp or tensor"
            )
        return make_mesh(**self.mesh.sizes)

    def open(self, *forms: str) -> tuple["Opened", Mesh]:
        """Returns the model, which must have one of some forms, and the mesh that it lies on."""
        mesh = self.start()
        return open_model(self.model, *forms, mesh=mesh, step=self.step), mesh


class Opened(NamedTuple):
    """A model, its parameters and tokenizer (None of images), and the local folder that it lies in.

    Args:
      begin: what stands before a text, and before a conversation, of a decoder: of a run an end of
        document, as in training; of another model what transformers puts there.
    """

    model: trained.Model
    params: Any
    tokenizer: Tokenizer | None
    folder: str
    begin: tuple[tuple[int, ...], tuple[int, ...]]


def open_model(
    name: str, *forms: str, mesh: Mesh, step: int | None = None, quantize: Kind | None = None
) -> Opened:
    """Reads the model of a run, a Hugging Face folder, or a name on its hub.

    Args:
      name: such as ``runs/gpt-1`` or ``ORG/NAME``.
      forms: those that it may have, such as ``decoder``.
      mesh: what its parameters are placed on.
      step: which checkpoint of a run; left out, the best one.
      quantize: codes of the kernels of attention and MLP; those of a Hugging Face folder are made
        as they are read.

    Raises:
      ValueError: there is no such model, it has another form, or its tokenizer is another's.
    """
    folder, model, is_run = find_model(name)
    if (form := trained.form_of(model)) not in forms:
        raise ValueError(
            f"the model in '{folder}' is of the form {form}: give one of the form "
            f"{' or '.join(forms)}"
        )

    def shardings(params: Any) -> Any:
        return param_shardings(params, mesh, kernel_rules(trained.FORMS[form][1].RULES, params))

    if step is not None and not is_run:
        raise ValueError(f"--step is {step}, and '{folder}' has no checkpoints: leave it out")
    if is_run:
        model, params, tokenizer = trained.load(folder, step, mesh=mesh)
        if quantize is not None:
            params = Quantize(quantize).params(params, jax.random.key(0))
            params = jax.device_put(params, shardings(params))
    else:
        group = hf.group_of(folder, quantize) if quantize else None
        params = Quantize(quantize, group).params(hf.open_weights(folder))
        params = hf.load(params, shardings(params))
        tokenizer = None if form == "vit" else SubwordTokenizer.load(folder)
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer in '{folder}' has {tokenizer.vocab_size} tokens, and the model "
            f"{model.vocab_size}: give the folder the tokenizer that the model was trained with"
        )
    if form != "decoder":
        return Opened(model, params, tokenizer, folder, ((), ()))
    begin = ((tokenizer.eod,),) * 2 if is_run else (tokenizer.beginning, ())
    # A pretrained model may have more tokens than its tokenizer, which has no text for those.
    model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    return Opened(model, params, tokenizer, folder, begin)


def open_adapter(folder: str, base: Opened) -> Additions:
    """Reads the additions of an adapter over a model: of a run trained by LoRA, or in PEFT's files.

    Raises:
      FileNotFoundError, ValueError: there are none, or they are another model's.
    """
    if trained.is_trained(folder):
        return trained.additions(folder)[1]
    is_run = trained.is_trained(base.folder)
    family = trained.stored(base.folder).get("family") if is_run else hf.family_name(base.folder)
    change, found = hf.adapters.read(folder, base.model, family=family)
    shapes = jax.eval_shape(lambda: decoder.init(base.model, jax.random.key(0)))
    placed = hf.adapters.placed(change.params(shapes), found)
    return named_nodes(LowRank | Dora, placed)


def find_model(name: str) -> tuple[str, trained.Model, bool]:
    """Finds a model, having downloaded one of the hub; no weight is read.

    Returns:
      The local folder, the model's sizes, and whether the folder is a run's.

    Raises:
      ValueError: there is no such model.
    """
    folder = hub.local_folder(name)
    is_run = trained.is_trained(folder)
    if not is_run and not exists(as_path(folder) / "config.json"):
        raise ValueError(
            f"'{folder}' is neither a run nor a Hugging Face folder: a run has a folder "
            "checkpoints, a Hugging Face folder has config.json and safetensors"
        )
    return folder, trained.model(folder) if is_run else hf.read_config(folder), is_run


def fields_of(folder: str) -> Mapping[str, Any]:
    """Returns the fields of a Hugging Face folder's config.json, or those that a run has for it."""
    if trained.is_trained(folder):
        return trained.stored(folder).get("special_tokens") or {}
    return read_json(as_path(folder) / "config.json")


def labels_of(folder: str, model: trained.Model) -> list[str]:
    """Returns the names of the classes, labels or tags of a model in a folder; of those that have
    none, numbers."""
    named = fields_of(folder).get("id2label") or {}
    return [str(named.get(str(i), i)) for i in range(getattr(model, "classes", None) or 0)]


def ends_of(folder: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end an answer: first the end of a document, with which rows are
    filled, then those that the generation config of a run or a model names; where it has none, its
    config."""
    beside = trained.beside(folder).get(trained.GENERATION)
    config = fields_of(folder) if beside is None else json.loads(beside)
    config = config if isinstance(config, dict) else {}
    check_token_ids(config, as_path(folder) / trained.GENERATION)
    ids = config.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    ends = {x for x in ids if type(x) is int and x >= 0}  # files say -1 for none
    return (tokenizer.eod, *sorted(ends - {tokenizer.eod}))
