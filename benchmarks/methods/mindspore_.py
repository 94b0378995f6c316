"""MindSpore: ``jit(vmap(grad(loss)))``, as in the tutorial on TD(0), with the reduction inside the jit.

Its losses are functions of as many tensors as there are parameters, since ``mindspore.grad`` counts positions. They use
only operations that its vmap batches: others it unrolls into one copy per sample. A compiled call may return before its
result is there; asking for NumPy arrays, which share its memory, waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from benchmarks.methods.method import CORRECTION, MAX_NORM, CannotError, Method, Prepared
from benchmarks.saved import Saved

DISCOUNT = 0.99


def prepare(saved: Saved, quantity: str) -> Prepared:
    if saved.kind not in _LOSSES:
        raise CannotError("this suite writes only losses on linear layers again in MindSpore")
    names, count = tuple(saved.params), len(saved.params)
    gradient = mindspore.grad(_LOSSES[saved.kind](count), grad_position=tuple(range(count)))
    per_sample = mindspore.vmap(gradient, in_axes=(None,) * count + (0,) * len(saved.batch))
    args = [Tensor(np.asarray(x)) for x in (*saved.params.values(), *saved.batch)]

    @mindspore.jit
    def compiled(*args):
        stack = per_sample(*args)
        return _reduce((stack,) if count == 1 else stack, quantity)

    def numpy(result):
        if quantity in {"norms", "gram"}:
            return result.asnumpy()
        return {name: value.asnumpy() for name, value in zip(names, result, strict=True)}

    return Prepared(lambda: numpy(compiled(*args)), lambda result: result, has_pool=True)


def _reduce(stack, quantity):
    """What ``stacked.reduce`` does, for a compiler that has no dicts with names from outside."""
    if quantity == "stack":
        return stack
    if quantity == "mean":
        return [g.mean(0) for g in stack]
    if quantity == "variance":
        return [g.var(0, ddof=CORRECTION) for g in stack]
    rows = [g.reshape(g.shape[0], -1) for g in stack]
    if quantity == "gram":
        return sum([ops.matmul(g, g.T) for g in rows])  # noqa: C419 - it has no generators either
    norms = sum([(g * g).sum(1) for g in rows]) ** 0.5  # noqa: C419
    if quantity == "norms":
        return norms
    weights = (MAX_NORM / norms).clip(None, 1.0) / norms.shape[0]
    return [ops.matmul(weights, g).reshape(like.shape[1:]) for g, like in zip(rows, stack)]  # noqa: B905 - nor strict


def _mlp(params, x, activation):
    for i in range(0, len(params), 2):
        x = ops.matmul(x, params[i].T) + params[i + 1]
        if i + 2 < len(params):
            x = activation(x)
    return x


def _tutorial(_count):
    def loss(theta, s_tm1, r_t, s_t):
        target = r_t + ops.stop_gradient(ops.matmul(s_t, theta))
        return ops.square(target - ops.matmul(s_tm1, theta))

    return loss


def _td(count):
    def loss(*args):
        params, (s_tm1, r_t, s_t) = args[:count], args[count:]
        target = r_t + DISCOUNT * _mlp(params, s_t, ops.tanh).squeeze()
        return ops.square(ops.stop_gradient(target) - _mlp(params, s_tm1, ops.tanh).squeeze())

    return loss


def _reinforce(count):
    def loss(*args):
        params, (obs_t, a_t, return_t, mask_t) = args[:count], args[count:]
        log_pi = ops.log_softmax(_mlp(params, obs_t, ops.tanh), -1)
        taken = ops.gather_elements(log_pi, 1, a_t.expand_dims(-1)).squeeze(-1)
        return -ops.reduce_sum(taken * return_t * mask_t)

    return loss


def _squared_error(count):
    def loss(*args):
        params, (x, y) = args[:count], args[count:]
        return ops.square(_mlp(params, x, ops.relu) - y).mean()

    return loss


_LOSSES: dict[str, Callable[[int], Callable[..., Any]]] = {
    "td_linear": _tutorial,
    "td_mlp": _td,
    "reinforce_mlp": _reinforce,
    "wide_mlp": _squared_error,
}

METHODS = (Method("MindSpore jit(vmap(grad))", "mindspore", prepare),)
