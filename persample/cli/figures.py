"""The pictures of the commands."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from persample.cli.cases import BATCH, FUSED, LOOP, PERSAMPLE
from persample.cli.report import Comparison, Row
from persample.cli.summary import Rows, Statistics
from persample.rl.baird import BairdRun
from persample.rl.training import Trainer
from persample.rl.training.trainer import EPISODES
from persample.rl.training.trainer import Row as Update

# Okabe, Ito, "Color Universal Design" (2008).
_GREY, _BLUE, _LIGHT, _ORANGE = "#999999", "#0072b2", "#56b4e9", "#e69f00"
_COLORS = {LOOP: _GREY, PERSAMPLE: _BLUE, FUSED: _LIGHT, BATCH: _ORANGE}
BAIRD = {"td0": ("semi-gradient TD(0)", _ORANGE), "gtd2": ("GTD2", _LIGHT), "tdc": ("TDC", _BLUE)}


def _figure(width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def _save(figure: Figure, path: Path, dpi: int = 120) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=dpi)


def save_comparison(comparisons: Sequence[Comparison], title: str, path: Path) -> None:
    """Draw a row of three panels for each loss: gradient norms, time and memory."""
    figure = _figure(12, 3.6 * len(comparisons), title)
    grid = figure.subplots(len(comparisons), 3, squeeze=False, width_ratios=(1.2, 1, 1))
    for (norms, time, memory), comparison in zip(grid, comparisons, strict=True):
        _histogram(norms, comparison)
        rows, loop = comparison.rows, comparison.rows[0]
        speeds = [f"{1e3 * row.median:.3g} ms" + _beside(row, loop, _speed(row.speedup)) for row in rows]
        _bars(time, rows, [1e3 * row.median for row in rows], speeds)
        time.set(xlabel="median time of one update [ms], log scale", title="Time")
        sizes = [row.peak_bytes / 2**20 for row in rows]
        shares = [_beside(row, loop, f"{row.peak_bytes / loop.peak_bytes:.3g} ×") for row in rows]
        _bars(memory, rows, sizes, [f"{size:.3g} MiB{share}" for size, share in zip(sizes, shares, strict=True)])
        memory.set(xlabel="peak extra memory [MiB], log scale", title="Memory")
    _save(figure, path, dpi=150)


def _histogram(axes: Axes, comparison: Comparison) -> None:
    axes.hist(comparison.norms, bins=40, color=_COLORS[PERSAMPLE])
    median = statistics.median(comparison.norms)
    axes.axvline(median, color="black", linewidth=1, linestyle="--", label=f"median {median:.3g}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        xlabel="Euclidean norm of a per-sample gradient",
        ylabel=f"number of {comparison.unit}s",
        title=f"{comparison.loss}: {comparison.samples} {comparison.unit}s, P = {comparison.parameters}",
    )


def _bars(axes: Axes, rows: Sequence[Row], values: Sequence[float], labels: Sequence[str]) -> None:
    bars = axes.barh([row.method for row in rows], values, color=[_COLORS[row.method] for row in rows])
    axes.bar_label(bars, labels, padding=4)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * (max(values) / min(values)) ** 0.8 * 3)  # room for the labels
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.invert_yaxis()


def _speed(ratio: float) -> str:
    return f"{ratio:.3g} × faster" if ratio >= 1 else f"{1 / ratio:.3g} × slower"


def _beside(row: Row, loop: Row, ratio: str) -> str:
    return "" if row is loop else f" ({ratio})"


def save_curve(trainer: Trainer, path: Path) -> None:
    """Draw returns or errors, and the norms of the per-sample gradients, of a trainer after at least one update."""
    config, history = trainer.config, trainer.history
    title = f"{type(config.algorithm).__name__} on {config.env}, seed {config.seed}, {config.engine} engine"
    figure = _figure(5.5, 6.2, title)
    upper, lower = figure.subplots(2, 1)
    if "return" in history[0]:
        _returns(upper, history, trainer.threshold)
    else:
        _errors(upper, history)
    _norms(lower, history, config.max_norm if config.reduce == "clipped" else math.inf)
    for axes in (upper, lower):
        axes.set_xlabel("steps of the environments")
    _save(figure, path)


def _returns(axes: Axes, history: list[Update], threshold: float) -> None:
    _line(axes, history, "return", color=_LIGHT, label="mean of the update's episodes")
    _line(axes, history, "average_return", color=_BLUE, label=f"mean of the last {EPISODES} episodes")
    if math.isfinite(threshold):
        axes.axhline(threshold, color="black", linewidth=1, linestyle="--", label=f"solved: {threshold:g}")
    axes.set(ylabel="undiscounted return", title="Returns")


def _errors(axes: Axes, history: list[Update]) -> None:
    if "value_error" in history[0]:
        _line(axes, history, "value_error", color=_BLUE, label="max |v − v_π| / max |v_π|")
        axes.axhline(0.02, color="black", linewidth=1, linestyle="--", label="2 %")
        axes.set(ylabel="relative error", title="Error of the values")
    else:
        _line(axes, history, "loss", color=_BLUE, label="mean of the update's transitions")
        axes.set(ylabel="squared TD error", title="Loss")
    _log_scale(axes)


def _norms(axes: Axes, history: list[Update], bound: float) -> None:
    _line(axes, history, "max_norm", color=_ORANGE, label="largest")
    _line(axes, history, "median_norm", color=_BLUE, label="median")
    if math.isfinite(bound):
        axes.axhline(bound, color="black", linewidth=1, linestyle="--", label=f"clipped to {bound:g}")
    axes.set(ylabel="norm", title="Norms of the per-sample gradients")
    _log_scale(axes)


def _line(axes: Axes, history: list[Update], name: str, *, color: str, label: str) -> None:
    axes.plot([row["steps"] for row in history], [row[name] for row in history], color=color, label=label)


def _log_scale(axes: Axes) -> None:
    if axes.dataLim.y1 > 0:  # a logarithm needs a positive value
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()}, log scale")


def save_statistics(source: str, found: Statistics, rows: Rows, path: Path) -> None:
    """Draw a histogram of the norms of the samples of a data set, and their leverages over their norms."""
    figure = _figure(12, 4, f"{source}: {found.samples:,} samples, noise scale {found.noise_scale:.3g}")
    left, right = figure.subplots(1, 2)
    norms, leverages = rows.norms.double().numpy(), rows.leverages.numpy()
    left.hist(norms, bins=60, color=_BLUE)
    for share in ("0.5", "0.99"):
        value = found.norm_quantiles[share]
        left.axvline(value, color=_ORANGE, label=f"quantile {share}: {value:.3g}")
    left.set(xlabel="norm of a sample's gradient", ylabel="samples", yscale="log")
    right.scatter(norms, leverages, s=4, alpha=0.5, color=_BLUE, linewidths=0, rasterized=True)
    right.set(xlabel="norm of a sample's gradient", ylabel="leverage")
    _save(figure, path)


def save_baird(runs: dict[str, BairdRun], path: Path) -> None:
    """Draw the errors of the methods on Baird's counterexample."""
    figure = _figure(5.5, 6.2, "Baird's counterexample, batches of 32 off-policy transitions")
    panels = figure.subplots(2, 1)
    for axes, field, label in zip(panels, BairdRun._fields, ("values", "Bellman errors"), strict=True):
        for method, run in runs.items():
            name, color = BAIRD[method]
            axes.plot(getattr(run, field), color=color, label=name)
        axes.set(xlabel="updates", ylabel=f"RMS of the {label}, log scale", yscale="log")
    _save(figure, path)
