"""The factors of layer parameters: a layer's gradient is Σ signal × input; the signals are gradients of its output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import pad

from persample._torch import version
from persample.engines.layers.convolutions import Geometry
from persample.engines.layers.shared import Part
from persample.factors import Conv, Dense, Embedding, Factor, Outer, choose_storage, sum_factors
from persample.factors.cost_model import Plan
from persample.factors.layout import Layout
from persample.factors.output_list import OutputList
from persample.utils.dtypes import as_real, autocast


class LayerParams(NamedTuple):
    """The parameters of one call of a layer.

    Args:
        weight: the weight's place among all parameters, or None: it is frozen.
        bias: the bias's place, or None.
        transposed: whether the layer multiplies with the weight's transpose ``[i, o]`` (``x @ w``).
    """

    weight: int | None
    bias: int | None
    transposed: bool = False


class LayerRecorder:
    """Records the inputs of layers, and makes factors of them and of the gradients of the layers' outputs.

    Signals below are ``[B·…, o]``, and ``[K, B·…, o]`` of losses with K outputs.

    Args:
        params: the parameters.
        size: B.
        plan: how gradients are stored.
    """

    def __init__(self, params: Sequence[Tensor], size: int, plan: Plan) -> None:
        self._params, self._size, self._plan = params, size, plan
        self.outputs: list[Tensor | GradientEdge] = []  # what autograd differentiates by
        self._uses: list[tuple[Callable[..., None], tuple[Any, ...], Tensor, int]] = []
        self._factors: dict[int, list[Factor]] = defaultdict(list)

    def record(self, use: Callable[..., None], settings: tuple[Any, ...], inputs: Tensor, output: Tensor) -> None:
        """Record the call of a layer.

        Args:
            use: adds the factors: ``add_products``, ``add_convolution`` or ``add_lookup`` of this class. No bound
                method: the graph is freed with the recorder.
            settings: what ``use`` is given before the inputs and the signals.
            inputs: the inputs of the layer.
            output: the output. A leaf stands for the gradient of an output that a kernel does not return.
        """
        # Not the output itself: the loss may write into it.
        self.outputs.append(output if output.is_leaf else get_gradient_edge(output))
        # Under autocast a product reads its inputs in the dtype of its output.
        read = inputs if inputs.dtype == output.dtype else autocast(inputs)
        self._uses.append((use, settings, read.detach(), version(read)))

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of the outputs, in the order of ``outputs``."""
        for (use, settings, inputs, written), grad in zip(self._uses, grads, strict=True):
            if grad is None:
                continue
            if version(inputs) != written:
                raise RuntimeError("the inputs of a layer have been modified by an inplace operation")
            use(self, *settings, inputs, as_real(grad))

    def add_part(self, part: Part, factor: Factor) -> bool:
        """Add the gradients of a part of a parameter, if they are sums of products; return whether they are."""
        if not isinstance(factor, Outer) or len(factor.shape) != 2 or not factor.layout.is_matrix:
            return False
        left, right = (
            x if x.shape[3] == count else pad(x, (first, count - first - x.shape[3]))
            for x, first, count in ((factor.left, part.row, part.rows), (factor.right, part.column, part.columns))
        )
        shape = tuple(self._params[part.of].shape)
        layout = Layout((), (part.rows,), (part.columns,), (0, 1), shape)
        self._factors[part.of].append(replace(factor, left=left, right=right, layout=layout))
        return True

    def add_factor(self, place: int, factor: Factor) -> None:
        """Add gradients of a parameter."""
        self._factors[place].append(factor)

    def add_written_out(self, place: int, grads: Tensor) -> None:
        """Add gradients ``[B, *shape]`` of a parameter, ``[B, K, *shape]`` of K outputs."""
        self._factors[place].append(Dense(as_real(grads)))

    def __contains__(self, place: int) -> bool:
        """Return whether the parameter at a place has gradients."""
        return place in self._factors

    def __bool__(self) -> bool:
        """Return whether any parameter has gradients."""
        return bool(self._factors)

    def factor(self, place: int, outputs: Sequence[int] = ()) -> Factor:
        """Return the gradients of a parameter, of shape ``[*outputs, *shape]``; zeros if nothing was added."""
        if place not in self._factors:
            param = self._params[place]
            return Dense.zeros(self._size, (*outputs, *param.shape), param.dtype, param.device)
        found = self._factors[place]
        total = found[0] if len(found) == 1 else sum_factors(found)
        return total if isinstance(total, Dense) else choose_storage(total, self._plan)

    def total(self, place: int) -> Factor:
        """Return the sum of what was added to the gradients of a parameter, as it was added."""
        return sum_factors(self._factors[place])

    def add_products(self, layer: LayerParams, inputs: Tensor, signals: Tensor) -> None:
        """Add the factors of a linear layer with inputs ``[B·…, i]`` and signals ``[B·…, o]``."""
        *outputs, _, width = signals.shape
        signals = signals.reshape(*outputs, self._size, -1, width)
        if outputs:
            signals = signals.movedim(0, 2)  # [B, T, K, o]
        if layer.weight is not None:
            param = self._params[layer.weight]
            left = signals.unsqueeze(1) if signals.ndim == 3 else signals.flatten(2).unsqueeze(1)
            right = inputs.reshape(self._size, 1, -1, inputs.shape[-1])
            layout = _layout(tuple(outputs), tuple(param.shape), transposed=layer.transposed)
            pair = (right, left) if layer.transposed else (left, right)
            self._factors[layer.weight].append(Outer(*pair, layout, param.dtype))
        if layer.bias is not None:
            grad = signals.squeeze(1) if signals.shape[1] == 1 else signals.sum(1)
            self._factors[layer.bias].append(Dense(grad.to(self._params[layer.bias].dtype)))

    def add_convolution(self, layer: LayerParams, geometry: Geometry, images: Tensor, signals: Tensor) -> None:
        """Add the factors of a convolution, whose images and signals are ``[B·N, channels, *sizes]``."""
        assert layer.weight is not None
        shape, outputs = tuple(self._params[layer.weight].shape), signals.shape[: signals.ndim - images.ndim]
        images, signals = (x.unflatten(x.ndim - images.ndim, (self._size, -1)) for x in (images, signals))
        if layer.bias is not None:
            grad = signals.flatten(len(outputs) + 3).sum((len(outputs) + 1, -1))
            self._factors[layer.bias].append(Dense(grad.transpose(0, 1) if outputs else grad))

        def kernel(signals: Tensor, shape: tuple[int, ...] = shape) -> Conv:
            left, right = (images, signals) if geometry.transposed else (signals, images)
            return Conv(left, right, shape, *geometry[:3], geometry.groups)

        if outputs and not geometry.transposed and geometry.groups == 1:  # the outputs share patches of the images
            factor: Factor = kernel(signals.movedim(0, 2).flatten(2, 3), (*outputs, *shape))
        else:
            factor = _of_each(kernel, signals) if outputs else kernel(signals)
        self._factors[layer.weight].append(factor)

    def add_lookup(self, place: int, padding: int | None, index: Tensor, signals: Tensor) -> None:
        """Add the factors of lookups of rows ``[B, …]`` in a table, whose row of padding has no gradient."""
        shape, outputs = tuple(self._params[place].shape), signals.shape[: signals.ndim - index.ndim - 1]
        if padding is not None:
            signals = signals.masked_fill((index == padding).unsqueeze(-1), 0)
        signals = signals.reshape(*outputs, self._size, -1, shape[1])
        rows = index.reshape(self._size, -1).long()

        def table(signals: Tensor) -> Embedding:
            return Embedding(signals, rows, shape)

        self._factors[place].append(_of_each(table, signals) if outputs else table(signals))


def _of_each(make: Callable[[Tensor], Factor], signals: Tensor) -> Factor:
    return OutputList(tuple(map(make, signals)))


def _layout(outputs: tuple[int, ...], shape: tuple[int, ...], *, transposed: bool) -> Layout:
    """Return the layout of the gradients ``[*outputs, *shape]`` of a matrix; the signals have the axis of outputs."""
    if not outputs:
        return Layout.of_matrix(*shape)
    if transposed:
        return Layout((), shape[:1], (*outputs, shape[1]), (1, 0, 2), (*outputs, *shape))
    return Layout((), (*outputs, shape[0]), shape[1:], (0, 1, 2), (*outputs, *shape))
