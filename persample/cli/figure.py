"""The picture of a comparison: gradient norms, time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from persample.cli.cases import BATCH, FUSED, LOOP, PERSAMPLE
from persample.cli.compare import Comparison, Row

# Okabe, Ito, "Color Universal Design" (2008).
_COLORS = {LOOP: "#999999", PERSAMPLE: "#0072b2", FUSED: "#56b4e9", BATCH: "#e69f00"}


def save_figure(comparisons: Sequence[Comparison], title: str, path: Path) -> None:
    """Draw a row of three panels for each loss.

    Args:
        comparisons: one per loss.
        title: the title of the figure.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(12, 3.6 * len(comparisons)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    grid = figure.subplots(len(comparisons), 3, squeeze=False, width_ratios=(1.2, 1, 1))
    for (norms, time, memory), comparison in zip(grid, comparisons, strict=True):
        _norms(norms, comparison)
        rows, loop = comparison.rows, comparison.rows[0]
        speeds = [f"{1e3 * row.median:.3g} ms" + _beside(row, loop, _speed(row.speedup)) for row in rows]
        _bars(time, rows, [1e3 * row.median for row in rows], speeds)
        time.set(xlabel="median time of one update [ms], log scale", title="Time")
        shares = [_mebibytes(row) + _beside(row, loop, f"{row.peak_bytes / loop.peak_bytes:.3g} ×") for row in rows]
        _bars(memory, rows, [row.peak_bytes / 2**20 for row in rows], shares)
        memory.set(xlabel="peak extra memory [MiB], log scale", title="Memory")
    figure.savefig(path, dpi=150)


def _norms(axes: Axes, comparison: Comparison) -> None:
    axes.hist(comparison.norms, bins=40, color=_COLORS[PERSAMPLE])
    median = statistics.median(comparison.norms)
    axes.axvline(median, color="black", linewidth=1, linestyle="--", label=f"median {median:.3g}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    axes.set(
        xlabel="Euclidean norm of a per-sample gradient",
        ylabel=f"number of {comparison.unit}s",
        title=f"{comparison.loss}: {comparison.samples} {comparison.unit}s, P = {comparison.parameters}",
    )
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Axes, rows: Sequence[Row], values: Sequence[float], labels: Sequence[str]) -> None:
    bars = axes.barh([row.method for row in rows], values, color=[_COLORS[row.method] for row in rows])
    axes.bar_label(bars, labels, padding=4)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * (max(values) / min(values)) ** 0.8 * 3)  # room for the labels
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _speed(ratio: float) -> str:
    return f"{ratio:.3g} × faster" if ratio >= 1 else f"{1 / ratio:.3g} × slower"


def _beside(row: Row, loop: Row, ratio: str) -> str:
    return "" if row is loop else f" ({ratio})"


def _mebibytes(row: Row) -> str:
    return f"{row.peak_bytes / 2**20:.3g} MiB"
