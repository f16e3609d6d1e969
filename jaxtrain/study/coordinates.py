"""The command ``jaxtrain coordinates``: how far a few steps move a decoder's activations, by width.

It is the coordinate check of Yang et al. 2022 (https://arxiv.org/abs/2203.03466), appendix D.1.

Shapes: B batch, T and S positions, D width, H query heads, G key heads, K features per head.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxtrain.build import compile_loop, make_abstract_state, make_experiment_mesh, make_state
from jaxtrain.experiment import Experiment
from jaxtrain.host import quiet
from jaxtrain.host.least import check_least
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.models import attending, decoder, layers, parts
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.run.main import build_experiment, load_config
from jaxtrain.run.trained import FORMS
from jaxtrain.sharding.rules import batch_sharding
from jaxtrain.stages import run_layers

PARAMETRIZATIONS = ("standard", "mup")
# By muP a coordinate may grow with the width by this power at most.
LARGEST_SLOPE = 0.25


@dataclasses.dataclass(frozen=True)
class CoordinatesOptions:
    """Trains a decoder for a few steps at several widths, under both parametrizations, and compares
    how far its activations move: by muP, no further at a larger width.

    All other flags go to the experiment. The exit status is 1 where something grows with the width
    under muP.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config) of a decoder, such as experiments.gpt."""
    widths: tuple[int, ...] = (32, 64, 128, 256)
    """Widths to compare, at least two, each of which the heads divide."""
    check_steps: int = 4
    """Train steps, at a constant rate."""
    png: str | None = None
    """Also draw the distances over the width in this PNG file."""


def run_coordinates(options: CoordinatesOptions, rest: list[str]) -> int:
    """Prints how far each coordinate has moved, and the power of the width that it grows with."""
    check_least(options, check_steps=1)
    if options.png is not None:  # Where that cannot be, nothing is trained.
        new_figure(1, 1)
    if len(set(options.widths)) < max(2, len(options.widths)):
        raise ValueError(f"--widths are {options.widths}: give two different ones, or more")
    experiments, full = {}, None
    for name, width in itertools.product(PARAMETRIZATIONS, options.widths):
        constant = ["--optimizer.schedule=constant", "--optimizer.warmup-steps=0"]
        own = [f"--width={width}", f"--parametrization={name}", f"--steps={options.check_steps}"]
        flags = [*rest, *own, *constant]
        module, config = load_config(
            options.experiment, flags, command="coordinates", own=type(options)
        )
        experiments[name, width] = build_experiment(module, config, outline=full is not None)
        full = full or experiments[name, width]
    if full.metadata.config.get("form") != "decoder":
        raise ValueError(f"experiment {full.name!r} trains no decoder: give one that does")
    quiet.start()
    found = {key: moved(each, full, options.check_steps) for key, each in experiments.items()}
    slopes = slopes_of(found, options.widths)
    _print(found, slopes, options.widths)
    if options.png is not None:
        save_png(found, options.widths, options.png)
        print(options.png)
    return int(any(slope > LARGEST_SLOPE for (name, _), slope in slopes.items() if name == "mup"))


def moved(experiment: Experiment, with_data: Experiment, steps: int) -> dict[str, float]:
    """Trains, and returns the mean distance that each coordinate of one more batch has moved."""
    form, stored = experiment.metadata.config["form"], experiment.metadata.config["model"]
    model = FORMS[form][0](**stored)
    mesh = make_experiment_mesh(experiment)
    train, _ = compile_loop(experiment, make_abstract_state(experiment, mesh), mesh, 0, steps)
    with with_data.train_batches(0, batch_sharding(mesh)) as stream:
        *batches, last = itertools.islice(stream, steps + 1)
    measure = jax.jit(functools.partial(coordinates, model))
    state = make_state(experiment, mesh)
    before = measure(state.params, last)
    for batch in batches:
        state, _ = train(state, batch)
    after = measure(state.params, last)
    return {name: float(jnp.abs(after[name] - before[name]).mean()) for name in after}


def coordinates(
    model: DecoderConfig, params: Mapping[str, Any], batch: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the activations that are compared: embeddings [B, T, D], the first layer's scores
    [B, H, T, S], what all layers add to the residual stream [B, T, D], and logits."""
    scores = []

    def attend(q_BTHK, k_BSGK, v_BSGK):
        k_BSHK, v_BSHK = (
            jnp.repeat(x, model.heads // model.kv_heads, axis=2) for x in (k_BSGK, v_BSGK)
        )
        scale = model.block.query_pre_attn_scalar**-0.5
        scores.append(jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * scale)
        return jnp.zeros_like(v_BSHK), None

    x_BTD = decoder.embed(model, params, batch)
    first = jax.tree.map(lambda p: p[0], params["blocks"])
    normed_BTD = layers.apply(parts.Norm, model.block, first["norm_attn"])(x_BTD)
    angles = attending.row_angles(model.block, 0, batch.get("positions"), x_BTD.shape[1])
    layers.apply(attending.Attention, model.block, first["attn"])(normed_BTD, angles, attend)
    out_BTD = run_layers(decoder.stages(model), params, x_BTD, batch, None)
    return {
        "embeddings": x_BTD,
        "scores": scores[0],
        "layers": out_BTD - x_BTD,
        "logits": decoder.head_logits(model, params, out_BTD),
    }


def slopes_of(
    found: Mapping[tuple[str, int], Mapping[str, float]], widths: Sequence[int]
) -> dict[tuple[str, str], float]:
    """Returns the power of the width that each coordinate's distance grows with, by
    parametrization."""
    names = {name: None for name, _ in found}
    kinds = next(iter(found.values()))
    values = {(n, kind): [found[n, w][kind] for w in widths] for n in names for kind in kinds}
    fit = lambda y: float(np.polyfit(np.log(widths), np.log(y), 1)[0])  # noqa: E731
    return {key: fit(each) for key, each in values.items()}


def save_png(
    found: Mapping[tuple[str, int], Mapping[str, float]], widths: Sequence[int], path: str
) -> None:
    """Draws the distances over the width, each parametrization by itself."""
    figure = new_figure(10, 4)
    for axes, name in zip(figure.subplots(1, 2, sharey=True), PARAMETRIZATIONS, strict=True):
        for kind in found[name, widths[0]]:
            axes.loglog(widths, [found[name, w][kind] for w in widths], ".-", label=kind, base=2)
        finish_axes(axes, name, x="width", y="mean distance")
        axes.set_xticks(widths, map(str, widths))
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def _print(found: Mapping, slopes: Mapping, widths: Sequence[int]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("moves")
    for name in (*map(str, widths), "grows as width to the"):
        table.add_column(name, justify="right", no_wrap=True)
    for (name, kind), slope in slopes.items():
        row = [f"{found[name, width][kind]:.4g}" for width in widths]
        table.add_row(f"{name}: {kind}", *row, f"{slope:+.2f}")
    Console(width=None if Console().is_terminal else 120).print(table, highlight=False)
