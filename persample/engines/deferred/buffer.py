"""The values behind placeholders, and the order in which they must be computed."""

from __future__ import annotations

import functools
import weakref

import torch
from torch import Tensor

from persample._torch import storage_id
from persample.engines.deferred.terms import DeferredTerm


def storage_key(tensor: Tensor) -> int:
    """Return what identifies the storage of a tensor, also of a fake or meta tensor.

    Args:
        tensor: any tensor but a placeholder.
    """
    return storage_id(tensor.untyped_storage())


class DeferredBuffer:
    """The value that all views of a placeholder share: a sum of terms until it is needed, then a tensor.

    Args:
        terms: the terms of the sum; none for zeros.
        meta: a contiguous meta tensor with the shape and dtype of the value.
        device: the device of the value.
        pending: the buffers of the same backward pass.
    """

    __slots__ = ("__weakref__", "device", "meta", "needed_by", "pending", "terms", "value")

    def __init__(
        self, terms: tuple[DeferredTerm, ...], meta: Tensor, device: torch.device, pending: PendingBuffers
    ) -> None:
        self.terms, self.meta, self.device, self.pending = terms, meta, device, pending
        self.value: Tensor | None = None
        self.needed_by = ""
        pending.add(self)

    def compute(self, needed_by: str) -> Tensor:
        """Return the value, which the first call computes.

        Args:
            needed_by: the operation that needs it.
        """
        if self.value is None:
            before, self.pending.is_computing = self.pending.is_computing, True
            try:
                self.value = self._sum()
            finally:
                self.pending.is_computing = before
            self.terms, self.needed_by = (), needed_by
        return self.value

    def _sum(self) -> Tensor:
        if not self.terms:
            return torch.zeros(self.meta.shape, dtype=self.meta.dtype, device=self.device)
        value = functools.reduce(torch.add, (term.compute(self.meta.dtype) for term in self.terms)).contiguous()
        # A value that shares memory with another tensor could be changed by a write into that tensor.
        shared = len(self.terms) == 1 and any(storage_key(value) == storage_key(x) for x in self.terms[0].tensors)
        return value.clone() if shared else value


class PendingBuffers:
    """The buffers of one backward pass that are not computed, found by the storages that they will be computed from."""

    def __init__(self) -> None:
        self._readers: dict[int, list[weakref.ref[DeferredBuffer]]] = {}
        self.is_computing = False  # nothing is deferred while a buffer is computed

    def add(self, buffer: DeferredBuffer) -> None:
        """Register a buffer under the storages of its terms.

        Args:
            buffer: a buffer that is not computed.
        """
        for term in buffer.terms:
            for tensor in term.tensors:
                self._readers.setdefault(storage_key(tensor), []).append(weakref.ref(buffer))

    def before_write(self, tensor: Tensor) -> None:
        """Compute the buffers that read the storage of a tensor.

        Args:
            tensor: the tensor that is about to be written into, not a placeholder.
        """
        for reference in self._readers.pop(storage_key(tensor), ()):
            buffer = reference()
            if buffer is not None:
                buffer.compute("a write in place")
