"""The mode that a loss made of layers runs under: it refuses the functions whose result would differ here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from persample.engines.layers.effects import is_pure, uses_autograd, written_tensors
from persample.engines.layers.interceptor import LayerInterceptor, NotLayersError
from persample.outputs import memory
from persample.vmap_rules import rewritten
from persample.vmap_rules.rows import is_batched, unwrapped


class LayerGuard(rewritten):
    """Sends uses of parameters to the interceptor, and refuses functions with effects that differ from vmap(vjp).

    Such functions ask autograd about tensors, put hooks on them, or write into tensors that the loss did not compute.

    Args:
        interceptor: computes what the loss does with parameters of layers.
        given: the tensors and constants that the loss is called with.
    """

    def __init__(self, interceptor: LayerInterceptor, given: Sequence[Any]) -> None:
        super().__init__({F.linear: interceptor.linear})
        self._interceptor, self._given = interceptor, given
        self._has_refused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch or its replacement.

        Args:
            func: the function.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            NotLayersError: if the function is refused.
        """
        try:
            if (kwargs or not is_pure(func)) and not self._may_call(func, args, kwargs or {}):
                raise NotLayersError(f"the loss calls {func}")
            if self._interceptor.is_used_by(args, kwargs):
                return self._interceptor.call(func, args, kwargs or {})
            return super().__torch_function__(func, types, args, kwargs)
        except NotLayersError:
            self._has_refused = True
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the mode.

        Args:
            kind: the type of the error that the loss raised, or None.
            error: the error, or None.
            trace: its traceback, or None.

        Raises:
            NotLayersError: if the loss caught a refusal, whatever the loss did then.
        """
        super().__exit__(kind, error, trace)
        interrupted = error is not None and not isinstance(error, Exception)
        if self._has_refused and not interrupted and not isinstance(error, NotLayersError):
            raise NotLayersError("the loss caught a refusal") from error

    def _may_call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return not uses_autograd(func) and all(map(self._is_computed, written_tensors(func, args, kwargs)))

    def _is_computed(self, x: Tensor) -> bool:
        """Return whether the loss computed a tensor, one per sample."""
        given = {memory(unwrapped(y)) for y in self._given if isinstance(y, Tensor)}
        return is_batched(x) and memory(unwrapped(x)) not in given
