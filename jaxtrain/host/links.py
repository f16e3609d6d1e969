"""Measured links: the time of a collective as a latency and a bandwidth, by what it crosses."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

# Between devices of one host (of a TPU: one slice), and between hosts (slices).
WITHIN, BETWEEN = "within", "between"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Link:
    """Time of a collective: ``seconds + sent / bytes_per_s``, with the bytes that one device
    sends."""

    seconds: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Links:
    """Links of a cluster as they were measured.

    Args:
      device_kind: what JAX calls the devices.
      measured: when, and on how many of them.
      links: by what is crossed, ``"within"`` or ``"between"``, and by kind of collective.
    """

    device_kind: str
    measured: str
    links: Mapping[str, Mapping[str, Link]]

    def save(self, path: os.PathLike) -> None:
        """Writes them as JSON, which :func:`read_links` reads."""
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_links(path: os.PathLike) -> Links:
    """Reads what :meth:`Links.save` has written. Raises ValueError where the file holds no links,
    OSError where it cannot be read."""
    try:
        told = json.loads(pathlib.Path(path).read_text())
        links = {
            where: {
                kind: Link(float(x["seconds"]), float(x["bytes_per_s"])) for kind, x in of.items()
            }
            for where, of in told["links"].items()
        }
        each = [(where, *at) for where, of in links.items() for at in of.items()]
        if any(where not in (WITHIN, BETWEEN) or kind not in KINDS for where, kind, _ in each):
            raise ValueError("some are of unknown names")
        if not all(0 <= x.seconds < np.inf and 0 < x.bytes_per_s < np.inf for _, _, x in each):
            raise ValueError("a time or a bandwidth is not positive and finite")
        return Links(str(told["device_kind"]), str(told["measured"]), links)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`links` is {str(path)!r}: it holds no measured links ({error}); give what jaxtrain "
            "check-hosts --out has written"
        ) from None


def fit(points: Sequence[tuple[float, float]]) -> Link:
    """Fits ``seconds + sent / bytes_per_s`` to times, by least squares of relative errors.

    Neither number becomes negative: of times that do not rise with the bytes the longest tells a
    bandwidth that is at least reached.

    Args:
      points: bytes that one device sends, and seconds, of at least two sizes.

    Raises:
      ValueError: all are of one size.

    >>> fit([(1e3, 2e-5 + 1e3 / 1e9), (1e6, 2e-5 + 1e6 / 1e9), (1e8, 2e-5 + 1e8 / 1e9)])
    Link(seconds=2e-05, bytes_per_s=1000000000.0)
    """
    sent, seconds = np.asarray(points, np.float64).T
    if sent.min() == sent.max():
        raise ValueError(
            f"`sizes` all send {sent[0]:g} bytes from a device, for each has a float32 at least: "
            "give sizes that are further apart"
        )
    columns = np.stack([1 / seconds, sent / sent.max() / seconds], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
    if latency < 0 or slope <= 0:
        slope_alone = columns[:, 1].sum() / np.square(columns[:, 1]).sum()
        latency, slope = 0.0, slope_alone if latency < 0 < slope else seconds[sent.argmax()]
    return Link(float(f"{latency:.6g}"), float(f"{sent.max() / slope:.6g}"))
