"""Results of copies: what a loss computes of small vectors alone, of each of which it is given one copy per sample."""

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


class ResultsOfCopies:
    """Remembers how results were computed, so that they can be computed once more, of the vectors themselves."""

    def __init__(self) -> None:
        self._known: dict[int, _Result] = {}

    def __contains__(self, x: Any) -> bool:
        """Return whether a value is a result of copies alone."""
        return id(x) in self._known

    def note(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Remember the results of a function of copies, or of such results."""
        leaves, structure = flatten((args, {}))
        given = set(map(id, leaves))
        for number, x in enumerate(flatten(result)[0]):
            if isinstance(x, Tensor) and unwrapped(x).requires_grad and id(x) not in given:
                self._known[id(x)] = _Result(x, func, leaves, structure, number)

    def forget(self) -> None:
        """Forget all results: one of them, or a view of it, is written into."""
        self._known.clear()

    def of_vectors(self, x: Tensor, vector_of: Callable[[Any], Any]) -> Tensor:
        """Return a result computed of the vectors, for all samples at once.

        Args:
            x: the result.
            vector_of: from an argument to what stands for it.
        """
        known = self._known[id(x)]
        if known.of_vectors is None:
            with torch.enable_grad():
                results = call(known.func, list(map(vector_of, known.leaves)), known.structure)
            known.of_vectors = flatten(results)[0][known.number]
        return known.of_vectors


def call(func: Callable[..., Any], leaves: list[Any], structure: TreeSpec) -> Any:
    """Call a function of tensors that all samples share, whose backward pass will be batched."""
    args, kwargs = unflatten(leaves, structure)
    with VmapRules(differentiated_by="any"):
        return func(*args, **kwargs)
