"""Attention on CPUs, whose fused kernel torch.func would call sample by sample."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _unwrap_batched
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.library import Library
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from persample.rewrites.rows import differentiated_once, refuse_graph

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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
    plain = attn_mask is None and not dropout_p and not options.get("enable_gqa") and query.ndim >= 3
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and query.shape[-1] == value.shape[-1]
    full = query.numel() > 0 and key.numel() > 0
    if plain and alike and full and query.dtype != torch.float16 and differentiated_once():
        return _fused(query, key, value, is_causal, options.get("scale"))
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
    with sdpa_kernel(SDPBackend.MATH):
        return F.multi_head_attention_forward(query, *args, **kwargs)


def _fused(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    _register()
    images = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    out = _kernel(*images, 0.0, is_causal, scale=scale)[0]
    if out.requires_grad:
        out.register_hook(lambda _: refuse_graph())  # its gradient has none
    return out.reshape(query.shape)


@functools.cache
def _register() -> Library:
    """Give the kernels the batching rules that torch has for those of GPUs only, from the first use on.

    Through an ``autograd.Function``, which can have one as well, a call takes twice as long.
    """
    rules = Library("aten", "IMPL")
    for kernel in (_kernel, _backward):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(kernel.name(), "FuncTorchBatched"):
            rules.impl(kernel, functools.partial(_batched, kernel), "FuncTorchBatched")
    return rules  # kept: they go with it


def _batched(kernel: Any, *args: Any, attn_mask: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Call a kernel of images ``[N, heads, steps, features]`` once for all samples: as more images N."""
    interpreter, images = retrieve_current_functorch_interpreter(), len(args[0])
    level = interpreter.level()
    given = [_unwrap_batched(x, level) if isinstance(x, Tensor) else (x, None) for x in (*args, attn_mask)]
    samples = next(x.shape[dim] for x, dim in given if dim is not None)

    def merged(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.expand(samples, *x.shape) if dim is None else x.movedim(dim, 0)
        x = x[:, None, None] if x.ndim == 3 else x  # a mask for all images and heads
        return x.expand(samples, images, *x.shape[2:]).flatten(0, 1)

    with interpreter.lower():
        *inputs, mask = (merged(*pair) for pair in given)
        out = [x.unflatten(0, (samples, images)) for x in kernel(*inputs, attn_mask=mask, **options)]
    return tuple(_add_batch_dim(x, 0, level) for x in out)
