"""Functions of parameters and of values of the samples that are no layers: products of three, distances, gathers.

``torch.func.vjp`` differentiates such a function under the vmap around the loss. The backward pass enters that vmap
again, and its products are deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp

from persample._torch import (
    add_batch_dim,
    remove_batch_dim,
    temporarily_clear_interpreter_stack,
    vmap_increment_nesting,
)
from persample.engines.deferred.placeholder import values_of
from persample.engines.layers.shared import NotLayersError
from persample.outputs import memory
from persample.vmap_rules.batched import batch_first, is_batched


class Vmap(NamedTuple):
    """The vmap around the loss.

    Args:
        level: its level.
        size: B.
    """

    level: int
    size: int


class Grads(NamedTuple):
    """The gradients of the arguments of a function.

    Args:
        of_params: the gradients of the parameters, ``[B, *shape]``; perhaps placeholders.
        of_values: the gradients of the values of the samples.
    """

    of_params: list[Tensor]
    of_values: list[Tensor]


class _WithBackward(Function):
    @staticmethod
    def forward(
        ctx: Any, results: list[Tensor], backward: _Backward, num_params: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)  # so that autograd refuses writes into them
        ctx.backward, ctx.num_params = backward, num_params
        return tuple(x.detach() for x in results)  # which the backward pass holds: with this node, that were a cycle

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, None, *[None] * ctx.num_params, *ctx.backward(signals)


_Backward = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # from output gradients to those of the values
# (results, backward pass, number of parameters, *parameters, *values) → the results, with a graph. Passes no gradient
# to parameters, so that a gradient there comes from another use of them.
_with_backward: Callable[..., tuple[Tensor, ...]] = _WithBackward.apply


def mixed(
    function: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
    params: Sequence[Tensor],
    values: Sequence[Tensor],
    vmap: Vmap,
    record: Callable[[Callable[[], Grads]], Sequence[Tensor]],
) -> list[Tensor]:
    """Call a function of parameters and of values of the samples.

    Args:
        function: from parameters and values to results.
        params: the parameters, plain.
        values: the values that need gradients, batched by the vmap.
        vmap: the vmap around the loss, which is the only transform.
        record: is given a backward pass; runs it, and returns the gradients of the values.

    Returns:
        The results, batched by the vmap; each has one value per sample.
    """
    level, size = vmap
    with torch.no_grad():
        results, backward, *_ = vjp(function, [x.detach() for x in params], [x.detach() for x in values])
    if not all(map(is_batched, results)):
        raise NotLayersError("the loss calls a function of tensors of the samples whose results are the same for all")

    def grads_of(signals: Sequence[Tensor]) -> Grads:
        with vmap_increment_nesting(size, "error") as level:
            grads = backward([add_batch_dim(x, 0, level) for x in signals], retain_graph=False)
            of_params, of_values = ([remove_batch_dim(x, level, size, 0) for x in xs] for xs in grads)
        return Grads(of_params, values_of(of_values, "the backward pass"))

    def pull_back(signals: Sequence[Tensor]) -> Sequence[Tensor]:
        return record(lambda: grads_of(signals))

    plain = list(map(batch_first, values))
    memories = set(map(memory, plain))  # autograd takes no views of its arguments for results
    found = [x.clone() if memory(x) in memories else x for x in map(batch_first, results)]
    with temporarily_clear_interpreter_stack():
        with_graph = _with_backward(found, pull_back, len(params), *params, *plain)
    return [add_batch_dim(x, 0, level) for x in with_graph]
