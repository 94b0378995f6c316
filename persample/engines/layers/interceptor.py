"""The functions that a loss calls with shared parameters: layers, any of parameters alone, and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import add_batch_dim, get_dynamic_layer_stack_depth, temporarily_clear_interpreter_stack
from persample.engines.layers.recorder import (
    Geometry,
    LayerParams,
    LayerRecorder,
    geometry_of,
    transposed_geometry_of,
)
from persample.engines.layers.shared import NotLayersError, SharedParams, Vmap
from persample.utils.numerics import autocast, full_precision, is_autocast, settled
from persample.utils.tracing import is_wrapped, unwrapped
from persample.utils.trees import Leaf, Tree, flatten, unflatten
from persample.vmap_rules import VmapRules
from persample.vmap_rules.effects import getters
from persample.vmap_rules.indexing import embedding_bag
from persample.vmap_rules.levels import batched, call_kernel, samples_first
from persample.vmap_rules.products import linear, linear_einsum
from persample.vmap_rules.recurrent import recurrent_rule, scan_kernel, scan_signals, unrolled
from persample.vmap_rules.recurrent_steps import Cell

# Functions are given copies of matrices of up to so many elements for all samples, or as many as another argument has:
# more work than products with one matrix, and less than that of the transforms of ``vmap(vjp)``.
_FEW = 2**20


class LayerInterceptor:
    """Computes layers once, on the rows of all samples, and has a recorder keep their inputs and outputs."""

    def __init__(self, params: SharedParams, vmap: Vmap, recorder: LayerRecorder) -> None:
        self.params, self.vmap, self._recorder = params, vmap, recorder
        self.is_laid_out = True  # whether results have the strides of one sample: views and copies are the same then

    def call(self, func: Callable[..., Tree], args: Sequence[Leaf], kwargs: Mapping[str, Leaf]) -> Tree:
        """Call a function with shared parameters among its arguments, or raise ``NotLayersError``."""
        try:
            layer = _LAYERS.get(func) or (None if kwargs else _OPERATORS.get(func))
            if layer is not None:
                return layer(self, *args, **kwargs)
            if func in _READS:
                return func(*args, **kwargs)
            if func in _CONVOLUTIONS:
                return self.convolution(func, *args, **kwargs)
            rule = recurrent_rule(func, self.recurrence, lambda x, *weights: self.linear(self._one_each(x), *weights))
            if rule is not None:
                return rule(*args, **kwargs)
        except NotLayersError:
            pass  # perhaps a function that is given copies
        if get_dynamic_layer_stack_depth() != self.vmap.level:
            raise NotLayersError("the loss calls a function of parameters inside of a transform")
        try:
            return self._other(func, args, kwargs)
        except RuntimeError as error:  # perhaps of this way alone: the loss must not go on with it
            raise NotLayersError(str(error)) from error

    def _other(self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Call a function that is no layer."""
        if func in WITHIN_A_DERIVATIVE:
            raise NotLayersError("the loss calls a function that torch batches within a derivative alone")
        leaves, structure = flatten((args, kwargs))
        if all(self.params.place_of(x) is not None for x in leaves if self._is_other(x)):
            return self.params.compute(func, leaves, structure)
        args, kwargs = unflatten(self._with_copies(func, leaves), structure)
        with VmapRules(differentiated_by="autograd"):
            return func(*args, **kwargs)

    def _is_other(self, x: object) -> bool:
        """Return whether a value is a tensor with one value per sample, copies of vectors among them."""
        return isinstance(x, Tensor) and self.params.get(x) is None and (x.requires_grad or is_wrapped(x))

    def _with_copies(self, func: object, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Return the arguments of a function with copies in place of parameters, or raise ``NotLayersError``."""
        largest = max(unwrapped(x).numel() for x in leaves if self._is_other(x))

        def copied(x: Leaf) -> object:
            param = self.params.get(x)
            if param is None:
                return x
            elements = self.vmap.size * param.tensor.numel()
            if elements <= max(largest, _FEW) and func not in _UNLIKE_COPIES:
                return self.params.copy(param)
            reason = "the loss computes something of a large parameter and a sample that is no layer"
            raise NotLayersError(reason, param.place)

        return list(map(copied, leaves))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Compute ``F.linear``, whose weight and bias may be parameters or not."""
        param, bias_place = self.params.shared.get(id(weight)), self.params.places.get(id(bias))
        plain_bias = bias if bias_place is None else self.params.values[bias_place]
        # Other tensors that require gradients were computed from parameters, or belong to the caller.
        known = isinstance(weight, Tensor) and (param is not None or not weight.requires_grad)
        known &= bias_place is not None or bias is None or (isinstance(bias, Tensor) and not bias.requires_grad)
        if known and (found := self.vmap.rows(input)) is not None and _fits(input, weight, plain_bias):
            place, transposed = (None, False) if param is None else param[1:]
            layer = LayerParams(place, bias_place, transposed)
            record = partial(self._recorder.record, LayerRecorder.add_products, (layer,))
            compute = partial(F.linear, weight=weight.detach(), bias=plain_bias)
            return self._of_rows(found, 2, compute, None if place is bias_place is None else record)
        if (
            param is not None
            and isinstance(bias, Tensor)
            and bias.shape == weight.shape[:1]
            and bias.dtype == weight.dtype
        ):
            return (out := self.linear(input, weight)) + bias.to(out.dtype)  # computed, perhaps for each sample
        if self.params.are_among((input, weight, bias)):
            raise NotLayersError("the loss calls F.linear with inputs that are not one per sample")
        return linear(input, weight, bias)

    def convolution(
        self,
        func: Callable[..., Tensor],
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        *settings: object,
        **named: object,
    ) -> Tensor:
        """Compute ``F.conv2d``, ``F.conv_transpose2d`` and their like, whose kernel is a parameter."""
        place, bias_place = self._parameter(weight), self.params.place_of(bias)
        plain_bias = bias if bias_place is None else self.params.values[bias_place]
        is_frozen = isinstance(bias, Tensor) and not (bias.requires_grad or is_wrapped(bias))
        is_layer = bias is None or bias_place is not None or is_frozen
        is_layer = is_layer and input.numel() > 0 and weight.ndim - input.ndim in {0, 1}
        is_layer = is_layer and (input.dtype == weight.dtype or is_autocast(input.device))
        if not is_layer or (found := self.vmap.rows(input)) is None:
            raise NotLayersError("the loss calls a convolution that has other biases or images than layers")
        geometry = _CONVOLUTIONS[func](weight, *settings, **named)
        if geometry is None:
            raise NotLayersError("the loss calls a convolution that pads one side of its images or output alone")

        def compute(images: Tensor) -> Tensor:  # by the function that the loss calls, which refuses what torch refuses
            return func(images, weight.detach(), plain_bias, *settings, **named)

        layer = LayerParams(place, bias_place), geometry
        record = partial(self._recorder.record, LayerRecorder.add_convolution, layer)
        return self._of_rows(found, weight.ndim, compute, record)

    @staticmethod
    def _of_rows(
        found: tuple[Tensor, Sequence[int]],
        axes: int,
        compute: Callable[[Tensor], Tensor],
        record: Callable[[Tensor, Tensor], None] | None,
    ) -> Tensor:
        """Call a layer on rows with ``axes`` axes: all before these are taken as one of samples."""
        rows, levels = found
        rows = rows if type(rows) is Tensor else settled(rows)
        lead = rows.shape[: rows.ndim - axes + 1]
        with temporarily_clear_interpreter_stack():
            flat = rows.flatten(0, len(lead) - 1) if len(lead) > 1 else rows
            record = record if torch.is_grad_enabled() else None
            if record is not None and not flat.requires_grad:
                flat = flat.detach().requires_grad_()  # so that the output has a gradient
            out = compute(flat)
            out = out if type(out) is Tensor else settled(out)
            if record is not None:
                record(flat, out)
            out = out.view(*lead, *out.shape[1:]) if len(lead) > 1 else out
        return batched(out, levels)

    def recurrence(
        self, cell: Cell, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Compute one recurrent layer of parameters."""
        *initial, x = (self._one_each(y) for y in (*initial, x))
        if len(weights) % 2:  # with a projection, whose steps are not elementwise
            return unrolled(cell, x, initial, weights, linear=self.linear)
        places = list(map(self._parameter, weights))
        if not x.numel() or not (is_autocast(x.device) or x.dtype == weights[0].dtype):
            raise NotLayersError("the loss calls a recurrent layer with inputs of another dtype, or without elements")
        *state, x = map(autocast, (*initial, x))
        (rows,), levels = samples_first((x,), 0)
        w_ih, w_hh, *biases = (autocast(self.params.values[place]) for place in places)
        # A kernel returns no signals of its gates, so that they are the gradients of tensors that it does not read.
        with temporarily_clear_interpreter_stack():
            recorded, shape = torch.is_grad_enabled(), rows.shape[:-1]
            gates = [w.new_zeros(()).expand(shape.numel(), len(w)).requires_grad_(recorded) for w in (w_ih, w_hh)]
            of_steps = [gate.view(*shape, -1) for gate in gates]
        states: list[Tensor] = []

        def kernel(_at_inputs: Tensor, _at_state: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            results = scan_kernel(cell, len(state), *tensors)
            states.append(results[len(state)])  # before each step
            return results

        def gradients(needed: Sequence[bool], *saved: Tensor) -> tuple[Tensor | None, ...]:
            grads, (_, w_ih, w_hh, *kept) = saved[: len(state)], saved[len(state) :]
            of_state, of_x, signals = scan_signals(cell, grads, w_ih, w_hh, kept, needs_x=needed[-3])
            return *signals, *of_state, *[None] * len(biases), of_x, None, None  # layers give weights no gradient

        unneeded = [*(batched(gate, levels) for gate in of_steps), *state, *biases]
        given = *unneeded, x, w_ih, w_hh
        with full_precision(x.device):
            out, *others = call_kernel(
                kernel, gradients, *given, unneeded=len(unneeded), returned=len(state), reads_returned=False
            )
        for k, inputs in enumerate((rows, *states) if recorded else ()):
            layer = LayerParams(places[k], places[k + 2] if biases else None)
            with temporarily_clear_interpreter_stack():
                self._recorder.record(LayerRecorder.add_products, (layer,), inputs.flatten(0, 2), gates[k])
        return out, out[-1], *others

    def _parameter(self, x: object) -> int:
        """Return the place of a parameter, or raise ``NotLayersError`` for any other value."""
        place = self.params.place_of(x)
        if place is None:
            raise NotLayersError("the loss calls a layer with a weight or bias that is no parameter")
        return place

    def _one_each(self, x: Tensor) -> Tensor:
        """Return a tensor with one value per sample; a parameter or a constant is expanded, without memory."""
        param = self.params.get(x)
        if param is not None:
            return self.params.copy(param)
        found = self.vmap.rows(x)
        if found is not None and len(found[1]) == 1:
            return x
        if not isinstance(x, Tensor) or is_wrapped(x) or x.requires_grad:
            raise NotLayersError("the loss calls a recurrent layer with inputs that are not one per sample")
        with temporarily_clear_interpreter_stack():
            one_each = x.expand(self.vmap.size, *x.shape)
        return add_batch_dim(one_each, 0, self.vmap.level)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute ``left @ right`` as a linear layer of a parameter."""
        if self.params.get(right) is not None:
            return self.linear(left, self.params.transpose(right))
        if not isinstance(right, Tensor) or right.ndim < 2:
            return self.linear(right, left)
        self.is_laid_out = False
        return self.linear(right.mT, left).mT

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute ``torch.inner`` as a linear layer of a parameter."""
        if self.params.get(right) is None and left.ndim * right.ndim != 2:  # a matrix and a vector alone commute
            raise NotLayersError("the loss calls torch.inner, and not as a linear layer")
        return self.linear(left, right) if self.params.get(right) is not None else self.linear(right, left)

    def addmm(self, bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Compute ``bias + left @ right`` as a linear layer of a parameter."""
        if right.ndim == 2 and self.params.get(right) is not None and bias.shape == right.shape[1:]:
            return self.linear(left, self.params.transpose(right), bias)
        if right.ndim == 1 and self.params.get(left) is not None and bias.shape == left.shape[:1]:
            return self.linear(right, left, bias)
        raise NotLayersError("the loss adds a product with a parameter to a tensor that is no bias")

    def einsum(self, equation: str, *operands: Tensor) -> Tensor:
        """Compute ``torch.einsum`` of a matrix and one other tensor as a linear layer of a parameter."""
        place = next((place for place, x in enumerate(operands) if self.params.get(x) is not None), None)
        layer = None if place is None or not isinstance(equation, str) else linear_einsum(equation, place)
        if place is None or layer is None:
            raise NotLayersError("the loss calls torch.einsum with a parameter, and not as a linear layer")
        weight = self.params.transpose(operands[place]) if layer.transposed else operands[place]
        self.is_laid_out = False
        return self.linear(operands[1 - place].movedim(layer.contracted, -1), weight).movedim(-1, layer.made)

    def embedding(
        self,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,  # noqa: ARG002
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """Compute ``F.embedding`` of a shared parameter."""
        param = self.params.get(weight)
        if param is None or param.transposed or weight.ndim != 2:
            raise NotLayersError("the loss calls F.embedding with a table that is no parameter")
        fits = padding_idx is None or -len(weight) <= padding_idx < len(weight)
        fits &= isinstance(input, Tensor) and input.numel() > 0
        if not fits or max_norm is not None or scale_grad_by_freq or sparse:
            raise NotLayersError("the loss calls F.embedding with options that lookups of all samples do not have")
        if (found := self.vmap.rows(input)) is None and is_wrapped(input):
            raise NotLayersError("the loss calls F.embedding with an index of another transform")
        index, levels = found or (input.expand(self.vmap.size, *input.shape), [self.vmap.level])
        with temporarily_clear_interpreter_stack():
            table = self.params.values[param.place]
            out = F.embedding(index, table.detach().requires_grad_())
            out = out if type(out) is Tensor else settled(out)
            if torch.is_grad_enabled():
                padding = None if padding_idx is None else padding_idx % len(weight)
                self._recorder.record(LayerRecorder.add_lookup, (param.place, padding), index, out)
        return batched(out, levels)

    def selected(self, table: Tensor, dim: int, index: Tensor) -> Tensor:
        """Compute ``torch.index_select`` of rows as a lookup."""
        if dim or index.ndim != 1:
            raise NotLayersError("the loss selects something else than rows")
        return self.embedding(index, table)

    def row(self, table: Tensor, index: Leaf) -> Tensor:
        """Compute ``table[index]`` for an index of rows as a lookup."""
        rows = isinstance(index, Tensor) and not (index.is_floating_point() or index.is_complex())
        if not rows or index.dtype in {torch.bool, torch.uint8}:
            raise NotLayersError("the loss indexes a parameter, and not by the numbers of rows")
        return self.embedding(torch.where(index < 0, index + len(table), index), table)


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:  # noqa: A002
    if weight.ndim != 2 or not input.numel() or input.shape[-1:] != weight.shape[1:] or is_wrapped(weight):
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or is_wrapped(bias)):
        return False
    alike = input.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
    return alike or is_autocast(input.device)


_READS = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, *getters("shape", "ndim", "dtype", "device", "is_cuda")),
    *(Tensor.detach, torch.detach, Tensor.data_ptr),
}
# Functions that torch batches within a derivative alone; outside of one it computes sample after sample.
WITHIN_A_DERIVATIVE = {
    *(F.kl_div, F.margin_ranking_loss, F.triplet_margin_loss, torch.stft, Tensor.stft, torch.column_stack),
    *(torch.kl_div, torch.margin_ranking_loss, torch.triplet_margin_loss, torch.diagflat, Tensor.diagflat),
    *(torch.linalg.tensorsolve, torch.lu_solve, Tensor.lu_solve),
}
_LAYERS: dict[object, Callable[..., Tensor]] = {
    F.linear: LayerInterceptor.linear,
    F.embedding: LayerInterceptor.embedding,
    F.embedding_bag: lambda self, *args, **kwargs: embedding_bag(self.embedding, *args, **kwargs),
}
_CONVOLUTIONS: dict[object, Callable[..., Geometry | None]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), geometry_of),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), transposed_geometry_of),
}
# Of copies, these would be a convolution of B groups, or lookups in one table of all copies.
_UNLIKE_COPIES = {
    *(*_CONVOLUTIONS, F.embedding, F.embedding_bag, Tensor.__getitem__),
    *(torch.index_select, Tensor.index_select),
}
# The latter as torch.compile writes them since torch 2.14.
_TRANSPOSES = *getters("T", "mT"), torch.ops.aten.numpy_T, torch.ops.aten.mT
_OPERATORS: dict[object, Callable[..., Tensor]] = {  # without keyword arguments
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), LayerInterceptor.matmul),
    **dict.fromkeys((torch.mm, Tensor.mm, torch.mv, Tensor.mv), LayerInterceptor.matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.addmv, Tensor.addmv), LayerInterceptor.addmm),
    **dict.fromkeys((torch.inner, Tensor.inner), LayerInterceptor.inner),
    torch.einsum: LayerInterceptor.einsum,
    Tensor.__getitem__: LayerInterceptor.row,
    **dict.fromkeys((torch.index_select, Tensor.index_select), LayerInterceptor.selected),
    **dict.fromkeys((torch.t, Tensor.t, *_TRANSPOSES), lambda self, x: self.params.transpose(x)),
}
