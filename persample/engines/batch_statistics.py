"""Losses that take a statistic of their batch: one sample, with ``keep_batch_dim``, where no gradient is left of it."""

from __future__ import annotations

import sys
import traceback
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from persample import naive
from persample.errors import BatchStatisticsWarning
from persample.inputs.call import Call
from persample.reductions import Aux, Loss
from persample.utils import rng, trees
from persample.utils.interrupts import raise_interrupt
from persample.utils.origin import user_line, users_depth
from persample.utils.tracing import is_wrapped

_NOISE = 100  # roundings: a gradient of up to so many counts as 0


def vanish(results: Any, reductions: Any) -> bool:
    """Return whether all results of gradients, in the memory of a CPU, consist of zeros and NaN."""
    of_gradients = [x for x, one in zip(results, reductions, strict=True) if not isinstance(one, Loss | Aux)]
    tensors = [x for x in trees.flatten(of_gradients)[0] if isinstance(x, Tensor) and x.numel()]
    if not tensors or any(x.device.type != "cpu" or is_wrapped(x) for x in tensors):
        return False
    # The first element of one tensor is enough in most calls.
    if any(abs(x[(0,) * x.ndim].item()) > 0 for x in reversed(tensors)):
        return False
    return not any(bool(x.nan_to_num().any()) for x in tensors)


def warn_of_statistics(call: Call, rows: int) -> None:
    """Warn if a loss without gradient for a batch of one sample has one for ``rows``, or subtracts a statistic."""
    if any(call.params_batched):  # no batch has parameters of each sample
        return
    loss, start, functions = replace(call.loss, keep_batch_dim=False), rng.Streams.now(), _Functions()

    def largest(rows: int) -> float:  # element of a gradient, in roundings
        start.go_back()
        with functions:
            params, leaves = call.at(slice(0, rows))
            grads = naive.value_and_grad(loss, params, leaves, like=loss.params.tensors, create_graph=False)[2]
        return max(float(x.abs().max()) / torch.finfo(x.dtype).eps for x in grads if x is not None and x.numel())

    alone, together = torch.inf, 0.0
    handled = sys.exc_info()[1]
    try:
        alone, functions.expected = largest(1), iter(functions.seen)
        together = largest(max(rows, 2))
    except Exception as error:  # noqa: BLE001 - the loss need not take a batch
        raise_interrupt(error, handled)
    start.go_back()
    cancels = functions.cancels and call.randomness == "error"  # random rows differ without a statistic
    if not alone > 0 and (cancels or _NOISE < together < torch.inf):  # alone may be NaN
        warnings.warn(
            f"{call.loss.called} takes a statistic of its batch, which keep_batch_dim=True makes one sample: "
            f"{functions.differing}. All gradients are 0 or NaN. Compute the statistic of all samples before the call, "
            "and pass it in batch; or use composite_grads, for losses that couple samples.",
            BatchStatisticsWarning,
            stacklevel=users_depth(),
        )


class _Functions(TorchFunctionMode):
    """Keeps what the functions of a loss return for one sample; then finds one that returns other rows for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.expected: Any = None
        self.differing, self.is_statistic, self.cancels = "", False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in (x.detach() for x in trees.flatten(result)[0] if isinstance(x, Tensor)):
            if self.expected is None:
                self.seen.append(x.clone())
            elif not _begins_with(x, row := next(self.expected)):
                self.cancels |= self.is_statistic and x.shape != row.shape and not row.nan_to_num().any()
                if not self.differing:
                    self.differing = f"{resolve_name(func) or func}{user_line(traceback.extract_stack())}"
                    self.is_statistic = x.shape == row.shape
        return result


def _begins_with(x: Tensor, row: Tensor) -> bool:
    longer = [axis for axis, (n, m) in enumerate(zip(x.shape, row.shape, strict=False)) if n > m]
    first = x.narrow(longer[0], 0, row.shape[longer[0]]) if longer else x
    wide = torch.complex128
    return first.shape == row.shape and torch.allclose(first.to(wide), row.to(wide), rtol=1e-3, equal_nan=True)
