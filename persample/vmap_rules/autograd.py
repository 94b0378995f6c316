"""Access to tensors past autograd: ``Tensor.data``, and the dual tensors of ``torch.func.linearize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from persample._torch import TransformType, is_batchedtensor, make_dual, peek_interpreter_stack
from persample.errors import LossError
from persample.vmap_rules.effects import SETS_DATA, refusal

_data = Tensor.data.__get__  # type: ignore[attr-defined]


def _detached_data(x: Tensor, *rest: Any) -> Tensor:
    return x.detach() if is_batchedtensor(x) else _data(x, *rest)  # torch.func rejects .data of what vmap wraps last


def _dual(tensor: Tensor, tangent: Tensor, *, level: int) -> Tensor:
    # linearize traces the function to a graph in which parameters are constants: their gradients would be zeros.
    top = peek_interpreter_stack()
    if get_proxy_mode() is not None and (top is None or top.key() != TransformType.Jvp):
        raise LossError(
            "loss_fn calls torch.func.linearize (or traces a forward derivative), which treats the parameters as "
            "constants. Use torch.func.jvp, or pass engine='loop'."
        )
    return make_dual(tensor, tangent, level=level)


def _set_data(*_: Any) -> None:
    # torch would put a wrapper into the object, which outlives the wrapper's level and crashes when it is read.
    raise refusal("a tensor (x.data = y)")


RULES: dict[Any, Callable[..., Any]] = {_data: _detached_data, SETS_DATA: _set_data, make_dual: _dual}
