"""The engine for B = 0, which vmap rejects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample._torch import FakeTensorMode, transforms
from persample.errors import LossError, TorchVersionError
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.utils import trees
from persample.utils.origin import is_users
from persample.vmap_rules.effects import guarded


def empty(call: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (gradients are dense anyway)
    """Return gradients with no rows; a fake sample shows the shapes.

    Args:
        call: a call without samples.
        required_ops: ignored.
    """
    value, (aux, has_aux) = of_fake_sample(call.loss, call)
    return Gradients.dense(
        [no_rows(x.expand((*value.shape, *x.shape))) for x in _one(call.params, call.params_batched)],
        spec=call.loss.spec,
        losses=no_rows(value),
        aux=trees.tree_map(no_rows, aux),
        has_aux=has_aux,
        weights=call.weights,
    )


def of_fake_sample(function: Callable[[Sequence[Tensor], Sequence[Any]], Any], call: Call) -> Any:
    """Call a function with the parameters and the leaves of a made-up sample.

    Args:
        function: a function of parameters and leaves.
        call: the call that defines the shapes and dtypes of the sample.

    Returns:
        The result of the function. Its tensors may be fake: only shapes, dtypes and devices are meaningful.
    """
    params = _one(call.params, call.params_batched)
    if not transforms():  # under which torch refuses to make leaves
        params = [param.requires_grad_() for param in params]
    with torch.enable_grad():  # for losses that differentiate something themselves
        return _fake_call(function, params, _one(call.leaves, call.leaves_batched))


def _one(values: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    rows = [x.new_zeros(x.shape[1:]) if split else x for x, split in zip(values, batched, strict=True)]
    return trees.map_tensors(torch.Tensor.detach, rows)  # new tensor objects, so that requires_grad_ spares the user's


def no_rows(x: Tensor) -> Tensor:
    """Return a tensor of zero rows of the shape of ``x``."""
    return torch.zeros((0, *x.shape), dtype=x.dtype, device=x.device)


def _fake_call(function: Callable[..., Any], params: Sequence[Tensor], leaves: Sequence[Any]) -> Any:
    handled = sys.exc_info()[1]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = trees.map_tensors(mode.from_tensor, (list(params), list(leaves)))
            return guarded(function)(*fakes)
    except (LossError, TorchVersionError):
        raise
    except Exception as error:
        if is_users(error, handled):
            raise
        return function(params, leaves)  # fake tensors have no values to read: the loss runs on zeros instead
