"""Losses whose matrices are used by linear layers alone: one vmap, and one backward pass of plain autograd.

``vmap(vjp(loss_fn))`` sends every operation through two transforms, in both directions. Where all matrices are weights
of ``F.linear``, one will do: the layers hand over their inputs and signals, which are the factors. That a matrix was
used in any other way, too, shows in autograd itself: only then it has a gradient of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _remove_batch_dim
from torch._functorch.predispatch import lazy_load_decompositions
from torch._functorch.vmap import vmap_increment_nesting

from persample import gemm
from persample.engines.watched import NotDirectError, Watching
from persample.factors import Dense, Factor, Outer, suited, total
from persample.factors.layout import Layout
from persample.fallback import explained
from persample.gradients import Gradients
from persample.loss import SampleLoss
from persample.numeric import full_precision, is_autocast, is_traced
from persample.rewrites import Caught, plain_autograd
from persample.rewrites.caught import Product
from persample.rewrites.functional import is_small
from persample.samples import Samples
from persample.trees import tree_map

_prepare = functools.cache(lazy_load_decompositions)  # of operations for vmap, once
# Of parameters with so few numbers, other than matrices, every sample may be given its own.
_SMALL = 2**12
_refused: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()  # shapes of parameters, by the code of the loss


def suits(loss: SampleLoss, samples: Samples) -> bool:
    """Return whether a loss may be one of linear layers: modules hold all matrices, and there is little beside them.

    Args:
        loss: the loss of one sample.
        samples: the chunk, not empty.
    """
    if loss.spec.shapes in _refused.get(_code(loss), ()):
        return False
    first = samples.params[0]
    if any(samples.params_batched) or is_traced(first) or is_autocast(first.device) or not first.is_floating_point():
        return False
    alike = all(x.dtype == first.dtype and x.device == first.device for x in samples.params)
    sizes = [(x.ndim == 2 and held) or (x.ndim < 2 and x.numel() <= _SMALL) for x, held in _held(loss, samples)]
    return alike and all(sizes) and any(x.ndim == 2 for x in samples.params)


def _held(loss: SampleLoss, samples: Samples) -> Iterable[tuple[Tensor, bool]]:
    return zip(samples.params, loss.params.in_layers, strict=True)


def gradients(loss: SampleLoss, samples: Samples, uses: frozenset[str]) -> Gradients | None:
    """Compute the gradients of all samples at once, if the loss is one of linear layers.

    Args:
        loss: the loss of one sample.
        samples: the chunk, not empty.
        uses: the operations of ``Factor`` that the reductions call.

    Returns:
        The gradients; or None if the loss is another, or raises.
    """
    try:
        with explained(), plain_autograd(), gemm.expected(samples.params, samples.leaves):
            return _gradients(loss, samples, uses)
    except Exception:  # noqa: BLE001 - whatever it is: torch.func takes more, and what it raises is explained
        return None


def refuse(loss: SampleLoss) -> None:
    """Remember that a loss is none of linear layers.

    Args:
        loss: the loss.
    """
    _refused.setdefault(_code(loss), set()).add(loss.spec.shapes)


def _code(loss: SampleLoss) -> Any:
    return getattr(loss.fn, "__code__", type(loss.fn))


def _dense(param: Tensor, signals: Sequence[Tensor], other: Tensor | None, size: int) -> Dense:
    """Return the gradients of a parameter that is no matrix: what linear layers were signalled, and what is left."""
    parts = [x if len(x) == size else x.view(size, -1, x.shape[1]).sum(1) for x in signals]
    if other is not None:
        parts.append(other)
    return Dense(functools.reduce(torch.add, parts)) if parts else _zeros(param, size)


def _factor(
    param: Tensor, products: Sequence[Product], other: Tensor | None, size: int, uses: frozenset[str]
) -> Factor:
    """Return the gradients of a matrix: products of signals and inputs."""
    if other is not None:
        raise NotDirectError
    if not products:
        return _zeros(param, size)
    return suited(total(_product(param, *product, size) for product in products), uses)


def _product(param: Tensor, signals: Tensor, rows: Tensor, of_vectors: bool, size: int) -> Factor:
    if of_vectors and 1 in param.shape and is_small(size, param):  # products with a number, as the long way has them
        return Dense(signals.unsqueeze(2) * rows.unsqueeze(1))
    left, right = (x.reshape(size, 1, -1, x.shape[1]) for x in (signals, rows))
    return Outer(left, right, Layout.of_matrix(*param.shape), param.dtype)


def _zeros(param: Tensor, size: int) -> Dense:
    return Dense.zeros(size, param.shape, param.dtype, param.device)


def _gradients(loss: SampleLoss, samples: Samples, uses: frozenset[str]) -> Gradients:
    _prepare()
    own = tuple(x.ndim != 2 for x in samples.params)
    leaves = tuple(
        (x.expand(samples.size, *x.shape) if split else x.detach()).requires_grad_()
        for x, split in zip(samples.params, own, strict=True)
    )

    with torch.enable_grad(), vmap_increment_nesting(samples.size, "error") as level:

        def given(values: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
            return [_add_batch_dim(x, 0, level) if split else x for x, split in zip(values, batched, strict=True)]

        params, sample = given(leaves, own), given(samples.leaves, samples.leaves_batched)
        caught = Caught(samples.params, params, level)
        with Watching(caught, (*sample, *params)):
            value, (aux, has_aux) = loss(params, sample)
        losses = _remove_batch_dim(value, level, samples.size, 0)
        if has_aux:  # perhaps the user's own tensors, so copied
            aux = tree_map(lambda x: _remove_batch_dim(x, level, samples.size, 0).detach().clone(), aux)
    others = torch.autograd.grad([losses], leaves, [torch.ones_like(losses)], allow_unused=True)
    if not caught.products and all(x is None for x in others):
        raise NotDirectError
    with full_precision(losses.device):
        factors = tuple(
            _factor(x, caught.products.get(place, ()), other, samples.size, uses)
            if x.ndim == 2
            else _dense(x, caught.signals.get(place, ()), other, samples.size)
            for place, (x, other) in enumerate(zip(samples.params, others, strict=True))
        )
    return Gradients(factors, loss.spec, losses.detach(), aux, has_aux, samples.weights)
