"""Derivatives around a call: of ``torch.func``, of plain autograd, and of forward mode."""

from __future__ import annotations

import torch

from persample import _torch
from persample.errors import ArgumentError
from persample.utils.flags import is_inside

_CONSTANTS = "If constants are meant, call it under torch.no_grad(), or before the differentiated function."


class NestedCallError(ArgumentError):
    """Raised where plain autograd differentiates a loss, and a call inside of it would return constants."""


def is_differentiated(called: str, *, requested: bool) -> bool:
    """Return whether the results of a call are differentiated, so that they must be computed by differentiable steps.

    Args:
        called: the name of the public function.
        requested: the argument ``differentiable``. Without grad mode it has no effect.

    Raises:
        ArgumentError: if a derivative is active that takes the results for constants.
    """
    _check_forward_mode(called)
    if any(map(_differentiates, _torch.transforms())):
        return True
    if not torch.is_grad_enabled():
        return False
    if (outer := is_inside()) and not requested:
        expected = f"differentiable=True inside {outer}, which is differentiated"
        raise NestedCallError.about(called, expected=expected, received="differentiable=False", fix=_CONSTANTS)
    return requested


def check_outside(called: str, instead: str) -> None:
    """Reject a call inside of a derivative or of vmap, for functions whose results would be constants there.

    ``torch.no_grad()`` inside of a derivative is accepted: it says that constants are meant.

    Args:
        called: the name of the public function.
        instead: what to use there.

    Raises:
        ArgumentError: if a derivative or vmap is active.
    """
    _check_forward_mode(called)
    around = [f"torch.func.{name}" for name in _torch.transforms() if name == "vmap" or _differentiates(name)]
    if (outer := is_inside()) and torch.is_grad_enabled():
        around = [f"{outer}, which is differentiated"]
    if around:
        expected, received = "to be called outside of transforms and losses", f"a call inside {around[0]}"
        raise ArgumentError.about(called, expected=expected, received=received, fix=f"{instead} {_CONSTANTS}")


def _differentiates(transform: str) -> bool:
    return transform == "jvp" or (transform == "grad" and torch.is_grad_enabled())


def _check_forward_mode(called: str) -> None:
    if not _torch.transforms() and _torch.is_forward_mode():
        fix = "Use torch.func.jvp; or call it before the level is entered, if constants are meant."
        expected, received = "torch.func for forward mode", "a call inside a level of torch.autograd.forward_ad"
        raise ArgumentError.about(called, expected=expected, received=received, fix=fix)
