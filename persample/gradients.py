"""The interface between engines and reductions: the per-sample gradients of a chunk, with losses, aux and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from persample.factors import Dense, Factor, contractions
from persample.factors.contractions import squared_norms_of_sums
from persample.utils.numerics import as_real, has_extreme, root, squared_norms_of_each
from persample.utils.tracing import is_recorded
from persample.utils.trees import Leaf, Tree, TreeSpec, unflatten


@dataclass(frozen=True)
class ParamSpec:
    """The structure, names, shapes and dtypes of the parameters, which results like the parameters share."""

    structure: TreeSpec  # the tree of the parameters (of a module: a dict by name)
    paths: tuple[str, ...]  # one readable name per parameter, such as ``params['fc.weight']``
    shapes: tuple[torch.Size, ...]  # the shape of one sample's gradient for each parameter
    dtypes: tuple[torch.dtype, ...]

    def tree(self, values: Sequence[Leaf]) -> Tree:
        """Return a tree like the parameters from one value per parameter."""
        return unflatten(list(values), self.structure)


@dataclass(frozen=True)
class Gradients:
    """The per-sample gradients g₁ … g_B of one chunk. Row i is the gradient of ℓᵢ, never of ℓᵢ/B.

    Of losses with K outputs, sample i has K gradients gᵢₖ: what is ``[B]`` below is ``[B, K]``, except for weights.

    Args:
        factors: one per parameter, in the order of ``spec.paths``.
        spec: the structure, names, shapes and dtypes of the parameters.
        losses: ``[B]``, or ``[B, K]`` of K outputs.
        aux: the auxiliary outputs of the loss, stacked; None if the loss returns none.
        has_aux: whether the loss returns ``(value, aux)``.
        weights: ``[B]`` float64, or None for ones.
        connected: whether any of the losses depends on any of the parameters.
        are_of_units: whether rows are units, each the sum of several samples: of all but ``aux``, whose rows are
            samples.
        unit_ids: the ids of the units, ``[B]``, or None.
        term_norms: where asked for, the norms of the terms of each parameter's gradients, ``[B, T]``, float64. Rows are
            samples, as those of ``aux``.
        filled: of units that are padded with terms, ``[B]`` float64, the part of the terms that are not padding.
    """

    factors: tuple[Factor, ...]
    spec: ParamSpec
    losses: Tensor
    aux: Tree = None
    has_aux: bool = False
    weights: Tensor | None = None
    connected: bool = True
    are_of_units: bool = False
    unit_ids: Tensor | None = None
    term_norms: tuple[Tensor, ...] | None = None
    filled: Tensor | None = None

    @classmethod
    def dense(cls, values: Sequence[Tensor], *, losses: Tensor, **fields: Any) -> Gradients:
        """Return gradients from dense tensors, ``[B, *shape]`` for each parameter, ``[B, K, *shape]`` of K outputs."""
        outputs = tuple(losses.shape[1:])
        return cls(tuple(Dense(as_real(value), outputs=outputs) for value in values), losses=losses, **fields)

    @cached_property
    def squared_norms_per_param(self) -> list[Tensor]:
        """‖gᵢ‖² of each single parameter, ``[B]`` float64 each."""
        return squared_norms_per_factor(self.factors)

    @cached_property
    def norms(self) -> Tensor:
        """Euclidean norms over all parameters, ``[B]`` float64."""
        first, *others = self.squared_norms_per_param
        return root(torch.stack([first, *others]).sum(0) if others else first)

    @cached_property
    def norms_per_param(self) -> list[Tensor]:
        """Euclidean norms of the gradients of each single parameter, ``[B]`` float64 each."""
        return [root(squared) for squared in self.squared_norms_per_param]

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
        divisor = torch.where(n > 0, n, 1)  # sums without samples are 0
        means = [x / divisor for x in self.sums([None] * count, [torch.float64] * count)]
        pairs = zip(self.weighted_factors, means, strict=True)
        return [(mean, factor.second_moment(self.weights, torch.float64, mean)) for factor, mean in pairs]

    @cached_property
    def weighted_factors(self) -> tuple[Factor, ...]:
        """The factors for sums over samples: rows of weight 0 are set to zero, because 0 · NaN would be NaN."""
        if self.weights is None:
            return self.factors
        removed = self.weights == 0
        return tuple(factor.zero_rows(self._unsummable(removed, factor)) for factor in self.factors)

    def _unsummable(self, removed: Tensor, factor: Factor) -> Tensor:
        """Return which removed rows to set to zero: where a weight of 0 has a derivative, only NaN and infinity."""
        if self.weights is None or not is_recorded(self.weights):
            return removed
        return removed & ~contractions.flat(factor.materialize()).isfinite().all(1)

    def sums(self, scales: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return Σ wᵢ sᵢ gᵢ of each parameter.

        Args:
            scales: the sᵢ of each parameter, ``[B]`` float64, or None for ones.
            dtypes: the dtype of accumulation of each parameter.

        Returns:
            One sum per parameter, ``[*shape]``, real; ``[K, *shape]`` of K outputs.
        """
        weighted: dict[int, Tensor | None] = {}  # usually one
        coefficients = []
        for scale in scales:
            if id(scale) not in weighted:
                weighted[id(scale)] = self._weighted(scale)
            coefficients.append(weighted[id(scale)])
        return weighted_sums(self.weighted_factors, coefficients, dtypes, are_weights=weighted.keys() == {id(None)})

    def _weighted(self, scale: Tensor | None) -> Tensor | None:
        if scale is None or self.weights is None:
            return self.weights if scale is None else scale
        weights = self.weights.view(-1, *[1] * (scale.ndim - 1))
        return weights * torch.where((weights == 0) & ~scale.isfinite(), 0, scale)


