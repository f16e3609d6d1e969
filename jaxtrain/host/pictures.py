"""Pictures in PNG files: of pixels, or drawn by matplotlib, which is optional."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from etils import epath

from jaxtrain.host import extras
from jaxtrain.host.paths import as_path, write_whole


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
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_whole(as_path(path), drawn.getvalue())


def save_pixels(pixels_HW3: np.ndarray, path: epath.PathLike) -> None:
    """Writes uint8 pixels [H, W, 3] into a PNG file, on a disk or in a bucket."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    height, width, _ = pixels_HW3.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of each of 3 colours
    rows = np.insert(pixels_HW3.reshape(height, -1), 0, 0, axis=1)  # each begins with its filter
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    written = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
    write_whole(as_path(path), written)
