"""The curves of runs as a PNG file, for a message or a paper."""

from collections.abc import Sequence

from etils import epath

from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.run.observe.metric import Metric
from jaxtrain.run.observe.report import rates as range_test
from jaxtrain.run.observe.report.records import Record, downsample

BUCKETS = 1000


def save_png(records: Sequence[Record], path: epath.PathLike) -> None:
    """Draws losses, gradient norm, learning rate and throughput of runs, overlaid in this order,
    and range tests of learning rates, into a file on a disk or in a bucket. Raises ImportError
    where matplotlib is not installed."""
    tests = [test for record in records for test in range_test.found(record)]
    rows = [*"LLL"], [*"GRT"], *([i] * 3 for i in range(len(tests)))
    figure = new_figure(11, 6.5 + 3.5 * len(tests))
    axes_of = figure.subplot_mosaic(rows, height_ratios=(3, 2, *[3] * len(tests)))
    loss, *small = (axes_of[name] for name in "LGRT")
    for i, test in enumerate(tests):
        range_test.draw(axes_of[i], test)
    rates = sorted({name for record in records for name in record.rates})
    held_out = sorted({name for record in records for name in record.held_out_losses})
    panels = [
        (loss, "loss", ["train/loss", *held_out]),
        (small[0], "gradient norm", ["train/grad_norm"]),
        (small[1], "learning rate", ["train/learning_rate"]),
        (small[2], " and ".join(n[5:].replace("_", " ") for n in rates), rates),
    ]
    for axes, title, names in panels:
        for i, record in enumerate(records):
            for name in names:
                if name not in record.series:
                    continue
                points = downsample(record.series[name], BUCKETS)
                held = name in held_out
                label = record.name + (f", held-out {Metric.of(name).name}" if held else "")
                style = {"marker": ".", "linestyle": "--"} if held else {}
                color = f"C{i + len(records) * held}"
                axes.plot(
                    points["x"], points["y"], color=color, linewidth=1.2, label=label, **style
                )
                if "lo" in points:
                    band = {"color": color, "alpha": 0.2, "linewidth": 0}
                    axes.fill_between(points["x"], points["lo"], points["hi"], **band)
        finish_axes(axes, title, x="step")
    small[0].set_yscale("log")
    small[2].set_ylim(bottom=0)
    if loss.lines:
        loss.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
