"""Normalization of activations (layer, group, batch and instance norm) and of weights (weight norm)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import weight_norm
from persample.utils.dtypes import is_autocast


def _autocast(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    """Call a normalization on an input in the dtype of its weights: under autocast torch.func does not cast it."""
    if is_autocast(input.device):
        dtypes = {x.dtype for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        if len(dtypes) == 1:
            return function(input.to(dtypes.pop()), *args, **kwargs).to(input.dtype)
    return function(input, *args, **kwargs)


# torch's kernels of group norm reject strided tensors, or read beyond them, and vmap passes such tensors to them
# (torch's pull request 186414). A copy mends that; so does layer norm over the channels of one group, without a copy,
# but its second derivatives in forward mode are wrong.
def _group_norm_of_copy(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if _is_normalizable(input, num_groups, weight, bias):
        input = input.clone(memory_format=torch.contiguous_format)  # noqa: A001
    return F.group_norm(input, num_groups, weight, bias, eps)


def _group_norm_by_layer_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if not _is_normalizable(input, num_groups, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)
    groups = input.reshape(input.shape[0], num_groups, -1)
    out = F.layer_norm(groups, groups.shape[2:], eps=eps).reshape(input.shape)
    per_channel = (-1, *(1,) * (input.ndim - 2))
    out = out if weight is None else out * weight.reshape(per_channel)
    return (out if bias is None else out + bias.reshape(per_channel)).to(input.dtype)


def _is_normalizable(x: Tensor, num_groups: int, *affine: Tensor | None) -> bool:
    """Return whether ``F.group_norm`` accepts the arguments, and has anything to normalize."""
    channels = x.shape[1:2]
    if x.ndim < 2 or channels[0] % num_groups or x.numel() <= num_groups:
        return False
    return all(parameter is None or parameter.shape == channels for parameter in affine)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if g.dtype != v.dtype:
        return weight_norm(v, g, dim)  # raises
    return v * (g / torch.norm_except_dim(v, 2, dim))


# Under vmap(grad), the gradients of the weights lose their dependence on mean and variance in torch's kernels, so that
# second derivatives are wrong (torch 2.13). Without weights the kernels are right.
def _layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _scaled(F.layer_norm(input, normalized_shape, eps=eps), weight, bias, ())


def _scaled_after(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return batch or instance norm whose weights are multiplied by themselves, after it."""

    def function(
        input: Tensor,  # noqa: A002
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        normalized = norm(input, running_mean, running_var, None, None, *args, **kwargs)
        return _scaled(normalized, weight, bias, (1,) * (input.ndim - 2))

    return function


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: tuple[int, ...]) -> Tensor:
    """Return a normalized tensor times weight plus bias, which get some more axes of 1 at their end."""
    out = x if weight is None else x * weight.reshape(*weight.shape, *axes)
    return (out if bias is None else out + bias.reshape(*bias.shape, *axes)).to(x.dtype)


RULES: dict[Any, Callable[..., Any]] = {
    F.layer_norm: functools.partial(_autocast, _layer_norm),
    F.batch_norm: functools.partial(_autocast, _scaled_after(F.batch_norm)),
    F.instance_norm: functools.partial(_autocast, _scaled_after(F.instance_norm)),
    F.group_norm: functools.partial(_autocast, _group_norm_of_copy),
    weight_norm: _weight_norm,
}
FIRST_DERIVATIVE_RULES: dict[Any, Callable[..., Any]] = {
    F.layer_norm: functools.partial(_autocast, F.layer_norm),
    F.batch_norm: functools.partial(_autocast, F.batch_norm),
    F.instance_norm: functools.partial(_autocast, F.instance_norm),
    F.group_norm: functools.partial(_autocast, _group_norm_by_layer_norm),
}
