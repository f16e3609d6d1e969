"""The capabilities of the composition table, and how two or three of them make one experiment.

A new capability joins by one entry here, or by none: update rules are read off
:data:`jaxtrain.optim.OPTIMIZERS`. A test holds that every field of a layout and every flag of the
optimizer has an entry.
"""

import atexit
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.compare import parity, whole_runs
from jaxtrain.compare.whole_runs import Check
from jaxtrain.data.growing import Watermarks
from jaxtrain.data.sources import open_text
from jaxtrain.data.tokenizers import ByteTokenizer
from jaxtrain.data.writing import append_store, write_store
from jaxtrain.engines.compressed import Compress, compressed
from jaxtrain.engines.plain import Engine, GradientSums, plain
from jaxtrain.engines.private import private
from jaxtrain.engines.rounded import rounded
from jaxtrain.engines.uneven import uneven
from jaxtrain.experiment import Experiment, optimizer_for
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.constrain import Constrain
from jaxtrain.finetune.distill import Distillation, StoredDistillation
from jaxtrain.finetune.group_policy import GroupPolicy, Rewarded
from jaxtrain.finetune.low_rank import LoRA, Strengths
from jaxtrain.finetune.preferences import Preference, Preferences
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.loss import WeightedLoss
from jaxtrain.methods.asynchrony import Workers, asynchronous
from jaxtrain.methods.federated import Federated, federated
from jaxtrain.methods.local_updates import Local, local_updates
from jaxtrain.methods.method import Method
from jaxtrain.methods.population import Member, follow, populate
from jaxtrain.methods.privacy import check_private
from jaxtrain.methods.rollouts import Rollouts, rollouts
from jaxtrain.models import convnet, decoder, encoder, vit
from jaxtrain.models.config import stacked_layers
from jaxtrain.models.generate import Scored
from jaxtrain.optim import OPTIMIZERS
from jaxtrain.run import trained
from jaxtrain.state import TrainState
from jaxtrain.tree import map_named

MESH = "data=2,fsdp=2,tensor=2"
# The smallest experiments that have all parts; the text is that of this folder. Layers are scanned
# on one device too, where a few would be compiled one by one.
TEXT = str(pathlib.Path(__file__).parent)
# The name, in flags, of the store that :func:`grown_store` makes.
STORE = "STORE"
_ANY = {"--steps": "4", "--global-batch": "16"}
_ANY |= {"--optimizer.name": "adamw", "--optimizer.warmup-steps": "1"}
_LAYERS = _ANY | {"--layers": "4", "--width": "16", "--heads": "2", "--scan-unroll": "1"}
_TEXTS = _LAYERS | {"--data": TEXT}
_ROWS = {"--seq-len": "16"}
BASES: dict[str, dict[str, str]] = {
    "experiments.gpt": _TEXTS | _ROWS | {"--held-out-bytes": "2000", "--sample-tokens": "0"},
    "experiments.bert": _TEXTS
    | _ROWS
    | {"--tokenizer": "wordpiece:300", "--held-out-rows": "16", "--examples": "0"},
    "experiments.t5": _TEXTS
    | {"--tokenizer": "bytes", "--held-out-bytes": "2000", "--examples": "0"},
    "experiments.vision": _ANY,
    "experiments.ppo": _ANY | {"--rollout.steps": "8", "--episodes": "8"},
    "experiments.recommend": _ANY
    | {"--users": "64", "--items": "32", "--width": "8", "--hidden": "8"}
    | {"--held-out-rows": "64"},
    "experiments.caption": _ANY | {"--layers": "4", "--width": "16", "--heads": "2"},
    "experiments.clip": _ANY | {"--layers": "2", "--width": "16", "--heads": "2", "--crop": "0"},
}
_SIZES = (each for each in _LAYERS.items() if each[0] not in _ANY)
_VIT = ("--model", "vit", *itertools.chain(*_SIZES))
_RULE = "--optimizer."
_READ_BY_STEP = ("--optimizer.freeze", "--optimizer.accumulate", "--optimizer.watch-every")
# Rounding does not average out in models 16 wide.
TOLERANCES = parity.TOLERANCES | {"bf16": 5e-2}


