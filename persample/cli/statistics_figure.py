"""The picture of the statistics of a data set: its gradient norms, and their leverages."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from persample.cli.statistics import Rows, Statistics

_BLUE, _ORANGE = "#0072b2", "#e69f00"


def save_figure(source: str, found: Statistics, rows: Rows, path: Path) -> None:
    """Draw a histogram of the norms, and leverages over norms.

    Args:
        source: the name of the data set.
        found: its statistics.
        rows: norms and leverages of its samples.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    norms, leverages = rows.norms.double().numpy(), rows.leverages.numpy()
    left.hist(norms, bins=60, color=_BLUE)
    for share in ("0.5", "0.99"):
        value = found.norm_quantiles[share]
        left.axvline(value, color=_ORANGE, label=f"quantile {share}: {value:.3g}")
    left.set(xlabel="norm of a sample's gradient", ylabel="samples", yscale="log")
    left.legend(frameon=False)
    right.scatter(norms, leverages, s=4, alpha=0.5, color=_BLUE, linewidths=0, rasterized=True)
    right.set(xlabel="norm of a sample's gradient", ylabel="leverage")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{source}: {found.samples:,} samples, noise scale {found.noise_scale:.3g}")
    figure.savefig(path, dpi=120)
