"""Gradients in other bases, Lᵀ g R: those of the eigenvectors of Kronecker factors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from persample.factors.embedding import Embedding
from persample.factors.factor import Factor, Mapped
from persample.factors.outer import Outer
from persample.factors.sum import SumFactor
from persample.utils import numerics


@dataclass(frozen=True)
class Rotated(Mapped):
    """The gradients Lᵀ gᵢ R of another factor, written out a few samples at a time.

    Args:
        factor: the factor of the gᵢ.
        left: L, ``[o, o]``, ``[G, o, o]`` of several blocks, or a vector ``[o]``, the diagonal of L.
        right: R, ``[i, i]``, ``[G, i, i]`` or ``[i]``.
    """

    left: Tensor
    right: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rotated gradients."""
        return self.left.dtype

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``."""
        values = self.factor.materialize().to(self.dtype)
        block = (*self.left.shape[:-2], self.left.shape[-1], self.right.shape[-1])
        rotated = between(self.left, values.reshape(*self.sizes, *block), self.right).view(values.shape)
        return rotated if out is None else out.copy_(rotated)


def between(left: Tensor, matrices: Tensor, right: Tensor) -> Tensor:
    """Return LᵀXR; a vector in the place of L or R is the diagonal of a matrix."""
    matrices = left.unsqueeze(-1) * matrices if left.ndim == 1 else left.mT @ matrices
    return matrices * right if right.ndim == 1 else matrices @ right


def rotated(factor: Factor, left: Tensor, right: Tensor) -> Factor:
    """Return the factor of Lᵀ gᵢ R, in float32 at least: signals and inputs are rotated where that is possible."""
    dtype = numerics.accumulate_dtype(factor.dtype)
    left, right = left.to(factor.device, dtype), right.to(factor.device, dtype)
    if isinstance(factor, SumFactor):
        return replace(factor, parts=tuple(rotated(part, left, right) for part in factor.parts))
    block = (left.shape[:-2].numel(), left.shape[-1], right.shape[-1])
    if isinstance(factor, Outer) and factor.block == block:
        pairs = (factor.left, left), (factor.right, right)
        signals, inputs = (x.to(dtype) * basis if basis.ndim == 1 else x.to(dtype) @ basis for x, basis in pairs)
        return replace(factor, left=signals, right=inputs, out_dtype=dtype)
    if isinstance(factor, Embedding) and left.ndim == 1 and right.ndim == 2:
        signals = factor.signals.to(dtype) @ right * left[factor.index].unsqueeze(-1)
        return replace(factor, signals=signals)
    return Rotated(factor, left, right, outputs=factor.outputs)
