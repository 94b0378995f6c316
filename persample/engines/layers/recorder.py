"""The factors of parameters: a layer's gradient is Σ signal × input; the signals are gradients of its output.

What the loss computes of parameters alone (scaled, masked, merged or normalized weights, penalties) is a parameter of
the rest of the loss. Where it is a sum of products with numbers and matrices (``W / 2``, ``W + B A``), the gradients of
the parameters are sums of products again, of signals or inputs times those. Others are written out, one per sample, and
pass through the graph of the computation in one batched backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.nn.functional import pad

from persample._torch import node_outputs, saved_by, top_saved_tensors_hooks, version
from persample.engines.layers.shared import NotLayersError, Part, SharedParams
from persample.factors import Conv, Dense, Embedding, Factor, Op, Outer, SumFactor, sum_factors
from persample.factors.cost_model import Plan
from persample.utils.numerics import as_real, autocast
from persample.utils.trees import Tree

MODIFIED = "the inputs of a layer have been modified by an inplace operation"
_MOST = 32  # nodes of a graph, which are passed once for each path


class SavesByHooksError(Exception):
    """Raised if hooks save tensors for the backward pass, as those of ``torch.utils.checkpoint``."""


class LayerParams(NamedTuple):
    """The places of a layer's weight (None: frozen) and bias; ``transposed`` of a weight ``[i, o]`` (``x @ w``)."""

    weight: int | None
    bias: int | None
    transposed: bool = False


Sizes: TypeAlias = int | Sequence[int]


