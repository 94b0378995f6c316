"""Functions of sequences ``[T, N, ·]`` that vmap calls once: the sequences of all samples are rows of one axis N."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function


class SamplesAsRows(Function):
    """A function of tensors ``[T, N, ·]``, and of weights that all samples share. Subclasses define its gradient."""

    apply: Callable[..., tuple[Tensor, ...]]

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Call the function once for all samples.

        Args:
            info: vmap's facts, among them the number of samples.
            in_dims: the batch axis of each argument.
            *args: the arguments.

        Returns:
            The results, and the batch axis of each.
        """

        def merged(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor) or (dim is None and x.ndim < 3):
                return x
            x = x.unsqueeze(1).expand(-1, info.batch_size, -1, -1) if dim is None else x.movedim(dim, 1)
            return x.flatten(1, 2)

        out = cls.apply(*map(merged, args, in_dims))
        return tuple(x.unflatten(1, (info.batch_size, -1)) for x in out), (1,) * len(out)


class NotDifferentiated(SamplesAsRows):
    """Calls any such function, given as the first argument, without recording a derivative."""

    @staticmethod
    def forward(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
        """Call the function.

        Args:
            function: the function.
            *args: its arguments.

        Returns:
            Its results.
        """
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        """Mark all results as constants.

        Args:
            ctx: autograd's context.
            inputs: the arguments.
            output: the results.
        """
        ctx.mark_non_differentiable(*output)
