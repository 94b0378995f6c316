"""Hooks on tensors. torch calls them with the gradient of a batch, which is never computed here."""

from __future__ import annotations

from torch import Tensor

from persample._torch import backward_hooks, post_accumulate_grad_hooks


def is_hooked(x: Tensor) -> bool:
    """Return whether a tensor has a hook.

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
