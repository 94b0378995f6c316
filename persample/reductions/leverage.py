"""Linear systems in the Fisher matrix of the per-sample gradients, solved in the space of samples, and leverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Op
from persample.factors.linear_system import float64_gram, solve, solve_weighted
from persample.gradients import Gradients
from persample.merge import Stacked
from persample.reductions.base import Reduction
from persample.utils.numerics import widest
from persample.utils.tracing import is_batched, is_recorded
from persample.utils.trees import Tree


@dataclass(frozen=True, eq=False)
class Solution(Reduction):
    """A solution of (F + λI) x = b with F = (1/n) Σ wᵢ gᵢ gᵢᵀ, n = Σ wᵢ."""

    damping: float | Tensor
    minimum_norm: bool = field(init=False, repr=False)  # λ = 0 has a compiled program of its own
    uses: ClassVar[frozenset[Op]] = frozenset({Op.gram, Op.weighted_sum})
    live: ClassVar[tuple[str, ...]] = ("damping",)
    divides_by_weight = True

    def __post_init__(self) -> None:
        hidden = is_batched(self.damping)
        if not is_number(self.damping) or not (hidden or 0 <= self.damping < torch.inf):
            expected, fix = "a finite number >= 0", "Pass λ, in the units of the squared gradients."
            raise ArgumentError.about("damping", expected=expected, received=repr(self.damping), fix=fix)
        object.__setattr__(self, "minimum_norm", not hidden and bool(self.damping == 0))

    def solved(
        self, matrix: Tensor, n: Tensor, right: Tensor, dtypes: Sequence[torch.dtype], scale: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        """Return the solution of (K + nλI) X = B, and whether λ counted as 0."""
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        damping = n * like(self.damping, matrix)
        return solve(matrix, damping, right, eps=eps, minimum_norm=self.minimum_norm, scale=scale)

    def is_recorded(self, *tensors: Tensor) -> bool:
        """Return whether autograd records tensors, or λ."""
        return any(is_recorded(x) for x in (*tensors, self.damping) if isinstance(x, Tensor))


@dataclass(frozen=True, eq=False)
class Leverage(Solution):
    """gᵢᵀ (F + λI)⁻¹ gᵢ / n with F = (1/n) Σ wᵢ gᵢ gᵢᵀ, n = Σ wᵢ: the influence of each sample on itself, ``[B]``.

    At λ = 0 (the pseudo-inverse of F) a sample of weight 1 has a leverage from 0 to 1, and they sum to the rank of F.
    The result is real, in float32 at least; a sample of weight 0 is scored, but does not count in F.

    Source: Hoaglin, Welsch, "The Hat Matrix in Regression and ANOVA" (1978); with ridge: Alaoui, Mahoney, "Fast
    Randomized Kernel Ridge Regression with Statistical Guarantees" (2015).

    Args:
        damping: λ >= 0, a number or 0-d tensor.

    Raises:
        ArgumentError: if ``damping`` is negative or not finite.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 9.0]])
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, Leverage(0.0))
        tensor([0.5000, 0.5000, 1.0000])
    """

    uses: ClassVar[frozenset[Op]] = frozenset({Op.gram})

    def lift(self, gradients: Gradients) -> Tree:
        pairs = zip(gradients.factors, gradients.spec.dtypes, strict=True)
        return {"factors": [Stacked(factor, dtype) for factor, dtype in pairs], "weights": weights_of(gradients)}

    def finish(self, merged: Tree) -> Tensor:
        dtypes = [leaf.dtype for leaf in merged["factors"]]
        factors = [leaf.concatenated() for leaf in merged["factors"]]
        gram = float64_gram(factors)
        weights, shape = merged["weights"].finish(), factors[0].sizes
        n = weights.sum()
        weights = of_each(weights, shape).flatten()
        if not self.minimum_norm and self.is_recorded(gram, weights):
            return self._plain_scores(gram, weights, n).view(shape).to(widest(dtypes))
        counts, root = weights != 0, weights.sqrt()
        seen = torch.where(counts[:, None], root[:, None] * gram, 0)  # a sample of weight 0 may be NaN
        solution, is_undamped = self.solved(torch.where(counts, seen * root, 0), n, seen, dtypes)
        if is_undamped:
            scores = solution.square().sum(0)
        else:  # samples that do not count by the formula of Sherman, Morrison and Woodbury, whose difference cancels
            others = (gram.diagonal() - (seen * solution).sum(0)).clamp_min(0) / (n * self.damping)
            scores = torch.where(counts, solution.diagonal() / root, others)
        return scores.view(shape).to(widest(dtypes))

    def _plain_scores(self, gram: Tensor, weights: Tensor, n: Tensor) -> Tensor:
        """Return the scores for λ > 0 without √w, which has no derivative where a weight is 0."""
        unknown = (weights == 0) & ~gram.diagonal().isfinite()
        known = gram.masked_fill(unknown | unknown[:, None], 0)
        solution = solve_weighted(known, weights, n, like(self.damping, gram), known)
        return torch.where(unknown, torch.nan, solution.diagonal() / n)


def of_each(weights: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``weights [B]`` in a shape ``[B]``, or ``[B, K]`` of K outputs."""
    return weights if len(shape) == 1 else weights[:, None].expand(*shape)


def is_number(x: object) -> bool:
    """Return whether an argument is a real number or a 0-d tensor of one."""
    if isinstance(x, Tensor):
        return x.ndim == 0 and not x.is_complex()
    return isinstance(x, Real) and not isinstance(x, bool)


def like(number: float | Tensor, x: Tensor) -> Tensor:
    """Return a number in the dtype and on the device of a tensor, without a copy from the CPU."""
    return number.to(x) if isinstance(number, Tensor) else x.new_full((), float(number))


def weights_of(gradients: Gradients) -> Stacked:
    """Return the weights of a chunk's samples, ones without weights."""
    ones = gradients.losses.new_ones(len(gradients.losses), dtype=torch.float64)
    return Stacked(ones if gradients.weights is None else gradients.weights)
