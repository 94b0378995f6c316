"""Operations that compiled code leaves to torch's own kernels, because Inductor's versions round differently.

The difference matters where a gradient consists of rounding errors, as the derivative 1 − tanh² of a saturated unit
does. Inductor calls another library's tanh, and computes some gradients by other formulas (1 − σ for 1 / (1 + e^x),
float64 constants for float32 ones).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from persample._torch import schema

_aten = torch.ops.aten
_FLOAT64 = {_aten.tanh.default, _aten.tanh_backward.default}  # in float32 tanh is a formula, see tanh.py
_ALWAYS = {
    *(_aten.hardsigmoid_backward.default, _aten.soft_margin_loss_backward.default),
    _aten.binary_cross_entropy_backward.default,
}


def with_torch_kernels(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a table of decompositions in which the operations above call torch's kernels on CPUs.

    Args:
        table: the decompositions of all operations of aten.
    """
    return {**table, **{x: functools.partial(_decomposed, x, table.get(x, _kept)) for x in (*_FLOAT64, *_ALWAYS)}}


def _decomposed(operation: Any, otherwise: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first = args[0]
    if first.device.type == "cpu" and (first.dtype == torch.float64 or operation in _ALWAYS):
        return _opaque(operation)(*args, **kwargs)
    return otherwise(*args, **kwargs)


def _kept(*_args: Any, **_kwargs: Any) -> Any:
    return NotImplemented  # make_fx then leaves the operation as it is


@functools.cache
def _opaque(operation: Any) -> Any:
    """Return an operation ``persample::…`` that calls torch's kernel; it is registered when a program first needs it.

    Args:
        operation: an operation of aten that Inductor would replace.
    """
    name, _, signature = str(schema(operation)).removeprefix("aten::").partition("(")
    compute = functools.partial(_computed, operation)
    own = torch.library.custom_op(f"persample::{name}", compute, mutates_args=(), schema=f"({signature}")
    own.register_fake(_empty_like)
    return own


def _computed(operation: Any, *args: Any) -> Tensor:
    return operation(*args).contiguous()


def _empty_like(*args: Any) -> Tensor:
    tensors = [x for x in args if isinstance(x, Tensor)]
    return tensors[0].new_empty(torch.broadcast_shapes(*(x.shape for x in tensors)))
