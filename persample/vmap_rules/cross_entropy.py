"""``F.cross_entropy`` and ``F.linear_cross_entropy``.

The gradient of the first over many classes takes one pass less than torch.func's own decomposition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.errors import LossError
from persample.utils.dtypes import is_autocast
from persample.vmap_rules.batched import is_batched, is_differentiated
from persample.vmap_rules.kernel_call import call_kernel

# With fewer logits per sample, the calls take longer than the passes.
_MANY = 2**12


def _cross_entropy(  # noqa: PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    classes = target.dtype == torch.long and input.shape[:-1] == target.shape and input.ndim in {1, 2}
    many = input.numel() >= _MANY and is_batched(input)
    known = reduction in {"mean", "sum", "none"} and not is_autocast(input.device)
    if not (plain and classes and many and known):
        settings = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return F.cross_entropy(input, target, *settings)
    kept = target != ignore_index
    losses = call_kernel(_losses, _gradients, input, torch.where(kept, target, 0), unneeded=1)
    losses = torch.where(kept, losses, 0)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / kept.sum()


def _losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, -1)
    return -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), log_p


def _gradients(_needed: Any, grad: Tensor, target: Tensor, _: Tensor, log_p: Tensor) -> tuple[Tensor, None]:
    is_shared = 0 in log_p.stride()  # by several gradients; otherwise nothing else reads them
    signals = (log_p.exp() if is_shared else log_p.exp_()).mul_(grad.unsqueeze(-1))
    return signals.scatter_add_(-1, target.unsqueeze(-1), -grad.unsqueeze(-1)), None


def _linear_cross_entropy(*args: Any, options: Any = None, weight: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Compute it at once: torch 2.13 batches the gradients of its parts wrongly, without an error."""
    if options is not None and weight is not None and is_differentiated(weight):
        raise LossError(
            "loss_fn: linear_cross_entropy with options expected weights of classes that depend on no parameter, "
            "received weights that do. Leave options out, or detach the weights."
        )
    return F.linear_cross_entropy(*args, weight=weight, **kwargs)


RULES: dict[Any, Callable[..., Any]] = {F.linear_cross_entropy: _linear_cross_entropy}
FIRST_DERIVATIVE_RULES: dict[Any, Callable[..., Any]] = {F.cross_entropy: _cross_entropy}
