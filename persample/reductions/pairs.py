"""Inner products and cosines of all pairs of samples."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from persample.factors import Factor
from persample.gradients import Gradients
from persample.merge import Stacked
from persample.reductions.base import Reduction


@dataclass(frozen=True)
class Gram(Reduction):
    """⟨gᵢ, gⱼ⟩: the ``[B, B]`` matrix of inner products over all parameters, real, in float32 at least.

    Pairs span chunks, so the factors of all samples are kept until the end.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 2.0]), Gram())
        tensor([[1., 2.],
                [2., 4.]])
    """

    uses: ClassVar[frozenset[str]] = frozenset({"gram"})

    def lift(self, gradients: Gradients) -> Any:
        """Return the factors."""
        return [Stacked(factor) for factor in gradients.factors]

    def finish(self, merged: Any) -> Tensor:
        """Return the inner products, summed over the parameters."""
        return _summed_gram([stacked.concatenated() for stacked in merged])


def _summed_gram(factors: Sequence[Factor]) -> Tensor:
    return functools.reduce(torch.add, (factor.gram() for factor in factors))


@dataclass(frozen=True)
class CosineSimilarity(Gram):
    """⟨gᵢ, gⱼ⟩ / (‖gᵢ‖ ‖gⱼ‖): the ``[B, B]`` matrix of cosines, 0 where a gradient is zero.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, CosineSimilarity())
        tensor([[1., 1., 0.],
                [1., 1., 0.],
                [0., 0., 1.]])
    """

    uses: ClassVar[frozenset[str]] = frozenset({"gram", "squared_norms"})

    def lift(self, gradients: Gradients) -> Any:
        """Return the factors, and the norms."""
        return {"factors": super().lift(gradients), "norms": Stacked(gradients.norms)}

    def finish(self, merged: Any) -> Tensor:
        """Return the cosines."""
        norms = merged["norms"].finish()
        inverse = torch.where(norms == 0, 0, 1 / norms)
        # Factors are scaled before the product, which may underflow for small float32 gradients.
        return _summed_gram([stacked.concatenated().scale_rows(inverse) for stacked in merged["factors"]])
