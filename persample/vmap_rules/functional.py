"""Functions of ``torch.nn.functional`` that reach kernels without a batching rule, or look at values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import nested_tensor_from_mask_left_aligned, weight_norm
from persample.utils.dtypes import is_autocast
from persample.vmap_rules.attention import attention, multi_head
from persample.vmap_rules.classification import cross_entropy
from persample.vmap_rules.rows import differentiated_once, is_batched, unwrapped


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Compute a linear layer.

    Args:
        input: as in torch.
        weight: as in torch.
        bias: as in torch.

    Returns:
        As in torch.
    """
    # To a vector whose numbers do not lie side by side torch adds a bias of any dtype.
    fits = _fits(bias, weight, dtypes=input.ndim > 1 or input.is_contiguous())
    if weight.ndim != 2 or not fits:
        return F.linear(input, weight, bias)
    # torch.func takes a linear layer apart anyway: the sum with the bias need not be a second tensor.
    out = torch.mv(weight, input) if _is_small_vector(input, weight) else F.linear(input, weight)
    if bias is None or is_batched(bias) or out.dtype != bias.dtype:
        return out if bias is None else out + bias.to(out.dtype)
    return out.add_(bias)


def _fits(bias: Tensor | None, weight: Tensor, *, dtypes: bool = True) -> bool:
    if bias is None:
        return True
    if (
        dtypes and bias.dtype != weight.dtype and not is_autocast(bias.device)
    ):  # torch.func would cast it, torch refuses
        raise RuntimeError(f"expected weight and bias to have the same dtype, not {weight.dtype} and {bias.dtype}")
    return bias.shape == weight.shape[:1]


def _is_small_vector(x: Tensor, weight: Tensor) -> bool:
    # Of a vector, a matrix-vector product is half as many operations, in a layout that only small tensors bear well.
    small = x.ndim == 1 and is_small(unwrapped(x).numel() // max(1, x.numel()), weight)
    return small and not is_autocast(x.device)  # which does not know mv


def is_small(samples: int, weight: Tensor) -> bool:
    """Return whether vectors of so many samples are multiplied with a matrix in few operations, whatever the layout.

    Args:
        samples: how many vectors there are.
        weight: the matrix.
    """
    return samples > 1 and samples * max(weight.shape) <= _SMALL


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input1.shape[:-1] != input2.shape[:-1] or not _fits(bias, weight):
        return torch.bilinear(input1, input2, weight, bias)  # raises
    forms = F.linear(input2, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
    out = (forms @ input1.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if g.dtype != v.dtype:
        return weight_norm(v, g, dim)  # raises
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _gaussian_nll_loss(  # noqa: PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    # What torch does, except for looking whether a tensor of variances is negative.
    sizes = {input.shape, input.shape[:-1], (*input.shape[:-1], 1)}
    fits = var.shape in sizes if isinstance(var, Tensor) else var >= 0
    if not fits or reduction not in {"none", "mean", "sum"}:
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)  # raises
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if input.shape != var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var.clamp(min=eps).detach() + (var - var.detach())  # clamped, and its gradient is not
    loss = (var.log() + (input - target).square() / var) / 2
    if full:
        loss = loss + math.log(2 * math.pi) / 2
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _normalized(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    if is_autocast(input.device):  # under which torch's kernels take inputs narrower than weights; torch.func does not
        dtypes = {x.dtype for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        if len(dtypes) == 1:
            return function(input.to(dtypes.pop()), *args, **kwargs).to(input.dtype)
    return function(input, *args, **kwargs)


def _group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    # torch's kernels refuse strided tensors, or read beyond them, and vmap hands them such (torch's pull request
    # 186414); those of layer norm, here over the channels of one group, take any.
    channels = input.shape[1:2]
    fits = input.ndim > 1 and channels[0] % num_groups == 0
    fits &= all(x is None or x.shape == channels for x in (weight, bias))
    if not fits or input.numel() <= num_groups:
        return F.group_norm(input, num_groups, weight, bias, eps)  # raises, or has nothing to normalize
    if not differentiated_once():  # of higher order, torch's derivatives of layer norm are others in forward mode
        return F.group_norm(input.clone(memory_format=torch.contiguous_format), num_groups, weight, bias, eps)
    groups = input.reshape(input.shape[0], num_groups, -1)
    out = F.layer_norm(groups, groups.shape[2:], eps=eps).reshape(input.shape)
    per_channel = (-1, *(1,) * (input.ndim - 2))
    out = out if weight is None else out * weight.reshape(per_channel)
    return (out if bias is None else out + bias.reshape(per_channel)).to(input.dtype)


_SMALL = 2**16  # numbers in the inputs, and in the outputs, of all samples
FUNCTIONAL: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head,
    F.cross_entropy: cross_entropy,
    weight_norm: _weight_norm,
    nested_tensor_from_mask_left_aligned: lambda *_: False,  # so that nn.TransformerEncoder makes no nested tensors
    torch.bilinear: _bilinear,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    **{
        function: functools.partial(_normalized, function) for function in (F.layer_norm, F.batch_norm, F.instance_norm)
    },
    F.group_norm: functools.partial(_normalized, _group_norm),
}
