"""From the samples to the loss, and from the loss back to the parameters; on every process of a group alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from persample import inputs
from persample.composite.buffers import Watch
from persample.composite.loss_head import Head
from persample.composite.passes import Passes
from persample.composite.processes import Processes, own_rows
from persample.errors import LossError
from persample.merge import merge
from persample.reductions import Reduction
from persample.utils import rng

_NOT_CONNECTED = (
    "encode_fn: expected z that depends on params, received z that depends on none of them. Likely causes: it uses a "
    "module or tensors it closed over instead of the params it is given, every path is detached, or the parameters "
    "sit in a module hidden in a plain Python list (use nn.ModuleList). Compute z from the first argument."
)


def two_passes(
    passes: Sequence[Passes], head: Head, wanted: Sequence[Reduction], watch: Watch | None, here: Processes
) -> tuple[Tensor, Any, list[Any]]:
    """Encode, differentiate the loss, encode again and back-propagate.

    Args:
        passes: of every tower.
        head: the loss.
        wanted: the reductions.
        watch: notes what the first pass leaves in buffers, if they are to be kept.
        here: which processes take part.

    Returns:
        The loss, the gradients of its own parameters, and the leaves of every reduction, merged.

    Raises:
        LossError: if z depends on no parameter.
    """
    sizes = here.facts([one.size for one in passes])  # by rank
    inputs.check_averages(wanted, None, sum(map(sum, sizes)))
    z = [_encoded(one, watch, here) for one in passes]
    loss, loss_grads, cotangents = here.together(lambda: _differentiated(head, z, here))
    after = rng.Streams.now()
    try:
        for one, of_tower in zip(passes, zip(*sizes, strict=True), strict=True):
            leaves = [cotangents.pop(0) for _ in range(one.leaves)]
            one.aim([None if leaf is None else own_rows(leaf, of_tower, here.rank) for leaf in leaves])
        lifted = here.together(lambda: functools.reduce(merge, (one.second(wanted) for one in passes)))
    finally:
        after.go_back()
    leaves, connected = here.merged(lifted)
    if not connected.value and any(map(sum, sizes)):
        raise LossError(_NOT_CONNECTED)
    return loss, loss_grads, leaves


def _encoded(passes: Passes, watch: Watch | None, here: Processes) -> Any:
    passes.prepare()
    return here.gathered(here.together(lambda: passes.first(watch)))


def _differentiated(head: Head, z: Sequence[Any], here: Processes) -> tuple[Tensor, Any, list[Tensor | None]]:
    before = None if here.group is None else rng.snapshot()
    found = head.differentiate(z)
    if before is not None and rng.moved_since(before):
        raise LossError(
            "loss_fn drew random numbers: every process of the group would compute another loss. Draw them before, "
            "alike on every process, and let loss_fn close over them."
        )
    return found
