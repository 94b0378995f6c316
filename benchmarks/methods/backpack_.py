"""BackPACK: the extension that fits the quantity: BatchGrad, BatchL2Grad, Variance, or none for the mean."""

from __future__ import annotations

import warnings
from typing import Any

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad, Variance

from benchmarks.methods.by_hand import reduce
from benchmarks.methods.hooked import Hooked
from benchmarks.methods.method import MAX_NORM, CannotError, Method, Prepared
from benchmarks.workloads import Workload

_EXTENSIONS: dict[str, Any] = {
    "stack": BatchGrad,
    "gram": BatchGrad,
    "norms": BatchL2Grad,
    "clipped_mean": BatchL2Grad,
    "variance": Variance,
}


def prepare(work: Workload, quantity: str) -> Prepared:
    hooked = Hooked(work, extend)
    extensions = [_EXTENSIONS[quantity]()] if quantity in _EXTENSIONS else []
    fields = [extension.savefield for extension in extensions]
    batch_size = len(work.batch[0])

    def backward(**options):
        hooked.clear(*fields)
        losses = hooked.losses()
        with backpack(*extensions, **options):
            losses.sum().backward(**options)
        return losses

    def norms(**options):
        losses = backward(**options)
        return losses, sum(hooked.read("batch_l2").values()).sqrt()

    def clip():
        losses, norm = norms(retain_graph=True)
        hooked.clear(*fields)
        (losses * (MAX_NORM / norm).clamp(max=1.0) / batch_size).sum().backward()
        return hooked.read("grad")

    def variance():  # BackPACK divides by n
        backward()
        return {name: v * (batch_size / (batch_size - 1)) for name, v in hooked.read("variance").items()}

    def mean():
        hooked.clear()
        hooked.losses().mean().backward()
        return hooked.read("grad")

    def from_stack():
        backward()
        return reduce(hooked.read("grad_batch"), quantity)

    special = {"norms": lambda: norms()[1], "clipped_mean": clip, "variance": variance, "mean": mean}
    _refuse_unsupported(backward, hooked, fields)
    return Prepared(special.get(quantity, from_stack), hooked.numpy)


def _refuse_unsupported(backward, hooked, fields):
    """BackPACK warns of a layer that it does not know, and leaves its parameters without the result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward()
    if any(getattr(p, field, None) is None for p in hooked.params for field in fields):
        reasons = dict.fromkeys(
            str(w.message) for w in caught if "'torch.nn" in str(w.message)
        )  # layers, not containers
        raise CannotError("; ".join(reasons))


METHODS = (Method("BackPACK", "torch-peers", prepare),)
