"""Tensors that stand for others not computed yet: chains of views over one shared cell."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persample._torch import disabled_torch_function, make_wrapper_subclass, storage_id
from persample.engines.deferred.terms import DeferredTerm
from persample.utils import trees


class Step(NamedTuple):
    """One view.

    Args:
        change: takes it of a term, or returns None.
        view: takes it of a tensor.
    """

    change: Callable[[DeferredTerm], DeferredTerm | None]
    view: Callable[[Tensor], Tensor]


class Watch:
    """Which cells are computed from which memory, so that they are filled before anybody writes into it."""

    def __init__(self) -> None:
        self._cells: dict[int, list[weakref.ref[DeferredBuffer]]] = {}
        self.is_filling = False  # then nothing is deferred

    def add(self, cell: DeferredBuffer) -> None:
        """Watch the memory that a cell is computed from.

        Args:
            cell: a cell that is not filled.
        """
        for term in cell.terms:
            for tensor in term.tensors:
                self._cells.setdefault(memory(tensor), []).append(weakref.ref(cell))

    def before_write(self, tensor: Tensor) -> None:
        """Fill what is computed from the memory of a tensor.

        Args:
            tensor: what is about to be written into, not a placeholder.
        """
        for reference in self._cells.pop(memory(tensor), ()):
            cell = reference()
            if cell is not None:
                cell.fill("a write in place")


def memory(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor, of one without any (fake, meta) too.

    Args:
        tensor: not a placeholder.
    """
    return storage_id(tensor.untyped_storage())


class DeferredBuffer:
    """What all views of one placeholder share: its terms, or its value once something needed it.

    Args:
        terms: what the value is the sum of; none for zeros.
        meta: a meta tensor of its shape and dtype; it is contiguous.
        device: where it is.
        watch: what keeps an eye on the memory it is computed from.
    """

    __slots__ = ("__weakref__", "device", "filled_by", "meta", "terms", "value", "watch")

    def __init__(self, terms: tuple[DeferredTerm, ...], meta: Tensor, device: torch.device, watch: Watch) -> None:
        self.terms, self.meta, self.device, self.watch = terms, meta, device, watch
        self.value: Tensor | None = None
        self.filled_by = ""
        watch.add(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        return self.meta.dtype

    def fill(self, reason: str) -> Tensor:
        """Return the value, computed the first time it is asked for.

        Args:
            reason: the operation that needs it.
        """
        if self.value is None:
            before, self.watch.is_filling = self.watch.is_filling, True
            try:
                self.value = self._computed()
            finally:
                self.watch.is_filling = before
            self.terms, self.filled_by = (), reason
        return self.value

    def _computed(self) -> Tensor:
        if not self.terms:
            return torch.zeros(self.meta.shape, dtype=self.dtype, device=self.device)
        value = functools.reduce(torch.add, (term.compute(self.dtype) for term in self.terms)).contiguous()
        # Never the memory of a tensor that somebody else holds.
        shared = len(self.terms) == 1 and any(memory(value) == memory(x) for x in self.terms[0].tensors)
        return value.clone() if shared else value


class Placeholder(Tensor):
    """A view of a cell, with the sizes and strides of the tensor it stands for.

    Args:
        cell: the cell.
        meta: the view, taken of the cell's meta tensor; None for the whole of it.
        chain: the same view, step by step.
    """

    cell: DeferredBuffer
    meta: Tensor
    chain: tuple[Step, ...]

    @staticmethod
    def __new__(cls, cell: DeferredBuffer, meta: Tensor | None = None, chain: tuple[Step, ...] = ()) -> Placeholder:
        """Return a view of a cell."""
        meta = cell.meta if meta is None else meta
        self = make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=cell.dtype,
            device=cell.device,
        )
        self.cell, self.meta, self.chain = cell, meta, chain
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from persample.engines.deferred.rules import act

        return act(func, args, kwargs or {})

    # What reads memory without an operation: only the tensor itself has any.
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values."""
        return self.value("numpy").numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values."""
        return self.value("numpy").__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values."""
        return self.value("dlpack").__dlpack__(*args, **kwargs)

    def tolist(self) -> Any:
        """Return the values."""
        return self.value("tolist").tolist()

    def data_ptr(self) -> int:
        """Return where the values are."""
        return self.value("data_ptr").data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the values."""
        return self.value("untyped_storage").untyped_storage()

    def terms(self) -> list[DeferredTerm] | None:
        """Return what the view is the sum of, or None if only its value can tell."""
        if self.cell.value is not None:
            return None
        terms: list[DeferredTerm] = []
        for term in self.cell.terms:
            seen: DeferredTerm | None = term
            for step in self.chain:
                seen = None if seen is None else step.change(seen)
            if seen is None:
                return None
            terms.append(seen)
        return terms

    def value(self, reason: str) -> Tensor:
        """Return the tensor it stands for; an alias of it, so that writing into it is seen through every view.

        Args:
            reason: the operation that needs it.
        """
        value = self.cell.fill(reason)
        for step in self.chain:  # not by strides: writes into those cannot be made functional
            value = step.view(value)
        return value


def placeholder(
    terms: Iterable[DeferredTerm], shape: Iterable[int], dtype: torch.dtype, device: torch.device, watch: Watch
) -> Placeholder:
    """Return the whole of a new cell.

    Args:
        terms: what it is the sum of; none for zeros.
        shape: its shape.
        dtype: its dtype.
        device: where it is.
        watch: what keeps an eye on the memory it is computed from.
    """
    meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return Placeholder(DeferredBuffer(tuple(terms), meta, device, watch))


def values_of(tree: Any, reason: str) -> Any:
    """Replace the placeholders of a tree by the tensors they stand for.

    Args:
        tree: any pytree.
        reason: the operation that needs them.
    """
    return trees.tree_map(lambda x: x.value(reason) if isinstance(x, Placeholder) else x, tree)
