"""What surrounds a call or a module, and does not go with a stream of batches."""

from __future__ import annotations

import warnings
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from persample._torch import transforms
from persample.errors import ArgumentError, WrapperWarning
from persample.inputs import check_outside
from persample.utils import trees


def unwrapped(params: Any) -> Any:
    """Return the parameters with the module inside of each ``DistributedDataParallel``.

    Args:
        params: the user's parameters.

    Warns:
        WrapperWarning: if there was one.
    """
    leaves, structure = trees.flatten(params)
    if not any(isinstance(leaf, DistributedDataParallel) for leaf in leaves):
        return params
    warnings.warn(
        "params: of a DistributedDataParallel module, accumulate uses the module inside, and names results by its "
        "parameters. Its own reduction of gradients does not run: pass group= for results of all processes.",
        WrapperWarning,
        stacklevel=3,
    )
    inner = [leaf.module if isinstance(leaf, DistributedDataParallel) else leaf for leaf in leaves]
    return trees.unflatten(inner, structure)


def check_constant(*, differentiable: bool) -> None:
    """Reject derivatives of the results, and transforms of the caller's, whose tensors do not outlive a batch.

    Args:
        differentiable: the argument.

    Raises:
        ArgumentError: if there is one.
    """
    fix = "Call per_sample_grads(…, differentiable=True) there, on one batch."
    check_outside("accumulate", fix)
    if around := transforms():
        expected = "to be called outside of torch.func's transforms"
        received = f"a call inside torch.func.{around[0]}"
        raise ArgumentError.about("accumulate", expected=expected, received=received, fix=fix)
    if differentiable:
        expected = "False for a stream, which keeps none of its batches for a graph"
        fix = "Call per_sample_grads(…, differentiable=True) for each batch."
        raise ArgumentError.about("differentiable", expected=expected, received="True", fix=fix)
