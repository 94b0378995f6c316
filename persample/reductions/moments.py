"""Second moments, variance, and gradient noise scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Op
from persample.gradients import Gradients
from persample.merge import Moments, Summed
from persample.reductions.base import Average, Reduction
from persample.utils.numerics import accumulate_dtype, restore, widest
from persample.utils.trees import Tree, flatten, tree_map


def _moments(gradients: Gradients, *, elementwise: bool) -> list[Moments]:
    """Return the weight, mean and squared deviations of each parameter; the last elementwise, or their sum."""
    pairs = zip(gradients.moments, gradients.spec.dtypes, strict=True)
    n, total = gradients.total_weight, torch.sum if gradients.losses.ndim == 1 else _sum_of_each
    return [Moments(n, mean, m2 if elementwise else total(m2), dtype) for (mean, m2), dtype in pairs]


def _sum_of_each(x: Tensor) -> Tensor:
    """Return the sums over the elements of each of K outputs, ``[K, 1, …]``, which broadcast with ``x [K, …]``."""
    return _by_output(x, len(x)).sum(1).view(-1, *[1] * (x.ndim - 1))


def _by_output(x: Tensor, outputs: int) -> Tensor:
    return x.reshape(outputs, x.numel() // outputs)


@dataclass(frozen=True)
class SecondMoment(Average):
    """Σ wᵢ gᵢ² / Σ wᵢ: the mean of the squared gradients, elementwise; a tree like the parameters.

    The real and the imaginary part of a complex parameter are squared and averaged separately. The rules for weights
    are those of Mean.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 3.0]), SecondMoment())
        tensor(5.)
    """

    uses: ClassVar[frozenset[Op]] = frozenset({Op.second_moment})

    def sums(self, gradients: Gradients) -> Tree:
        pairs = zip(gradients.weighted_factors, gradients.spec.dtypes, strict=True)
        weights = gradients.weights
        sums = [Summed(factor.second_moment(weights, accumulate_dtype(dtype)), dtype) for factor, dtype in pairs]
        return gradients.spec.tree(sums)


@dataclass(frozen=True)
class Variance(Reduction):
    """Σ wᵢ (gᵢ − ḡ)² / (n − correction), n = Σ wᵢ: the variance over samples, elementwise; a tree like the parameters.

    With ``total``, its sum over all parameters: tr Σ = Σ wᵢ ‖gᵢ − ḡ‖² / (n − correction), one number. Weight k means
    that the sample was seen k times. Contracted in float64, chunks merged by Chan's formula.

    Args:
        correction: as in ``torch.var``: 1 for the unbiased estimate, 0 for the biased one.
        total: return one number instead of a tree, in the parameters' real dtype, float32 at least.

    Raises:
        ArgumentError: if ``correction`` is negative or not a number, or (when used) if n does not exceed it.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 3.0]), Variance())
        tensor(2.)
        >>> x = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, Variance(total=True))  # 2 + 8
        tensor(10.)
    """

    correction: float = 1
    total: bool = False
    uses: ClassVar[frozenset[Op]] = frozenset({Op.second_moment, Op.weighted_sum})
    live: ClassVar[tuple[str, ...]] = ("correction",)
    divides_by_weight = True

    def __post_init__(self) -> None:
        number = isinstance(self.correction, int | float) and not isinstance(self.correction, bool)
        if not number or not self.correction >= 0:
            fix = "Use 1 for the unbiased estimate or 0 for the plain one."
            raise ArgumentError.about("correction", expected="a number >= 0", received=repr(self.correction), fix=fix)

    @property
    def needs_more_than(self) -> float:
        """The divisor n − correction must be positive."""
        return self.correction

    def lift(self, gradients: Gradients) -> Tree:
        return gradients.spec.tree(_moments(gradients, elementwise=not self.total))

    def finish(self, merged: object) -> Tree:
        """Return the variances in the dtypes of the parameters, or their sum."""
        if self.total:
            leaves = flatten(merged)[0]
            return _trace(leaves, self.correction).to(_dtype(leaves))
        return tree_map(lambda leaf: restore(leaf.m2 / (leaf.n - self.correction), leaf.dtype), merged)


class NoiseScaleEstimate(NamedTuple):
    """The result of ``NoiseScale``; three 0-d tensors, or ``[K]`` for losses with K outputs.

    Attributes:
        covariance_trace: tr Σ, the summed variance of one sample's gradient (unbiased).
        squared_mean: the unbiased estimate of ‖E g‖²; it may be negative when the noise exceeds the mean.
        noise_scale: their ratio, the simple gradient noise scale, in samples.
    """

    covariance_trace: Tensor
    squared_mean: Tensor
    noise_scale: Tensor


@dataclass(frozen=True)
class NoiseScale(Reduction):
    """The simple gradient noise scale tr Σ / ‖E g‖²: roughly the size of a useful batch.

    With n = Σ wᵢ: tr Σ = Σ wᵢ ‖gᵢ − ḡ‖² / (n − 1), and ‖E g‖² is estimated without bias by ‖ḡ‖² − tr Σ / n. Contracted
    in float64; returns a ``NoiseScaleEstimate`` in the parameters' real dtype, float32 at least. n ≤ 1 is an error.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.tensor([1.0, 3.0])
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), x, NoiseScale()).noise_scale  # 2 / (4 - 2/2)
        tensor(0.6667)
    """

    uses: ClassVar[frozenset[Op]] = frozenset({Op.second_moment, Op.weighted_sum})
    divides_by_weight = True

    @property
    def needs_more_than(self) -> float:
        """One sample has no variance."""
        return 1.0

    def lift(self, gradients: Gradients) -> Tree:
        """Return the moments of one chunk, the squared deviations summed over each parameter."""
        return _moments(gradients, elementwise=False)

    def finish(self, merged: object) -> NoiseScaleEstimate:
        leaves: list[Moments] = flatten(merged)[0]
        n, trace = leaves[0].n, _trace(leaves, 1)
        squares = [_by_output(leaf.mean.square(), leaf.m2.numel()).sum(1).view(trace.shape) for leaf in leaves]
        squared_mean = torch.stack(squares).sum(0) - trace / n
        return NoiseScaleEstimate(*(x.to(_dtype(leaves)) for x in (trace, squared_mean, trace / squared_mean)))


def _trace(leaves: Sequence[Moments], correction: float) -> Tensor:
    """Return the summed variances, 0-d, or ``[K]`` of K outputs."""
    outputs = leaves[0].m2.shape[:1]
    return torch.stack([leaf.m2.view(outputs) for leaf in leaves]).sum(0) / (leaves[0].n - correction)


def _dtype(leaves: Sequence[Moments]) -> torch.dtype:
    return widest(leaf.dtype for leaf in leaves if leaf.dtype is not None)
