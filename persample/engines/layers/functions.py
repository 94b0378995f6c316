"""Functions of torch on the rows of all samples: pointwise ones, convolutions, recurrent layers and losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from persample._torch import temporarily_clear_interpreter_stack
from persample.engines.layers.shared import Vmap
from persample.vmap_rules.recurrent import scan_kernel, scan_signals
from persample.vmap_rules.recurrent_steps import Cell

# The names of operations by the names of methods and functions that compute the same.
_ALIASES = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}
_OPTIONS = {"beta", "delta", "ignore_index"}  # of losses


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Return whether a function of torch is pointwise, as torch tags its operations.

    Examples:
        >>> from torch import Tensor
        >>> is_pointwise(Tensor.add_), is_pointwise(Tensor.__rtruediv__), is_pointwise(torch.where)
        (True, True, True)
        >>> is_pointwise(Tensor.matmul), is_pointwise(torch.sum), is_pointwise(Tensor.__getitem__)
        (False, False, False)
    """
    full = str(getattr(func, "__name__", ""))
    name = full.strip("_")
    if full.startswith("__") and name[:1] in {"r", "i"}:  # reflected, or in place
        name = name[1:]
    packet = getattr(torch.ops.aten, _ALIASES.get(name, name), None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, x).tags for x in packet.overloads())


class Geometry(NamedTuple):
    """How a kernel is moved over images, one number per spatial axis: the settings of ``aten.convolution``.

    Attributes:
        stride: the distance of neighbouring places of the kernel.
        padding: zeros on both sides.
        dilation: the distance of neighbouring entries of the kernel.
        transposed: whether images and output change places.
        output_padding: what a transposed convolution adds to the size of its output.
        groups: the number of groups of channels.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def geometry_of(
    kernel: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Geometry | None:
    """Return the geometry that ``F.conv2d`` and its like are given, or None if the two sides are padded unequally."""
    sizes = kernel.shape[2:]
    strides, dilations = (_per_axis(x, len(sizes)) for x in (stride, dilation))
    if isinstance(padding, str):
        total = [apart * (size - 1) * (padding == "same") for apart, size in zip(dilations, sizes, strict=True)]
        if any(x % 2 for x in total):
            return None
        padding = [x // 2 for x in total]
    return Geometry(strides, _per_axis(padding, len(sizes)), dilations, False, (0,) * len(sizes), groups)


def transposed_geometry_of(
    kernel: Tensor, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
) -> Geometry | None:
    """Return the geometry that ``F.conv_transpose2d`` and its like are given.

    None if the output is padded by a whole stride: a convolution of the output would be larger than the images.
    """
    settings = (_per_axis(x, kernel.ndim - 2) for x in (stride, padding, dilation, output_padding))
    stride, padding, dilation, output_padding = settings
    fits = all(pad < step for pad, step in zip(output_padding, stride, strict=True))
    return Geometry(stride, padding, dilation, True, output_padding, groups) if fits else None


def _per_axis(x: Any, axes: int) -> tuple[int, ...]:
    values = tuple(map(int, x if isinstance(x, Sequence) else (x,)))  # numbers of NumPy, too
    return values * axes if len(values) == 1 else values


class _ScannedSequences(Function):
    @staticmethod
    def forward(ctx: Any, cell: Cell, size: int, _at_inputs: Tensor, _at_state: Tensor, *tensors: Tensor) -> Any:
        *given, x, w_ih, w_hh = tensors
        state, biases = given[:size], given[size:]
        one_each = [w.expand(len(x), *w.shape) for w in (*biases, w_ih, w_hh)]
        out = scan_kernel(cell, size, *state, *one_each[:-2], x, *one_each[-2:])
        ctx.save_for_backward(w_ih, w_hh, *out[size:])
        ctx.cell, ctx.size, ctx.num_biases = cell, size, len(biases)
        ctx.mark_non_differentiable(out[size])
        ctx.set_materialize_grads(False)
        return out[: size + 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        w_ih, w_hh, *kept = (y.detach() for y in ctx.saved_tensors)
        w_ih, w_hh = (w.expand(len(kept[0]), *w.shape) for w in (w_ih, w_hh))
        needs_x = ctx.needs_input_grad[-3]
        of_state, of_x, signals = scan_signals(ctx.cell, grads[: ctx.size], w_ih, w_hh, kept, needs_x=needs_x)
        return None, None, *signals, *of_state, *[None] * ctx.num_biases, of_x, None, None


# (cell, size of the state, two tensors [B, T, N, G] whose gradients are the signals at the gates of x and of the
# state, *state [B, 1, N, H], *biases [G], x [B, T, N, I], W, W') → outputs of all steps, the rest of the last state,
# and the state before each step. Weights and biases get no gradient here, so that one there comes from another use.
scanned_sequences: Callable[..., tuple[Tensor, ...]] = _ScannedSequences.apply


def loss_of_rows(vmap: Vmap, function: Any, input: Any, target: Any, *args: Any, **options: Any) -> Any:  # noqa: A002
    """Call one of ``LOSSES``, or return ``NotImplemented`` for arguments that it takes in another way.

    Args:
        vmap: the vmap around the loss.
        function: the function of torch.
        input: predictions or logits, one per sample.
        target: targets of the same shape, or classes; one per sample.
        *args: further arguments.
        **options: further arguments by name.
    """
    given = {name: option for name, option in options.items() if option is not None}
    reduction, smoothing = given.pop("reduction", "mean"), given.pop("label_smoothing", 0)
    if args or smoothing or not given.keys() <= _OPTIONS or reduction not in _REDUCTIONS:
        return NotImplemented
    one, other = vmap.rows(input), vmap.rows(target)
    if one is None or other is None or one[1] != other[1] or not input.numel():
        return NotImplemented
    if not LOSSES[function](input, target):
        return NotImplemented
    (rows, levels), (targets, _) = one, other
    with temporarily_clear_interpreter_stack():
        has_classes = function is F.cross_entropy
        flat = (rows.flatten(0, -2), targets.flatten()) if has_classes else (rows, targets)
        losses = function(*flat, reduction="none", **given).view(targets.shape)
        own = tuple(range(len(levels), losses.ndim))
        if reduction == "mean" and has_classes:
            kept = targets != given.get("ignore_index", -100)
            losses = losses.sum(own) / kept.sum(own) if own else losses / kept  # 0 / 0 where none is kept
        elif own:
            losses = _REDUCTIONS[reduction](losses, own)
    return vmap.batched(losses, levels)


def _are_numbers(x: Tensor, target: Tensor) -> bool:
    return x.shape == target.shape and x.is_floating_point() and target.is_floating_point()


def _are_classes(x: Tensor, target: Tensor) -> bool:
    return target.dtype == torch.long and x.ndim in {1, 2} and x.shape[:-1] == target.shape


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "sum": torch.sum, "none": lambda x, _: x}
LOSSES: dict[Any, Callable[[Tensor, Tensor], bool]] = {
    F.cross_entropy: _are_classes,
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss), _are_numbers),
}
