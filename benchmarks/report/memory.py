"""README's picture: the memory of one call over the number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.report.plots import Curves
from benchmarks.report.styles import Style


@dataclass(frozen=True)
class Peaks:
    """Peak memory over the batch size, both on linear axes.

    Args:
        title: the title of the figure.
        lines: for each method, as the picture names it, its style, its batch sizes, and its peaks in MiB.
    """

    title: str
    lines: dict[str, tuple[Style, tuple[int, ...], tuple[float, ...]]]


def peaks(curves: Curves, names: Mapping[str, str], title: str) -> Peaks:
    """Select the memory of some methods.

    Args:
        curves: time and memory over the batch size.
        names: what the picture calls each method.
        title: the title of the figure.

    Returns:
        The data of the figure, without the sizes whose memory is unknown.
    """
    lines = {}
    for method, name in names.items():
        if line := curves.lines.get(method):
            known = [
                (size, peak / 2**20) for size, peak in zip(line.sizes, line.peaks, strict=True) if peak is not None
            ]
            sizes, amounts = zip(*known, strict=True) if known else ((), ())
            lines[name] = line.style, sizes, amounts
    return Peaks(title, lines)
