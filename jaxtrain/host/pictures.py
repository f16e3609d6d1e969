"""Pictures in PNG files, drawn by matplotlib, which is optional."""

from typing import Any

from etils import epath

from jaxtrain.host import extras
from jaxtrain.host.paths import as_path


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure, in inches. Raises ImportError where matplotlib is not
    installed."""
    matplotlib = extras.load("a PNG needs matplotlib", "plot", "matplotlib.figure")
    return matplotlib.figure.Figure(figsize=(width, height), dpi=130, layout="constrained")


def finish_axes(axes: Any, title: str, *, x: str, y: str = "") -> None:
    """Gives axes their title, labels and a light grid."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, path: epath.PathLike) -> None:
    """Writes a figure into a PNG file, on a disk or in a bucket."""
    with as_path(path).open("wb") as file:
        figure.savefig(file, format="png")
