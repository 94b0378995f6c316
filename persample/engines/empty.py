"""What stands in for every engine where there are no samples: vmap refuses an empty batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from persample import trees
from persample.errors import LossError
from persample.gradients import Gradients
from persample.lift import Lift
from persample.loss import SampleLoss
from persample.samples import Samples


def empty(lift: Lift, loss: SampleLoss, samples: Samples, randomness: str) -> Any:  # noqa: ARG001
    """Lift gradients of no rows, their shapes taken from one fake sample.

    Args:
        lift: what to do with the gradients.
        loss: the loss of one sample.
        samples: none.
        randomness: not looked at; nothing is drawn.

    Returns:
        What ``lift`` returns.
    """
    params = [param.requires_grad_() for param in _one(samples.params, samples.params_batched)]
    with torch.enable_grad():  # for losses that differentiate something themselves
        value, (aux, has_aux) = _fake_call(loss, params, _one(samples.leaves, samples.leaves_batched))
    return lift(
        Gradients.dense(
            trees.tree_map(_no_rows, params),
            spec=loss.spec,
            losses=_no_rows(value),
            aux=trees.tree_map(_no_rows, aux),
            has_aux=has_aux,
            weights=samples.weights,
        )
    )


def _one(values: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    rows = [x.new_zeros(x.shape[1:]) if split else x for x, split in zip(values, batched, strict=True)]
    return trees.map_tensors(torch.Tensor.detach, rows)  # handles of our own, even of what is not batched


def _no_rows(x: Tensor) -> Tensor:
    return torch.zeros((0, *x.shape), dtype=x.dtype, device=x.device)


def _fake_call(loss: SampleLoss, params: Sequence[Tensor], leaves: Sequence[Any]) -> tuple[Tensor, Any]:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return loss(trees.map_tensors(mode.from_tensor, params), trees.map_tensors(mode.from_tensor, leaves))
    except LossError:
        raise
    except Exception:  # noqa: BLE001 (a loss that reads values runs on zeros instead, or says itself what is wrong)
        return loss(params, leaves)
