"""How often a loss is differentiated: rules with hand-written gradients serve a single reverse-mode derivative.

``VmapRules`` is told who differentiates the loss:

- ``"torch.func"``: one ``vjp`` or ``grad`` of ``torch.func``, around or inside of vmap;
- ``"autograd"``: plain autograd, outside of all transforms;
- ``"any"``: anyone, any number of times.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from persample._torch import GradInterpreter, TransformType, retrieve_all_functorch_interpreters

DifferentiatedBy: TypeAlias = Literal["torch.func", "autograd", "any"]


class SecondDerivativeError(RuntimeError):
    """A hand-written gradient was differentiated again, for example by ``autograd.grad`` inside a loss.

    That shows only in the backward pass. ``VmapRules(differentiated_by="any")`` serves such a loss.
    """


def reject_second_derivative() -> None:
    """Raise an error if autograd records the backward pass that calls this function.

    Raises:
        SecondDerivativeError: if it does.
    """
    if torch.is_grad_enabled():
        raise SecondDerivativeError


def is_differentiated_once(by: DifferentiatedBy) -> bool:
    """Return whether the transforms that are active now are vmaps and at most one derivative, which is not recorded.

    Args:
        by: who differentiates the loss.
    """
    if by == "any":
        return False
    levels = retrieve_all_functorch_interpreters()
    grads = [level for level in levels if isinstance(level, GradInterpreter)]
    if not all(level.key() in {TransformType.Vmap, TransformType.Grad} for level in levels):  # forward mode
        return False
    if by == "autograd":
        return not grads
    return len(grads) == 1 and not grads[0].prev_grad_mode()