@dataclasses.dataclass(frozen=True)
class Capability:
    """One thing that an experiment can have, with which every other one is tried.

    Args:
      name: in the table.
      group: the section of the table.
      flags: those that give it.
      layout: what it asks of the layout, as :meth:`jaxtrain.Layout.parse` reads it.
      module: of the experiment that it is of; None where any experiment may have it.
      called: a regex that finds it in a refusal; left out, its name.
      change: makes it of an experiment, where no flag does.
      check: what is compared in place of train steps, of whole runs.
      needs: the hardware without which it cannot be run, or None.
      tolerance: the largest error that is rounding, where it is more than that of the precision.
    """

    name: str
    group: str
    flags: tuple[str, ...] = ()
    layout: str = ""
    module: str | None = None
    called: str = ""
    change: Callable[[Experiment], Experiment] | None = None
    check: Check | None = None
    needs: str | None = None
    tolerance: float = 0.0


def _layouts() -> Iterator[Capability]:
    pipe = "pipe=2,pipeline.microbatches=4"
    interleaved = f"{pipe},pipeline.schedule=interleaved,pipeline.virtual=2"
    for name, layout, called in (
        ("data parallel", "data=2", "data|mesh"),
        ("fsdp", "fsdp=2", "fsdp|mesh"),
        ("tensor parallel", "tensor=2", "tensor|mesh"),
        ("context parallel", "data=2,context=2", "context|mesh|positions"),
        ("ring attention", "context=2,exchange=ring", "exchange|context|mesh|positions"),
        ("pipeline, 1F1B", f"{pipe},pipeline.schedule=1f1b", "pipe|stage"),
        ("pipeline, interleaved", interleaved, "pipe|stage"),
        ("pipeline, GPipe", f"{pipe},pipeline.schedule=gpipe", "pipe|stage"),
        ("pipeline, residuals kept", f"{pipe},pipeline.remat=none", "pipe|stage"),
        ("pipeline, balanced stages", f"{pipe},pipeline.balance=true", "pipe|stage|balance"),
        ("ZeRO 1", "data=2,zero=1", "zero"),
        ("ZeRO 2", "data=2,zero=2", "zero"),
        ("ZeRO 3", "data=2,zero=3", "zero"),
        ("slow network", "data=2,dcn_data=2", "dcn|slow"),
        ("accumulation", "accumulate=2", "accumulate|microbatch"),
        ("gather by layer", "gather=layer", "gather"),
        ("gather once", "gather=step", "gather"),
        ("remat full", "remat=full", "remat"),
        ("remat dots", "remat=dots", "remat"),
        ("remat save_attention", "remat=save_attention", "remat"),
        ("scan unrolled", "scan_unroll=2", "scan.unroll"),
        ("attention by XLA", "attention=xla", "attention"),
        ("whole residual stream", "sequence_parallel=false", "sequence.parallel"),
        ("offloaded optimizer", "offload_optimizer=true", "offload"),
        ("offloaded parameters", "offload_parameters=true,remat=full", "offload|remat"),
        ("exact sums", "exact=4", "exact|grains"),
    ):
        yield Capability(name, "layout", layout=layout, called=called)
    calls = {"layout": "steps_per_call=2", "called": "steps.per.call"}
    yield Capability("steps per call", "layout", **calls, check=whole_runs.in_calls)
    for name, layout, needs in (
        ("attention by cuDNN", "attention=cudnn", "a GPU"),
        ("attention by Splash", "attention=splash", "a TPU"),
        ("hidden communication", "hide_communication=true", "a TPU"),
        ("deterministic programs", "deterministic=true", "a GPU"),
    ):
        yield Capability(name, "layout", layout=layout, needs=needs)


def _optimizers() -> Iterator[Capability]:
    # Of the recipes the one that no layout changes: the others' scales are of a microbatch.
    for name in ("bf16", "pure_bf16", "fp16", "fp8"):
        yield Capability(name, "precision", flags=("--precision", name), called=f"precision|{name}")
    flags, called = ("--precision", "fp8"), "count.rounding|precision|fp8"
    yield Capability("rounding counted", "precision", flags=flags, called=called, change=_counted)
    for name in OPTIMIZERS:
        yield Capability(name, "optimizer", flags=("--optimizer.name", name))
    for name, *flags in (
        ("clip by norm", "clip-norm", "0.1"),
        ("clip by max", "clip-order", "max"),
        ("clip by value", "clip-value", "1e-3"),
        ("frozen leaves", "freeze", "embed"),
        ("rate multipliers", "rate-multipliers", "^blocks/=0.5"),
        ("decay multipliers", "decay-multipliers", "^blocks/=0.5"),
        ("calls accumulated", "accumulate", "2"),
        ("batch ramp", "accumulate", "2", "accumulate-ramp", "1:1"),
        ("spikes left out", "skip-spikes", "6"),
        ("moving average", "ema", "0.9"),
        ("norms by layer", "watch-every", "1"),
        ("plateau", "plateau-factor", "0.5"),
        ("rate by batch", "base-batch", "8"),
    ):
        given = tuple(f"--optimizer.{x}" if i % 2 == 0 else x for i, x in enumerate(flags))
        yield Capability(name, "optimizer", flags=given, called=flags[0].replace("-", "."))


