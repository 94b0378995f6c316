"""A model in the hands of a library that hooks its layers and leaves results on its parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor, nn

from benchmarks.methods.by_hand import arrays
from benchmarks.methods.layers import layered, losses
from benchmarks.workloads import Workload


class Hooked:
    """A layered copy of the workload's model, hooked by a library.

    Args:
        work: the workload.
        hook: what the library does to a model; it may wrap it.
    """

    def __init__(self, work: Workload, hook: Callable[[nn.Module], nn.Module]):
        layers, original = layered(work.model)
        self.model = hook(layers)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        inner = getattr(self.model, "_module", self.model)  # Opacus wraps
        self._named = {original(name): p for name, p in inner.named_parameters() if p.requires_grad}
        self._shapes = {name: p.shape for name, p in work.params.items()}
        self._losses, self._batch = losses(work), work.batch

    def losses(self) -> Tensor:
        return self._losses(self.model, *self._batch)

    def clear(self, *attributes: str) -> None:
        """Drop the last results first, as training loops do, so that two of them never live at once."""
        for p in self.params:
            for attribute in ("grad", *attributes):
                setattr(p, attribute, None)

    def read(self, attribute: str) -> dict[str, Tensor]:
        """Collect what the library left on the parameters, under the original names."""
        return {name: getattr(p, attribute) for name, p in self._named.items()}

    def numpy(self, result: Tensor | dict[str, Tensor]) -> np.ndarray | dict[str, np.ndarray]:
        """Turn it into arrays of the original shapes (after the batch axis, if there is one)."""
        if isinstance(result, Tensor):
            return arrays(result)
        axes = {name: x.ndim - self._named[name].ndim for name, x in result.items()}
        return {name: arrays(x).reshape(x.shape[: axes[name]] + self._shapes[name]) for name, x in result.items()}
