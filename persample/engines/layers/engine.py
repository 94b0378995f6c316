"""Losses whose matrices are used by layers alone: one vmap, and one backward pass of plain autograd.

``vmap(vjp(loss_fn))`` sends every operation through two transforms, in both directions. Where matrices are weights of
``F.linear`` and ``F.embedding``, one will do: the layers hand over their inputs and signals, which are the factors.
That a matrix, or a bias that only layers hold, was used in any other way shows in autograd itself: only then it has a
gradient of its own. Of what else there is every sample has its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample._torch import (
    add_batch_dim,
    lazy_load_decompositions,
    remove_batch_dim,
    transforms,
    vmap_increment_nesting,
)
from persample.engines.layers.factors import LayerFactors
from persample.engines.layers.guard import LayerGuard, NotLayersError
from persample.engines.layers.interceptor import LayerInterceptor
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.utils.dtypes import is_autocast
from persample.utils.interrupts import interrupts_first
from persample.utils.origin import handled_error, is_users
from persample.utils.tracing import is_traced
from persample.utils.trees import tree_map
from persample.vmap_rules import plain_autograd

_prepare = functools.cache(lazy_load_decompositions)  # of operations for vmap, once
# Of other vectors with so few numbers every sample may be given its own.
_SMALL = 2**12


def suits(call: Call) -> bool:
    """Return whether a loss may be one of layers: modules hold all matrices, and there is little beside them.

    Args:
        call: the chunk, not empty.
    """
    loss, samples = call.loss, call
    first = samples.params[0]
    if call.randomness != "error" or transforms():
        return False
    if any(samples.params_batched) or is_traced(first) or is_autocast(first.device) or not first.is_floating_point():
        return False
    alike = all(x.dtype == first.dtype and x.device == first.device for x in samples.params)
    known = [
        held or (by_hand if x.ndim > 1 else x.numel() <= _SMALL)
        for (x, held), by_hand in zip(_held(loss, samples), loss.params.by_hand, strict=True)
    ]
    return alike and all(known) and any(held and x.ndim == 2 for x, held in _held(loss, samples))


def _held(loss: SampleLoss, samples: Call) -> Iterable[tuple[Tensor, bool]]:
    return zip(samples.params, loss.params.in_layers, strict=True)


def gradients(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients of all samples at once, if the loss is one of layers.

    Args:
        call: the chunk, not empty.
        required_ops: the operations of ``Factor`` that the reductions call.

    Raises:
        NotLayersError: if the loss is another, or if torch refuses what it does.
        Exception: what the loss itself raises.
    """
    handled = handled_error()
    try:
        with interrupts_first(), plain_autograd():
            return _gradients(call.loss, call, required_ops)
    except Exception as error:
        if is_users(error, handled):
            raise
        raise NotLayersError from error


def _gradients(loss: SampleLoss, samples: Call, uses: frozenset[str]) -> Gradients:
    _prepare()
    own = tuple(not held for _, held in _held(loss, samples))
    leaves = tuple(
        (x.expand(samples.size, *x.shape) if split else x.detach()).requires_grad_()  # each sample's own, or one
        for x, split in zip(samples.params, own, strict=True)
    )

    with torch.enable_grad(), vmap_increment_nesting(samples.size, "error") as level:

        def given(values: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
            return [add_batch_dim(x, 0, level) if split else x for x, split in zip(values, batched, strict=True)]

        params, sample = given(leaves, own), given(samples.leaves, samples.leaves_batched)
        repeated = itertools.compress(params, own)
        collected = LayerFactors(samples.params, samples.size, uses)
        caught = LayerInterceptor(samples.params, params, level, samples.size, collected)
        with LayerGuard(caught, (*sample, *params), repeated) as watching:
            value, (aux, has_aux) = loss(params, sample)
        if watching.has_refused:
            raise NotLayersError
        losses = remove_batch_dim(value, level, samples.size, 0)
        if has_aux:  # perhaps the user's own tensors, so copied
            aux = tree_map(lambda x: remove_batch_dim(x, level, samples.size, 0).detach().clone(), aux)
    others = torch.autograd.grad([losses], leaves, [torch.ones_like(losses)], allow_unused=True)
    found = [split for split, other in zip(own, others, strict=True) if other is not None]
    if not all(found) or not (found or collected):
        raise NotLayersError
    factors = tuple(
        collected.other(place, other) if split or x.ndim != 2 else collected.matrix(place)
        for place, (x, split, other) in enumerate(zip(samples.params, own, others, strict=True))
    )
    return Gradients(factors, loss.spec, losses.detach(), aux, has_aux, samples.weights)
