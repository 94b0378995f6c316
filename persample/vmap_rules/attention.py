"""Attention on CPUs, whose fused kernel torch.func would call sample by sample."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import (
    aten_attention_cpu,
    aten_attention_cpu_backward,
    aten_attention_math,
    multi_head_attention_by,
    nested_tensor_from_mask_left_aligned,
)
from persample.utils.numerics import autocast, is_autocast, precast
from persample.utils.tracing import holds
from persample.vmap_rules.levels import Function, Rules, call_kernel, gradients_by_autograd

_sdpa: Function = F.scaled_dot_product_attention
_mha: Function = F.multi_head_attention_forward


def _attention(compute: Function, query: Tensor, *args: object, **options: object) -> Tensor:
    """Compute scaled dot product attention: on CPUs by a given function, on other devices by torch's own."""
    if query.device.type != "cpu":
        return _sdpa(query, *args, **options)
    if is_autocast(query.device):
        return precast(autocast, query.device, compute, query, *args, **options)
    return compute(query, *args, **options)


def _composed_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: object, **options: object
) -> Tensor:
    """Compose attention of operations with a batching rule; ``sdpa_kernel`` would choose so for all threads."""
    known = attn_mask is None or attn_mask.dtype in {torch.bool, query.dtype}
    if not known or min(query.ndim, key.ndim, value.ndim) < 2:
        return _sdpa(query, key, value, attn_mask, *args, **options)  # mostly raises
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return aten_attention_math(query, key, value, attn_mask, *args, **options)[0]


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the fused kernel once for all samples if it supports the arguments; else compose attention of operations."""
    plain = attn_mask is None and not dropout_p and not enable_gqa and query.ndim >= 3
    alike = key.shape == value.shape and query.shape[:-2] == key.shape[:-2] and query.shape[-1] == key.shape[-1]
    full = query.numel() > 0 and key.numel() > 0
    known = query.dtype == key.dtype == value.dtype != torch.float16
    if not (plain and alike and full and known):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _composed_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    kernel = functools.partial(_kernel, is_causal=is_causal, scale=scale)
    gradients = functools.partial(_gradients, is_causal=is_causal, scale=scale)
    return call_kernel(kernel, gradients, query, key, value)[0]


def _multi_head(query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
    """Compute multi-head attention; inside of it no other rule is applied."""
    if query.device.type != "cpu":
        return _mha(query, *args, **kwargs)
    if is_autocast(query.device) and not kwargs.get("need_weights", True):  # its softmax would not be cast
        # Cached, so that arguments which are one tensor remain one tensor.
        return precast(functools.cache(autocast), query.device, _multi_head, query, *args, **kwargs)
    return multi_head_attention_by(_composed_attention)(query, *args, **kwargs)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention, the logarithms of its normalizers, and which heads were computed without the kernel."""
    images = [_as_images(x) for x in (query, key, value)]
    out, normalizers = aten_attention_cpu(*images, 0.0, is_causal, scale=scale)
    # Heads ``[N, H]`` with NaN, which the kernel may take for a mask (pytorch/pytorch#141128).
    composed = ~(images[0].sum((-2, -1)) + images[1].sum((-2, -1))).isfinite()
    if holds(composed.any()):
        out[composed] = _composed_heads(*(x[composed] for x in images), is_causal=is_causal, scale=scale)
    heads = query.shape[:-2]
    return out.reshape(query.shape), normalizers.reshape(query.shape[:-1]), composed.reshape(heads)


def _gradients(
    _needed: object, grad: Tensor, *tensors: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """Return the gradients of the kernel, and by autograd those of the heads that were computed without it."""
    *same, normalizers, composed = tensors
    images = [_as_images(x) for x in (grad, *same)]
    normalizers, composed = normalizers.reshape(images[0].shape[:-1]), composed.reshape(images[0].shape[:-2])
    grads = aten_attention_cpu_backward(*images, normalizers, 0.0, is_causal, scale=scale)
    if holds(composed.any()):
        attend = functools.partial(_composed_heads, is_causal=is_causal, scale=scale)
        found = gradients_by_autograd(attend, *(x[composed] for x in images[:4]))
        grads = [x.index_put((composed,), y) for x, y in zip(grads, found, strict=False)]
    return tuple(x.reshape(like.shape) for x, like in zip(grads, same, strict=False))


def _composed_heads(*tensors: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    return aten_attention_math(*tensors, None, 0.0, is_causal, scale=scale)[0]


def _as_images(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()  # the kernel reads features as if they were contiguous
    return x.reshape(-1, *x.shape[-3:])


RULES: Rules = {
    _sdpa: functools.partial(_attention, _composed_attention),
    _mha: _multi_head,
    nested_tensor_from_mask_left_aligned: lambda *_: False,  # so that nn.TransformerEncoder makes no nested tensors
}
FIRST_DERIVATIVE_RULES: Rules = {_sdpa: functools.partial(_attention, _fused_attention)}
