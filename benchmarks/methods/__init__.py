"""The methods, one file per library; only the files of one environment are ever imported together."""

from __future__ import annotations

import importlib

from benchmarks.methods.method import Method

# Environment → the files whose METHODS it can run, in the order of the tables.
FILES: dict[str, tuple[str, ...]] = {
    "torch": ("unit", "loop", "torch_func", "ours", "expanded_weights", "limits"),
    "torch-peers": ("opacus_", "backpack_", "torchjd_"),
    "jax": ("jax_", "jax_privacy_"),
    "mindspore": ("mindspore_",),
}


def load(environment: str) -> dict[str, Method]:
    """Import the methods of one environment, by name."""
    return methods_of(*FILES[environment])


def methods_of(*names: str) -> dict[str, Method]:
    """Import the methods of some files, by name."""
    files = [importlib.import_module(f"benchmarks.methods.{name}") for name in names]
    return {method.name: method for file in files for method in file.METHODS}
