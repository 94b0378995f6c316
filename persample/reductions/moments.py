"""Reductions that measure how the samples' gradients spread: second moments, variance, gradient noise scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.gradients import Gradients
from persample.merge import Moments, Summed
from persample.reductions.base import Average, Reduction
from persample.utils.dtypes import accumulate_dtype, restore, widest
from persample.utils.trees import flatten, tree_map


def _moments(gradients: Gradients, *, elementwise: bool) -> list[Moments]:
    """Weight, mean and squared deviations of each parameter, these elementwise or added up."""
    pairs = zip(gradients.moments, gradients.spec.dtypes, strict=True)
    n = gradients.total_weight
    return [Moments(n, mean, m2 if elementwise else m2.sum(), dtype) for (mean, m2), dtype in pairs]


@dataclass(frozen=True)
class SecondMoment(Average):
    """Σ wᵢ gᵢ² / Σ wᵢ: the mean of the squared gradients, elementwise; a tree like the parameters.

    Of a complex parameter the squares of the real and of the imaginary part are averaged, each in its place. Weights
    as in Mean.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 3.0]), SecondMoment())
        tensor(5.)
    """

    uses: ClassVar[frozenset[str]] = frozenset({"second_moment"})

    def sums(self, gradients: Gradients) -> Any:
        """Return the sums of squares of one chunk."""
        pairs = zip(gradients.weighted_factors, gradients.spec.dtypes, strict=True)
        weights = gradients.weights
        sums = [Summed(factor.second_moment(weights, accumulate_dtype(dtype)), dtype) for factor, dtype in pairs]
        return gradients.spec.tree(sums)


@dataclass(frozen=True)
class Variance(Reduction):
    """Σ wᵢ (gᵢ − ḡ)² / (n − correction), n = Σ wᵢ: the variance over samples, elementwise; a tree like the parameters.

    Weight k means that the sample was seen k times. Contracted in float64, chunks merged by Chan's formula.

    Args:
        correction: degrees of freedom taken off, as in ``torch.var``: 1 for the unbiased estimate, 0 for the plain one.

    Raises:
        ArgumentError: if ``correction`` is negative or not a number, or (when used) if n does not exceed it.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 3.0]), Variance())
        tensor(2.)
    """

    correction: float = 1
    uses: ClassVar[frozenset[str]] = frozenset({"second_moment", "weighted_sum"})
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

    def lift(self, gradients: Gradients) -> Any:
        """Return the moments of one chunk."""
        return gradients.spec.tree(_moments(gradients, elementwise=True))

    def finish(self, merged: Any) -> Any:
        """Return the variances in the dtypes of the parameters."""
        return tree_map(lambda leaf: restore(leaf.m2 / (leaf.n - self.correction), leaf.dtype), merged)


class NoiseScaleEstimate(NamedTuple):
    """What ``NoiseScale`` returns; three 0-d tensors.

    Attributes:
        covariance_trace: tr Σ, the summed variance of one sample's gradient (unbiased).
        squared_mean: the unbiased estimate of ‖E g‖²; may come out negative when noise drowns the mean.
        noise_scale: their ratio, the simple gradient noise scale, in samples.
    """

    covariance_trace: Tensor
    squared_mean: Tensor
    noise_scale: Tensor


@dataclass(frozen=True)
class NoiseScale(Reduction):
    """The simple gradient noise scale tr Σ / ‖E g‖²: about how many samples a useful batch holds.

    With n = Σ wᵢ: tr Σ = Σ wᵢ ‖gᵢ − ḡ‖² / (n − 1), and ‖E g‖² is estimated without bias by ‖ḡ‖² − tr Σ / n. Contracted
    in float64; returns a ``NoiseScaleEstimate`` in the parameters' real dtype, float32 at least. n ≤ 1 is refused.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.tensor([1.0, 3.0])
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), x, NoiseScale()).noise_scale  # 2 / (4 - 2/2)
        tensor(0.6667)
    """

    uses: ClassVar[frozenset[str]] = frozenset({"second_moment", "weighted_sum"})
    divides_by_weight = True

    @property
    def needs_more_than(self) -> float:
        """One sample has no spread."""
        return 1.0

    def lift(self, gradients: Gradients) -> Any:
        """Return the moments of one chunk, the squared deviations summed over each parameter."""
        return _moments(gradients, elementwise=False)

    def finish(self, merged: Any) -> NoiseScaleEstimate:
        """Return the estimate."""
        leaves: list[Moments] = flatten(merged)[0]
        n = leaves[0].n
        trace = torch.stack([leaf.m2 for leaf in leaves]).sum() / (n - 1)
        squared_mean = torch.stack([leaf.mean.square().sum() for leaf in leaves]).sum() - trace / n
        dtype = widest(leaf.dtype for leaf in leaves if leaf.dtype is not None)
        return NoiseScaleEstimate(*(x.to(dtype) for x in (trace, squared_mean, trace / squared_mean)))
