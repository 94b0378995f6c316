"""Draws plots as PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks.report.memory import Peaks
from benchmarks.report.plots import Curves, Dots, Line, fingerprint
from benchmarks.report.records import LIMITS
from benchmarks.report.standings import is_ours
from benchmarks.report.styles import Style

# A narrow figure can be read on a phone.
_WIDTH, _DPI, _FONT = 6.4, 125, 10
_KEY, _GRID = "persample-data", "#dddddd"


def draw(plot: Dots | Curves | Peaks, path: Path) -> None:
    """Draw a plot, and store the fingerprint of its data in the picture.

    Args:
        plot: the data to draw.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(_WIDTH, _height(plot)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(plot.title, fontsize=12)
    if isinstance(plot, Dots):
        _draw_dots(figure.subplots(), plot)
    elif isinstance(plot, Peaks):
        _draw_peaks(figure.subplots(), plot)
    else:
        _draw_curves(figure.subplots(2, sharex=True), plot)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=_FONT)
    _save(figure, fingerprint(plot), path)


def _save(figure: Figure, data: str, path: Path) -> None:
    drawn, info = io.BytesIO(), PngInfo()
    figure.savefig(drawn, dpi=_DPI)
    info.add_text(_KEY, data)
    # 256 colors need a third of the bytes, and change nothing but blends at edges.
    with Image.open(drawn) as picture:
        indexed = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        indexed.save(path, "PNG", optimize=True, pnginfo=info)


def shown_by(path: Path) -> str | None:
    """Return the fingerprint stored in a picture.

    Args:
        path: a PNG file.

    Returns:
        The fingerprint; None if the file is missing, is no picture, or was not drawn by ``draw``.
    """
    try:
        with Image.open(path) as picture:
            return picture.info.get(_KEY)
    except OSError:
        return None


def _height(plot: Dots | Curves | Peaks) -> float:
    """Return the height of the figure in inches: panels, legend and margins."""
    if isinstance(plot, Dots):
        return 0.42 * max(len(plot.rows), 2) + 0.22 * math.ceil(len(plot.series) / 2) + 1.2
    if isinstance(plot, Peaks):
        return 3.6
    return 6.5 + 0.22 * math.ceil(len(plot.lines) / 2)


def _draw_dots(axes: Axes, plot: Dots) -> None:
    for row, mark in enumerate(plot.marks):
        axes.axhspan(row - 0.5, row + 0.5, color="#f4f4f4" if row % 2 else "white", zorder=0)
        axes.vlines(mark or [], row - 0.5, row + 0.5, color="black", linestyle=(0, (3, 2)), linewidth=1.2, zorder=1)
    for place, (method, (style, values)) in enumerate(plot.series.items()):
        shift = 0.7 * ((place + 0.5) / len(plot.series) - 0.5)  # top down in the order of the legend
        dots = [(value, row + shift) for row, value in enumerate(values) if value is not None]
        axes.plot(*zip(*dots, strict=True), label=method, **_look(method, style), linestyle="")
    axes.set_yticks(range(len(plot.rows)), [row.replace(", ", ",\n") for row in plot.rows])
    axes.set_ylim(len(plot.rows) - 0.5, -0.5)
    axes.set_xlabel(plot.label, fontsize=_FONT)
    _logarithmic(axes, axes.xaxis)
    axes.grid(visible=True, axis="x", color=_GRID, linewidth=0.6)


def _draw_peaks(axes: Axes, plot: Peaks) -> None:
    for name, (style, sizes, amounts) in plot.lines.items():
        axes.plot(sizes, amounts, label=name, **_look(name, style), linewidth=2)
    axes.set_xlabel("samples in the batch", fontsize=_FONT)
    axes.set_ylabel("peak memory of a call [MiB]", fontsize=_FONT)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, color=_GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _look(method: str, style: Style) -> dict[str, Any]:
    size, order = (8, 3) if is_ours(method) else (6, 2)
    return {
        "color": style.color, "marker": style.marker, "markersize": size, "zorder": order,
        "markeredgecolor": "white", "markeredgewidth": 0.6,
    }  # fmt: skip


def _draw_curves(panels: Iterable[Axes], plot: Curves) -> None:
    time, memory = panels
    for method, line in plot.lines.items():
        _curve(time, method, line, [1e3 * seconds for seconds in line.times])
        _curve(memory, method, line, [nbytes / 2**20 if nbytes else float("nan") for nbytes in line.peaks])
    time.set_ylabel("time [ms], log scale", fontsize=_FONT)
    memory.set_ylabel("peak extra memory [MiB], log scale", fontsize=_FONT)
    memory.set_xlabel(f"{plot.label}, log scale (×: the next size fails)", fontsize=_FONT)
    for axes in (time, memory):
        _logarithmic(axes, axes.yaxis)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
        axes.grid(visible=True, color=_GRID, linewidth=0.6)


def _curve(axes: Axes, method: str, line: Line, values: list[float]) -> None:
    limit = {"linestyle": "--", "linewidth": 2, "marker": ""} if method in LIMITS else {}
    axes.plot(line.sizes, values, label=method, **_look(method, line.style) | limit)
    if line.end and values:
        style: dict[str, Any] = {
            "markersize": 14,
            "markeredgewidth": 2,
            "markeredgecolor": line.style.color,
            "zorder": 4,
        }
        axes.plot(line.sizes[-1:], values[-1:], marker="x", **style)


def _logarithmic(axes: Axes, axis: XAxis | YAxis) -> None:
    axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 3) if high / low < 1e4 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=_FONT)
    axes.spines[["top", "right"]].set_visible(False)
