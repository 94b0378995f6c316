"""What stands in for every engine where there are no samples: vmap refuses an empty batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample._torch import FakeTensorMode
from persample.errors import LossError
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.reductions.requested import Reductions
from persample.utils import trees


def empty(lift: Reductions, loss: SampleLoss, samples: Call, randomness: str) -> Any:  # noqa: ARG001
    """Lift gradients of no rows, their shapes taken from one fake sample.

    Args:
        lift: what to do with the gradients.
        loss: the loss of one sample.
        samples: none.
        randomness: not looked at; nothing is drawn.

    Returns:
        What ``lift`` returns.
    """
    value, (aux, has_aux) = of_fake_sample(loss, samples)
    params = _one(samples.params, samples.params_batched)
    return lift(
        Gradients.dense(
            trees.tree_map(no_rows, params),
            spec=loss.spec,
            losses=no_rows(value),
            aux=trees.tree_map(no_rows, aux),
            has_aux=has_aux,
            weights=samples.weights,
        )
    )


def of_fake_sample(call: Callable[[Sequence[Tensor], Sequence[Any]], Any], samples: Call) -> Any:
    """Call a function with the parameters and the leaves of one sample that is not there.

    Args:
        call: from parameters and leaves to anything.
        samples: of which only shapes and dtypes are looked at.

    Returns:
        What it returns; tensors may be fake: only their shapes, dtypes and devices say something.
    """
    params = [param.requires_grad_() for param in _one(samples.params, samples.params_batched)]
    with torch.enable_grad():  # for losses that differentiate something themselves
        return _fake_call(call, params, _one(samples.leaves, samples.leaves_batched))


def _one(values: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    rows = [x.new_zeros(x.shape[1:]) if split else x for x, split in zip(values, batched, strict=True)]
    return trees.map_tensors(torch.Tensor.detach, rows)  # handles of our own, even of what is not batched


def no_rows(x: Tensor) -> Tensor:
    """Return an empty tensor of the rows that a tensor is one of."""
    return torch.zeros((0, *x.shape), dtype=x.dtype, device=x.device)


def _fake_call(call: Callable[..., Any], params: Sequence[Tensor], leaves: Sequence[Any]) -> Any:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return call(trees.map_tensors(mode.from_tensor, params), trees.map_tensors(mode.from_tensor, leaves))
    except LossError:
        raise
    except Exception:  # noqa: BLE001 (a loss that reads values runs on zeros instead, or says itself what is wrong)
        return call(params, leaves)
