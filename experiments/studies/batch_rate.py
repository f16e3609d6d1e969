"""The best learning rate over the batch: ``python -m experiments.studies.batch_rate``.

Every update rule trains with every batch on the same number of tokens, with all rates of a range as
one population. The best rate of a batch is the vertex of the parabola through the lowest loss and
its neighbours. Two rules of thumb stand beside it: the rate grows as the batch (Goyal et al. 2017,
https://arxiv.org/abs/1706.02677) or as its square root (Krizhevsky 2014,
https://arxiv.org/abs/1404.5997; for Adam Malladi et al. 2022, https://arxiv.org/abs/2205.10287).

    python -m experiments.studies.batch_rate --study-dir BATCH --png batch_rate.png

Shapes: B batches, R rates.
"""

import dataclasses
import math
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tyro

from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path, exists
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.methods.population import ALL, Population
from jaxtrain.run.main import load_config
from jaxtrain.run.observe.report.records import read_run
from jaxtrain.run.refusal import refusing
from jaxtrain.study.command import join

MODULE, RATE = "experiments.gpt", "optimizer.learning_rate"
# Rates that hold the best of each batch of the default model.
RATES = {"sgd": "0.025:3.2:8", "adamw": "1e-3:0.128:8", "muon": "2e-3:0.256:8"}
# What the rules of thumb are of: no decay, which the rate multiplies, and gradients as they are.
FLAGS = ("--layers=1", "--width=48", "--heads=1", "--seq-len=32", "--sample-tokens=0")
FLAGS += ("--held-out-bytes=100000", "--optimizer.weight-decay=0", "--optimizer.clip-norm=None")


class Axis(NamedTuple):
    """What a study of rates varies: its name and its column in the table, and the names and the
    colours of rules of thumb, by the power of it that they say the best rate grows as."""

    name: str
    column: str
    powers: Mapping[float, tuple[str, str]]


BATCH = Axis("batch", "rows", {1.0: ("linear", "C3"), 0.5: ("square root", "C2")})


@dataclasses.dataclass(frozen=True)
class Options:
    """Finds the best learning rate of each batch, next to the linear and the square-root rule.

    All other flags go to experiments.gpt. The same command resumes an interrupted study.
    """

    study_dir: str
    """Folder of the study, which is made: its runs and what they print."""
    rules: tuple[str, ...] = tuple(RATES)
    """Update rules, as RULE=LOW:HIGH:COUNT with a range of rates; sgd, adamw and muon have one."""
    rows: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Rows of a batch."""
    tokens: int = 2**17
    """Tokens of every training."""
    seeds: int = 2
    """Trainings of each batch and rate, whose mean loss counts."""
    png: str | None = None
    """Also draw the best rates over the batch, and the losses, in this PNG file."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The losses of one update rule, float64 [B, R], by rows [B] and rates [R]."""

    rule: str
    rows_B: np.ndarray
    rates_R: np.ndarray
    losses_BR: np.ndarray

    @property
    def best_B(self) -> np.ndarray:
        """The best rate of each batch; NaN where the lowest loss is at an end of the range."""
        return np.array([vertex(self.rates_R, losses_R) for losses_R in self.losses_BR])

    @property
    def power(self) -> tuple[float, float]:
        """The power of the batch that the best rate grows as, by least squares, and its standard
        error; NaN where fewer than three batches have a best rate."""
        inside_B = np.isfinite(self.best_B)
        if inside_B.sum() < 3:
            return math.nan, math.nan
        x, y = np.log(self.rows_B[inside_B]), np.log(self.best_B[inside_B])
        (power, start), spread = np.polyfit(x, y, 1), np.square(x - x.mean()).sum()
        left = np.square(y - power * x - start).sum() / (len(x) - 2)
        return float(power), math.sqrt(left / spread)

    def ruled(self, power: float) -> np.ndarray:
        """The rates [B] of a rule of thumb that goes through the middle of the best ones."""
        inside_B, shape_B = np.isfinite(self.best_B), self.rows_B**power
        if not inside_B.any():
            return np.full_like(shape_B, math.nan)
        return shape_B * np.exp(np.log((self.best_B / shape_B)[inside_B]).mean())


