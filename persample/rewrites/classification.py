"""Cross-entropy over many classes: one pass less than torch.func's own decomposition of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import Function
from torch.nn import functional as F

from persample.numeric import is_autocast
from persample.rewrites.rows import SecondDerivativeError, differentiated_once, is_batched, refuse_graph

# Below this many logits in a sample the calls cost more than the passes.
_MANY = 2**12


def cross_entropy(  # noqa: PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy of logits and classes.

    Args:
        input: as in torch.
        target: as in torch.
        weight: as in torch.
        size_average: as in torch.
        ignore_index: as in torch.
        reduce: as in torch.
        reduction: as in torch.
        label_smoothing: as in torch.

    Returns:
        As in torch.
    """
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    classes = target.dtype == torch.long and input.shape[:-1] == target.shape and input.ndim in {1, 2}
    # One grad and one vmap: the rule that torch generates knows no other.
    many = input.numel() >= _MANY and is_batched(input) and len(retrieve_all_functorch_interpreters()) == 2
    known = reduction in {"mean", "sum", "none"} and not is_autocast(input.device)
    if not (plain and classes and many and known and differentiated_once()):
        settings = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return F.cross_entropy(input, target, *settings)
    kept = target != ignore_index
    losses = torch.where(kept, _CrossEntropy.apply(input, torch.where(kept, target, 0))[0], 0)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / kept.sum()


class _CrossEntropy(Function):
    """Losses and log-probabilities of rows of logits."""

    apply: Callable[..., tuple[Tensor, Tensor]]
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(logits, -1)
        return -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), log_p

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[1], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        refuse_graph()
        if getattr(ctx, "is_used", False):  # a second backward pass inside the loss
            raise SecondDerivativeError
        ctx.is_used = True
        target, log_p = ctx.saved_tensors
        # In place: nothing else reads them.
        signals = log_p.exp_().mul_(grad.unsqueeze(-1)).scatter_add_(-1, target.unsqueeze(-1), -grad.unsqueeze(-1))
        return signals.view_as(log_p), None  # torch.func takes a saved tensor itself for one of another level
