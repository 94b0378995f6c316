"""The mode that a loss made of layers runs under: it refuses what would compute something else than vmap(vjp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import multi_head_attention_by
from persample.engines.layers.interceptor import WITHIN_A_DERIVATIVE, LayerInterceptor
from persample.engines.layers.losses import LOSSES, loss_of_rows
from persample.engines.layers.shared import LISTS, NotLayersError
from persample.errors import LossError
from persample.outputs import memory
from persample.utils.dtypes import full_precision, in_single_precision, is_autocast
from persample.utils.strides import storage_key
from persample.utils.tracing import is_wrapped
from persample.utils.trees import map_tensors
from persample.vmap_rules import RULED, VmapRules
from persample.vmap_rules.effects import is_pure, is_refusal, reads_state, written_tensors
from persample.vmap_rules.levels import unwrapped

# Under vmap alone torch takes these apart before autocast, which computes them in single precision, has seen them.
_SINGLE_PRECISION = {
    *(F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.l1_loss, F.cosine_embedding_loss),
    *(F.hinge_embedding_loss, F.poisson_nll_loss, F.adaptive_avg_pool3d, torch.trace, Tensor.trace),
}
# Functions whose results have memory of their own: what a loss may write into, such as masks.
_MAKERS = {
    *("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "eye", "arange", "clone", "triu", "tril"),
}


class LayerGuard(VmapRules):
    """Sends uses of shared parameters to the interceptor, and refuses functions with effects that differ here.

    Such functions read autograd's state or memory, register hooks, or write into tensors that the loss did not compute.

    Args:
        interceptor: computes the functions that the loss calls with shared parameters.
        leaves: the tensors and constants of the sample.
    """

    def __init__(self, interceptor: LayerInterceptor, leaves: Sequence[Any]) -> None:
        super().__init__(differentiated_by="autograd")
        self._interceptor, self._leaves = interceptor, leaves
        self._made: dict[int, Tensor] = {}  # by address, kept alive: tensors of the loss's own that all samples share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            if not is_pure(func) or kwargs:
                self._check_effects(func, args, kwargs)
            params = self._interceptor.params
            is_used = not params.shared.keys().isdisjoint(map(id, args))
            if kwargs or not LISTS.isdisjoint(map(type, args)):
                is_used = is_used or params.are_among((*args, *kwargs.values()))
            # Without grad mode, results are constants, whatever a parameter is used for.
            is_used = is_used and torch.is_grad_enabled()
            if is_used and func is F.multi_head_attention_forward:  # of layers, which torch calls without any mode
                return self._call(multi_head_attention_by(F.scaled_dot_product_attention), *args, **kwargs)
            if is_used or func in WITHIN_A_DERIVATIVE:
                return self._interceptor.call(func, args, kwargs)
            if func in LOSSES:
                result = loss_of_rows(self._interceptor.vmap, func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if func in _SINGLE_PRECISION and is_autocast(params.plain[0].device):
                args, kwargs = map_tensors(in_single_precision, (args, kwargs))
                with full_precision(params.plain[0].device):
                    return self.replaced(func, args, kwargs)
            if func is F.linear:  # perhaps with a copy of a vector as its bias
                return self._interceptor.linear(*args, **kwargs)
            result = self.replaced(func, args, kwargs) if kwargs or func in RULED else func(*args)
        except Exception as error:
            if isinstance(error, NotLayersError) or is_refusal(error, func, args, kwargs):
                self._refusal = self._refusal or error
            raise
        if type(result) is Tensor and not is_wrapped(result) and getattr(func, "__name__", "") in _MAKERS:
            self._made[storage_key(result)] = result
        return result

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        refusal = self._refusal
        try:
            super().__exit__(kind, error, trace)
        except LossError as swallowed:
            raise NotLayersError(str(swallowed)) from error
        if isinstance(refusal, NotLayersError) and isinstance(error, Exception) and error is not refusal:
            raise NotLayersError("the loss caught a refusal") from error

    def _check_effects(self, func: Any, args: Any, kwargs: Any) -> None:
        params, written = self._interceptor.params, written_tensors(func, args, kwargs)
        # nn.GRU on a GPU asks for the places of its weights.
        reads = reads_state(func) and (func is not Tensor.data_ptr or params.place_of(args[0]) is None)
        if reads or not all(map(self._is_computed, written)):
            raise NotLayersError(f"the loss calls {func}, which reads a tensor's state or writes into a given tensor")

    def _is_computed(self, x: Tensor) -> bool:
        """Return whether the loss computed a tensor itself, and not the caller or autograd."""
        if not self._interceptor.has_one_each(x):
            return storage_key(x) in self._made
        given = [y for y in (*self._leaves, *self._interceptor.params.plain) if isinstance(y, Tensor)]
        return memory(unwrapped(x)) not in {memory(unwrapped(y)) for y in given}
