"""Workloads and references as .npz files, which environments without torch can read. NumPy only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# The name of a reference that is one array.
_ONE = "result"


@dataclass(frozen=True)
class Saved:
    """A workload as arrays.

    Args:
        name: the name of the workload.
        kind: the model and loss to rebuild.
        sizes: the sizes of the model and the batch.
        params: the differentiated parameters, by torch's names.
        frozen: the constant parameters (a target network, LoRA's bases), by torch's names.
        batch: arrays with a leading batch axis.
    """

    name: str
    kind: str
    sizes: dict[str, Any]
    params: dict[str, np.ndarray]
    frozen: dict[str, np.ndarray]
    batch: tuple[np.ndarray, ...]


def save(saved: Saved, path: str | Path) -> None:
    """Write the file: arrays named params/…, frozen/… and batch/0, batch/1, …; the rest as JSON text."""
    about = json.dumps({"name": saved.name, "kind": saved.kind, "sizes": saved.sizes})
    arrays = {
        **{f"params/{name}": value for name, value in saved.params.items()},
        **{f"frozen/{name}": value for name, value in saved.frozen.items()},
        **{f"batch/{i}": value for i, value in enumerate(saved.batch)},
    }
    np.savez(path, about=np.array(about), **arrays)  # type: ignore[arg-type]


def load(path: str | Path) -> Saved:
    """Read the file."""
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(str(arrays.pop("about")))
    batch = _under("batch/", arrays)
    ordered = tuple(batch[str(i)] for i in range(len(batch)))
    return Saved(**about, params=_under("params/", arrays), frozen=_under("frozen/", arrays), batch=ordered)


def equal(one: Saved, other: Saved) -> bool:
    """Return whether two workloads have equal parameters and batches."""
    if one.params.keys() != other.params.keys() or len(one.batch) != len(other.batch):
        return False
    pairs = [(one.params[name], other.params[name]) for name in one.params]
    return all(np.array_equal(a, b) for a, b in [*pairs, *zip(one.batch, other.batch, strict=True)])


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def save_truth(truth: Mapping[str, np.ndarray] | np.ndarray, path: str | Path) -> None:
    """Write the reference of a quantity."""
    arrays = truth if isinstance(truth, Mapping) else {_ONE: truth}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_truth(path: str | Path) -> dict[str, np.ndarray] | np.ndarray:
    """Read the reference of a quantity."""
    with np.load(path) as file:
        truth = dict(file)
    return truth[_ONE] if truth.keys() == {_ONE} else truth
