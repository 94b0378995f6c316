"""Hooks on tensors. torch calls them with the gradient of a batch, which is never computed here."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from persample._torch import backward_hooks, post_accumulate_grad_hooks


def are_hooked(tensors: Sequence[Tensor]) -> bool:
    """Return whether any of some tensors has a hook.

    Args:
        tensors: the parameters.

    Examples:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> hook = x.register_hook(torch.neg)
        >>> are_hooked([x]), hook.remove(), are_hooked([x])
        (True, None, False)
    """
    return any(map(backward_hooks, tensors)) or any(map(post_accumulate_grad_hooks, tensors))
