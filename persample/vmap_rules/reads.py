"""What torch.func gets wrong, or refuses, when a loss reads tensors past autograd: ``.data``, and ``linearize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from persample._torch import TransformType, is_batchedtensor, make_dual, peek_interpreter_stack
from persample.errors import LossError

_data = Tensor.data.__get__  # type: ignore[attr-defined]


def _dual(tensor: Tensor, tangent: Tensor, *, level: int) -> Tensor:
    # Traced into a graph, what the function closes over becomes constants, and so do parameters: zeros as gradients.
    top = peek_interpreter_stack()
    if get_proxy_mode() is not None and (top is None or top.key() != TransformType.Jvp):
        raise LossError(
            "loss_fn calls torch.func.linearize (or traces a forward derivative), whose result torch.func takes for a "
            "constant of the parameters. Use torch.func.jvp, or pass engine='loop'."
        )
    return make_dual(tensor, tangent, level=level)


READS: dict[Any, Callable[..., Any]] = {
    make_dual: _dual,
    _data: lambda x, *rest: x.detach() if is_batchedtensor(x) else _data(x, *rest),  # refused of what vmap alone wraps
}
