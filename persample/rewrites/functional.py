"""Functions of ``torch.nn.functional`` that reach kernels without a batching rule, or look at values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _nested_tensor_from_mask_left_aligned
from torch.nn import functional as F

from persample.numeric import is_autocast
from persample.rewrites.attention import attention, multi_head
from persample.rewrites.classification import cross_entropy
from persample.rewrites.rows import is_batched, unwrapped


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    # torch.func takes a linear layer apart anyway: the sum with the bias need not be a second tensor.
    out = torch.mv(weight, input) if _is_small_vector(input, weight) else F.linear(input, weight)
    if bias is None or is_batched(bias) or out.dtype != bias.dtype:
        return out if bias is None else out + bias.to(out.dtype)
    return out.add_(bias)


def _is_small_vector(x: Tensor, weight: Tensor) -> bool:
    # Of a vector, a matrix-vector product is half as many operations, in a layout that only small tensors bear well.
    samples = unwrapped(x).numel() // max(1, x.numel())
    small = x.ndim == 1 and samples > 1 and samples * max(weight.shape) <= _SMALL
    return small and not is_autocast(x.device)  # which does not know mv


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    forms = F.linear(input2, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
    out = (forms @ input1.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _gaussian_nll_loss(  # noqa: PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    # What torch does, except for looking whether a variance is negative.
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    var = var.clamp(min=eps).detach() + (var - var.detach())  # clamped, and its gradient is not
    loss = (var.log() + (input - target).square() / var) / 2
    if full:
        loss = loss + math.log(2 * math.pi) / 2
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


_SMALL = 2**16  # numbers in the inputs, and in the outputs, of all samples
FUNCTIONAL: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head,
    F.cross_entropy: cross_entropy,
    torch._weight_norm: _weight_norm,
    _nested_tensor_from_mask_left_aligned: lambda *_: False,  # so that nn.TransformerEncoder makes no nested tensors
    torch.bilinear: _bilinear,
    F.gaussian_nll_loss: _gaussian_nll_loss,
}
