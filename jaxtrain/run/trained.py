"""Loads the model, parameters and tokenizer that a run of a shipped model has trained."""

import dataclasses
import os
import types
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtrain import data
from jaxtrain.data.chat import TEMPLATE, TOKENIZER_CONFIG
from jaxtrain.finetune.constrain import Constrain
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.host import storage
from jaxtrain.host.paths import as_path, exists
from jaxtrain.methods.population import BEST
from jaxtrain.models import clip, convnet, decoder, encoder, encoder_decoder, llava, vit
from jaxtrain.ops.linear import Dora, LowRank, merge
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.folder import CHECKPOINTS, is_half_deleted
from jaxtrain.run.options import RunOptions
from jaxtrain.run.provenance import flatten
from jaxtrain.sharding.rules import as_rules, param_shardings
from jaxtrain.state import shapes_on
from jaxtrain.tree import combine, map_kind, map_named, named_nodes, partition

# In the folder of a run whose tokenizer is not that of bytes.
TOKENIZER_FILE = "tokenizer.json"
# What is said of a tokenizer and of generation beside it, in a run's folder as in a model's.
GENERATION = "generation_config.json"
BESIDE = (TEMPLATE, TOKENIZER_CONFIG, GENERATION)

# What a checkpoint's config calls the changes of its parameters, which ``load`` takes back.
CHANGES = {change.key for change in (LoRA, Quantize, Constrain)}

# What a checkpoint's config calls the form of its model: the class of its sizes, and the module.
FORMS = {
    "decoder": (decoder.DecoderConfig, decoder),
    "encoder": (encoder.EncoderConfig, encoder),
    "encoder-decoder": (encoder_decoder.T5Config, encoder_decoder),
    "vit": (vit.ViTConfig, vit),
    "convnet": (convnet.ConvNetConfig, convnet),
    "clip": (clip.ClipConfig, clip),
    "llava": (llava.LlavaConfig, llava),
}
Model = decoder.DecoderConfig | encoder.EncoderConfig | encoder_decoder.T5Config | vit.ViTConfig
Model |= clip.ClipConfig | llava.LlavaConfig | convnet.ConvNetConfig


def load(
    run: str, step: int | None = None, *, mesh: Mesh | None = None, member: int | None = None
) -> tuple[Model, dict, data.Tokenizer | None]:
    """Reads a run's model, parameters and tokenizer, which a model of images has not. What LoRA has
    added is merged, packed kernels are made dense, and the model state of a ConvNet is among its
    parameters. Raises FileNotFoundError where there is no checkpoint, ValueError where a
    parameter does not fit the mesh, and DamagedCheckpointError for damage.

    Args:
      step: the checkpoint; None for :func:`default_step`.
      mesh: what the parameters are placed on, by the rules of their model; None for one device.
      member: of a population, which; None for the best in the evaluation of the checkpoint.
    """
    with open_checkpoints(run) as checkpoints:
        stored, at = _chosen(checkpoints, step, member)
        model, module, change, shapes = _shapes_of(checkpoints, stored)
        places = None
        if mesh is not None:
            plain, rules = jax.eval_shape(merge, shapes), as_rules(module.RULES)
            places = param_shardings(plain, mesh, rules)
            parts = param_shardings(shapes, mesh, change.rules(rules, shapes))
            shapes = shapes_on(shapes, parts)
        params = _read(checkpoints, shapes, *at)
    if stored.keys() & CHANGES:
        params = jax.jit(merge, out_shardings=places)(params)
    if module in (vit, convnet, clip):  # the texts of the latter's experiment are bytes
        return model, params, None
    # Never a path from the config: the tokenizer is one of two, and the second is in the run.
    if stored.get("tokenizer") == "bytes":
        return model, params, data.ByteTokenizer()
    return model, params, data.SubwordTokenizer.load(as_path(run) / TOKENIZER_FILE)


