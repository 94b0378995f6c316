"""Which quantities are measured on which workloads, by which methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quantities import QUANTITIES

# Clipped means everywhere, stacks where others are made for them, every quantity once: the run takes long as it is.
MEASURED: dict[str, tuple[str, ...]] = {
    "tutorial TD(0), B=2": ("stack",),
    "tutorial TD(0), B=4096": ("stack",),
    "tutorial TD(0), B=65536": ("stack",),
    "TD(0) MLP 64, B=256": ("clipped_mean",),
    "TD(0) MLP 64, B=1024": ("clipped_mean",),
    "TD(0) MLP 256, B=256": QUANTITIES,
    "TD(0) MLP 256, B=1024": ("clipped_mean",),
    "REINFORCE MLP 64, 32x200": ("clipped_mean", "variance"),
    "REINFORCE MLP 256, 32x200": ("clipped_mean",),
    "GRU policy, 32x50": ("clipped_mean",),
    "DQN Nature CNN, B=32": ("clipped_mean", "norms"),
    "transformer tied, B=16": ("clipped_mean", "gram"),
    "transformer tied 32000, B=16": ("clipped_mean",),
    "LoRA transformer, B=16": ("clipped_mean", "stack"),
    "wide MLP 5120, B=32": ("clipped_mean", "stack"),
}
QUICK: dict[str, tuple[str, ...]] = {"TD(0) MLP 64, B=256": ("clipped_mean",)}


@dataclass(frozen=True)
class Listed:
    """A method as its environment's worker lists it.

    Args:
        name: of the method.
        environment: where it runs.
        shown_for: the quantities for which it has a row.
        is_limit: whether it is a physical limit.
        shown_on: what the names of the workloads begin with for which it has a row.
    """

    name: str
    environment: str
    shown_for: Sequence[str]
    is_limit: bool = False
    shown_on: str = ""


@dataclass(frozen=True)
class Cell:
    """One number of the tables: a method on a workload's quantity."""

    workload: str
    quantity: str
    method: Listed

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of its record."""
        return self.workload, self.quantity, self.method.name

    @property
    def label(self) -> str:
        """What it is called on the screen, and what --only looks into."""
        return ", ".join(self.key)


def is_shown(method: Any, workload: str, quantity: str) -> bool:
    """Tell whether a method, or one that is listed, has a row for a quantity of a workload."""
    return quantity in method.shown_for and workload.startswith(method.shown_on)


def cells(methods: Iterable[Listed], *, quick: bool = False, only: Sequence[str] = ()) -> list[Cell]:
    """List what a run measures, workload by workload; of it, the cells whose labels contain every text of ``only``."""
    found = [
        Cell(workload, quantity, method)
        for workload, quantities in (QUICK if quick else MEASURED).items()
        for quantity in quantities
        for method in methods
        if is_shown(method, workload, quantity)
    ]
    return [cell for cell in found if all(text in cell.label for text in only)]
