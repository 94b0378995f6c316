"""Hooks on tensors, which would be called with the gradient of the batch: here there is none."""

from __future__ import annotations

from torch import Tensor


def is_hooked(x: Tensor) -> bool:
    """Return whether a hook was put on a tensor and not removed since.

    Args:
        x: a parameter.

    Examples:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> hook = x.register_hook(torch.neg)
        >>> is_hooked(x), hook.remove(), is_hooked(x)
        (True, None, False)
    """
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)
