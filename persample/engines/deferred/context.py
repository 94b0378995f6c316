"""The state of one deferred backward pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from persample.engines.deferred.buffer import PendingBuffers, storage_key
from persample.engines.deferred.copies import OutputCopies
from persample.engines.deferred.offsets import SampleOffsets
from persample.engines.deferred.placeholder import Placeholder, defer
from persample.engines.deferred.terms import DeferredTerm
from persample.factors.cost_model import Plan, Size


class DeferralContext:
    """The state of one deferred backward pass: pending buffers, known offsets of samples, and what is worth deferring.

    Args:
        plan: how gradients are stored.
        params: the parameters: products with them are signals, not gradients, and are never deferred.
    """

    def __init__(self, plan: Plan, params: Iterable[Tensor]) -> None:
        self.pending, self.offsets, self.copies = PendingBuffers(), SampleOffsets(), OutputCopies()
        self._plan = plan
        self._params = {storage_key(param) for param in params}

    def defers(self, num_terms: int, written: int, *operands: Tensor, is_product: bool = True) -> bool:
        """Return whether a product is better deferred than computed.

        Args:
            num_terms: T.
            written: the number of elements in the product.
            *operands: the operands of the product.
            is_product: whether it is a matrix product, and not a sum of rows.
        """
        is_real = all(x.dtype.is_floating_point and x.dtype == operands[0].dtype and x.numel() for x in operands)
        if not written or not is_real or any(storage_key(x) in self._params for x in operands):
            return False
        stored = sum(x.numel() for x in operands)
        size = Size(num_terms, written, stored, operands[0].device.type)
        return not self._plan.reason_to_write_out(size, is_product=is_product)

    def placeholder(self, term: DeferredTerm, like: Tensor) -> Placeholder:
        """Return the placeholder of one term.

        Args:
            term: the term.
            like: a tensor of the same dtype on the same device.
        """
        return defer((term,), term.shape, like.dtype, like.device, self.pending)