def unmerged(run: str, step: int | None = None, *, member: int | None = None) -> tuple[Model, dict]:
    """Reads a run's model and its parameters as they were trained: additions by themselves, and
    kernels packed that were. Arguments and errors are those of :func:`load`."""
    with open_checkpoints(run) as checkpoints:
        stored, at = _chosen(checkpoints, step, member)
        model, _, _, shapes = _shapes_of(checkpoints, stored)
        return model, _read(checkpoints, shapes, *at)


def additions(
    run: str, step: int | None = None, *, member: int | None = None
) -> tuple[Model, dict[str, LowRank | Dora]]:
    """Reads what LoRA has added to a run's model: its kernels by path, without their bases, which a
    checkpoint may lack. Raises ValueError where it has added nothing, or more has been trained."""
    with open_checkpoints(run) as checkpoints:
        stored, at = _chosen(checkpoints, step, member)
        model, _, change, shapes = _shapes_of(checkpoints, stored)
        if change.rank is None or change.train:
            more = f"has trained {change.train[0]!r} too" if change.train else "has no additions"
            raise ValueError(f"the run in '{run}' {more}: export it without --adapter")
        found = map_kind(LowRank, lambda x: dataclasses.replace(x, base=None), shapes)
        return model, _read(checkpoints, named_nodes(LowRank | Dora, found), *at)


def default_step(run: str) -> int:
    """Returns the step of a run's best checkpoint, or of the newest if no evaluation ranks them.

    Raises:
      DamagedCheckpointError: one is damaged, because it might be the one to return.
      FileNotFoundError: there is none.
    """
    with open_checkpoints(run) as checkpoints:
        return _default_step(checkpoints)


def _default_step(checkpoints: Checkpointer) -> int:
    checkpoints.check_sound()
    best = checkpoints.best_step()
    return checkpoints.latest_step() if best is None else best


def _chosen(
    checkpoints: Checkpointer, step: int | None, member: int | None
) -> tuple[Mapping[str, Any], tuple[int, int | None]]:
    """The config of a checkpoint, which is the best one if ``step`` is None, and its step with
    the number of a member of a population, as whose training alone the config then is."""
    step = _default_step(checkpoints) if step is None else step
    stored = dict(checkpoints.config(step))
    if (population := stored.pop("population", None)) is None:
        if member is not None:
            raise ValueError(f"`member` is {member}: the run has no population; leave it out")
        return stored, (step, None)
    members = population["members"]
    best = checkpoints.metrics(step).get(f"eval/{population['set']}{BEST}")
    if member is None and best is None:
        raise ValueError(
            f"the run has {len(members)} members, and no evaluation of checkpoint {step} says "
            "which is the best: give `member`"
        )
    member = int(best) if member is None else member
    if not 0 <= member < len(members):
        raise ValueError(f"`member` is {member}: give one from 0 to {len(members) - 1}")
    own = {n: members[member][f"lora.{n}"] for n in ("rank", "alpha") if f"lora.{n}" in members[0]}
    stored |= {"low_rank": stored["low_rank"] | own} if "low_rank" in stored else {}
    return stored, (step, member)


def _read(checkpoints: Checkpointer, shapes: Any, step: int, member: int | None) -> Any:
    """Reads parameters of a checkpoint: of a member, its own from those of all."""
    if member is None:
        return checkpoints.restore_params(shapes, step)
    wide, at = checkpoints.shapes(step), "method/members/params"
    own, rest = partition(lambda name, _: f"{at}/{name}" in wide, shapes)
    abstract = map_named(lambda n, x: jax.ShapeDtypeStruct(wide[f"{at}/{n}"], x.dtype), own)
    found = checkpoints.restore_part({"method": {"members": {"params": abstract}}}, step)
    found = found["method"]["members"]["params"]
    mine = jax.tree.map(lambda x, of: x[member][tuple(map(slice, of.shape))], found, own)
    mine = jax.tree.map(lambda x, of: jax.device_put(x, getattr(of, "sharding", None)), mine, own)
    return combine(mine, checkpoints.restore_params(rest, step)) if rest else mine