def _tasks() -> Iterator[Capability]:
    yield Capability("dropout", "task", flags=("--dropout", "0.2"))
    flags = ("--attention-dropout", "0.2")
    yield Capability("attention dropout", "task", flags=flags, called="attention.dropout")
    gpt = functools.partial(Capability, group="task", module="experiments.gpt")
    yield gpt("z-loss", flags=("--z-loss", "1e-3"))
    # The rate is the preset's, which at this width, 1/128 of Llama's, is so many times as large.
    flags = ("--parametrization", "mup", "--optimizer.learning-rate", "1e-4")
    # So its gradients begin with much that cancels: by float64, one device's own rounding is 2e-5.
    yield gpt("muP", flags=flags, tolerance=1e-4)
    yield gpt("packed documents", flags=("--packing", "fit"), called="packing")
    shares = "a=0.5:{0},b=0.5:{0}".format(os.path.relpath(TEXT))
    yield gpt("mixture, two held-out sets", flags=("--data", shares), called="data")
    flags = ("--data", STORE, "--grow-every", "1")
    yield gpt("growing store", flags=flags, called="grow.every|watermarks", change=_grows)


@functools.cache
def grown_store() -> str:
    """Makes a store of this folder's text, with that of another appended; for this process."""
    folder = tempfile.TemporaryDirectory(prefix="jaxtrain-compose-")
    atexit.register(folder.cleanup)
    write_store(open_text(TEXT), ByteTokenizer(), store := os.path.join(folder.name, "store"))
    append_store(open_text(str(pathlib.Path(TEXT).parent / "finetune")), store)
    return store


def _grows(experiment: Experiment) -> Experiment:
    """The run began before the part was appended: its second batch is the first with text of it."""
    marks = experiment.data.watermarks
    (first,) = Watermarks(marks.store, every=1, begun=0).before(1)
    log = pathlib.Path(tempfile.mkdtemp(dir=pathlib.Path(marks.store).parent), "log")
    log.write_text(json.dumps(first))
    marks.keep(log)
    return experiment


def _models() -> Iterator[Capability]:
    for name, module, flags, called in (
        ("Llama", "gpt", ("--model", "llama-1b"), "model"),
        ("Gemma", "gpt", ("--model", "gemma3-1b"), "model"),
        ("experts", "gpt", ("--model", "tiny-moe"), "model|expert"),
        # One more layer, as the first is no part of a pipeline's chunks.
        ("latent attention", "gpt", ("--model", "tiny-deepseek", "--layers", "5"), "model|expert"),
        ("linear attention", "gpt", ("--model", "tiny-delta", "--layers", "8"), "model|delta"),
        ("attention sinks", "gpt", ("--model", "gpt-oss-20b"), "model|expert|sinks"),
        ("encoder", "bert", (), "bert|encoder"),
        ("encoder-decoder", "t5", (), "t5|decoder|two stacks"),
        ("vision transformer", "vision", _VIT, "vit|image|model"),
        (
            "captions of images",
            "caption",
            (),
            "several stacks|two stacks|llava|caption|image|model",
        ),
        ("contrastive", "clip", (), "clip|pairs of rows|engine|stages|image|model"),
        (
            "tables by rows",
            "recommend",
            (),
            "recommend|bottom|table|engine|method|stages|layers|model",
        ),
        ("convolutions, model state", "vision", ("--model", "convnet"), "conv|model|layers"),
        ("on-policy rollouts", "ppo", (), "actor|rollout|method|ppo|model|layers|stages"),
    ):
        layout = "data=2,expert=2" if "expert" in called else ""
        # The other way of tokens to experts than few devices have by choice.
        layout += ",dispatch=exchange" if name == "latent attention" else ""
        own = {"module": f"experiments.{module}", "called": called}
        # The later updates of its step are of parameters that have been rounded otherwise.
        own["tolerance"] = 1e-4 if module == "ppo" else 0.0
        yield Capability(name, "model", flags, layout, **own)


