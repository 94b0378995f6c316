"""Products of large float32 matrices on CPUs: by oneDNN, where MKL uses but half of the processor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from persample.numeric import is_traced, is_wrapped

# Multiplications below which finding oneDNN's kernel takes longer than it saves, and the shortest axis that fills its
# registers (measured, torch 2.13, 2 cores of an AMD EPYC with AVX-512).
_LEAST_WORK = 2**22
_LEAST_SIZE = 16
# Multiplications below which looking at every operation of a forward pass (0.2 ms) takes longer than it saves.
_WORTH_LOOKING = 2**25
# Columns for which MKL takes up to 5 times as long as for as many rows (measured there too, in both precisions).
_NARROW = 8
_aten = torch.ops.aten


@functools.cache
def _is_ahead() -> bool:
    """Return whether oneDNN is here and MKL, which leaves AVX-512 to Intel's processors, is not as fast."""
    cpu: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    wide = cpu.get("avx512_f", False) and "Intel" not in cpu.get("cpu_name", "Intel")
    return bool(wide and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available())


def suits(left: Tensor, right: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether ``product`` takes some operands, and is faster than torch.

    Args:
        left: the first matrix.
        right: the second.
        bias: what is added, or nothing.
    """
    given = (left, right) if bias is None else (left, right, bias)
    if any(x.dtype != torch.float32 or x.device.type != "cpu" for x in given) or not left.ndim == right.ndim == 2:
        return False
    (rows, inner), (paired, columns) = sizes(left), sizes(right)
    if inner != paired or (bias is not None and sizes(bias) != [columns]):
        return False  # torch says what is wrong
    large = rows * inner * columns >= _LEAST_WORK and min(rows, inner, columns) >= _LEAST_SIZE
    return large and _is_ahead() and torch._C._get_mkldnn_enabled()


def sizes(x: Tensor) -> list[int]:
    """Return the shape of a tensor, of sizes that vary those of the example."""
    return [int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in x.shape]


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left @ right + bias``, computed by oneDNN.

    Args:
        left: ``[m, k]`` float32 on the CPU.
        right: ``[k, n]`` likewise.
        bias: ``[n]``, or none.

    Returns:
        ``[m, n]``, its rows side by side in memory.
    """
    linear = torch.ops.mkldnn._linear_pointwise.default
    # The first operand is read row by row, and copied if it does not lie so; the other may lie either way.
    copied = 0 if left.stride(1) == 1 else left.numel()
    turned = len(left) * right.shape[1] + (0 if right.stride(0) == 1 else right.numel())
    if bias is None and turned < copied:
        return linear(right.T, _plain(left), None, "none", [], "").T.contiguous()
    return linear(left, _plain(right.T), None if bias is None else bias.contiguous(), "none", [], "")


def _plain(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x.T.is_contiguous() else x.contiguous()


def mm(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right``.

    Args:
        left: ``[m, k]``.
        right: ``[k, n]``.

    Returns:
        ``[m, n]``.
    """
    real = not any(is_wrapped(x) or x.requires_grad for x in (left, right))
    return _mm(left, right) if real else torch.mm(left, right)


def contracted(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.mT @ right``, a sum of outer products.

    Args:
        left: ``[..., n, o]``.
        right: ``[..., n, i]``.

    Returns:
        ``[..., o, i]``.
    """
    multiply = mm if left.ndim == 2 else torch.matmul
    if left.device.type == "cpu" and right.shape[-1] <= _NARROW < left.shape[-1]:
        return multiply(right.mT, left).mT.contiguous()
    return multiply(left.mT, right)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows @ weight.T + bias``, not differentiated.

    Args:
        rows: ``[n, i]``.
        weight: ``[o, i]``.
        bias: ``[o]``, or none.

    Returns:
        ``[n, o]``.
    """
    return _mm(rows, weight.T) if bias is None else _addmm(bias, rows, weight.T)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    faster = suits(left, right) and not _is_watched()
    return product(left, right) if faster else torch.mm(left, right)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Tensor:
    faster = not scales and suits(left, right, bias) and not _is_watched()
    return product(left, right, bias) if faster else torch.addmm(bias, left, right, **scales)


def _is_watched() -> bool:
    """Return whether a mode of the caller's (that counts, traces, fakes) looks for the operations of torch."""
    return torch._C._len_torch_dispatch_stack() > 0


FASTER: dict[Any, Callable[..., Tensor]] = {_aten.mm.default: _mm, _aten.addmm.default: _addmm}


def expected(params: Iterable[Tensor], data: Iterable[Any]) -> AbstractContextManager[object]:
    """Return a context in which the faster library computes, if there is enough to compute for that to pay.

    Args:
        params: what rows are multiplied with.
        data: tensors of rows, or of indices of rows.
    """
    tensors = [x for x in data if isinstance(x, Tensor) and not is_traced(x)]
    rows = max((x.shape[:-1].numel() if x.is_floating_point() else x.numel() for x in tensors), default=0)
    worth = rows * sum(x.numel() for x in params) >= _WORTH_LOOKING and _is_ahead()
    return Gemm() if worth else nullcontext()  # type: ignore[no-untyped-call]


class Gemm(TorchDispatchMode):
    """While it is entered, products of large matrices are computed by the faster library."""

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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # guarding against it costs more than the mode itself
