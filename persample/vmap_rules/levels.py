"""The levels of ``torch.func``: what wraps a tensor, who differentiates a loss, and kernels called below all levels.

``differentiated_by`` of ``VmapRules`` says who differentiates the loss:

- ``"torch.func"``: one ``vjp`` or ``grad`` of ``torch.func``, around or inside of vmap;
- ``"autograd"``: plain autograd, outside of all transforms;
- ``"any"``: anyone, any number of times.

Kernels with hand-written gradients serve a single reverse-mode derivative, on the plain tensors of all samples.
``torch.func`` takes an ``autograd.Function`` through its levels one by one, in Python, and makes a class for every
call: nearly a millisecond, where an operation of torch takes 20 µs. A loss that is differentiated once needs less: one
autograd node, at the level of that derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from persample._torch import (
    SingleLevelFunction,
    add_batch_dim,
    allow_single_level_autograd_function,
    is_forward_mode,
    maybe_get_bdim,
    maybe_get_level,
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
    transforms,
    wrap_for_grad,
)
from persample.utils.tracing import unwrapped_once, wrapped
from persample.utils.trees import Leaf

_ENDED = -2  # the level of a tensor that was saved by a derivative which has ended
DifferentiatedBy: TypeAlias = Literal["torch.func", "autograd", "any"]
Function: TypeAlias = Callable[..., Any]  # of torch, or the rule that replaces it; each of torch's has its own types
Rules: TypeAlias = dict[Function, Function]
Args: TypeAlias = Sequence[Leaf]
Options: TypeAlias = Mapping[str, Leaf]


class SecondDerivativeError(RuntimeError):
    """A hand-written gradient was differentiated again; ``VmapRules(differentiated_by="any")`` serves such a loss."""


def is_differentiated_once(by: DifferentiatedBy) -> bool:
    """Return whether the transforms that are active now are vmaps and at most one derivative, which is not recorded."""
    if by == "any":
        return False
    levels = retrieve_all_functorch_interpreters()
    kinds = [level.key().name for level in levels]
    if not {"Vmap", "Grad"}.issuperset(kinds):  # forward mode
        return False
    grads = [level for level, kind in zip(levels, kinds, strict=True) if kind == "Grad"]
    if by == "autograd":
        return not grads
    return len(grads) == 1 and not grads[0].prev_grad_mode()


def is_in_forward_mode() -> bool:
    """Return whether a forward derivative is active, of ``torch.func`` or of ``torch.autograd.forward_ad``."""
    return is_forward_mode() or "jvp" in transforms()


def is_differentiated(x: Tensor) -> bool:
    """Return whether autograd, or a derivative of torch.func at any level, differentiates a tensor."""
    return any(inside.requires_grad for inside in wrapped(x))


# Functions of plain tensors. All have the same axes of samples in front, any number of them, and so have the results.
Kernel: TypeAlias = Callable[..., tuple[Tensor, ...]]
Gradients: TypeAlias = Callable[..., tuple[Tensor | None, ...]]
_Result = TypeVar("_Result", Tensor, Tensor | None)


def call_kernel(
    kernel: Kernel,
    gradients: Gradients,
    *tensors: Tensor,
    unneeded: int = 0,
    returned: int = 1,
    reads_returned: bool = True,
) -> tuple[Tensor, ...]:
    """Call a kernel whose gradient is hand-written, and return its first results; a loss may differentiate these once.

    ``gradients`` is called once, with (which tensors need a gradient, the gradients of the ``returned`` results or
    None, the tensors but the first ``unneeded``, the results), and may overwrite results that are not returned. Those
    that are it gets only if ``reads_returned``; if not, the loss may write into them.
    """
    grads = (x.level() for x in retrieve_all_functorch_interpreters() if x.key().name == "Grad")
    level = next(grads, 0)  # 0: plain autograd differentiates
    inner, batch_levels = samples_first(tensors, level)
    if level:
        inner = [x if maybe_get_level(x) == level else wrap_for_grad(x, level) for x in inner]
    saved = slice(unneeded, None), slice(0 if reads_returned else returned, None)
    try:
        allow_single_level_autograd_function(True)
        out = _Node.apply(kernel, gradients, saved, returned, level, *inner)
    finally:
        allow_single_level_autograd_function(False)
    return tuple(batched(x, batch_levels) for x in out[:returned])


class _Node(SingleLevelFunction):
    """A kernel call as one node of the graph, at the level of the one derivative."""

    apply: Callable[..., tuple[Tensor, ...]]

    @staticmethod
    def forward(
        kernel: Kernel, _gradients: Gradients, _saved: tuple[slice, slice], _returned: int, level: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        out = _called_on_plain_tensors(kernel, tensors)
        return tuple(wrap_for_grad(x, level) for x in out) if level else out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.gradients, (of_tensors, of_results), ctx.returned, _, *tensors = inputs
        ctx.save_for_backward(*tensors[of_tensors], *output[of_results])
        ctx.mark_non_differentiable(*output[ctx.returned :])
        ctx.set_materialize_grads(False)  # the results that are not returned have none

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # A second backward pass inside the loss: saved results may be overwritten.
        if torch.is_grad_enabled() or ctx.gradients is None:
            raise SecondDerivativeError
        needed = ctx.needs_input_grad[5:]
        gradients, ctx.gradients = partial(ctx.gradients, needed), None
        out = _called_on_plain_tensors(gradients, (*grads[: ctx.returned], *ctx.saved_tensors))
        return *[None] * 5, *(x if wanted else None for x, wanted in zip(out, needed, strict=True))


def _called_on_plain_tensors(
    function: Callable[..., tuple[_Result, ...]], tensors: tuple[Tensor | None, ...]
) -> tuple[_Result, ...]:
    """Call a function below all levels of torch.func, none of which differentiates it."""
    with temporarily_clear_interpreter_stack():
        places = [place for place, x in enumerate(tensors) if x is not None]
        plain, batch_levels = samples_first([x for x in tensors if x is not None], 0)
        given = dict(zip(places, plain, strict=True))
        out = function(*map(given.get, range(len(tensors))))
    return tuple(None if x is None else batched(x, batch_levels) for x in out) if batch_levels else out


def gradients_by_autograd(function: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a function of plain tensors, for the gradients of kernels."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(function(*leaves), leaves, grad)


def samples_first(tensors: Sequence[Tensor], above: int) -> tuple[list[Tensor], list[int]]:
    """Unwrap tensors from all levels above one; their batch axes come first, that of the outermost vmap before all."""
    taken = [_unwrapped(x, above) for x in tensors]
    sizes = {level: size for _, axes in taken for level, (_, size) in axes.items()}
    levels = sorted(sizes)
    # Axes are moved only when all tensors are unwrapped: an operation on a wrapped one would need its level.
    for done, level in enumerate(levels):
        taken = [(_moved(x, axes.get(level), done, sizes[level]), axes) for x, axes in taken]
    return [x for x, _ in taken], levels


def _unwrapped(x: Tensor, above: int) -> tuple[Tensor, dict[int, tuple[int, int]]]:
    """Return the tensor inside of the levels above one, and for each vmap among them the batch axis and its size."""
    axes = {}
    while (level := maybe_get_level(x)) > above or level == _ENDED:
        axis, x = maybe_get_bdim(x), unwrapped_once(x)
        if axis >= 0:
            axes[level] = axis, x.shape[axis]
    return x, axes


def _moved(x: Tensor, axis: tuple[int, int] | None, done: int, size: int) -> Tensor:
    """Return a tensor with one batch axis at place ``done``: moved there, or expanded if the tensor has none."""
    if axis is None:
        return x.unsqueeze(done).expand(*x.shape[:done], size, *x.shape[done:])
    return x.movedim(axis[0] + done, done) if axis[0] else x


def batched(x: Tensor, levels: Sequence[int]) -> Tensor:
    """Wrap a tensor for vmaps, the first level for the first axis: the inverse of ``samples_first``."""
    for level in levels:
        x = add_batch_dim(x, 0, level)
    return x