def _clipped(loss_fn: Callable[..., Any]) -> Callable[..., GradientSums]:
    """Gradients of every row by itself, clipped, and summed."""
    alone = plain(loss_fn)

    def engine(params, model_state, batch, rng, loss_scale):
        def one(row):
            row = jax.tree.map(lambda x: x[None], row)
            sums = alone(params, model_state, row, rng, loss_scale)
            shrunk = jnp.minimum(1.0, 1.0 / jnp.maximum(optax.tree.norm(sums.grads), 1e-12))
            return dataclasses.replace(sums, grads=jax.tree.map(lambda g: g * shrunk, sums.grads))

        return jax.tree.map(lambda x: x.sum(0), jax.vmap(one)(batch))

    return engine


def _replicas(state: TrainState) -> TrainState:
    """Two replicas that begin alike, and have the optimizer's state."""
    replicas = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    return dataclasses.replace(state, opt_state=(), method=replicas)


def _averaged(step: Callable[..., Any]) -> Callable[..., Any]:
    """Each replica trains on half of the rows; after each step both have the mean."""

    def both(state, batch):
        halves = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), batch)
        replicas, metrics = jax.vmap(step, in_axes=(0, 1))(state.method, halves)
        # Codes of packed kernels do not train, and are the same in both.
        of = lambda x: x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]  # noqa: E731
        mean = jax.tree.map(of, replicas.params)
        met = jax.tree.map(jnp.broadcast_to, mean, jax.tree.map(jnp.shape, replicas.params))
        replicas = dataclasses.replace(replicas, params=met)
        state = dataclasses.replace(state, step=state.step + 1, params=mean, method=replicas)
        return state, jax.tree.map(lambda x: x.mean(0), metrics)

    return both


def _counted(experiment: Experiment) -> Experiment:
    return experiment.with_(policy=dataclasses.replace(experiment.policy, count_rounding=True))


def _multi_steps(experiment: Experiment) -> Experiment:
    chain = functools.partial(optimizer_for, experiment)
    return experiment.with_(
        optimizer=lambda stack: optax.MultiSteps(chain(stack), 2).gradient_transformation(),
        freeze=None,  # which the chain does
    )


