"""The mode that a loss made of layers runs under: it refuses what would compute something else than vmap(vjp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.engines.layers.interceptor import WITHIN_A_DERIVATIVE, LayerInterceptor
from persample.engines.layers.shared import NotLayersError
from persample.outputs import memory
from persample.vmap_rules import VmapRules
from persample.vmap_rules.batched import is_batched, unwrapped
from persample.vmap_rules.effects import is_pure, uses_autograd, written_tensors


class LayerGuard(VmapRules):
    """Sends uses of shared parameters to the interceptor, and refuses functions with effects that differ here.

    Such functions read autograd's state, register hooks, or write into tensors that the loss did not compute.

    Args:
        interceptor: computes the functions that the loss calls with shared parameters.
        leaves: the tensors and constants of the sample.
    """

    def __init__(self, interceptor: LayerInterceptor, leaves: Sequence[Any]) -> None:
        super().__init__({F.linear: interceptor.linear}, differentiated_by="autograd")
        self._interceptor, self._leaves = interceptor, leaves
        self._of_copies = interceptor.params.copies.known
        self._has_refused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            if not is_pure(func) or kwargs:
                self._check_effects(func, args, kwargs)
            params = self._interceptor.params
            # Without grad mode, results are constants, whatever a parameter is used for.
            recorded = torch.is_grad_enabled()
            if (recorded and params.are_among((*args, *kwargs.values()))) or func in WITHIN_A_DERIVATIVE:
                return self._interceptor.call(func, args, kwargs)
            result = self.replaced(func, args, kwargs)
        except NotLayersError:
            self._has_refused = True
            raise
        if args and id(args[0]) in self._of_copies and recorded and not kwargs:
            params.note(func, args, result)
        return result

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        interrupted = error is not None and not isinstance(error, Exception)
        if self._has_refused and not interrupted and not isinstance(error, NotLayersError):
            raise NotLayersError("the loss caught a refusal") from error

    def _check_effects(self, func: Any, args: Any, kwargs: Any) -> None:
        written = written_tensors(func, args, kwargs)
        if uses_autograd(func) or not all(map(self._is_computed, written)):
            raise NotLayersError(f"the loss calls {func}, which uses autograd or writes into a given tensor")
        if written:
            self._interceptor.params.copies.forget_results()

    def _is_computed(self, x: Tensor) -> bool:
        """Return whether the loss computed a tensor itself, with one value per sample."""
        given = [y for y in (*self._leaves, *self._interceptor.params.plain) if isinstance(y, Tensor)]
        return is_batched(x) and memory(unwrapped(x)) not in {memory(unwrapped(y)) for y in given}
