"""Hooks on tensors, which would be called with the gradient of the batch: here there is none."""

from __future__ import annotations

from torch import Tensor

from persample._torch import backward_hooks, post_accumulate_grad_hooks


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
    return bool(backward_hooks(x) or post_accumulate_grad_hooks(x))