def _preferences(loss: str, experiment: Experiment) -> Experiment:
    """Every row is an answer that is preferred to another, of other bytes."""
    model = trained.read_model(experiment.metadata.config, where="compose")
    of_tokens, frozen = decoder.log_probs, experiment.task.freeze
    if loss == "reward":
        model, of_tokens = dataclasses.replace(model, head="score"), decoder.scores
        config = {**experiment.metadata.config, "model": dataclasses.asdict(model)}
        init_fn = functools.partial(decoder.init, model)
        own = {"stages": decoder.stages(model), "config": config}
        experiment = experiment.with_(init_fn=init_fn, **own)
    # Where good and bad answers weigh alike, their gradients cancel to what fp8 rounds.
    how = Preference(loss, gamma=0.1 if loss == "kto_unpaired" else None)
    change = Preferences(functools.partial(of_tokens, model), how, frozen=frozen)
    experiment = apply(experiment, change)
    stages = experiment.task.stages

    def of_pairs(function: Callable[..., Any], place: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def paired(*given: Any) -> Any:
            batch = {name: jnp.stack([x, x], axis=1) for name, x in given[place].items()}
            for name in ("tokens", "targets"):
                batch[name] = batch[name].at[:, 1].add(128) % model.vocab_size
            batch["segments"] = jnp.ones_like(batch["segments"])
            if loss == "kto_unpaired":  # One side is the answer, the other one of another prompt.
                sign_B11 = 1 - 2 * (batch["tokens"][:, :1, :1] % 2)
                batch["mask"] *= sign_B11 * jnp.array([[1], [-1]])
            found = function(*given[:place], batch, *given[place + 1 :])
            # Rewards are rounding where the policy is its reference, and of a new head.
            if isinstance(found, WeightedLoss):
                return dataclasses.replace(found, metrics={})
            return found

        return paired

    embed, head_loss = of_pairs(stages.embed, 1), of_pairs(stages.head_loss, 2)
    block = of_pairs(stages.blocks[0], 3)
    return experiment.with_(
        stages=dataclasses.replace(stages, embed=embed, block=block, head_loss=head_loss)
    )


class _Told(Rollouts):
    """Answers that are told by their prompts, and differ in a group: no rounding changes them."""

    def answer(self, params, prompts, rng):
        tokens_BP, lengths_B = prompts["tokens"], prompts["lengths"]
        each_B1 = 7 * (jnp.arange(len(lengths_B))[:, None] % 2)
        tokens_BN = (3 * tokens_BP[:, : self.longest] + each_B1) % self.model.vocab_size
        return Scored(tokens_BN, jnp.zeros(tokens_BN.shape, jnp.float32))


def _odd(tokens_BP: np.ndarray, lengths_B: np.ndarray, new_BN: np.ndarray) -> np.ndarray:
    """The share of odd tokens, a reward that has another value in each answer to a prompt."""
    return (new_BN % 2).mean(axis=1) + np.arange(len(new_BN)) % 2


def _rewarded(experiment: Experiment) -> Experiment:
    """Half of every row is a prompt, whose answers are told apart by their rewards."""
    model = trained.read_model(experiment.metadata.config, where="compose")
    how = GroupPolicy(size=2, weight="constant", kl=0.1)
    told = _Told(model, _odd, end=-1, longest=model.seq_len // 2)
    method = rollouts(told, how)
    of_tokens, frozen = functools.partial(decoder.log_probs, model), experiment.task.freeze
    change = Rewarded(of_tokens, how, frozen=frozen, longest=told.longest)

    def of_prompts(step: Callable[..., Any]) -> Callable[..., Any]:
        def halved(state: TrainState, batch: Any) -> Any:
            tokens_QP = batch["tokens"][:, : told.longest]
            return step(
                state, {"tokens": tokens_QP, "lengths": jnp.full(len(tokens_QP), told.longest)}
            )

        return halved

    around = lambda make: lambda step: of_prompts(make(step))  # noqa: E731
    own = {"step": around(method.step), "evaluation": around(method.evaluation)}
    return apply(experiment, change, method=dataclasses.replace(method, **own))


def _quantized(experiment: Experiment) -> Experiment:
    """With DoRA, and in groups of 4, which models 16 wide have several of on every device."""
    lora = LoRA(rank=2, alpha=4.0, dora=True)
    return apply(apply(experiment, lora), Quantize("nf4-double", group=4))


def _constrained(experiment: Experiment) -> Experiment:
    """With a third of the kernels' weights 0, and the others rounded in groups of 4."""

    def pruned(name: str, x: jax.Array) -> jax.Array:
        third = jnp.arange(x.size).reshape(x.shape) % 3 == 0
        return jnp.where(third, 0, x) if "kernel" in name else x

    init = lambda rng: map_named(pruned, experiment.task.init_fn(rng))  # noqa: E731
    return apply(experiment.with_(init_fn=init), Constrain(True, "int4", group=4))


def _distilled(experiment: Experiment) -> Experiment:
    """A wider teacher, whose layers are no multiple of the student's."""
    model = trained.read_model(experiment.metadata.config, where="compose")
    module = trained.FORMS[trained.form_of(model)][1]
    sizes = {"layers": model.layers + 2, "width": 24, "head_dim": None, "mlp_width": None}
    names = {field.name for field in dataclasses.fields(model)}
    teacher = dataclasses.replace(model, **{k: sizes[k] for k in sizes.keys() & names})
    # As drawn, all tokens are alike to both models, and their divergence is rounding.
    init = lambda rng: jax.tree.map(lambda x: 4 * x, module.init(teacher, rng))  # noqa: E731
    head = getattr(model, "head", "tokens")
    hidden = 0.5 if head == "tokens" else 0.0
    loss = module.distillation_loss(model, teacher, temperature=2.0, mix=0.5, hidden=hidden)
    labelled = lambda *given: loss(*given[:-1], _labelled(head, given[-1]))  # noqa: E731
    given = {"depth": stacked_layers(model), "teacher_rules": module.RULES}
    return apply(experiment, Distillation(module.stages(teacher), init, labelled, **given))


def _taught_by_convnet(experiment: Experiment) -> Experiment:
    """A teacher without stages, for a vision transformer."""
    model = trained.read_model(experiment.metadata.config, where="compose")
    teacher = convnet.ConvNetConfig(model.image, model.classes, channels=(8, 8))
    answers = lambda params, x, batch: convnet.logits(teacher, params, batch)  # noqa: E731
    loss = vit.distillation_loss(model, answers, temperature=2.0, mix=0.5)
    init = functools.partial(convnet.variables, teacher)
    return apply(experiment, Distillation(None, init, loss, depth=stacked_layers(model)))


def _answered(experiment: Experiment) -> Experiment:
    """A teacher's stored answers, which are functions of the tokens."""
    model = trained.read_model(experiment.metadata.config, where="compose")
    loss = decoder.stored_distillation_loss(model, temperature=2.0, mix=0.5)

    def head_loss(params: Any, x_BTD: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
        ids_BT3 = (batch["tokens"][..., None] + jnp.array([0, 3, 7])) % model.vocab_size
        log_probs_BT4 = jnp.log(jnp.array([0.5, 0.2, 0.1, 0.2])) + jnp.zeros(
            (*ids_BT3.shape[:2], 4)
        )
        told = {"teacher_ids": ids_BT3, "teacher_log_probs": log_probs_BT4}
        return loss(params, x_BTD, {**batch, **told})

    return apply(experiment, StoredDistillation(head_loss))


def _populated(experiment: Experiment) -> Experiment:
    """Members of other ranks and seeds."""
    rank = {n: apply(experiment, Strengths(rank=n, alpha=4.0)) for n in (2, 1)}
    members = [Member(rank[n].laid.init_fn, seed, {}) for n, seed in ((2, 0), (1, 0), (2, 1))]
    whole = rank[2].with_(optimizer=follow(rank[2].optimizer))
    return populate(whole, members)


def _bred(experiment: Experiment) -> Experiment:
    """Two members of one seed, of which the first is copied over the other before each later step.
    What parity replays is copied too: with keys of their own they would have other gradients."""

    def optimizer(stack: Any, **numbers: Any) -> optax.GradientTransformation:
        made = optimizer_for(experiment, stack)
        return optax.chain(made, optax.scale(numbers.get("rate", 1.0)))

    members = [Member(experiment.laid.init_fn, 0, {"rate": rate}) for rate in (0.5, 1.5)]
    return populate(experiment.with_(optimizer=follow(optimizer)), members, exploit_every=1)


def _labelled(head: str, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    """A batch of tokens with what is functions of them, for a head that predicts no tokens."""
    if head == "tokens":
        return batch
    tokens_BT, seen_BT = batch["tokens"], (batch["segments"] > 0).astype(jnp.float32)
    told = {"targets": tokens_BT % 3, "mask": seen_BT}
    if head == "spans":
        told = {"span": tokens_BT[:, :2] % jnp.array([1, 3]), "mask": seen_BT[:, 0]}
    elif head == "labels":
        told = {"label": tokens_BT[:, :3] % 2, "mask": seen_BT[:, 0]}
    return {"segments": batch["segments"]} | told


def _with_head(head: str, experiment: Experiment) -> Experiment:
    """An encoder with a head for tags, spans or labels, which are functions of its tokens."""
    config = experiment.metadata.config
    model = trained.read_model(config, where="compose")
    model = dataclasses.replace(model, head=head, classes=None if head == "spans" else 3)
    if head != "tags":  # First tokens are alike, and a norm's bias has no gradient but rounding.
        own = {"norm_position": "pre", "bias": False, "pooling": "mean"}
        model = dataclasses.replace(model, **own)
    stages = encoder.stages(model)

    def head_loss(params: Any, x_BTD: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
        return stages.head_loss(params, x_BTD, _labelled(head, batch))

    return experiment.with_(
        init_fn=functools.partial(encoder.init, model),
        stages=dataclasses.replace(stages, head_loss=head_loss),
        config={**config, "model": dataclasses.asdict(model)},
    )


def _finetuning() -> Iterator[Capability]:
    tune = functools.partial(Capability, group="fine-tuning")
    heads = {"tags of words": "tags", "answers in contexts": "spans", "labels of rows": "labels"}
    for name, head in heads.items():
        head = {"change": functools.partial(_with_head, head), "called": "head|encoder"}
        yield tune(name, module="experiments.bert", **head)
    names = {"called": "lora|low.rank|kernel|freeze|frozen"}
    yield tune("low-rank kernels", change=lambda e: apply(e, LoRA(rank=2, alpha=4.0)), **names)
    names = {"called": "quantiz|packed|nf4|lora|kernel|freeze|frozen"}
    yield tune("quantized kernels", change=_quantized, **names)
    names = {"called": "masked|rounded|kernel|freeze|frozen"}
    yield tune("masked and rounded kernels", change=_constrained, **names)
    names = {"called": "population|member|method|lora|low.rank|kernel|freeze|frozen"}
    yield tune("population of adapters", change=_populated, **names)
    names = {"called": "population|member|method|freeze|frozen"}
    yield tune("population, the best copied", change=_bred, **names)
    names = {"called": "preference|dpo|reference|freeze|frozen", "module": "experiments.gpt"}
    yield tune("preferences", change=functools.partial(_preferences, "dpo"), **names)
    # Advantages sum to 0, so that the loss is a small difference.
    own = names | {"called": "reward|method|reference", "tolerance": 1e-4}
    yield tune("rewarded answers", change=_rewarded, **own)
    own = functools.partial(_preferences, "kto_unpaired")
    yield tune("preferences, unpaired", change=own, **names)
    names["called"] += "|head"
    yield tune("reward model", change=functools.partial(_preferences, "reward"), **names)
    names = {"called": "distil|teacher|freeze|frozen", "module": "experiments.gpt"}
    yield tune("distillation", change=_distilled, **names)
    own = names | {"module": "experiments.bert", "called": f"{names['called']}|encoder"}
    yield tune("distillation of an encoder", change=_distilled, **own)
    own = names | {"module": "experiments.vision", "called": f"{names['called']}|vit|image|model"}
    own["flags"] = _VIT
    yield tune("distillation of images", change=_taught_by_convnet, **own)
    names = {"called": "distil|answers|losses? of their own", "module": "experiments.gpt"}
    yield tune("distillation, stored", change=_answered, **names)


def _changes() -> Iterator[Capability]:
    """Yields what users write in Python."""
    own = functools.partial(Capability, group="of one's own")
    engine, method = Engine(_clipped, row_wise=True), Method(_averaged, start=_replicas)
    yield own("an engine", change=lambda e: e.with_(engine=engine), called="engine")
    same = lambda e: e.with_(engine=rounded(None))  # noqa: E731  what is drawn goes by the layout
    yield own("rounded gradients, neutral", change=same, called="engine")
    shares = {
        "layout": "data=2,accumulate=2",
        "called": "row_shares|engine|pipe|draws|split over data|model state",
    }
    yield own("row shares by speed", change=lambda e: e.with_(engine=uneven((3.0, 1.0))), **shares)
    yield own("a method", change=lambda e: e.with_(method=method), called="method")
    thin = compressed(Compress("powersgd", rank=2, parts=2))
    # Errors are small differences of gradients.
    names = {"called": "compress|engine", "tolerance": 5e-4}
    yield own("compressed gradients", change=lambda e: e.with_(engine=thin), **names)
    local = Local(replicas=2, every=2, outer="nesterov", fragments=2)
    # The outer momentum is of small differences of parameters.
    names = {"called": "local|replica|method", "tolerance": 1e-4}
    yield own("local updates", change=lambda e: local_updates(e, local), **names)
    late = Local(replicas=2, every=2, outer="nesterov", delay=1)
    yield own("local updates, delayed", change=lambda e: local_updates(e, late), **names)
    # Adam, which begins anew in each round, blows up the rounding of gradients that are nearly 0.
    names["flags"] = ("--optimizer.name", "sgd")
    names["called"] = "federated|client|replica|method|sgd"
    rounds = Federated(per_round=2, epochs=2)
    of_rounds = lambda e: federated(e, rounds, local_batch=8)  # noqa: E731
    yield own("federated rounds", change=of_rounds, **names)
    # Rows are drawn by the flag, and noise is added that no accounting of it is installed for.
    noisy = dataclasses.replace(private(1.0, 0.1, 16.0), check=check_private)
    names = {"flags": ("--private.noise", "0", "--seed", "1"), "called": "private|engine"}
    yield own("private training", change=lambda e: e.with_(engine=noisy), **names)
    workers = Workers(seconds=(1.0, 2.0), late=2, temper=1.0)
    names = {"called": "worker|method|pipe|engine"}
    yield own("late gradients", change=lambda e: asynchronous(e, workers), **names)
    yield own("optax.MultiSteps", change=_multi_steps, called="MultiSteps|optimizer")


def _runs() -> Iterator[Capability]:
    run = functools.partial(Capability, group="run")
    yield run("saved and resumed", check=whole_runs.resumed, called="resume|run")
    yield run("generation", check=whole_runs.generated, called="generat|model")
    yield run("exact log-probabilities", check=whole_runs.exactly_scored, called="exact|model")
    gpt2 = {"flags": ("--model", "gpt2-124m"), "module": "experiments.gpt"}
    yield run("export", **gpt2, check=whole_runs.exported, called="export|model")


def capabilities() -> tuple[Capability, ...]:
    """All capabilities, in the order of the table."""
    parts = (_layouts, _optimizers, _tasks, _models, _finetuning, _changes, _runs)
    return tuple(each for part in parts for each in part())


def together(chosen: Sequence[Capability]) -> "Together | None":
    """Joins capabilities; None where they are alternatives, of which a run has one."""
    flags: dict[str, str] = {}
    fields: dict[str, str] = {}
    for each in chosen:
        pairs = dict(zip(each.flags[::2], each.flags[1::2], strict=True))
        asked = dict(word.split("=") for word in each.layout.split(",") if word)
        for have, more in ((flags, pairs), (fields, asked)):
            if any(have.get(name, value) != value for name, value in more.items()):
                return None
            have |= more
    modules = {each.module for each in chosen if each.module} or {"experiments.gpt"}
    return None if len(modules) > 1 else Together(tuple(chosen), modules.pop(), flags, fields)


@dataclasses.dataclass(frozen=True, eq=False)
class Together:
    """Capabilities in one experiment: its module, its flags, and the fields of its layout."""

    chosen: tuple[Capability, ...]
    module: str
    flags: Mapping[str, str]
    fields: Mapping[str, str]

    @property
    def task(self) -> tuple[str, ...]:
        """The flags without the layout."""
        own = BASES[self.module] | self.flags
        if "--data" in own:
            own["--data"] = os.path.relpath(own["--data"])
        return tuple(itertools.chain(*own.items()))

    @property
    def beside(self) -> tuple[str, ...]:
        """The optimizer's flags, where it may be one of several side by side in a step: where the
        step reads nothing in its state, and updates are all that is compared."""
        own = tuple(itertools.chain(*(x for x in self.flags.items() if x[0].startswith(_RULE))))
        read_by_step = any(name.startswith(_READ_BY_STEP) for name in own)
        return own if self.updates and not read_by_step else ()

    @property
    def changes(self) -> tuple[str, ...]:
        """The names of those that no flag gives."""
        return tuple(each.name for each in self.chosen if each.change is not None)

    @property
    def shared(self) -> tuple[str, ...]:
        """What cells have in common that are compared with the same run on one device, or with one
        whose optimizers are side by side."""
        rest = {n: x for n, x in self.flags.items() if not (self.beside and n.startswith(_RULE))}
        task = dataclasses.replace(self, flags=rest).task
        return (self.module, *task, *self.changes, bool(self.beside))

    @property
    def layout(self) -> str:
        """The layout, on :data:`MESH` where none asks for a mesh."""
        fields = dict(self.fields)
        if not fields.keys() & {"data", "fsdp", "tensor", "pipe", "context"}:
            fields = dict(word.split("=") for word in MESH.split(",")) | fields
        return ",".join(f"{name}={value}" for name, value in fields.items())

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the capabilities."""
        return tuple(each.name for each in self.chosen)

    @property
    def checks(self) -> tuple[Check, ...]:
        """What is compared in place of train steps, of whole runs."""
        return tuple(each.check for each in self.chosen if each.check is not None)

    @property
    def updates(self) -> bool:
        """Whether one is of updates alone, which an evaluation knows nothing of: evaluations are
        compared where that one is not. An average is evaluated in place of the parameters."""
        of_updates = any(each.group == "optimizer" for each in self.chosen)
        return of_updates and "--optimizer.ema" not in self.flags and not self.checks

    @property
    def tolerance(self) -> float:
        """The largest error of a leaf that is rounding, by the precision and the capabilities."""
        of_precision = TOLERANCES[self.flags.get("--precision", "f32")]
        return max(of_precision, *(each.tolerance for each in self.chosen))

    @property
    def command(self) -> str:
        """The command that repeats it."""
        with_ = f" with {' and '.join(self.changes)} of one's own" if self.changes else ""
        command = f"jaxtrain parity {self.module} {shlex.join(self.task)} --layout {self.layout}"
        if any(each.tolerance for each in self.chosen):
            command += f" --tolerance {self.tolerance:g}"
        return command + with_
