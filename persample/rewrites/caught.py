"""Linear layers under vmap that are computed on the rows of all samples, and hand over their inputs and signals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    get_unwrapped,
    is_batchedtensor,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function

from persample import gemm
from persample.numeric import is_autocast, is_wrapped
from persample.rewrites.functional import linear

Product = tuple[Tensor, Tensor, bool]  # signals, inputs, and whether a sample's input is a vector


class Caught:
    """Stands for ``F.linear`` under one vmap over plain autograd, and catches the uses of parameters.

    What it catches leaves no gradient at the parameters: only other uses do.

    Args:
        params: the parameters, plain tensors.
        given: the same, as the loss is given them: all but matrices batched.
        level: of the vmap.

    Examples:
        >>> import torch
        >>> from torch.func import vmap
        >>> w, x, seen = torch.ones(1, 2, requires_grad=True), torch.tensor([[3.0, 4.0]]), []
        >>> def loss(x):
        ...     seen.append(Caught([w], [w], level=1))
        ...     return seen[0](x, w)[0] ** 2
        >>> torch.autograd.grad(vmap(loss)(x).sum(), w, allow_unused=True)
        (None,)
        >>> seen[0].products
        {0: [(tensor([[14.]]), tensor([[3., 4.]]), True)]}
    """

    def __init__(self, params: Sequence[Tensor], given: Sequence[Tensor], level: int) -> None:
        self._level = level
        self._params = params
        self._places = {id(x): place for place, x in enumerate(given)}
        self.products: dict[int, list[Product]] = {}  # by the place of the weight
        self.signals: dict[int, list[Tensor]] = {}  # by the place of the bias

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Compute a linear layer.

        Args:
            input: as in torch.
            weight: as in torch.
            bias: as in torch.

        Returns:
            As in torch.
        """
        place, bias_place = self._places.get(id(weight)), self._places.get(id(bias))
        added = bias if bias_place is None else self._params[bias_place]
        known = place is not None or (bias_place is None and not weight.requires_grad)
        if not known or not self._is_of_rows(input) or not _fits(input, weight, added) or is_autocast(input.device):
            return linear(input, weight, bias)
        rows = get_unwrapped(input).movedim(maybe_get_bdim(input), 0)
        catch = None if place is None else functools.partial(self._catch, place, bias_place, input.ndim == 1)
        with temporarily_clear_interpreter_stack():
            # The shape is made outside of the function: what it returned as a view could not be written in place.
            out = _Linear.apply(rows.flatten(0, -2), weight, added, catch)
            out = out.view(*rows.shape[:-1], len(weight)) if rows.ndim > 2 else out
        return _add_batch_dim(out, 0, self._level)

    def _is_of_rows(self, x: Tensor) -> bool:
        own = is_batchedtensor(x) and maybe_get_level(x) == self._level
        return own and not is_wrapped(get_unwrapped(x))

    def _catch(self, place: int, bias_place: int | None, of_vectors: bool, signals: Tensor, rows: Tensor) -> None:
        self.products.setdefault(place, []).append((signals, rows, of_vectors))
        if bias_place is not None:
            self.signals.setdefault(bias_place, []).append(signals)


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:  # noqa: A002
    if weight.ndim != 2 or input.dtype != weight.dtype or not input.numel() or input.shape[-1:] != weight.shape[1:]:
        return False
    if bias is not None and (bias.requires_grad or bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        return False
    return not any(is_wrapped(x) for x in (weight, bias) if x is not None)


class _Linear(Function):
    """A linear layer that hands its inputs and signals over, and has no gradient of its weight and bias."""

    apply: Callable[..., Tensor]

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, catch: Any) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.catch = catch
        return gemm.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, signals: Tensor) -> tuple[Tensor | None, None, None, None]:
        rows, weight = ctx.saved_tensors
        if ctx.catch is not None:
            ctx.catch(signals, rows.detach())
        return gemm.mm(signals, weight.detach()) if ctx.needs_input_grad[0] else None, None, None, None
