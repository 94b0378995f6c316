"""Linear layers, bilinear forms, and methods that write their results, mostly products: ``Tensor.addmm_``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.errors import LossError
from persample.utils.dtypes import is_autocast


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Compute ``F.linear``, and reject a bias of another dtype, as torch does; torch.func would cast it."""
    # Where the input is no matrix and not contiguous, torch adds a bias of any dtype.
    if input.ndim == 2 or input.is_contiguous():
        _check_dtype(bias, weight)
    return F.linear(input, weight, bias)


def _check_dtype(bias: Tensor | None, weight: Tensor) -> None:
    if bias is not None and bias.dtype != weight.dtype and not is_autocast(bias.device):
        raise RuntimeError(f"expected weight and bias to have the same dtype, not {weight.dtype} and {bias.dtype}")


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_dtype(bias, weight)
    if input1.shape[:-1] != input2.shape[:-1] or (bias is not None and bias.shape != weight.shape[:1]):
        return torch.bilinear(input1, input2, weight, bias)  # raises
    forms = F.linear(input2, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
    out = (forms @ input1.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias


def _in_place(name: str, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    """Write the result of a method into its tensor; torch.func refuses to where samples are batched twice."""
    out = getattr(input, name)(*args, **kwargs)
    if input.shape != out.shape:  # torch may resize the tensor, torch.func does not
        raise LossError(
            f"loss_fn: {name}_ expected a tensor of the shape of its result, {list(out.shape)}, received "
            f"{list(input.shape)}. Use torch.{name}, which makes a new one."
        )
    if not torch.can_cast(out.dtype, input.dtype):
        return getattr(input, f"{name}_")(*args, **kwargs)  # raises
    return input.copy_(out)


# Their gradients do not need the values that are overwritten.
_WRITTEN = "addbmm", "addcdiv", "addcmul", "addmm", "addmv", "addr", "baddbmm", "lerp", "masked_scatter", "scatter"
RULES: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    torch.bilinear: _bilinear,
    **{getattr(Tensor, f"{name}_"): functools.partial(_in_place, name) for name in _WRITTEN},
}