def _shapes_of(
    checkpoints: Checkpointer, stored: Mapping[str, Any]
) -> tuple[Model, types.ModuleType, LoRA, dict]:
    """The model that a checkpoint's config says, its module, the change that it was trained with,
    and the shapes of its parameters."""
    model = read_model(stored, where=f"the config of a checkpoint in {checkpoints.directory}")
    module = FORMS[form_of(model)][1]
    change = LoRA.of(stored)
    stack = module.STACK if hasattr(module, "STACK") else module.stages(model).stacked
    init = getattr(module, "variables", module.init)

    def make(key: jax.Array) -> dict:
        params = change.params(init(model, key), key, stack)
        params = Quantize.of(stored).params(params, key, stack)
        return Constrain.of(stored).params(params, key, stack)

    return model, module, change, jax.eval_shape(make, jax.random.key(0))


def is_trained(folder: str) -> bool:
    """Whether a folder is that of a run, which has checkpoints, and not a Hugging Face folder."""
    return exists(as_path(folder) / CHECKPOINTS)


def open_checkpoints(run: str) -> Checkpointer:
    """Opens a run's checkpoints, the best of which is what the run has taken for it; raises
    FileNotFoundError where there is none."""
    directory = as_path(run) / CHECKPOINTS
    with Checkpointer(directory) as found:
        best = flatten(found.config()).get("provenance.best", "eval/loss min")
    metric, _, mode = str(best).rpartition(" ")
    return Checkpointer(directory, best_metric=metric, best_mode=mode)


def model(run: str) -> Model:
    """Returns a run's model; raises ValueError where its checkpoints have none."""
    where = f"the config of a checkpoint in {as_path(run) / 'checkpoints'}"
    return read_model(stored(run), where=where)


def kept_file(run: RunOptions, name: str) -> os.PathLike | None:
    """Returns the file that a run to resume has kept in its folder; None where there is none."""
    if not (run.resume or run.auto_resume) or run.run_dir is None:
        return None
    path = as_path(run.run_dir) / name

    def is_kept() -> bool:
        return exists(path) and not is_half_deleted(path.parent)

    return path if storage.retrying(is_kept, f"the file {path}") else None


def stored(run: str) -> Mapping[str, Any]:
    """Returns what a run's checkpoints say of it: the Hugging Face ``family`` that it began from,
    ``special_tokens`` (fields of config.json that it is exported with, such as ``eos_token_id`` and
    names of classes), ``pixels`` (as of :func:`jaxtrain.hf.pixels`), and ``context`` (positions of
    the model that it began from), of which each may be missing."""
    with Checkpointer(as_path(run) / CHECKPOINTS) as checkpoints:
        return checkpoints.config()


def form_of(model: Model) -> str:
    """Returns the name of a model's form, a key of :data:`FORMS`."""
    return next(name for name, (kind, _) in FORMS.items() if isinstance(model, kind))


def beside(folder: str) -> dict[str, str]:
    """Returns the files ``BESIDE`` that a run, or a Hugging Face folder, has."""
    found = {name: as_path(folder) / name for name in BESIDE}
    return {name: path.read_text() for name, path in found.items() if exists(path)}


def read_model(stored: Mapping[str, Any], *, where: str) -> Model:
    """Makes a model's sizes of what a checkpoint's config says; raises ValueError where it says
    none."""
    sizes, form = stored.get("model"), stored.get("form", "decoder")
    if form not in FORMS:
        raise ValueError(f"{where} has a model of the form {form!r}: known are {', '.join(FORMS)}")
    if sizes is None:
        raise ValueError(
            f"{where} has no model: an experiment of your own stores none, and a ConvNet of an "
            "earlier release stored none; train the ConvNet again, or resume its run, whose next "
            "checkpoint has one"
        )
    kind, _ = FORMS[form]
    known = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(sizes, dict) or not sizes.keys() <= known:
        raise ValueError(f"{where} has no model with the sizes of a {kind.__name__}")
    try:
        return kind(**sizes)
    except TypeError as error:  # one is missing
        raise ValueError(f"{where} has no whole model ({error})") from None