def vertex(rates_R: np.ndarray, losses_R: np.ndarray) -> float:
    """Returns the rate at which the parabola, in the logarithm of the rate, through the lowest loss
    and its two neighbours is lowest; NaN where one of them is missing or not finite."""
    i = int(np.argmin(losses_R))
    near = slice(i - 1, i + 2)
    if not 0 < i < len(rates_R) - 1 or not np.isfinite(losses_R[near]).all():
        return math.nan
    a, b, _ = np.polyfit(np.log(rates_R[near] / rates_R[i]), losses_R[near], 2)
    return float(rates_R[i] * math.exp(-b / (2 * a)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study by its command line."""
    program = "python -m experiments.studies.batch_rate"
    options, rest = tyro.cli(Options, args=arguments, prog=program, return_unknown_args=True)
    with refusing(Options):
        check_least(options, tokens=1, seeds=1)
        if options.png is not None:  # Where that cannot be, nothing is trained.
            new_figure(1, 1)
        flags = [*FLAGS, *rest]
        _, config = load_config(MODULE, flags, command="studies", own=Options)
        record = {"module": MODULE, "flags": shlex.join(rest), "rules": list(options.rules)}
        record |= {"tokens": options.tokens, "seeds": options.seeds}
        join(pathlib.Path(options.study_dir), record)
        sweeps = [sweep(options, flags, config, rule) for rule in options.rules]
        tell(sweeps)
        if options.png is not None:
            draw(sweeps, options.png)
            print(options.png)


def sweep(options: Options, flags: Sequence[str], config: Any, text: str) -> Sweep:
    """Trains a rule with every batch."""
    rule, _, spread = text.partition("=")
    if not (spread := spread or RATES.get(rule, "")):
        raise ValueError(f"`rules` has {rule!r}: write its rates behind it, as {rule}=1e-3:0.1:8")
    vary = f"{RATE}=log:{spread}"
    members = Population(vary=(vary,)).members()
    rates_R = np.array([each[RATE] for each in members])
    losses = []
    for rows in options.rows:
        steps = round(options.tokens / (rows * config.seq_len))
        own = [f"--optimizer.name={rule}", f"--global-batch={rows}", f"--steps={steps}"]
        own += [f"--population.vary={vary}", f"--population.size={options.seeds * rates_R.size}"]
        run = pathlib.Path(options.study_dir) / f"{rule}-{rows}"
        losses.append(train(run, [*flags, *own]).reshape(rates_R.size, options.seeds).mean(1))
    return Sweep(rule, np.array(options.rows, np.float64), rates_R, np.array(losses))


def train(run: pathlib.Path, flags: Sequence[str]) -> np.ndarray:
    """Trains a population, or reads what it came to, and returns the held-out loss of each member;
    infinite where that is not finite."""
    name = f"eval/{ALL}loss"
    if not exists(run) or name not in read_run(as_path(run), "").vectors:
        words = ["-m", MODULE, *flags, "--run-dir", str(run), "--auto-resume"]
        with run.with_suffix(".out").open("w") as out:
            done = subprocess.run([sys.executable, *words], stdout=out, stderr=subprocess.STDOUT)
        if done.returncode:
            raise ValueError(f"the run {run} ended with {done.returncode}: see {out.name}")
    losses = read_run(as_path(run), "").vectors[name].values[-1].astype(np.float64)
    return np.where(np.isfinite(losses), losses, np.inf)


def tell(sweeps: Sequence[Sweep], axis: Axis = BATCH) -> None:
    """Prints the best rates, next to those of the rules of thumb."""
    rules = (name for name, _ in axis.powers.values())
    names = ("rule", axis.column, "loss", "best rate", *rules)
    print(("{:>12}" * len(names)).format(*names))
    for each in sweeps:
        columns = (each.losses_BR.min(1), each.best_B, *map(each.ruled, axis.powers))
        for row in zip(each.rows_B, *columns, strict=True):
            print(f"{each.rule:>12}" + "".join(f"{x:12.4g}" for x in row))
    for each in sweeps:
        power = "{:.2f} (± {:.2f})".format(*each.power)
        print(f"The best rate of {each.rule} grows as the {axis.name} ^ {power}.")


def draw(sweeps: Sequence[Sweep], path: str, axis: Axis = BATCH) -> None:
    """Draws the best rates over the batch with the rules of thumb, and all losses below."""
    figure = new_figure(4 * len(sweeps), 7)
    panels = figure.subplots(2, len(sweeps), squeeze=False)
    for (above, below), each in zip(panels.T, sweeps, strict=True):
        for power, (name, color) in axis.powers.items():
            above.loglog(each.rows_B, each.ruled(power), "--", color=color, label=name)
        above.loglog(each.rows_B, each.best_B, "o-", color="black", label="best")
        above.set_xticks(each.rows_B, [f"{rows:.0f}" for rows in each.rows_B])
        above.minorticks_off()
        above.legend(frameon=False, fontsize=8)
        title = f"{each.rule}: rate as {axis.name} ^ {each.power[0]:.2f}"
        finish_axes(above, title, x=axis.name, y="best learning rate")
        for rows, losses_R in zip(each.rows_B, each.losses_BR, strict=True):
            below.semilogx(each.rates_R, losses_R, ".-", label=f"{rows:.0f} {axis.column}")
        below.set_ylim(each.losses_BR.min() - 0.05, each.losses_BR.min() + 1)
        below.legend(frameon=False, fontsize=8)
        finish_axes(below, "held-out loss", x="learning rate", y="nats per token")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
