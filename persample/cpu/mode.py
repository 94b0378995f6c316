"""Operations of torch that another library computes faster: a mode that lets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from persample._torch import UnguardedDispatchMode
from persample.cpu import gemm, onednn, tanh
from persample.utils.numeric import is_traced

# Multiplications below which looking at every operation of a forward pass (0.2 ms) takes longer than it saves.
_WORTH_LOOKING = 2**25
_aten = torch.ops.aten
FASTER: dict[Any, Callable[..., Tensor]] = {
    _aten.mm.default: gemm.raw_mm,
    _aten.addmm.default: gemm.raw_addmm,
    _aten.tanh.default: tanh.tanh,
}


def expected(params: Iterable[Tensor], data: Iterable[Any]) -> AbstractContextManager[object]:
    """Return a context in which a faster library computes, if there is enough to compute for that to pay.

    Args:
        params: what rows are multiplied with.
        data: tensors of rows, or of indices of rows.
    """
    tensors = [x for x in data if isinstance(x, Tensor) and not is_traced(x)]
    rows = max((x.shape[:-1].numel() if x.is_floating_point() else x.numel() for x in tensors), default=0)
    worth = rows * sum(x.numel() for x in params) >= _WORTH_LOOKING and onednn.is_ahead()
    return Faster() if worth else nullcontext()


class Faster(UnguardedDispatchMode):
    """While it is entered, a faster library computes what it takes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation.

        Args:
            func: an operation of aten.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the operation returns.
        """
        return (func if types else FASTER.get(func, func))(*args, **(kwargs or {}))
