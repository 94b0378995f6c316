"""Inputs and output gradients of layers, recorded in a backward pass, and the factors that they are."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from persample.engines.layers.autograd import Callback
from persample.factors import Dense, Embedding, Factor, Outer, choose_storage, sum_factors
from persample.factors.layout import Layout
from persample.vmap_rules.functional import is_small


class LayerParams(NamedTuple):
    """The parameters of one call of a linear layer.

    Args:
        weight: the weight's place among all parameters, or None: it is frozen.
        bias: the bias's place, or None.
        transposed: whether the layer multiplies with the weight's transpose ``[i, o]`` (``x @ w``).
        of_vectors: whether the layer's input is one vector per sample.
    """

    weight: int | None
    bias: int | None
    transposed: bool
    of_vectors: bool


class LayerRecorder:
    """Records what the backward passes of layers report, and returns a factor per parameter.

    Args:
        params: the parameters.
        size: B.
        required_ops: the operations of ``Factor`` that the reductions call.
    """

    def __init__(self, params: Sequence[Tensor], size: int, required_ops: frozenset[str]) -> None:
        self._params, self._size, self._required_ops = params, size, required_ops
        self._num_calls: Counter[int | None] = Counter()  # of layers, by the place of their weight
        self._products: dict[int, list[Factor]] = defaultdict(list)
        self._bias_grads: dict[int, list[Tensor]] = defaultdict(list)

    def __bool__(self) -> bool:
        """Return whether any layer has reported."""
        return bool(self._products or self._bias_grads)

    def linear(self, params: LayerParams) -> Callback:
        """Register a call of a linear layer.

        Args:
            params: which parameters the layer has.

        Returns:
            The callback that its backward pass invokes with (output gradients, inputs), one row each per input vector.
        """
        self._num_calls[params.weight] += 1
        return functools.partial(self._record_linear, params)

    def embedding(self, place: int, padding: int | None) -> Callback:
        """Register a call of an embedding.

        Args:
            place: the table's place among the parameters.
            padding: the row of the table that has no gradient, or None.

        Returns:
            The callback that its backward pass invokes with (output gradients, indices).
        """
        self._num_calls[place] += 1
        return functools.partial(self._record_embedding, place, padding)

    def factor(self, place: int, rest: Tensor | None) -> Factor:
        """Return the gradients of a parameter.

        Args:
            place: the parameter's place.
            rest: the gradients of its copies, ``[B, *shape]``, or None: only layers use it.
        """
        param = self._params[place]
        dense = [*self._bias_grads.get(place, ()), *([] if rest is None else [rest])]
        terms = [*self._products.get(place, ()), *([Dense(functools.reduce(torch.add, dense))] if dense else [])]
        if not terms:
            return Dense.zeros(self._size, param.shape, param.dtype, param.device)
        return choose_storage(sum_factors(terms), self._required_ops)

    def _record_linear(self, params: LayerParams, signals: Tensor, rows: Tensor) -> None:
        if params.weight is not None:
            self._add(params.weight, self._product(params, signals, rows))
        if params.bias is not None:
            one_each = signals.shape[0] == self._size
            grad = signals if one_each else signals.view(self._size, -1, signals.shape[1]).sum(1)
            self._bias_grads[params.bias].append(grad)

    def _record_embedding(self, place: int, padding: int | None, signals: Tensor, index: Tensor) -> None:
        shape = self._params[place].shape
        if padding is not None:
            signals = signals.masked_fill((index == padding).unsqueeze(-1), 0)
        signals = signals.reshape(self._size, -1, shape[1])
        self._add(place, Embedding(signals, index.reshape(self._size, -1).long(), tuple(shape)))

    def _add(self, place: int, factor: Factor) -> None:
        # Materialize immediately, while the gradients are in cache, where no other call adds to them.
        only = self._num_calls[place] == 1
        self._products[place].append(choose_storage(factor, self._required_ops) if only else factor)

    def _product(self, params: LayerParams, signals: Tensor, rows: Tensor) -> Factor:
        param = self._params[params.weight]  # type: ignore[index]
        left, right = (rows, signals) if params.transposed else (signals, rows)
        if params.of_vectors and 1 in param.shape and is_small(self._size, param):
            return Dense(left.unsqueeze(2) * right.unsqueeze(1))  # a product with a number, as the vmap engine stores it
        left, right = (x.reshape(self._size, 1, -1, x.shape[1]) for x in (left, right))
        return Outer(left, right, Layout.of_matrix(*param.shape), param.dtype)
