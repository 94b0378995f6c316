"""What the commands print and write: consoles, directories, and pictures."""

from __future__ import annotations

import errno
import stat
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.console import Console
from torch import Tensor

from persample.errors import ArgumentError
from persample.rl.training import EPISODES, Row, Trainer
from persample.utils.trees import Leaf


def console(*, stderr: bool = False) -> Console:
    """Return a console that is wide enough for tables where there is no terminal to ask."""
    return Console(stderr=stderr, width=None if (sys.stderr if stderr else sys.stdout).isatty() else 110)


def spelled(argument: str) -> str:
    """Return the option of an argument: ``--max-norm`` for ``max_norm``, ``--env`` for ``env_id``."""
    return f"--{argument.removesuffix('_id').rstrip('_').replace('_', '-')}"


def writable(directory: Path, *names: str) -> Path:
    """Make a directory, check that files with these names can be written to it, and return it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        for name in names:
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(mode := (directory / name).lstat().st_mode):
                    kind = "a directory" if stat.S_ISDIR(mode) else "no plain file"
                    raise FileExistsError(errno.EEXIST, f"{name} is {kind}")
    except (OSError, ValueError) as error:
        fix = "Choose another one."
        reason = getattr(error, "strerror", error)  # a zero byte is a ValueError
        expected, received = "a directory that can be written to", f"{str(directory)!r} ({reason})"
        raise ArgumentError.about("--output", expected=expected, received=received, fix=fix) from error
    return directory


if TYPE_CHECKING:  # it draws
    from persample.cli.compare_command import Comparison

# Okabe, Ito, "Color Universal Design" (2008).
_GREY, _BLUE, _LIGHT, _ORANGE = "#999999", "#0072b2", "#56b4e9", "#e69f00"


def _figure(width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def save_comparison(comparisons: Sequence[Comparison], title: str, path: Path) -> None:
    """Draw a row of three panels for each loss: gradient norms, time and memory."""
    figure = _figure(12, 3.6 * len(comparisons), title)
    grid = figure.subplots(len(comparisons), 3, squeeze=False, width_ratios=(1.2, 1, 1))
    for (norms, time, memory), found in zip(grid, comparisons, strict=True):
        norms.hist(found.norms, bins=40, color=_BLUE)
        median = statistics.median(found.norms)
        norms.axvline(median, color="black", linewidth=1, linestyle="--", label=f"median {median:.3g}")
        norms.set(xlabel="norm of a sample's gradient", ylabel="samples", title=f"{found.loss}: {found.samples}")
        names = [row.method for row in found.rows]
        _bars(time, names, [1e3 * row.seconds for row in found.rows], "ms")
        time.set(xlabel="median time of one update [ms], log scale", title="Time")
        _bars(memory, names, [row.peak_bytes / 2**20 for row in found.rows], "MiB")
        memory.set(xlabel="peak extra memory [MiB], log scale", title="Memory")
    _save(figure, path)


def _bars(axes: Axes, names: list[str], values: list[float], unit: str) -> None:
    bars = axes.barh(names, values, color=(_GREY, _BLUE, _LIGHT, _ORANGE))
    labels = [f"{value:.3g} {unit} ({value / values[0]:.3g} ×)" for value in values]
    axes.bar_label(bars, labels, padding=4)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * (max(values) / min(values)) ** 0.8 * 3)  # room for the labels
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.invert_yaxis()


def save_curve(trainer: Trainer, path: Path) -> None:
    """Draw returns or errors, and the norms of the per-sample gradients, of a trainer after at least one update."""
    history = trainer.history
    title = f"{type(trainer.algorithm).__name__} on {trainer.env}, seed {trainer.seed}, {trainer.engine} engine"
    figure = _figure(5.5, 6.2, title)
    upper, lower = figure.subplots(2, 1)
    if "return" in history[0]:
        _line(upper, history, "return", _LIGHT, "mean of the update's episodes")
        _line(upper, history, "average_return", _BLUE, f"mean of the last {EPISODES} episodes")
        upper.set(ylabel="undiscounted return", title="Returns")
    else:
        name = "value_error" if "value_error" in history[0] else "loss"
        label = {"value_error": "max |v − v_π| / max |v_π|", "loss": "mean squared TD error of the update"}[name]
        _line(upper, history, name, _BLUE, label)
        upper.set(title="Error of the values" if name == "value_error" else "Loss")
        _log_scale(upper)
    _line(lower, history, "max_norm", _ORANGE, "largest")
    _line(lower, history, "median_norm", _BLUE, "median")
    lower.set(title="Norms of the per-sample gradients")
    _log_scale(lower)
    for axes in (upper, lower):
        axes.set_xlabel("steps of the environments")
    _save(figure, path)


def _line(axes: Axes, history: list[Row], name: str, color: str, label: str) -> None:
    axes.plot([row["steps"] for row in history], [row[name] for row in history], color=color, label=label)


def _log_scale(axes: Axes) -> None:
    if axes.dataLim.y1 > 0:  # a logarithm needs a positive value
        axes.set(yscale="log", ylabel="log scale")


def save_statistics(source: str, found: dict[str, Leaf], norms: Tensor, leverages: Tensor, path: Path) -> None:
    """Draw a histogram of the norms of the samples of a data set, and their leverages over their norms."""
    figure = _figure(12, 4, f"{source}: {found['samples']:,} samples, noise scale {found['noise_scale']:.3g}")
    left, right = figure.subplots(1, 2)
    left.hist(norms.double().numpy(), bins=60, color=_BLUE)
    for share in ("0.5", "0.99"):
        value = found["norm_quantiles"][share]
        left.axvline(value, color=_ORANGE, label=f"quantile {share}: {value:.3g}")
    left.set(xlabel="norm of a sample's gradient", ylabel="samples", yscale="log")
    right.scatter(norms.double().numpy(), leverages.numpy(), s=4, alpha=0.5, color=_BLUE, linewidths=0, rasterized=True)
    right.set(xlabel="norm of a sample's gradient", ylabel="leverage")
    _save(figure, path)
