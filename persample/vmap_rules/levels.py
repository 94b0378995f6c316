"""Functions run below torch.func's levels, on plain tensors with all samples in front.

``torch.func`` takes an ``autograd.Function`` through its levels one by one, in Python, with a class made for every
call: nearly a millisecond, where an operation of torch takes 20 µs. Inside of vmap and one derivative that nobody
differentiates, less will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from persample._torch import (
    DisableFuncTorch,
    GradInterpreter,
    SingleLevelFunction,
    add_batch_dim,
    enable_single_level_autograd_function,
    get_unwrapped,
    maybe_get_bdim,
    maybe_get_level,
    retrieve_all_functorch_interpreters,
    unwrap_dead_wrappers,
    wrap_for_grad,
)
from persample.vmap_rules.rows import SecondDerivativeError, refuse_graph

# Of plain tensors with any number of axes in front, the same for all, which what it returns has, too.
Kernel = Callable[..., tuple[Tensor | None, ...]]


def differentiated(function: Kernel, gradients: Kernel, *tensors: Tensor, unneeded: int = 0) -> Any:
    """Call a function whose gradients are written out, where ``differentiated_once`` holds.

    Args:
        function: what to call; of its results the first is returned, and the gradients need all.
        gradients: from the gradient of the first result, the tensors and all results to the gradients of the tensors.
            It is called once and may write into further results.
        *tensors: what it is called with.
        unneeded: how many of the first tensors the gradients are not given, so that they need not be kept.

    Returns:
        Its first result.
    """
    grads = (x.level() for x in retrieve_all_functorch_interpreters() if isinstance(x, GradInterpreter))
    level = next(grads, 0)  # none: plain autograd differentiates
    inner, levels = _in_front(tensors, level)
    if level:
        inner = tuple(x if maybe_get_level(x) == level else wrap_for_grad(x, level) for x in inner)
    with enable_single_level_autograd_function():
        out = _Node.apply(_Recipe(function, gradients, unneeded, level), *inner)
    return _batched(out[:1], levels)[0]


class _Recipe(NamedTuple):
    function: Kernel
    gradients: Kernel
    unneeded: int
    level: int


class _Node(SingleLevelFunction):
    """A function, at the level of the one derivative."""

    apply: Callable[..., tuple[Tensor, ...]]

    @staticmethod
    def forward(recipe: _Recipe, *tensors: Tensor) -> tuple[Tensor, ...]:
        out = _below(recipe.function, tensors)
        return tuple(wrap_for_grad(x, recipe.level) for x in out) if recipe.level else out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        recipe, *tensors = inputs
        ctx.gradients = recipe.gradients
        ctx.save_for_backward(*tensors[recipe.unneeded :], *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # of further results, for which there is none

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        refuse_graph()
        if ctx.gradients is None:  # a second backward pass inside the loss
            raise SecondDerivativeError
        gradients, ctx.gradients = ctx.gradients, None
        return None, *_below(gradients, (grad, *ctx.saved_tensors))


def _below(function: Kernel, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Call a function below all levels, which therefore do not differentiate it."""
    with DisableFuncTorch():
        plain, levels = _in_front(tensors, 0)
        out = function(*plain)
    return _batched(out, levels)


def _in_front(tensors: tuple[Tensor, ...], above: int) -> tuple[tuple[Tensor, ...], list[int]]:
    """Take tensors out of the levels above one: what vmap batches them along comes first, the outermost before all."""
    taken = [_taken_out(x, above) for x in unwrap_dead_wrappers(tensors)]  # saved by a derivative that has ended
    sizes = {level: size for _, axes in taken for level, (_, size) in axes.items()}
    levels = sorted(sizes)
    # Not before all are out of all levels: an operation on a tensor that is in one would need that level.
    for done, level in enumerate(levels):
        taken = [(_moved(x, axes.get(level), done, sizes[level]), axes) for x, axes in taken]
    return tuple(x for x, _ in taken), levels


def _taken_out(x: Tensor, above: int) -> tuple[Tensor, dict[int, tuple[int, int]]]:
    """Return what is in a tensor, and by the levels of vmap that it was taken out of: axis (of the rest) and size."""
    axes = {}
    while (level := maybe_get_level(x)) > above:
        axis, x = maybe_get_bdim(x), get_unwrapped(x)
        if axis >= 0:
            axes[level] = axis, x.shape[axis]
    return x, axes


def _moved(x: Tensor, axis: tuple[int, int] | None, done: int, size: int) -> Tensor:
    if axis is None:
        return x.unsqueeze(done).expand(*x.shape[:done], size, *x.shape[done:])
    return x.movedim(axis[0] + done, done) if axis[0] else x


def _batched(tensors: tuple[Tensor | None, ...], levels: list[int]) -> tuple[Any, ...]:
    for level in levels:
        tensors = tuple(None if x is None else add_batch_dim(x, 0, level) for x in tensors)
    return tensors
