"""The gradients of parameters, from what layers hand over in a backward pass."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from persample.engines.layers.interceptor import LayerParams
from persample.factors import Dense, Embedding, Factor, Outer, choose_storage, sum_factors
from persample.factors.layout import Layout
from persample.vmap_rules.linear import is_small


class LayerFactors:
    """Signals and inputs of linear layers and embeddings, and the gradients that they make up.

    What will be written out is so at once, while the signals are in the caches; and where there are several of them per
    sample, their memory is free for those of the next layer.

    Args:
        params: the parameters.
        size: B.
        uses: the operations of ``Factor`` that the reductions call.
    """

    def __init__(self, params: Sequence[Tensor], size: int, uses: frozenset[str]) -> None:
        self._params, self._size, self._uses = params, size, uses
        self._layers: Counter[int | None] = Counter()  # by the places of their matrices, as all that follows
        self._products: dict[int, list[Factor]] = defaultdict(list)
        self._sums: dict[int, list[Tensor]] = defaultdict(list)

    def layer(self, use: LayerParams) -> Callable[[Tensor, Tensor], None]:
        """Expect what a layer hands over.

        Args:
            use: which parameters it uses.

        Returns:
            What takes the signals (the gradients of its outputs, a row for each input) and the inputs, those of a
            sample one below the other.
        """
        self._layers[use.weight] += 1
        return functools.partial(self._take, use)

    def table(self, place: int, padding: int | None) -> Callable[[Tensor, Tensor], None]:
        """Expect what lookups in a table hand over.

        Args:
            place: of the table among the parameters.
            padding: the row that has no gradient, if one has none.

        Returns:
            What takes the signals (the gradients of the rows that were looked up) and the rows' indices.
        """
        self._layers[place] += 1
        return functools.partial(self._take_rows, place, padding)

    def _take_rows(self, place: int, padding: int | None, signals: Tensor, index: Tensor) -> None:
        shape = self._params[place].shape
        if padding is not None:
            signals = signals.masked_fill((index == padding).unsqueeze(-1), 0)
        signals = signals.reshape(self._size, -1, shape[1])
        self._keep(place, Embedding(signals, index.reshape(self._size, -1).long(), tuple(shape)))

    def _keep(self, place: int, factor: Factor) -> None:
        self._products[place].append(choose_storage(factor, self._uses) if self._layers[place] == 1 else factor)

    def _take(self, use: LayerParams, signals: Tensor, rows: Tensor) -> None:
        if use.weight is not None:
            self._keep(use.weight, self._product(use.weight, signals, rows, of_vectors=use.of_vectors))
        if use.bias is not None:
            split = signals if signals.shape[0] == self._size else signals.view(self._size, -1, signals.shape[1]).sum(1)
            self._sums[use.bias].append(split)

    def __bool__(self) -> bool:
        """Return whether any layer handed anything over."""
        return bool(self._products or self._sums)

    def matrix(self, place: int) -> Factor:
        """Return the gradients of a matrix, which only layers use.

        Args:
            place: of the matrix among the parameters.
        """
        products = self._products.get(place)
        return choose_storage(sum_factors(products), self._uses) if products else self._zeros(place)

    def other(self, place: int, rest: Tensor | None) -> Dense:
        """Return the gradients of any other parameter.

        Args:
            place: of the parameter among all.
            rest: what it is used for elsewhere leaves, ``[B, *shape]``, or nothing.
        """
        parts = [*self._sums.get(place, ()), *([] if rest is None else [rest])]
        return Dense(functools.reduce(torch.add, parts)) if parts else self._zeros(place)

    def _product(self, place: int, signals: Tensor, rows: Tensor, *, of_vectors: bool) -> Factor:
        param = self._params[place]
        if of_vectors and 1 in param.shape and is_small(self._size, param):
            return Dense(signals.unsqueeze(2) * rows.unsqueeze(1))  # by a number: as the long way has it
        left, right = (x.reshape(self._size, 1, -1, x.shape[1]) for x in (signals, rows))
        return Outer(left, right, Layout.of_matrix(*param.shape), param.dtype)

    def _zeros(self, place: int) -> Dense:
        param = self._params[place]
        return Dense.zeros(self._size, param.shape, param.dtype, param.device)
