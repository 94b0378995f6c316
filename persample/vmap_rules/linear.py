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
from persample.utils.tracing import is_traced
from persample.vmap_rules.batched import is_batched, unwrapped

_SMALL = 2**16  # numbers in the inputs, and in the outputs, of all samples


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Compute ``F.linear``, and add a bias that all samples share in place."""
    # Where the input is no matrix and not contiguous, torch adds a bias of any dtype.
    if input.ndim == 2 or input.is_contiguous():
        _check_dtype(bias, weight)
    if weight.ndim != 2 or not _fits(bias, weight):
        return F.linear(input, weight, bias)
    # torch.func decomposes a linear layer with a bias into a product and a sum; the sum needs no second tensor.
    out = torch.mv(weight, input) if _is_small_vector(input, weight) else F.linear(input, weight)
    if bias is None or is_batched(bias) or out.dtype != bias.dtype or is_traced(unwrapped(out)):
        return out if bias is None else out + bias.to(out.dtype)
    return out.add_(bias)


def is_small(samples: int, weight: Tensor) -> bool:
    """Return whether the products of a matrix and one vector per sample are small.

    Small products are best computed in few operations, even if the result has an inconvenient layout. Compiled code
    (traced weights) has no price for an operation: there, none is small.

    Args:
        samples: the number of vectors.
        weight: the matrix.
    """
    return not is_traced(unwrapped(weight)) and samples > 1 and samples * max(weight.shape) <= _SMALL


def _is_small_vector(x: Tensor, weight: Tensor) -> bool:
    # A matrix-vector product takes half as many operations, but its layout is slow to use where tensors are large.
    small = x.ndim == 1 and is_small(unwrapped(x).numel() // max(1, x.numel()), weight)
    return small and not is_autocast(x.device)  # autocast does not know mv


def _check_dtype(bias: Tensor | None, weight: Tensor) -> None:
    """Reject a bias of another dtype, as torch does; torch.func would cast it."""
    if bias is not None and bias.dtype != weight.dtype and not is_autocast(bias.device):
        raise RuntimeError(f"expected weight and bias to have the same dtype, not {weight.dtype} and {bias.dtype}")


def _fits(bias: Tensor | None, weight: Tensor) -> bool:
    return bias is None or bias.shape == weight.shape[:1]


def _matmul(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    """Compute ``w @ x.T`` of a matrix that all samples share as ``F.linear(x, w).T``, so that x is not copied."""
    is_layer = input.ndim == other.ndim == 2 and is_batched(other) and not is_batched(input)
    if is_layer and input.shape[1] == len(other) and other.mT.is_contiguous():
        return linear(other.mT, input).mT.contiguous()  # as torch's result: losses view it in another shape
    return torch.matmul(input, other)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_dtype(bias, weight)
    if input1.shape[:-1] != input2.shape[:-1] or not _fits(bias, weight):
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
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.bilinear: _bilinear,
    **{getattr(Tensor, f"{name}_"): functools.partial(_in_place, name) for name in _WRITTEN},
}
