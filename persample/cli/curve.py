"""The learning curve of a training."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from persample.rl.training import Trainer
from persample.rl.training.trainer import EPISODES, Row

# Okabe, Ito, "Color Universal Design" (2008).
_BLUE, _LIGHT, _ORANGE = "#0072b2", "#56b4e9", "#e69f00"


def save_curve(trainer: Trainer, path: Path) -> None:
    """Draw returns or errors, and the norms of the per-sample gradients.

    Args:
        trainer: a trainer after at least one update.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(5.5, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    config, history = trainer.config, trainer.history
    figure.suptitle(f"{type(config.algorithm).__name__} on {config.env}, seed {config.seed}, {config.engine} engine")
    upper, lower = figure.subplots(2, 1)
    if "return" in history[0]:
        _returns(upper, history, trainer.threshold)
    else:
        _errors(upper, history)
    _norms(lower, history, config.max_norm if config.reduce == "clipped" else math.inf)
    for axes in (upper, lower):
        axes.set_xlabel("steps of the environments")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _returns(axes: Axes, history: list[Row], threshold: float) -> None:
    _line(axes, history, "return", color=_LIGHT, label="mean of the update's episodes")
    _line(axes, history, "average_return", color=_BLUE, label=f"mean of the last {EPISODES} episodes")
    if math.isfinite(threshold):
        axes.axhline(threshold, color="black", linewidth=1, linestyle="--", label=f"solved: {threshold:g}")
    axes.set(ylabel="undiscounted return", title="Returns")


def _errors(axes: Axes, history: list[Row]) -> None:
    if "value_error" in history[0]:
        _line(axes, history, "value_error", color=_BLUE, label="max |v − v_π| / max |v_π|")
        axes.axhline(0.02, color="black", linewidth=1, linestyle="--", label="2 %")
        axes.set(ylabel="relative error", title="Error of the values")
    else:
        _line(axes, history, "loss", color=_BLUE, label="mean of the update's transitions")
        axes.set(ylabel="squared TD error", title="Loss")
    _log_scale(axes)


def _norms(axes: Axes, history: list[Row], bound: float) -> None:
    _line(axes, history, "max_norm", color=_ORANGE, label="largest")
    _line(axes, history, "median_norm", color=_BLUE, label="median")
    if math.isfinite(bound):
        axes.axhline(bound, color="black", linewidth=1, linestyle="--", label=f"clipped to {bound:g}")
    axes.set(ylabel="norm", title="Norms of the per-sample gradients")
    _log_scale(axes)


def _line(axes: Axes, history: list[Row], name: str, *, color: str, label: str) -> None:
    axes.plot([row["steps"] for row in history], [row[name] for row in history], color=color, label=label)


def _log_scale(axes: Axes) -> None:
    if axes.dataLim.y1 > 0:  # a logarithm needs a positive value
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()}, log scale")
