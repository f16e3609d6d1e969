"""The best learning rate over the width, under the standard form and muP.

Every width trains on the same batches, with all rates of a range as one population. Under muP (Yang
et al. 2022, https://arxiv.org/abs/2203.03466) a wide model's best rate is that of a narrow one;
under the standard form that of Adam falls as the width grows.

    python -m experiments.studies.width_rate --study-dir WIDTHS --png width_rate.png
"""

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence

import numpy as np
import tyro

from experiments.studies.batch_rate import MODULE, RATE, Axis, Sweep, draw, tell, train
from jaxtrain.host.least import check_least
from jaxtrain.host.pictures import new_figure
from jaxtrain.methods.population import Population
from jaxtrain.run.main import load_config
from jaxtrain.run.refusal import refusing
from jaxtrain.study.command import join

WIDTH = Axis("width", "wide", {-1.0: ("1 / width", "C3"), 0.0: ("constant", "C2")})
FLAGS = ("--layers=2", "--heads=2", "--seq-len=32", "--global-batch=8", "--steps=60")
FLAGS += ("--optimizer.name=adamw", "--sample-tokens=0", "--held-out-bytes=8000")


@dataclasses.dataclass(frozen=True)
class Options:
    """Finds the best learning rate of each width, under the standard form and under muP.

    All other flags go to experiments.gpt. The same command resumes an interrupted study.
    """

    study_dir: str
    """Folder of the study, which is made: its runs and what they print."""
    widths: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Widths of the model."""
    rates: str = "2.44e-4:0.03125:8"
    """Range of learning rates, as LOW:HIGH:COUNT, equal factors apart."""
    seeds: int = 2
    """Trainings of each width and rate, whose mean loss counts."""
    png: str | None = None
    """Also draw the best rates over the width, and the losses, in this PNG file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study by its command line."""
    program = "python -m experiments.studies.width_rate"
    options, rest = tyro.cli(Options, args=arguments, prog=program, return_unknown_args=True)
    with refusing(Options):
        check_least(options, seeds=1)
        if options.png is not None:  # Where that cannot be, nothing is trained.
            new_figure(1, 1)
        flags, vary = [*FLAGS, *rest], f"{RATE}=log:{options.rates}"
        load_config(MODULE, flags, command="studies", own=Options)
        record = {"module": MODULE, "flags": shlex.join(rest), "rates": options.rates}
        join(pathlib.Path(options.study_dir), record | {"seeds": options.seeds})
        rates_R = np.array([each[RATE] for each in Population(vary=(vary,)).members()])
        flags += [f"--population.vary={vary}", f"--population.size={options.seeds * rates_R.size}"]
        sweeps = [sweep(options, flags, rates_R, form) for form in ("standard", "mup")]
        tell(sweeps, WIDTH)
        if options.png is not None:
            draw(sweeps, options.png, WIDTH)
            print(options.png)


def sweep(options: Options, flags: Sequence[str], rates_R: np.ndarray, form: str) -> Sweep:
    """Trains every width under a form."""
    losses = []
    for width in options.widths:
        own = [*flags, f"--width={width}", f"--parametrization={form}"]
        losses.append(train(pathlib.Path(options.study_dir) / f"{form}-{width}", own))
    losses_WR = np.reshape(losses, (-1, rates_R.size, options.seeds)).mean(2)
    return Sweep(form, np.array(options.widths, np.float64), rates_R, losses_WR)


if __name__ == "__main__":
    main()
