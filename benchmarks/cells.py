"""Which quantities are measured on which workloads, by which methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quantities import QUANTITIES
from benchmarks.sweep import draws

# Clipped means everywhere, stacks where other libraries aim at them, every quantity once: more would take too long.
MEASURED: dict[str, tuple[str, ...]] = {
    "tutorial TD(0), B=2": ("stack",),
    "tutorial TD(0), B=4096": ("stack",),
    "tutorial TD(0), B=65536": ("stack",),
    "TD(0) MLP 64, B=256": ("clipped_mean", "natural_gradient"),
    "TD(0) MLP 64, B=1024": ("clipped_mean",),
    "TD(0) MLP 256, B=256": QUANTITIES,
    "TD(0) MLP 256, B=1024": ("clipped_mean",),
    "REINFORCE MLP 64, 32x200": ("clipped_mean", "variance", "natural_gradient"),
    "REINFORCE MLP 256, 32x200": ("clipped_mean",),
    "GRU policy, 32x50": ("clipped_mean",),
    "DQN Nature CNN, B=32": ("clipped_mean", "norms", "natural_gradient"),
    "transformer tied, B=16": ("clipped_mean", "gram"),
    "transformer tied 32000, B=16": ("clipped_mean",),
    "LoRA transformer, B=16": ("clipped_mean", "stack"),
    "wide MLP 5120, B=32": ("clipped_mean", "stack"),
}
# Clipped means of models as transformers has them, by our methods alone.
LARGE = ("GPT-2 124M, T=128, B=4", "GPT-2 124M, T=512, B=2")
QUICK: dict[str, tuple[str, ...]] = {"TD(0) MLP 64, B=256": ("clipped_mean",)}
# The methods of the sweep: ours, and the libraries that users choose between.
OURS = ("persample eager", "persample traced", "persample compiled")
SWEEPING = (
    *OURS,
    "torch.func",
    "Opacus hooks",
    "Opacus ghost clipping",
    "Opacus fast gradient clipping",
    "BackPACK",
    "JAX jit(vmap(grad))",
)


@dataclass(frozen=True)
class Listed:
    """A method, as listed by the worker of its environment.

    Args:
        name: the name of the method.
        environment: the environment it runs in.
        shown_for: the quantities in whose tables it has a row.
        is_limit: whether it is a physical limit.
        shown_on: the prefixes of the names of workloads in whose tables it has a row.
    """

    name: str
    environment: str
    shown_for: Sequence[str]
    is_limit: bool = False
    shown_on: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell of the tables: a method, a workload and a quantity."""

    workload: str
    quantity: str
    method: Listed

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of its record."""
        return self.workload, self.quantity, self.method.name

    @property
    def label(self) -> str:
        """The label on the screen, which --only searches."""
        return ", ".join(self.key)


def is_shown(method: Any, workload: str, quantity: str) -> bool:
    """Return whether a method has a row for a quantity of a workload."""
    return quantity in method.shown_for and workload.startswith(method.shown_on)


def cells(methods: Iterable[Listed], *, quick: bool = False, only: Sequence[str] = ()) -> list[Cell]:
    """List the cells of a run by workload, restricted to labels that contain every text of ``only``."""
    found = [
        Cell(workload, quantity, method)
        for workload, quantities in (QUICK if quick else MEASURED).items()
        for quantity in quantities
        for method in methods
        if is_shown(method, workload, quantity)
    ]
    return _chosen(found, only)


def large(methods: Iterable[Listed], *, quick: bool = False, only: Sequence[str] = ()) -> list[Cell]:
    """List the cells of the large models, for our methods."""
    ours = [method for method in methods if method.name in OURS]
    return _chosen(
        [Cell(name, "clipped_mean", method) for name in (LARGE[:1] if quick else LARGE) for method in ours], only
    )


def swept(methods: Iterable[Listed], *, quick: bool = False, only: Sequence[str] = ()) -> list[Cell]:
    """List the cells of the sweep: clipped means of its workloads, two of them in a smoke run."""
    chosen = [method for method in methods if method.name in SWEEPING]
    names = draws.QUICK if quick else draws.DRAWS
    return _chosen([Cell(name, "clipped_mean", method) for name in names for method in chosen], only)


def _chosen(found: list[Cell], only: Sequence[str]) -> list[Cell]:
    return [cell for cell in found if all(text in cell.label for text in only)]