class Geometry(NamedTuple):
    """How a kernel is moved over images, one number per spatial axis: the settings of ``aten.convolution``."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def geometry_of(
    kernel: Tensor, stride: Sizes = 1, padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1
) -> Geometry | None:
    """Return the geometry of ``F.conv2d`` and its like, or None if the two sides are padded unequally."""
    sizes = kernel.shape[2:]
    strides, dilations = (_per_axis(x, len(sizes)) for x in (stride, dilation))
    if isinstance(padding, str):
        total = [apart * (size - 1) * (padding == "same") for apart, size in zip(dilations, sizes, strict=True)]
        if any(x % 2 for x in total):
            return None
        padding = [x // 2 for x in total]
    return Geometry(strides, _per_axis(padding, len(sizes)), dilations, False, (0,) * len(sizes), groups)


def transposed_geometry_of(
    kernel: Tensor,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Geometry | None:
    """Return the geometry of ``F.conv_transpose2d`` and its like.

    None if the output is padded by a whole stride: a convolution of the output would be larger than the images.
    """
    settings = (_per_axis(x, kernel.ndim - 2) for x in (stride, padding, dilation, output_padding))
    stride, padding, dilation, output_padding = settings
    fits = all(pad < step for pad, step in zip(output_padding, stride, strict=True))
    return Geometry(stride, padding, dilation, True, output_padding, groups) if fits else None


def _per_axis(x: Sizes, axes: int) -> tuple[int, ...]:
    values = tuple(map(int, x if isinstance(x, list | tuple) else (x,)))  # numbers of NumPy, too
    return values * axes if len(values) == 1 else values


class LayerRecorder:
    """Records the inputs of layers, and makes factors of them and of the gradients of the layers' outputs.

    Signals below are ``[B·…, o]``, and ``[K, B·…, o]`` of losses with K outputs.
    """

    def __init__(self, params: SharedParams, plan: Plan) -> None:
        self.params, self._plan = params, plan
        self._keeps_terms = not {Op.term_norms, Op.kronecker}.isdisjoint(plan.required_ops)
        self.sizes: tuple[int, ...] = ()  # of the losses: (B,), or (B, K) of K outputs
        self.outputs: list[Tensor | GradientEdge] = []  # what autograd differentiates by
        self._uses: list[tuple[Callable[..., None], tuple[object, ...], Tensor, int]] = []
        self._factors: dict[int, list[Factor]] = defaultdict(list)

    def record(self, use: Callable[..., None], settings: tuple[object, ...], inputs: Tensor, output: Tensor) -> None:
        """Record the call of a layer.

        Args:
            use: adds the factors: ``add_products``, ``add_convolution`` or ``add_lookup`` of this class. No bound
                method: the graph is freed with the recorder.
            settings: the arguments of ``use`` before the inputs and the signals.
            inputs: the inputs of the layer.
            output: the output. A leaf stands for an output that a kernel does not return.

        Raises:
            SavesByHooksError: if the caller's hooks save tensors, and perhaps compute them again.
        """
        if top_saved_tensors_hooks() is not None:
            raise SavesByHooksError
        # Not the output itself: the loss may write into it.
        self.outputs.append(output if output.is_leaf else get_gradient_edge(output))
        # Under autocast a product reads its inputs in the dtype of its output.
        read = inputs if inputs.dtype == output.dtype else autocast(inputs)
        self._uses.append((use, settings, read.detach(), version(read)))

    def add(self, grads: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        """Add the gradients of ``outputs``, copies and parameters, in this order, for losses of some sizes."""
        self.sizes = tuple(sizes)
        copies = slice(len(self.outputs), len(self.outputs) + len(self.params.expanded))
        # Layers pass no gradient to their parameters, so a gradient here comes from a use that the guard did not see.
        if others := [place for place, grad in enumerate(grads[copies.stop :]) if grad is not None]:
            raise NotLayersError("a parameter of a layer has another use", *others)
        if not any(map(torch.is_tensor, grads)):
            raise NotLayersError("no parameter has a gradient")
        for (use, settings, inputs, written), grad in zip(self._uses, grads, strict=False):
            if grad is None:
                continue
            if version(inputs) != written:
                raise RuntimeError(MODIFIED)
            use(self, *settings, inputs, as_real(grad))
        for place, grad in zip(self.params.expanded, grads[copies], strict=True):
            if grad is not None:
                self.add_written_out(place, grad if len(sizes) == 1 else grad.transpose(0, 1))
        if self.params.computed:
            self._pull_back()

    def _add_part(self, part: Part, factor: Factor) -> bool:
        """Add the gradients of a part of a parameter, if they are sums of products; return whether they are."""
        if not isinstance(factor, Outer) or len(factor.param_shape) != 2 or not factor.has_rows:
            return False
        left, right = (
            x if x.shape[-1] == count else pad(x, (first, count - first - x.shape[-1]))
            for x, first, count in ((factor.left, part.row, part.rows), (factor.right, part.column, part.columns))
        )
        shape = tuple(self.params.plain[part.of].shape)
        self._factors[part.of].append(replace(factor, left=left, right=right, param_shape=shape))
        return True

    def add_written_out(self, place: int, grads: Tensor) -> None:
        """Add gradients ``[B, *shape]`` of a parameter, ``[B, K, *shape]`` of K outputs."""
        self._factors[place].append(Dense(as_real(grads), outputs=self.sizes[1:]))

    def factor(self, place: int) -> Factor:
        """Return the gradients of a parameter; zeros if nothing was added."""
        if place not in self._factors:
            return Dense.zeros(self.sizes, self.params.plain[place])
        found = self._factors[place]
        total = found[0] if len(found) == 1 else sum_factors(found)
        if isinstance(total, Dense) or not total.reason_to_write_out(self._plan):
            return total
        return Dense(total.materialize(), outputs=total.outputs)

    def term_norms(self) -> tuple[Tensor, ...]:
        """Return the norms of each parameter's terms, ``[B, T]``, use after use."""
        found = [
            SumFactor(tuple(self._factors[place])).term_norms()
            if place in self._factors
            else x.new_zeros(*self.sizes, 0)
            for place, x in enumerate(self.params.plain)
        ]
        if others := [place for place, norms in enumerate(found) if norms is None]:
            raise NotLayersError("their gradients are no sums of terms", *others)
        return tuple(norms for norms in found if norms is not None)

    def add_products(self, layer: LayerParams, inputs: Tensor, signals: Tensor) -> None:
        """Add the factors of a linear layer with inputs ``[B·…, i]`` and signals ``[B·…, o]``."""
        signals = self._signals(signals)  # [B, T, o]
        if layer.weight is not None:
            param = self.params.plain[layer.weight]
            left, right = signals.unsqueeze(-3), self._shared(inputs).unsqueeze(-3)
            pair = (right, left) if layer.transposed else (left, right)
            factor = Outer(*pair, tuple(param.shape), param.dtype, outputs=self.sizes[1:])
            self._factors[layer.weight].append(factor)
        if layer.bias is not None and self._keeps_terms:
            self._add_terms_of_bias(layer.bias, signals)
        elif layer.bias is not None:
            grad = signals.squeeze(-2) if signals.shape[-2] == 1 else signals.sum(-2)
            bias = Dense(grad.to(self.params.plain[layer.bias].dtype), outputs=self.sizes[1:])
            self._factors[layer.bias].append(bias)

    def add_convolution(self, layer: LayerParams, geometry: Geometry, images: Tensor, signals: Tensor) -> None:
        """Add the factors of a convolution, whose images and signals are ``[B·N, channels, *sizes]``."""
        assert layer.weight is not None
        images, signals = self._shared(images), self._signals(signals)  # [B, N, channels, *sizes]
        axis = len(self.sizes)
        if layer.bias is not None and self._keeps_terms:
            self._add_terms_of_bias(layer.bias, signals.flatten(axis + 2).mT.flatten(axis, axis + 1))
        elif layer.bias is not None:
            self.add_written_out(layer.bias, signals.flatten(axis + 2).sum((axis, -1)))
        pair = (images, signals) if geometry.transposed else (signals, images)
        shape = tuple(self.params.plain[layer.weight].shape)
        factor = Conv(*pair, shape, *geometry[:3], geometry.groups, outputs=self.sizes[1:])
        self._factors[layer.weight].append(factor)

    def _add_terms_of_bias(self, place: int, signals: Tensor) -> None:
        """Add signals ``[B, T, o]`` as the terms of the gradient of a bias, products of signals and ones."""
        param, left = self.params.plain[place], signals.unsqueeze(-3)
        ones = left.new_ones(self.sizes[0], *[1] * (left.ndim - 3), left.shape[-2], 1)
        self._factors[place].append(Outer(left, ones, tuple(param.shape), param.dtype, outputs=self.sizes[1:]))

    def add_lookup(self, place: int, padding: int | None, index: Tensor, signals: Tensor) -> None:
        """Add the factors of lookups of rows ``[B, …]`` in a table, whose row of padding has no gradient."""
        shape, rows = tuple(self.params.plain[place].shape), index.reshape(self.sizes[0], -1).long()
        if padding is not None:
            signals = signals.masked_fill((index == padding).unsqueeze(-1), 0)
        signals = self._signals(signals.flatten(len(self.sizes) - 1, -2))
        factor = Embedding(signals, self._shared(rows.flatten()), shape, outputs=self.sizes[1:])
        self._factors[place].append(factor)

    def _signals(self, x: Tensor) -> Tensor:
        """Return ``[B·n, …]`` as ``[B, n, …]``; of K outputs ``[K, B·n, …]`` as ``[B, K, n, …]``."""
        if len(self.sizes) == 1:
            return x.reshape(*self.sizes, -1, *x.shape[1:])
        # In memory ``[B, n, K, …]``: sums over samples take K and the next axis as one.
        return x.unflatten(1, (self.sizes[0], -1)).movedim(0, 2).contiguous().transpose(1, 2)

    def _shared(self, x: Tensor) -> Tensor:
        """Return ``[B·n, …]`` as ``[B, n, …]``; of K outputs as ``[B, 1, n, …]``."""
        x = x.reshape(self.sizes[0], -1, *x.shape[1:])
        return x if len(self.sizes) == 1 else x.unsqueeze(1)

    def _pull_back(self) -> None:
        """Add the gradients of computed parameters to those of the parameters that they were computed of."""
        found, params = dict[int, Factor](), self.params
        for place in [place for place in params.computed if place in self._factors]:
            total = sum_factors(self._factors[place])
            if place in params.parts and self._add_part(params.parts[place], total):
                continue  # of a sliced, split or reshaped parameter: products stay
            products = _products(params.computed[place].grad_fn, total)
            if products is None:
                found[place] = total
            for variable, factor in products or ():
                self._factors[next(k for k, x in enumerate(params.plain) if x is variable)].append(factor)
        if found:
            self._write_out(found)

    def _write_out(self, found: dict[int, Factor]) -> None:
        params = self.params
        values, given = [params.computed[place] for place in found], params.plain[: len(params.given)]
        signals = [factor.materialize() for factor in found.values()]
        used: list[int] = []

        def of_one(*signals: Tensor) -> list[Tensor]:
            with torch.no_grad():
                grads = torch.autograd.grad(values, given, signals, allow_unused=True)
            used[:] = [place for place, grad in enumerate(grads) if grad is not None]
            return [grads[place] for place in used]

        grads = vmap(of_one if len(self.sizes) == 1 else vmap(of_one))(*signals)
        for place, grad in zip(used, grads, strict=True):
            self.add_written_out(place, grad)


