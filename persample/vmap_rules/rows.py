"""Leaving torch.func's levels: functions called once on plain tensors, the samples as more rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from persample._torch import (
    GradInterpreter,
    TransformType,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    retrieve_all_functorch_interpreters,
)
from persample.utils.flags import flags


class SecondDerivativeError(RuntimeError):
    """Raised by a shortcut that is differentiated twice, which shows only then (``autograd.grad`` inside a loss)."""


@contextmanager
def plain_autograd() -> Iterator[None]:
    """Say that plain autograd differentiates what is computed, below all levels, and once."""
    flags.plain = True
    try:
        yield
    finally:
        flags.plain = False


@contextmanager
def composed() -> Iterator[None]:
    """Replace operations by compositions only, which can be differentiated any number of times."""
    flags.composed = True
    try:
        yield
    finally:
        flags.composed = False


def refuse_graph() -> None:
    """Refuse, in a backward pass, to be differentiated again.

    Raises:
        SecondDerivativeError: if the backward pass is recorded.
    """
    if torch.is_grad_enabled():
        raise SecondDerivativeError


def differentiated_once() -> bool:
    """Return whether all that is around is vmap and one derivative, which nobody differentiates.

    Returns:
        Whether second derivatives, and derivatives in forward mode, are out of the question.
    """
    if getattr(flags, "composed", False):
        return False
    levels = retrieve_all_functorch_interpreters()
    grads = [level for level in levels if isinstance(level, GradInterpreter)]
    known = all(level.key() in {TransformType.Vmap, TransformType.Grad} for level in levels)
    if getattr(flags, "plain", False):
        return known and not grads
    return known and len(grads) == 1 and not grads[0].prev_grad_mode()


def is_batched(x: Tensor) -> bool:
    """Return whether a tensor varies from sample to sample.

    Args:
        x: a tensor.

    Returns:
        Whether any vmap batches it.
    """
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor behind all levels of torch.func, with all samples in it.

    Args:
        x: a tensor.

    Returns:
        The plain tensor.
    """
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


class Rows(Function):
    """A function of sequences ``[T, N, ·]`` and of weights that are not batched: for vmap, samples are more rows N."""

    apply: Callable[..., tuple[Tensor, ...]]

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Call the function once for all samples.

        Args:
            info: what vmap tells, among it the number of samples.
            in_dims: where the samples are.
            *args: the arguments.

        Returns:
            The results, and where their samples are.
        """

        def merged(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor) or (dim is None and x.ndim < 3):
                return x
            x = x.unsqueeze(1).expand(-1, info.batch_size, -1, -1) if dim is None else x.movedim(dim, 1)
            return x.flatten(1, 2)

        out = cls.apply(*map(merged, args, in_dims))
        return tuple(x.unflatten(1, (info.batch_size, -1)) for x in out), (1,) * len(out)


class Plain(Rows):
    """Any such function, not differentiated."""

    @staticmethod
    def forward(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
        """Call the function.

        Args:
            function: what to call.
            *args: its arguments.

        Returns:
            What it returns.
        """
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        """Keep nothing.

        Args:
            ctx: autograd's context.
            inputs: the arguments.
            output: the results.
        """
        ctx.mark_non_differentiable(*output)
