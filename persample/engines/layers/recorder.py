"""The factors of layer parameters, from the inputs and output gradients that the backward passes of layers report."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from persample.engines.deferred import Deferral, factor_of
from persample.engines.deferred.placeholder import Placeholder, values_of
from persample.engines.layers import recurrences
from persample.engines.layers.convolutions import Geometry
from persample.engines.layers.rows import Callback
from persample.factors import Conv, Dense, Embedding, Factor, Outer, choose_storage, sum_factors
from persample.factors.cost_model import Plan
from persample.factors.layout import Layout
from persample.vmap_rules.kernel_call import Product
from persample.vmap_rules.linear import is_small


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
    """Records the inputs and output gradients of layers, and returns a factor per parameter.

    Args:
        params: the parameters.
        size: B.
        plan: how gradients are stored.
    """

    def __init__(self, params: Sequence[Tensor], size: int, plan: Plan) -> None:
        self._params, self._size, self._plan = params, size, plan
        self._num_calls: Counter[int | None] = Counter()  # of layers, by the place of their weight
        self._products: dict[int, list[Factor]] = defaultdict(list)
        self._bias_grads: dict[int, list[Tensor]] = defaultdict(list)

    def __bool__(self) -> bool:
        """Return whether any layer has reported."""
        return bool(self._products or self._bias_grads)

    def linear(self, layer: LayerParams) -> Callback:
        """Register a linear layer; return the callback its backward pass invokes with (output gradients, inputs)."""
        self._num_calls[layer.weight] += 1
        return _computed(functools.partial(self._record_linear, layer))

    def embedding(self, place: int, padding: int | None) -> Callback:
        """Register a lookup in the table at a place; return the callback for (output gradients, indices)."""
        self._num_calls[place] += 1
        return _computed(functools.partial(self._record_lookup, place, padding))

    def convolution(self, weight: int, bias: int | None, geometry: Geometry) -> Callback:
        """Register a convolution; return the callback for (output gradients, images)."""
        self._num_calls[weight] += 1
        return _computed(functools.partial(self._record_convolution, weight, bias, geometry))

    def recurrence(self, weights: Sequence[int], biases: Sequence[int]) -> recurrences.Callback:
        """Register a recurrent layer; return the callback for the gradients of its biases and weights."""
        self._num_calls.update(weights)
        return _computed(functools.partial(self._record_recurrence, weights, biases))

    def record(self, places: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Add to the gradients of the parameters at some places what a backward pass under ``deferral`` returned."""
        for place, grad in zip(places, grads, strict=True):
            self._products[place].append(factor_of(grad, self._plan))

    def deferral(self) -> Deferral:
        """Return the context of a backward pass whose gradients are recorded."""
        return Deferral(self._plan, self._params)

    def __contains__(self, place: int) -> bool:
        """Return whether a layer has reported gradients of the parameter at a place."""
        return place in self._products or place in self._bias_grads

    def factor(self, place: int, rest: Tensor | None) -> Factor:
        """Return the gradients of a parameter; ``rest`` are those of its copies, ``[B, *shape]``, if there are any."""
        param = self._params[place]
        found = list(self._products.get(place, ()))
        if place in self._bias_grads:
            found.append(Dense(functools.reduce(torch.add, self._bias_grads[place])))
        found = [self._settled(x) for x in found]
        if rest is not None:
            found.append(factor_of(rest, self._plan))
        if not found:
            return Dense.zeros(self._size, param.shape, param.dtype, param.device)
        total = sum_factors(found)
        return total if isinstance(total, Dense) else choose_storage(total, self._plan)

    def _record_linear(self, layer: LayerParams, signals: Tensor, rows: Tensor) -> None:
        if layer.weight is not None:
            left, right = (rows, signals) if layer.transposed else (signals, rows)
            self._add(layer.weight, self._product(self._params[layer.weight], left, right, of_vectors=layer.of_vectors))
        if layer.bias is not None:
            one_each = signals.shape[0] == self._size
            grad = signals if one_each else signals.view(self._size, -1, signals.shape[1]).sum(1)
            self._bias_grads[layer.bias].append(grad)

    def _record_convolution(
        self, weight: int, bias: int | None, geometry: Geometry, signals: Tensor, images: Tensor
    ) -> None:
        pair = [x.view(self._size, -1, *x.shape[1:]) for x in (signals, images)]
        left, right = reversed(pair) if geometry.transposed else pair
        shape, places = tuple(self._params[weight].shape), geometry[:3]
        self._add(weight, Conv(left, right, shape, *places, geometry.groups))
        if bias is not None:
            self._bias_grads[bias].append(pair[0].flatten(3).sum((1, 3)))

    def _record_recurrence(
        self,
        weights: Sequence[int],
        biases: Sequence[int],
        of_biases: Sequence[Tensor],
        of_weights: Sequence[Product],
    ) -> None:
        for place, grad in zip(biases, of_biases, strict=True):
            self._bias_grads[place].append(grad)
        for place, (left, right) in zip(weights, of_weights, strict=True):
            self._add(place, self._product(self._params[place], left.flatten(0, 2), right.flatten(0, 2)))

    def _record_lookup(self, place: int, padding: int | None, signals: Tensor, index: Tensor) -> None:
        shape = self._params[place].shape
        if padding is not None:
            signals = signals.masked_fill((index == padding).unsqueeze(-1), 0)
        signals = signals.reshape(self._size, -1, shape[1])
        self._add(place, Embedding(signals, index.reshape(self._size, -1).long(), tuple(shape)))

    def _add(self, place: int, factor: Factor) -> None:
        # If no other call adds to the gradients, choose their storage now, while they are in cache.
        only = self._num_calls[place] == 1
        self._products[place].append(choose_storage(factor, self._plan) if only else factor)

    def _settled(self, factor: Factor) -> Factor:
        """Return a factor without placeholders: the backward pass defers products that a layer writes out, too."""
        if isinstance(factor, Dense) and isinstance(factor.values, Placeholder):
            return factor_of(factor.values, self._plan)
        return factor

    def _product(self, param: Tensor, left: Tensor, right: Tensor, *, of_vectors: bool = False) -> Factor:
        if of_vectors and 1 in param.shape and is_small(self._size, param):
            return Dense(left.unsqueeze(2) * right.unsqueeze(1))  # a product with a number, as vmap(vjp) stores it
        left, right = (x.reshape(self._size, 1, -1, x.shape[1]) for x in (left, right))
        return Outer(left, right, Layout.of_matrix(*param.shape), param.dtype)


def _computed(record: Callable[..., None]) -> Callable[..., None]:
    """Return a callback that computes what the backward pass around it has deferred."""
    return lambda *reported: record(*values_of(reported, "a layer"))
