"""Derivatives around a call, which would treat its results as constants."""

from __future__ import annotations

import torch

from persample import _torch
from persample.errors import ArgumentError
from persample.utils.flags import is_inside

_FIX = (
    "Its results are constants to outer derivatives. To differentiate them, reduce the rows of "
    "torch.func.vmap(torch.func.grad(loss_fn), in_dims=(None, 0))(params, batch) yourself. If constants are meant, "
    "call it under torch.no_grad(), or before the differentiated function."
)


def check_derivatives(called: str) -> None:
    """Reject a call inside of a derivative.

    ``torch.func.vmap`` around a call is accepted, also ``torch.no_grad()``, which says that constants are meant.

    Args:
        called: the name of the public function.

    Raises:
        ArgumentError: if a derivative is active.
    """
    around = [f"torch.func.{name}" for name in _torch.transforms() if name == "jvp" or _recorded(name)]
    if not around and _torch.is_forward_mode():
        around = ["a level of torch.autograd.forward_ad"]
    if (outer := is_inside()) and torch.is_grad_enabled():
        around = [f"{outer}, which is differentiated"]
    if around:
        expected = "to be called where nobody differentiates its results"
        raise ArgumentError.about(called, expected=expected, received=f"a call inside {around[0]}", fix=_FIX)


def _recorded(name: str) -> bool:
    return name == "grad" and torch.is_grad_enabled()
