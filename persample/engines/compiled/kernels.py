"""Operations that compiled code leaves to torch's own kernels, for their digits.

Small gradients are made of rounding: of a saturated unit's derivative 1 − tanh² nothing else is left. Inductor's tanh,
of another library, and its compositions of some gradients (1 − σ for 1 / (1 + e^x), constants of double precision for
such of float32) leave other digits than torch's kernels, or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from persample._torch import schema
from persample.engines.compiled.operations import define

_aten = torch.ops.aten
_DOUBLE = {_aten.tanh.default, _aten.tanh_backward.default}  # float32 is worth more as fast as it is
_ALWAYS = {
    *(_aten.hardsigmoid_backward.default, _aten.soft_margin_loss_backward.default),
    _aten.binary_cross_entropy_backward.default,
}


def _computed(operation: Any, *args: Any) -> Tensor:
    return operation(*args).contiguous()


def _like(*args: Any) -> Tensor:
    tensors = [x for x in args if isinstance(x, Tensor)]
    return tensors[0].new_empty(torch.broadcast_shapes(*(x.shape for x in tensors)))


@functools.cache
def _define_all() -> None:
    for operation in (*_DOUBLE, *_ALWAYS):
        define(str(schema(operation)).removeprefix("aten::"), functools.partial(_computed, operation), _like)


def kept(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return decompositions of aten operations that leave these to torch's kernels on CPUs.

    Args:
        table: the decompositions of all operations.
    """
    _define_all()
    return {**table, **{x: functools.partial(_decomposed, x, table[x]) for x in (*_DOUBLE, *_ALWAYS)}}


def _decomposed(operation: Any, otherwise: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first = args[0]
    if first.device.type == "cpu" and (first.dtype == torch.float64 or operation in _ALWAYS):
        return getattr(torch.ops.persample, operation.overloadpacket.__name__)(*args, **kwargs)
    return otherwise(*args, **kwargs)
