"""Normalization of activations (layer, group, batch and instance norm) and of weights (weight norm)."""

from __future__ import annotations

import functools
import inspect
import math
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
def _group_norm(  # noqa: PLR0917 - as torch's
    compute: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    fits = _is_normalizable(input, num_groups, weight, bias)
    return (compute if fits else F.group_norm)(input, num_groups, weight, bias, eps)


def _of_copy(x: Tensor, *args: Any) -> Tensor:
    return F.group_norm(x.clone(memory_format=torch.contiguous_format), *args)


def _by_layer_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    groups = x.reshape(x.shape[0], num_groups, -1)
    out = F.layer_norm(groups, groups.shape[2:], eps=eps).reshape(x.shape)
    return _scaled(out, weight, bias, x.shape[1:2], (1,) * (x.ndim - 2)).to(x.dtype)


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


def _composed(norm: Callable[..., Tensor], flag: str, samples: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return batch or instance norm by its formula where the statistics are those of the input.

    Args:
        norm: the function of torch.
        flag: its argument that asks for these statistics.
        samples: the axes beside those of positions that a mean is over.
    """
    signature = inspect.signature(norm)

    def function(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        x, weight, bias = given["input"], given["weight"], given["bias"]
        axes = (*samples, *range(2, x.ndim))
        has_several = math.prod(x.shape[axis] for axis in axes) > 1  # otherwise an error
        if given[flag] and given["running_mean"] is None and has_several:
            normalized = _normalized(x, axes, given["eps"])
        else:
            normalized = norm(**{**given, "weight": None, "bias": None})
        return _scaled(normalized, weight, bias, x.shape[1:2], (1,) * (x.ndim - 2)).to(x.dtype)

    return function


def _normalized(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Return (x − mean) / √(variance + ε) over some axes, in float32 at least."""
    wide = x.to(accumulate_dtype(x.dtype))
    centered = wide - wide.mean(axes, keepdim=True)
    return centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()


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
    F.batch_norm: functools.partial(_autocast, _composed(F.batch_norm, "training", (0,))),
    F.instance_norm: functools.partial(_autocast, _composed(F.instance_norm, "use_input_stats", ())),
    F.group_norm: functools.partial(_autocast, functools.partial(_group_norm, _of_copy)),
    weight_norm: _weight_norm,
}
FIRST_DERIVATIVE_RULES: dict[Any, Callable[..., Any]] = {
    F.layer_norm: functools.partial(_autocast, F.layer_norm),
    F.batch_norm: functools.partial(_autocast, F.batch_norm),
    F.instance_norm: functools.partial(_autocast, F.instance_norm),
    F.group_norm: functools.partial(_autocast, functools.partial(_group_norm, _by_layer_norm)),
}
