"""The interface between engines and reductions: the per-sample gradients of a chunk, with losses, aux and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from persample.factors import Dense, Factor
from persample.factors.norms import squared_norms_per_factor
from persample.utils.dtypes import as_real
from persample.utils.norms import has_extreme
from persample.utils.tracing import is_traced
from persample.utils.trees import TreeSpec, unflatten

# Gradients with up to this many elements in all samples are joined: one copy is faster than an operation on each.
_SMALL = 2**14


@dataclass(frozen=True)
class ParamSpec:
    """The structure, names, shapes and dtypes of the parameters, which results like the parameters share.

    Args:
        structure: the tree of the parameters (of a module: a dict by name).
        paths: one readable name per parameter, such as ``params['fc.weight']``.
        shapes: the shape of one sample's gradient for each parameter.
        dtypes: the dtype of each parameter.
    """

    structure: TreeSpec
    paths: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    def tree(self, values: Sequence[Any]) -> Any:
        """Return a tree like the parameters from one value per parameter."""
        return unflatten(list(values), self.structure)


@dataclass(frozen=True)
class Gradients:
    """The per-sample gradients g₁ … g_B of one chunk. Row i is the gradient of ℓᵢ, never of ℓᵢ/B.

    Args:
        factors: one per parameter, in the order of ``spec.paths``.
        spec: the structure, names, shapes and dtypes of the parameters.
        losses: ``[B]``.
        aux: the auxiliary outputs of the loss, stacked; None if the loss returns none.
        has_aux: whether the loss returns ``(value, aux)``.
        weights: ``[B]`` float64, or None for ones.
        connected: whether any of the losses depends on any of the parameters.
    """

    factors: tuple[Factor, ...]
    spec: ParamSpec
    losses: Tensor
    aux: Any = None
    has_aux: bool = False
    weights: Tensor | None = None
    connected: bool = True

    @classmethod
    def dense(cls, values: Sequence[Tensor], **fields: Any) -> Gradients:
        """Return gradients from dense tensors, ``[B, *shape]`` for each parameter."""
        return cls(tuple(Dense(as_real(value)) for value in values), **fields)

    @cached_property
    def squared_norms_per_param(self) -> list[Tensor]:
        """‖gᵢ‖² of each single parameter, ``[B]`` float64 each."""
        return self._squared_norms(self.factors)

    @cached_property
    def norms(self) -> Tensor:
        """Euclidean norms over all parameters, ``[B]`` float64."""
        return torch.stack(self._squared_norms(self._joined)).sum(0).sqrt()

    def _squared_norms(self, factors: Sequence[Factor]) -> list[Tensor]:
        new = [factor for factor in factors if id(factor) not in self._known]
        self._known.update(zip(map(id, new), squared_norms_per_factor(new), strict=True))
        return [self._known[id(factor)] for factor in factors]

    @cached_property
    def _known(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _joined(self) -> Sequence[Factor]:
        """The same gradients, with small dense factors joined into one, so that one operation serves all of them."""
        small = [factor for factor in self.factors if _is_small(factor)]
        if len(small) < 2:
            return self.factors
        rows = Dense(torch.cat([factor.materialize().flatten(1) for factor in small], 1))
        return [rows, *(factor for factor in self.factors if not _is_small(factor))]

    @cached_property
    def norms_per_param(self) -> list[Tensor]:
        """Euclidean norms of the gradients of each single parameter, ``[B]`` float64 each."""
        return [squared.sqrt() for squared in self.squared_norms_per_param]

    @property
    def total_weight(self) -> Tensor:
        """Σ wᵢ (B without weights), 0-d float64."""
        if self.weights is None:
            return self.losses.new_full((), len(self.losses), dtype=torch.float64)
        return self.weights.sum()

    @cached_property
    def moments(self) -> list[tuple[Tensor, Tensor]]:
        """The mean of each parameter's gradients and Σ wᵢ (gᵢ − mean)², in float64 against cancellation."""
        n, count = self.total_weight, len(self.factors)
        means = [torch.where(n > 0, x / n, 0) for x in self.sums([None] * count, [torch.float64] * count)]
        pairs = zip(self.weighted_factors, means, strict=True)
        return [(mean, factor.second_moment(self.weights, torch.float64, mean)) for factor, mean in pairs]

    @cached_property
    def weighted_factors(self) -> tuple[Factor, ...]:
        """The factors for sums over samples: rows of weight 0 are set to zero, because 0 · NaN would be NaN."""
        if self.weights is None:
            return self.factors
        removed = self.weights == 0
        return tuple(factor.zero_rows(removed) for factor in self.factors)

    def sums(self, scales: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return Σ wᵢ sᵢ gᵢ of each parameter.

        Args:
            scales: the sᵢ of each parameter, ``[B]`` float64, or None for ones.
            dtypes: the dtype of accumulation of each parameter.

        Returns:
            One sum per parameter, ``[*shape]``, real.
        """
        distinct: dict[tuple[int, torch.dtype], tuple[Tensor | None, torch.dtype, Any]] = {}  # usually one
        sums = []
        for factor, scale, dtype in zip(self.weighted_factors, scales, dtypes, strict=True):
            key = id(scale), dtype
            if key not in distinct:
                distinct[key] = self._coefficients(scale, dtype)
            coefficients, wide, rest = distinct[key]
            total = factor.weighted_sum(coefficients, wide)
            sums.append((total if rest is None else total + rest).to(dtype))
        return sums

    def _coefficients(
        self, scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, torch.dtype, Tensor | None]:
        """Return wᵢ sᵢ, the dtype of the sum, and a number to add to all elements of the sum, or None.

        The scales of huge or tiny gradients may exceed float32. A NaN scale must make every element of the sum NaN, but
        factors skip elements that are zero: the added number makes these NaN, too.
        """
        if scale is None:
            return self.weights, dtype, None
        scale = scale if self.weights is None else torch.where(self.weights == 0, 0, self.weights * scale)
        return (scale, torch.float64, 0 * scale.sum()) if has_extreme(scale) else (scale.to(dtype), dtype, None)


def _is_small(factor: Factor) -> bool:
    if not isinstance(factor, Dense):
        return False
    return factor.values.ndim > 1 and factor.stored <= _SMALL and not is_traced(factor.values)
