"""Placeholders: tensors without values, each of them a chain of views over a deferred buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persample._torch import disabled_torch_function, make_wrapper_subclass
from persample.engines.deferred.buffer import DeferredBuffer, PendingBuffers
from persample.engines.deferred.terms import DeferredTerm
from persample.utils import trees


class View(NamedTuple):
    """One view operation.

    Args:
        of_term: applies it to a term; returns None if the term does not know how.
        of_tensor: applies it to a tensor.
    """

    of_term: Callable[[DeferredTerm], DeferredTerm | None]
    of_tensor: Callable[[Tensor], Tensor]


def _method_of_value(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.value(name.strip("_")), name)(*args, **kwargs)


class Placeholder(Tensor):
    """A view of a deferred buffer, with the sizes and strides of the tensor that it stands for.

    Args:
        buffer: the buffer.
        meta: the same view of the buffer's meta tensor; None for the whole of it.
        views: the operations that make up the view.
    """

    buffer: DeferredBuffer
    meta: Tensor
    views: tuple[View, ...]

    @staticmethod
    def __new__(cls, buffer: DeferredBuffer, meta: Tensor | None = None, views: tuple[View, ...] = ()) -> Placeholder:
        """Return a view of a buffer."""
        meta = buffer.meta if meta is None else meta
        self = make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=buffer.device,
        )
        self.buffer, self.meta, self.views = buffer, meta, views
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from persample.engines.deferred.rules import apply

        return apply(func, args, kwargs or {})

    # The methods that read memory without an operation of aten.
    numpy: Any = _method_of_value("numpy")
    __array__: Any = _method_of_value("__array__")
    __dlpack__: Any = _method_of_value("__dlpack__")
    tolist: Any = _method_of_value("tolist")
    data_ptr: Any = _method_of_value("data_ptr")
    untyped_storage: Any = _method_of_value("untyped_storage")

    def terms(self) -> list[DeferredTerm] | None:
        """Return the terms of the view, or None if one is unknown or the buffer is computed."""
        if self.buffer.value is not None:
            return None
        terms: list[DeferredTerm] = []
        for term in self.buffer.terms:
            viewed: DeferredTerm | None = term
            for view in self.views:
                viewed = None if viewed is None else view.of_term(viewed)
            if viewed is None:
                return None
            terms.append(viewed)
        return terms

    def value(self, needed_by: str) -> Tensor:
        """Return the tensor that the placeholder stands for, an alias of the buffer: every view sees writes into it.

        Args:
            needed_by: the operation that needs it.
        """
        value = self.buffer.compute(needed_by)
        for view in self.views:  # as_strided would be shorter, but writes into it cannot be made functional
            value = view.of_tensor(value)
        return value


def defer(
    terms: Iterable[DeferredTerm],
    shape: Iterable[int],
    dtype: torch.dtype,
    device: torch.device,
    pending: PendingBuffers,
) -> Placeholder:
    """Return the placeholder of a new buffer.

    Args:
        terms: the terms of the sum that the tensor is; none for zeros.
        shape: the shape of the tensor.
        dtype: the dtype of the tensor.
        device: the device of the tensor.
        pending: the buffers of the same backward pass.
    """
    meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return Placeholder(DeferredBuffer(tuple(terms), meta, device, pending))


def values_of(tree: Any, needed_by: str) -> Any:
    """Replace the placeholders of a tree by the tensors that they stand for.

    Args:
        tree: any pytree.
        needed_by: the operation that needs the tensors.
    """
    return trees.tree_map(lambda x: x.value(needed_by) if isinstance(x, Placeholder) else x, tree)
