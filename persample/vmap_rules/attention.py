"""Attention on CPUs, whose fused kernel torch.func would call sample by sample."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from persample._torch import (
    aten_attention_cpu,
    aten_attention_cpu_backward,
    aten_attention_math,
    temporarily_clear_interpreter_stack,
)
from persample.utils.dtypes import full_precision, is_autocast
from persample.utils.tracing import holds
from persample.utils.trees import map_tensors
from persample.vmap_rules.levels import differentiated
from persample.vmap_rules.rows import differentiated_once


def attention(  # noqa: PLR0917 - as torch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute scaled dot product attention.

    Args:
        query: as in torch.
        key: as in torch.
        value: as in torch.
        attn_mask: as in torch.
        dropout_p: as in torch.
        is_causal: as in torch.
        **options: as in torch: scale and enable_gqa.

    Returns:
        As in torch.
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if is_autocast(query.device):  # done here: torch.func differentiates none of the kernels under it
        query, key, value, attn_mask = map_tensors(_autocast, (query, key, value, attn_mask))
        with full_precision(query.device):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    plain = attn_mask is None and not dropout_p and not options.get("enable_gqa") and query.ndim >= 3
    alike = key.shape == value.shape and query.shape[:-2] == key.shape[:-2] and query.shape[-1] == key.shape[-1]
    full = query.numel() > 0 and key.numel() > 0
    known = query.dtype == key.dtype == value.dtype != torch.float16
    if plain and alike and full and known and differentiated_once():
        scale = options.get("scale")
        attend = functools.partial(_attend, is_causal=is_causal, scale=scale)
        gradients = functools.partial(_gradients, is_causal=is_causal, scale=scale)
        return differentiated(attend, gradients, query, key, value)
    with sdpa_kernel(SDPBackend.MATH):  # composed of operations with a batching rule
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def multi_head(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute multi-head attention, inside of which no other rewriting is at work.

    Args:
        query: as in torch.
        *args: as in torch.
        **kwargs: as in torch.

    Returns:
        As in torch.
    """
    if query.device.type != "cpu":
        return F.multi_head_attention_forward(query, *args, **kwargs)
    if is_autocast(query.device) and not kwargs.get("need_weights", True):  # whose softmax would not be cast
        # Cached: what is one tensor stays one.
        query, args, kwargs = map_tensors(functools.cache(_autocast), (query, args, kwargs))
        with full_precision(query.device):
            return multi_head(query, *args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return F.multi_head_attention_forward(query, *args, **kwargs)


def _autocast(x: Tensor) -> Tensor:
    narrowed = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if narrowed else x


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel: attention, the logarithms of its normalizers, and which heads were computed without it."""
    images = [_as_images(x) for x in (query, key, value)]
    out, normalizers = aten_attention_cpu(*images, 0.0, is_causal, scale=scale)
    composed = _irregular(*images[:2])
    if holds(composed.any()):
        out[composed] = _composed(*(x[composed] for x in images), is_causal=is_causal, scale=scale)
    heads = query.shape[:-2]
    return out.reshape(query.shape), normalizers.reshape(query.shape[:-1]), composed.reshape(heads)


def _gradients(grad: Tensor, *tensors: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    """The kernel's own, but for the heads that were computed without it."""
    *same, normalizers, composed = tensors
    images = [_as_images(x) for x in (grad, *same)]
    normalizers, composed = normalizers.reshape(images[0].shape[:-1]), composed.reshape(images[0].shape[:-2])
    grads = aten_attention_cpu_backward(*images, normalizers, 0.0, is_causal, scale=scale)
    if holds(composed.any()):
        attend = functools.partial(_composed, is_causal=is_causal, scale=scale)
        found = _differentiated(attend, *(x[composed] for x in images[:4]))
        grads = [x.index_put((composed,), y) for x, y in zip(grads, found, strict=False)]
    return tuple(x.reshape(like.shape) for x, like in zip(grads, same, strict=False))


def _irregular(query: Tensor, key: Tensor) -> Tensor:
    """Return which heads ``[N, H]`` have NaN where the kernel may take it for a mask (pytorch/pytorch#141128)."""
    return ~(query.sum((-2, -1)) + key.sum((-2, -1))).isfinite()


def _composed(*tensors: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    return aten_attention_math(*tensors, None, 0.0, is_causal, scale=scale)[0]


def _differentiated(function: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    with temporarily_clear_interpreter_stack(), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(function(*leaves), leaves, grad)


def _as_images(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()  # the kernel takes it for granted, and reads what lies beyond
    return x.reshape(-1, *x.shape[-3:])