def _products(node: Tree, factor: Factor) -> list[tuple[Tensor, Outer]] | None:
    """Return the gradients of the leaves of a graph, or None where they are no sums of products."""
    if not isinstance(factor, Outer) or len(factor.param_shape) != 2 or not factor.has_rows:
        return None
    found: list[tuple[Tensor, Outer]] = []
    stack = [(node, factor)]
    for _ in range(_MOST):
        if not stack:
            return found
        node, factor = stack.pop()
        if hasattr(node, "variable"):
            found.append((node.variable, factor))
        elif node.name() not in _LINEAR:
            return None
        else:
            steps = _LINEAR[node.name()](saved_by(node))
            for (parent, place), step in zip(node.next_functions, steps, strict=False):
                if parent is not None:
                    pulled = None if step is None else step(factor)
                    output = node_outputs(parent)[place]
                    if pulled is None or (pulled.param_shape, pulled.dtype) != (tuple(output.shape), output.dtype):
                        return None  # or broadcast, or of another dtype
                    stack.append((parent, pulled))
    return None


_Step = Callable[[Outer], Outer]


def _times(number: Tensor | complex, *, divided: bool = False) -> _Step | None:
    if isinstance(number, Tensor) and number.ndim:
        return None
    return lambda x: replace(x, left=x.left / number if divided else x.left * number)


def _of_product(left: Tensor, right: Tensor) -> Sequence[_Step]:
    return (
        lambda x: replace(x, right=x.right @ right.mT, param_shape=(x.param_shape[0], len(right))),
        lambda x: replace(x, left=x.left @ left, param_shape=(left.shape[1], x.param_shape[1])),
    )


# From what a node of a graph has saved to what the gradient of each of its arguments is, of the gradient of its result.
_LINEAR: dict[str, Callable[[Callable[[str], Tree]], Sequence[_Step | None]]] = {
    "AddBackward0": lambda saved: (lambda x: x, _times(saved("alpha"))),
    "SubBackward0": lambda saved: (lambda x: x, _times(-saved("alpha"))),
    "NegBackward0": lambda _saved: (_times(-1),),
    "MulBackward0": lambda saved: (_times(saved("other")), _times(saved("self"))),
    "DivBackward0": lambda saved: (_times(saved("other"), divided=True), None),
    "MmBackward0": lambda saved: _of_product(saved("self"), saved("mat2")),
}
