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
from persample.engines.layers.shared import NotLayersError, Vmap
from persample.outputs import memory
from persample.vmap_rules.batched import batch_first, is_batched


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
    def forward(ctx: Any, results: list[Tensor], backward: _Backward, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = tuple(x.detach() for x in results)  # the backward pass holds the results: with this node, a cycle
        ctx.save_for_backward(*tensors, *found)  # so that autograd refuses writes into them
        ctx.backward = backward
        return found

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, *ctx.backward(signals)


_Backward = Callable[[Sequence[Tensor]], Sequence["Tensor | None"]]  # from output gradients to those of the tensors
# (results, backward pass, *tensors) → the results, with a graph.
_with_backward: Callable[..., tuple[Tensor, ...]] = _WithBackward.apply


def mixed(
    function: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]],
    params: Sequence[Tensor],
    values: Sequence[Tensor],
    vmap: Vmap,
    record: Callable[[Callable[[], Grads]], Sequence[Tensor]],
) -> list[Tensor]:
    """Call a function of parameters and of values of the samples.

    Parameters get no gradient from autograd, so that a gradient there comes from another use of them.

    Args:
        function: from parameters and values to results.
        params: the parameters, plain.
        values: the values, batched by the vmap.
        vmap: the vmap around the loss, which is the only transform.
        record: is given a backward pass; runs it, and returns the gradients of the values.

    Returns:
        The results, batched by the vmap; each has one value per sample.
    """
    plain, constants = list(map(batch_first, values)), [x.detach() for x in values]
    chosen = [place for place, x in enumerate(plain) if x.requires_grad]
    if not (params or chosen):  # a derivative of something, for functions that torch does not batch without one
        chosen = [place for place, x in enumerate(plain) if x.is_floating_point()]

    def of_chosen(params: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        found = dict(zip(chosen, given, strict=True))
        return function(params, [found.get(place, x) for place, x in enumerate(constants)])

    with torch.no_grad():
        results, backward, *_ = vjp(of_chosen, [x.detach() for x in params], [constants[place] for place in chosen])
    used = set(map(memory, plain))
    if not all(is_batched(x) and memory(batch_first(x)) not in used for x in results):
        raise NotLayersError("the loss calls a function that returns a parameter or a view of another argument")

    def grads_of(signals: Sequence[Tensor]) -> Grads:
        with vmap_increment_nesting(vmap.size, "error") as level:
            grads = backward([add_batch_dim(x, 0, level) for x in signals], retain_graph=False)
            of_params, of_values = ([remove_batch_dim(x, level, vmap.size, 0) for x in xs] for xs in grads)
        return Grads(of_params, values_of(of_values, "the backward pass"))

    def pull_back(signals: Sequence[Tensor]) -> list[Tensor | None]:
        found = dict(zip(chosen, record(lambda: grads_of(signals)), strict=True))
        return [*[None] * len(params), *map(found.get, range(len(plain)))]

    with temporarily_clear_interpreter_stack():
        with_graph = _with_backward(list(map(batch_first, results)), pull_back, *params, *plain)
    return [add_batch_dim(x, 0, vmap.level) for x in with_graph]
