"""Products of the empirical Fisher matrix with vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.gradients import Gradients, ParamSpec
from persample.merge import Summed
from persample.reductions.base import Average
from persample.reductions.directions import Dot, check_directions
from persample.utils.dtypes import accumulate_dtype
from persample.utils.trees import leaves_like


@dataclass(frozen=True, eq=False)
class FisherVectorProduct(Average):
    """(1/n) Σ wᵢ ⟨gᵢ, v⟩ gᵢ, n = Σ wᵢ: the product of the empirical Fisher matrix and a vector.

    Returns a tree like the parameters, in their dtypes. With K vectors, each leaf has a leading axis of K. Of losses
    with several outputs, F adds up over these, too.

    Args:
        v: a tree like the parameters, of their shapes; or with one more axis, of K vectors, in front of each.

    Raises:
        ArgumentError: (when used) if the structure or shapes are not those of the parameters.
    """

    v: Any
    uses: ClassVar[frozenset[str]] = frozenset({"dot", "weighted_sum"})
    live: ClassVar[tuple[str, ...]] = ("v",)

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if the vectors are not trees like the parameters."""
        fix = "Pass a tree like the parameters (of a module: a dict by name), or K of them stacked on a new axis 0."
        check_directions(self.v, spec, stacked=(stacked := self._is_stacked(spec)), argument="v", fix=fix)
        if stacked and not len((leaves_like(self.v, spec.structure) or [])[0]):
            raise ArgumentError.about("v", expected="one vector or more", received="none", fix=fix)

    def _is_stacked(self, spec: ParamSpec) -> bool:
        leaves = leaves_like(self.v, spec.structure) or []
        return bool(leaves) and isinstance(leaves[0], Tensor) and leaves[0].ndim > len(spec.shapes[0])

    def sums(self, gradients: Gradients) -> Any:
        """Return the sums of one chunk: for each vector inner products, and a sum weighted by them."""
        spec = gradients.spec
        products = Dot(self.v, stacked=(stacked := self._is_stacked(spec))).lift(gradients).rows.double()
        wide = [accumulate_dtype(dtype) for dtype in spec.dtypes]
        totals = [gradients.sums([c] * len(wide), wide) for c in (products.unbind(-1) if stacked else [products])]
        if gradients.losses.ndim > 1:  # F adds up over K outputs
            totals = [[x.sum(0) for x in total] for total in totals]
        columns = [torch.stack(column) if stacked else column[0] for column in zip(*totals, strict=True)]
        return spec.tree([Summed(x, dtype) for x, dtype in zip(columns, spec.dtypes, strict=True)])
