"""What a loss may do with parameters that all samples share: call layers with them, view them, and add them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, get_unwrapped, is_batchedtensor, maybe_get_bdim, maybe_get_level
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F

from persample.engines.layers.autograd import LinearRows, LookupRows
from persample.engines.layers.effects import is_addition
from persample.engines.layers.recorder import LayerParams, LayerRecorder
from persample.utils.numeric import is_autocast, is_wrapped
from persample.vmap_rules.functional import linear
from persample.vmap_rules.rows import is_batched

_SMALL = 2**12  # numbers in a vector of which one copy per sample may be used anywhere
_READS = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
}
_DETACHES = {Tensor.detach, torch.detach}
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_TRANSPOSES = {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__}
_CONSTANT_INDICES = (int, slice, type(None), type(Ellipsis))


class NotLayersError(Exception):
    """A loss is not made of layers alone; ``vmap(vjp(loss))`` differentiates it."""


class SharedParam(NamedTuple):
    """A parameter that all samples share, or a view of one.

    Args:
        tensor: the parameter or view, plain.
        copy: the same with one copy per sample, or None: it may not be added.
        place: the parameter's place among all if layers may have it as their weight, else None.
        transposed: whether the view is the parameter's transpose.
    """

    tensor: Tensor
    copy: Tensor | None
    place: int | None
    transposed: bool = False


class LayerInterceptor:
    """Replaces layers, so that they compute the rows of all samples at once and report to a recorder.

    Small vectors are given to the loss as one copy per sample, for any use. Matrices and large vectors are shared by
    all samples: they may be parameters of layers, and they may be added to tensors of one value per sample. Any other
    use would cost B copies, and is refused.

    Args:
        shared: the parameters, plain.
        copies: the parameters, one copy per sample, under the innermost vmap.
        size: B.
        recorder: records what the backward passes of layers report.
    """

    def __init__(
        self, shared: Sequence[Tensor], copies: Sequence[Tensor], size: int, recorder: LayerRecorder
    ) -> None:
        self._plain, self._size, self._recorder = shared, size, recorder
        self._level = maybe_get_level(copies[0])
        is_shared = [x.ndim > 1 or x.numel() > _SMALL for x in shared]
        self.params = [x if keep else copy for x, copy, keep in zip(shared, copies, is_shared, strict=True)]
        self._places = {id(x): place for place, x in enumerate(self.params)}
        self._shared = {
            id(x): SharedParam(x, copy, place)
            for place, (x, copy, keep) in enumerate(zip(shared, copies, is_shared, strict=True))
            if keep
        }

    def is_used_by(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether a function is called with a shared parameter.

        Args:
            args: its arguments; shared parameters are found in lists among them, too.
            kwargs: its keyword arguments.
        """
        for x in (*args, *kwargs.values()) if kwargs else args:
            if id(x) in self._shared or (isinstance(x, list | tuple) and any(id(y) in self._shared for y in x)):
                return True
        return False

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that uses a shared parameter.

        Args:
            func: the function of torch.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            NotLayersError: if the function is none of those that may.
        """
        if func is F.linear:
            return self.linear(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func in _READS or func in _DETACHES:
            return func(*args, **kwargs)
        if func in _PRODUCTS and not kwargs:
            return self._matmul(*args)
        if func in _TRANSPOSES:
            return self._transpose(args[0])
        if func is Tensor.__getitem__:
            return self._part(*args)
        if is_addition(func):
            return self._add(func, args, kwargs)
        raise NotLayersError(f"the loss calls {func} with a parameter")

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Compute ``F.linear``.

        Args:
            input: as in torch.
            weight: as in torch; a parameter or not.
            bias: as in torch; a parameter or not.

        Returns:
            As in torch.

        Raises:
            NotLayersError: if a shared parameter is used, and the layer cannot be computed on rows.
        """
        param, bias_place = self._shared.get(id(weight)), self._places.get(id(bias))
        added = bias if bias_place is None else self._plain[bias_place]
        place = None if param is None else param.place
        known = place is not None or not weight.requires_grad
        known &= bias_place is not None or bias is None or not bias.requires_grad
        if known and self._has_rows(input) and _fits(input, weight, added):
            transposed = param is not None and param.transposed
            return self._on_rows(input, weight, added, LayerParams(place, bias_place, transposed, input.ndim == 1))
        if self.is_used_by((input, weight, bias), None):
            raise NotLayersError("the loss calls F.linear with other inputs than one per sample")
        return linear(input, weight, bias)

    def _on_rows(self, input: Tensor, weight: Tensor, bias: Tensor | None, params: LayerParams) -> Tensor:  # noqa: A002
        rows = _batch_first(input)
        callback = None if params.weight is params.bias is None else self._recorder.linear(params)
        with temporarily_clear_interpreter_stack():
            # Unflattened outside of the function: a view that a function returns could not be written in place.
            out = LinearRows.apply(rows.flatten(0, -2), weight, bias, callback)
            out = out.view(*rows.shape[:-1], weight.shape[0]) if rows.ndim > 2 else out
        return _add_batch_dim(out, 0, self._level)

    def _matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute ``left @ right`` as a linear layer."""
        if id(right) in self._shared:
            return self.linear(left, self._transpose(right))
        if not isinstance(right, Tensor) or right.ndim < 2:
            return self.linear(right, left)
        return self.linear(right.mT, left).mT

    def _embedding(  # noqa: PLR0917 - as torch's
        self,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,  # noqa: ARG002
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        param = self._shared.get(id(weight))
        if param is None or param.place is None or param.transposed or weight.ndim != 2 or not input.numel():
            raise NotLayersError("the loss calls F.embedding with a view of a parameter")
        fits = padding_idx is None or -len(weight) <= padding_idx < len(weight)
        plain = self._has_rows(input) or not is_wrapped(input)
        if max_norm is not None or scale_grad_by_freq or sparse or not fits or not plain:
            raise NotLayersError("the loss calls F.embedding with options that rows of all samples do not have")
        index = _batch_first(input) if is_wrapped(input) else input.expand(self._size, *input.shape)
        callback = self._recorder.embedding(param.place, None if padding_idx is None else padding_idx % len(weight))
        with temporarily_clear_interpreter_stack():
            out = LookupRows.apply(weight, index, callback)
        return _add_batch_dim(out, 0, self._level)

    def _transpose(self, x: Tensor) -> Tensor:
        param = self._shared[id(x)]
        if param.place is None or x.ndim != 2:
            raise NotLayersError("the loss transposes a parameter that is no matrix")
        out = self._plain[param.place] if param.transposed else x.T
        if not param.transposed:
            self._shared[id(out)] = SharedParam(out, None, param.place, transposed=True)
        return out

    def _part(self, x: Tensor, index: Any) -> Tensor:
        """Return a part of a parameter, one copy per sample."""
        copy = self._shared[id(x)].copy if id(x) in self._shared else None
        indices = index if isinstance(index, tuple) else (index,)
        if copy is None or not all(isinstance(i, _CONSTANT_INDICES) for i in indices):
            raise NotLayersError("the loss looks up parts of a parameter")
        part = copy[index]
        self._shared[id(part)] = SharedParam(part, part, None)
        return part

    def _add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Add a parameter to a tensor that has one value per sample anyway."""
        copies = [self._shared[id(x)].copy if id(x) in self._shared else x for x in args]
        results = [x for x in args if isinstance(x, Tensor) and not (id(x) in self._shared or id(x) in self._places)]
        if not any(map(is_batched, results)) or any(x is None for x in copies) or self.is_used_by((), kwargs):
            raise NotLayersError("the loss adds a parameter to a tensor that all samples share")
        return func(*copies, **kwargs)

    def _has_rows(self, x: Tensor) -> bool:
        """Return whether the innermost vmap, and no other level, batches a tensor."""
        batched = is_batchedtensor(x) and maybe_get_level(x) == self._level
        return batched and not is_wrapped(get_unwrapped(x))


def _batch_first(x: Tensor) -> Tensor:
    plain, axis = get_unwrapped(x), maybe_get_bdim(x)
    return plain.movedim(axis, 0) if axis else plain


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:  # noqa: A002
    if weight.ndim != 2 or input.dtype != weight.dtype or not input.numel() or input.shape[-1:] != weight.shape[1:]:
        return False
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        return False
    return not (is_autocast(input.device) or is_wrapped(weight) or (bias is not None and is_wrapped(bias)))
