"""Normalization of activations (layer, group, batch and instance norm) and of weights (weight norm)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import weight_norm
from persample.utils.dtypes import accumulate_dtype, is_autocast


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


# torch's kernels (2.13) are right for one derivative. In further ones, terms are missing: of the gradients of weights
# under vmap(grad); of reverse derivatives of forward ones, and of third derivatives, also without vmap.
def _layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    if list(input.shape[axes[0] :]) == list(normalized_shape):
        normalized = _normalized(input, axes, eps)
    else:  # an error
        normalized = F.layer_norm(input, normalized_shape, eps=eps)
    return _scaled(normalized, weight, bias, normalized_shape, ()).to(input.dtype)


def _batch_norm(  # noqa: PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: None,
    bias: None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training and running_mean is None and input.numel() > input.shape[1]:  # otherwise an error
        return _normalized(input, (0, *range(2, input.ndim)), eps)
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(  # noqa: PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: None,
    bias: None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if use_input_stats and running_mean is None and input.shape[2:].numel() > 1:  # otherwise an error
        return _normalized(input, tuple(range(2, input.ndim)), eps)
    return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _normalized(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Return (x − mean) / √(variance + ε) over some axes, in float32 at least."""
    wide = x.to(accumulate_dtype(x.dtype))
    centered = wide - wide.mean(axes, keepdim=True)
    return centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()


def _scaled_after(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return batch or instance norm whose weights are multiplied after it."""

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
        return _scaled(normalized, weight, bias, input.shape[1:2], (1,) * (input.ndim - 2)).to(input.dtype)

    return function


def _scaled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], axes: tuple[int, ...]
) -> Tensor:
    """Return a normalized tensor times weight plus bias of a shape, which get some more axes of 1 at their end."""
    for parameter in (weight, bias):
        if parameter is not None and list(parameter.shape) != list(shape):
            raise RuntimeError(f"Expected weight and bias of shape {list(shape)}, but got {list(parameter.shape)}")
    out = x if weight is None else x * weight.reshape(*weight.shape, *axes)
    return out if bias is None else out + bias.reshape(*bias.shape, *axes)


RULES: dict[Any, Callable[..., Any]] = {
    F.layer_norm: functools.partial(_autocast, _layer_norm),
    F.batch_norm: functools.partial(_autocast, _scaled_after(_batch_norm)),
    F.instance_norm: functools.partial(_autocast, _scaled_after(_instance_norm)),
    F.group_norm: functools.partial(_autocast, _group_norm_of_copy),
    weight_norm: _weight_norm,
}
FIRST_DERIVATIVE_RULES: dict[Any, Callable[..., Any]] = {
    F.layer_norm: functools.partial(_autocast, F.layer_norm),
    F.batch_norm: functools.partial(_autocast, F.batch_norm),
    F.instance_norm: functools.partial(_autocast, F.instance_norm),
    F.group_norm: functools.partial(_autocast, _group_norm_by_layer_norm),
}
