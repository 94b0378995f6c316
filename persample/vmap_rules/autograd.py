"""Access to tensors past autograd: ``Tensor.data``, dual tensors of ``torch.func.linearize``, deep copies, pickles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from persample._torch import (
    TransformType,
    is_batchedtensor,
    make_dual,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)
from persample.errors import LossError
from persample.utils.tracing import is_traced
from persample.vmap_rules.batched import is_batched, unwrapped
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


def _deepcopy(x: Tensor, memo: dict[int, Any]) -> Any:
    if not _is_shared_leaf(x):
        return Tensor.__deepcopy__(x, memo)  # type: ignore[no-untyped-call]
    if id(x) not in memo:
        with temporarily_clear_interpreter_stack():
            values = unwrapped(x).detach().clone()
            memo[id(x)] = nn.Parameter(values) if x.requires_grad else values
    return memo[id(x)]


def _untyped_storage(x: Tensor) -> UntypedStorage:
    return unwrapped(x).untyped_storage() if _is_shared_leaf(x) else Tensor.untyped_storage(x)  # pickle reads it


def _is_shared_leaf(x: Tensor) -> bool:
    """Return whether all samples share a tensor that no operation made, as parameters and buffers."""
    return x.is_leaf and not is_batched(x) and not is_traced(unwrapped(x))


RULES: dict[Any, Callable[..., Any]] = {
    _data: _detached_data,
    **dict.fromkeys(SETS_DATA, _set_data),
    make_dual: _dual,
    Tensor.__deepcopy__: _deepcopy,
    Tensor.untyped_storage: _untyped_storage,
}
