"""Copies of small vectors, one per sample, and what a loss computes of copies alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample.utils.trees import TreeSpec, flatten, unflatten
from persample.vmap_rules import VmapRules
from persample.vmap_rules.batched import unwrapped


@dataclass
class _Result:
    value: Tensor  # alive, because a later object may have the id of one that is gone
    func: Callable[..., Any]
    leaves: list[Any]  # the arguments
    structure: TreeSpec
    number: int  # which of the function's results
    of_vectors: Tensor | None = None


class Copies:
    """Knows which tensors are copies, and how others were computed of them, so that vectors can stand for both.

    Attributes:
        known: the ids of copies and results.
    """

    def __init__(self) -> None:
        self.known: set[int] = set()
        self._places: dict[int, int] = {}
        self._results: dict[int, _Result] = {}
        self._alive: list[Tensor] = []

    def add(self, copy: Tensor, place: int) -> None:
        """Add the copies of the vector at a place."""
        self._places[id(copy)] = place
        self.known.add(id(copy))
        self._alive.append(copy)

    def place_of(self, x: Any) -> int | None:
        """Return the place of the vector that is copied, or None for any other value."""
        return self._places.get(id(x))

    def note(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Remember the results of a function if all tensors among its arguments are copies and results of copies."""
        leaves, structure = flatten((args, {}))
        given = {id(x) for x in leaves if isinstance(x, Tensor)}
        if not given <= self.known:
            return
        for number, x in enumerate(flatten(result)[0]):
            if isinstance(x, Tensor) and unwrapped(x).requires_grad and id(x) not in given:
                self._results[id(x)] = _Result(x, func, leaves, structure, number)
                self.known.add(id(x))

    def forget_results(self) -> None:
        """Forget all results: one of them, or a view of it, is written into."""
        self.known.difference_update(self._results)
        self._results.clear()

    def of_vectors(self, x: Tensor, vector_of: Callable[[Any], Any]) -> Tensor:
        """Return a result computed of the vectors, for all samples at once.

        Args:
            x: the result.
            vector_of: from an argument to what stands for it.
        """
        result = self._results[id(x)]
        if result.of_vectors is None:
            with torch.enable_grad():
                results = call(result.func, list(map(vector_of, result.leaves)), result.structure)
            result.of_vectors = flatten(results)[0][result.number]
        return result.of_vectors


def call(func: Callable[..., Any], leaves: list[Any], structure: TreeSpec) -> Any:
    """Call a function of tensors that all samples share, whose backward pass will be batched."""
    args, kwargs = unflatten(leaves, structure)
    with VmapRules(differentiated_by="any"):
        return func(*args, **kwargs)
