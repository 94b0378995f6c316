"""Cross-entropy over many classes: one pass less than torch.func's own decomposition of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.utils.dtypes import is_autocast
from persample.vmap_rules.levels import differentiated
from persample.vmap_rules.rows import differentiated_once, is_batched

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
    many = input.numel() >= _MANY and is_batched(input)
    known = reduction in {"mean", "sum", "none"} and not is_autocast(input.device)
    if not (plain and classes and many and known and differentiated_once()):
        settings = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return F.cross_entropy(input, target, *settings)
    kept = target != ignore_index
    losses = torch.where(kept, differentiated(_losses, _gradients, input, torch.where(kept, target, 0), unneeded=1), 0)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / kept.sum()


def _losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, -1)
    return -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), log_p


def _gradients(grad: Tensor, target: Tensor, _: Tensor, log_p: Tensor) -> tuple[Tensor, None]:
    signals = log_p.exp_().mul_(grad.unsqueeze(-1))  # in place: nothing else reads them
    return signals.scatter_add_(-1, target.unsqueeze(-1), -grad.unsqueeze(-1)), None
