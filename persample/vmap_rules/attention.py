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
from persample.vmap_rules.levels import Function, Rules, call_kernel, gradients_by_autograd, is_differentiated

_sdpa: Function = F.scaled_dot_product_attention
_mha: Function = F.multi_head_attention_forward
_LARGEST = 1e3  # the sum of exponentials, whose logarithm is added to a score of this size, keeps 4 digits in float32


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
    if not _is_known(attn_mask, query) or min(query.ndim, key.ndim, value.ndim) < 2:
        return _sdpa(query, key, value, attn_mask, *args, **options)  # mostly raises
    return aten_attention_math(query, key, value, _summand(attn_mask, query), *args, **options)[0]


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
    plain = not dropout_p and query.ndim >= 3 and query.numel() > 0 and key.numel() > 0 and key.shape == value.shape
    if plain and enable_gqa and query.ndim == key.ndim and query.shape[-3] % key.shape[-3] == 0:
        count, enable_gqa = query.shape[-3] // key.shape[-3], False
        key, value = (x.repeat_interleave(count, -3) for x in (key, value))
    alike = query.shape[:-2] == key.shape[:-2] and query.shape[-1] == key.shape[-1] and not enable_gqa
    known = query.dtype == key.dtype == value.dtype != torch.float16
    if attn_mask is not None:  # the kernel gives masks no gradient
        known &= _is_known(attn_mask, query) and not (is_causal or is_differentiated(attn_mask))
    if not (plain and alike and known):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _composed_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    kernel = functools.partial(_kernel, is_causal=is_causal, scale=scale)
    gradients = functools.partial(_gradients, is_causal=is_causal, scale=scale)
    mask = _summand(attn_mask, query)
    masks = () if mask is None else (mask.expand(*query.shape[:-1], key.shape[-2]),)
    return call_kernel(kernel, gradients, query, key, value, *masks)[0]


def _is_known(mask: Tensor | None, query: Tensor) -> bool:
    return mask is None or mask.dtype in {torch.bool, query.dtype}


def _summand(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return what is added to the products of queries and keys."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)


def _multi_head(query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
    """Compute multi-head attention; inside of it no other rule is applied."""
    if query.device.type != "cpu":
        return _mha(query, *args, **kwargs)
    if is_autocast(query.device) and not kwargs.get("need_weights", True):  # its softmax would not be cast
        # Cached, so that arguments which are one tensor remain one tensor.
        return precast(functools.cache(autocast), query.device, _multi_head, query, *args, **kwargs)
    return multi_head_attention_by(_composed_attention)(query, *args, **kwargs)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention, the logarithms of its normalizers, and which heads were computed without the kernel."""
    images = [_as_images(x) for x in (query, key, value)]
    mask = None if mask is None else _as_images(mask)
    out, normalizers = aten_attention_cpu(*images, 0.0, is_causal, attn_mask=mask, scale=scale)
    # Heads ``[N, H]`` with NaN, which the kernel may take for a mask (pytorch/pytorch#141128).
    composed = ~(images[0].sum((-2, -1)) + images[1].sum((-2, -1))).isfinite()
    if mask is not None:
        # Where a mask adds the least number to all keys of a query, their count is lost in the normalizer, and the
        # kernel's gradients are too large.
        composed |= ~(mask.sum((-2, -1)) < torch.inf)
        composed |= ((normalizers.abs() > _LARGEST) & normalizers.isfinite()).any(-1)
        images.append(mask)
    if holds(composed.any()):
        out[composed] = _composed_heads(*(x[composed] for x in images), is_causal=is_causal, scale=scale)
    heads = query.shape[:-2]
    return out.reshape(query.shape), normalizers.reshape(query.shape[:-1]), composed.reshape(heads)


def _gradients(
    _needed: object, grad: Tensor, *tensors: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the kernel, and by autograd those of the heads that were computed without it."""
    query, key, value, *masks, out, normalizers, composed = tensors
    images = [_as_images(x) for x in (grad, query, key, value, out, *masks)]
    normalizers, composed = normalizers.reshape(images[0].shape[:-1]), composed.reshape(images[0].shape[:-2])
    mask = images.pop() if masks else None
    grads = aten_attention_cpu_backward(*images, normalizers, 0.0, is_causal, attn_mask=mask, scale=scale)
    if holds(composed.any()):
        attend = functools.partial(_composed_heads, is_causal=is_causal, scale=scale)
        inputs = images[:4] if mask is None else (*images[:4], mask)
        found = gradients_by_autograd(attend, *(x[composed] for x in inputs))
        grads = [x.index_put((composed,), y) for x, y in zip(grads, found, strict=False)]
    of_inputs = (x.reshape(like.shape) for x, like in zip(grads, (query, key, value), strict=True))
    return *of_inputs, *[None] * len(masks)


def _composed_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: object) -> Tensor:
    return aten_attention_math(query, key, value, mask, 0.0, **options)[0]


def _as_images(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()  # the kernel reads features as if they were contiguous
    return x.reshape(-1, *x.shape[-3:])


RULES: Rules = {
    _sdpa: functools.partial(_attention, _composed_attention),
    _mha: _multi_head,
    nested_tensor_from_mask_left_aligned: lambda *_: False,  # so that nn.TransformerEncoder makes no nested tensors
}
FIRST_DERIVATIVE_RULES: Rules = {_sdpa: functools.partial(_attention, _fused_attention)}