def weighted_sums(
    factors: Sequence[Factor],
    coefficients: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
    *,
    are_weights: bool = False,
) -> list[Tensor]:
    """Return Σ cᵢ gᵢ of each parameter, ``[*shape]``, real, accumulated in its dtype of ``dtypes``.

    The coefficients are ``[B]`` float64 (``[B, K]`` of K outputs), or None for ones; gradients of coefficient 0 are
    finite. Coefficients of huge or tiny gradients may exceed float32, but not those that ``are_weights`` of the call. A
    NaN coefficient must make every element of the sum NaN, but factors skip elements that are zero: a number that is
    added makes these NaN, too.
    """
    given = list({id(x): x.flatten() for x in coefficients if x is not None}.values())  # usually one
    is_extreme = bool(given) and not are_weights and has_extreme(torch.cat(given) if len(given) > 1 else given[0])
    distinct: dict[tuple[int, torch.dtype], tuple[Tensor | None, torch.dtype, Any]] = {}
    sums = []
    for factor, coefficient, dtype in zip(factors, coefficients, dtypes, strict=True):
        key = id(coefficient), dtype
        if key not in distinct:
            distinct[key] = _representable(coefficient, dtype, is_extreme=is_extreme)
        representable, wide, rest = distinct[key]
        total = factor.weighted_sum(representable, wide)
        if rest is not None:
            total = total + rest.view([*rest.shape, *[1] * (total.ndim - rest.ndim)])
        sums.append(total.to(dtype))
    return sums


def _representable(
    coefficients: Tensor | None, dtype: torch.dtype, *, is_extreme: bool
) -> tuple[Tensor | None, torch.dtype, Tensor | None]:
    """Return the coefficients, the dtype of their sum, and a number (of each output) to add, or None."""
    if coefficients is None:
        return None, dtype, None
    if is_extreme:
        return coefficients, torch.float64, 0 * coefficients.sum(0)
    return coefficients.to(dtype), dtype, None


def squared_norms_per_factor(factors: Sequence[Factor]) -> list[Tensor]:
    """Return ‖gᵢ‖² of each parameter, with one check of all magnitudes; what factors share is read once."""
    operands = [factor.norm_operands for factor in factors]
    terms = [() if own else factor.term_operands for factor, own in zip(factors, operands, strict=True)]
    pairs = list(chain.from_iterable(terms))
    sums = iter(squared_norms_of_sums(pairs) if pairs else ())
    norms = iter(squared_norms_of_each(list(chain.from_iterable(operands)), len(factors[0].outputs) + 1))
    found = []
    for factor, own, of_factor in zip(factors, operands, terms, strict=True):
        if len(own) == 2:
            found.append(next(norms) * next(norms))
        elif own:
            found.append(next(norms))
        else:
            found.append(factor.joined([next(sums) for _ in of_factor]) if of_factor else factor.squared_norms())
    return found
