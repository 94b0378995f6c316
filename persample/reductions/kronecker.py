"""Kronecker factors of the Fisher matrix of each parameter (K-FAC), and second moments in their eigenbases (EKFAC)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Dense, Factor, Op, Outer, TermMoments
from persample.gradients import Gradients, ParamSpec
from persample.merge import Summed
from persample.reductions.base import Average, Reduction, check_positive
from persample.utils.numerics import accumulate_dtype
from persample.utils.trees import Leaf, Tree, flatten, leaves_like, on_one_line, structure, unflatten


class KroneckerFactor(NamedTuple):
    """The factors of one parameter's block F ≈ S ⊗ A, gradients seen as matrices ``[o, i]``; or their eigenvectors.

    Attributes:
        A: ``[i, i]``, that of all axes but the first: of the inputs of a layer. A vector is a diagonal matrix.
        S: ``[o, o]``, that of the first axis of the parameter: of the signals (gradients of the layer's outputs).
    """

    A: Tensor
    S: Tensor

    @property
    def sides(self) -> torch.Size:
        """The sides o and i, perhaps after G."""
        return torch.Size((*self.S.shape[:-2], self.S.shape[-1], self.A.shape[-1]))

    def fits(self, shape: torch.Size) -> bool:
        """Return whether a parameter of some shape is such a matrix, its first axes the rows."""
        rows = self.sides[:-1].numel()
        return shape.numel() == self.sides.numel() and any(shape[:n].numel() == rows for n in range(len(shape) + 1))


class _Sums(NamedTuple):
    A: Summed
    S: Summed
    terms: Summed  # Σ wᵢ Tᵢ, or Σ wᵢ Tᵢ² of summed terms


@dataclass(frozen=True)
class KroneckerFactors(Reduction):
    """Kronecker factors of each parameter's Fisher matrix (K-FAC): F ≈ S ⊗ A, with F = Σ wᵢ gᵢ gᵢᵀ / Σ wᵢ.

    Returns a tree like the parameters, with leaves ``KroneckerFactor(A, S)``, in float32 at least, which
    ``persample.Curvature`` multiplies by and inverts.

    The gradient of a layer's weight is a sum of T terms, gᵢ = Σₜ lᵢₜ rᵢₜᵀ, one for each position (step, pixel) that the
    layer is applied to: l is the gradient of its output, and r its input. A bias is a separate layer, with input 1.

    - "expand" treats terms as independent: S = Σ wᵢ lᵢₜ lᵢₜᵀ / Σ wᵢ and A = Σ wᵢ rᵢₜ rᵢₜᵀ / Σ wᵢ Tᵢ, sums over i and t.
    - "reduce" adds the terms up first, lᵢ = Σₜ lᵢₜ and rᵢ = Σₜ rᵢₜ: S = Σ wᵢ lᵢ lᵢᵀ / Σ wᵢ and
      A = Σ wᵢ rᵢ rᵢᵀ / Σ wᵢ Tᵢ².

    S belongs to the first axis of the parameter, and A to all others. If inputs lie along the first (``x @ w``,
    tables, transposed convolutions), S belongs to them, and S ⊗ A is the same. A parameter that is used several times
    has the terms of all uses. For losses with K outputs, F is the sum over the outputs.

    Shapes other than ``[o, o]`` and ``[i, i]``:

    - ``[n]``, the diagonal alone: of axes longer than ``max_size``, and S of a table that is only looked up.
    - ``[G, o/G, o/G]`` and ``[G, i, i]``: one block for each of the G groups of a convolution.
    - A tensor like the parameter in place of both, E[gᵢ²], the diagonal of F: if gradients are not products, for
      example of masked or complex weights. A real vector or scalar has its exact block: S = E[gᵢ gᵢᵀ] and A = 1.
      ``explain`` calls these parameters "Dense".

    Source: Martens, Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature" (2015);
    Eschenhagen et al., "Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures" (2023),
    equations 7 (expand) and 9 (reduce).

    Args:
        approximation: "expand" or "reduce".
        max_size: the most elements of an axis that has a full matrix.

    Raises:
        ArgumentError: if ``approximation`` is another, or ``max_size`` is not a positive int; (when used) if a weight
            is negative, or weights sum to 0.
        LossError: if samples use a parameter in different ways, which only ``engine="loop"`` allows.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> def loss(w, x):
        ...     return torch.nn.functional.linear(x, w).sum()
        >>> x = torch.tensor([[[1.0, 2.0], [3.0, 0.0]]])  # one sample, two positions
        >>> per_sample_grads(loss, torch.ones(1, 2), x, KroneckerFactors())
        KroneckerFactor(A=tensor([[5., 1.],
                [1., 2.]]), S=tensor([[2.]]))
        >>> per_sample_grads(loss, torch.ones(1, 2), x, KroneckerFactors("reduce"))
        KroneckerFactor(A=tensor([[4., 2.],
                [2., 1.]]), S=tensor([[4.]]))
    """

    approximation: Literal["expand", "reduce"] = "expand"
    max_size: int = 8192
    uses: ClassVar[frozenset[Op]] = frozenset({Op.kronecker, Op.second_moment})
    divides_by_weight = True

    def __post_init__(self) -> None:
        if self.approximation not in ("expand", "reduce"):
            expected, fix = "'expand' or 'reduce'", "Pick one of them."
            raise ArgumentError.about("approximation", expected=expected, received=repr(self.approximation), fix=fix)
        check_positive("max_size", self.max_size, "Pass the length of the longest axis that is to have a matrix.")

    def lift(self, gradients: Gradients) -> Tree:
        moments = TermMoments(gradients.weights, self.approximation == "reduce", self.max_size, gradients.filled)
        pairs = zip(gradients.weighted_factors, gradients.spec.dtypes, strict=True)
        sums = [self._sums(factor, dtype, gradients, moments) for factor, dtype in pairs]
        return {"sums": gradients.spec.tree(sums), "weight": Summed(gradients.total_weight)}

    def _sums(self, factor: Factor, dtype: torch.dtype, gradients: Gradients, moments: TermMoments) -> _Sums | Summed:
        found = (factor if dtype.is_complex else _as_product(factor)).kronecker(moments)
        if found is None:
            return _summed_squares(factor, gradients, dtype)
        power = 2 if self.approximation == "reduce" else 1
        count = _count(factor, gradients, power) * prod(factor.outputs)  # each output counts what they share
        return _Sums(Summed(found[1]), Summed(found[0]), Summed(count))

    def finish(self, merged: Tree) -> Tree:
        weight = merged["weight"].finish()
        leaves, tree = flatten(merged["sums"], is_leaf=lambda x: isinstance(x, _Sums))
        found: dict[int, Tensor] = {}  # layers share sums, which are divided in place

        def averaged(total: Summed, divisor: Tensor) -> Tensor:
            key = id(total.value)
            if key not in found:
                found[key] = total.finish(divisor)
            return found[key]

        def factor(leaf: _Sums | Summed) -> KroneckerFactor | Tensor:
            if isinstance(leaf, Summed):
                return leaf.finish(weight)
            terms = leaf.terms.finish()
            terms = terms.clamp_min(torch.finfo(terms.dtype).tiny)  # 0 where a table was not looked up
            return KroneckerFactor(averaged(leaf.A, terms), averaged(leaf.S, weight))

        return unflatten(list(map(factor, leaves)), tree)


@dataclass(frozen=True, eq=False)
class EigenMoment(Average):
    """Σ wᵢ (U_Sᵀ gᵢ U_A)² / Σ wᵢ, elementwise: the diagonal of F in the eigenbasis of its Kronecker factors.

    The second pass of EKFAC: F ≈ (U_S ⊗ U_A) diag (U_S ⊗ U_A)ᵀ, with the best diagonal for these eigenvectors. Returns
    a tree like the parameters, of their shapes, in float32 at least, which ``persample.Curvature(bases, moments)``
    takes. Gradients that are products are rotated as signals and inputs. With K outputs, F also sums over them.

    Source: George et al., "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis" (2018).

    Args:
        bases: the eigenvectors, as ``persample.eigenbases`` returns them.

    Raises:
        ArgumentError: (when used) if the bases do not fit the parameters.

    Examples:
        >>> import torch
        >>> from persample import eigenbases, per_sample_grads
        >>> def loss(w, x):
        ...     return torch.nn.functional.linear(x, w).sum()
        >>> w, x = torch.ones(1, 2), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> factors = per_sample_grads(loss, w, x, KroneckerFactors())
        >>> per_sample_grads(loss, w, x, EigenMoment(eigenbases(factors)))
        tensor([[4.5000, 8.0000]])
    """

    bases: Tree
    uses: ClassVar[frozenset[Op]] = frozenset({Op.second_moment})
    live: ClassVar[tuple[str, ...]] = ("bases",)

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if the bases do not fit the parameters."""
        fix = "Pass eigenbases(factors), of the KroneckerFactors() of the same parameters."
        leaves = leaves_like(self.bases, spec.structure)
        if leaves is None:
            expected, received = f"the structure {on_one_line(spec.structure)}", on_one_line(structure(self.bases))
            raise ArgumentError.about("bases", expected=expected, received=received, fix=fix)
        for path, shape, leaf in zip(spec.paths, spec.shapes, leaves, strict=True):
            if not _fits(leaf, shape):
                parts: Leaf = leaf if isinstance(leaf, tuple) else (leaf,)
                received = " and ".join(str(list(x.shape)) if isinstance(x, Tensor) else repr(x) for x in parts)
                raise ArgumentError.about(
                    path.replace("params", "bases", 1),
                    expected=f"eigenvectors for shape {list(shape)}, or a tensor of it",
                    received=received,
                    fix=fix,
                )

    def sums(self, gradients: Gradients) -> Tree:
        spec = gradients.spec
        columns = gradients.weighted_factors, spec.dtypes, leaves_like(self.bases, spec.structure) or []
        sums = []
        for factor, dtype, leaf in zip(*columns, strict=True):
            if isinstance(leaf, KroneckerFactor):
                bases = (basis.to(factor.device, accumulate_dtype(dtype)) for basis in (leaf.S, leaf.A))
                factor = _as_product(factor).rotated(*bases)  # noqa: PLW2901
            sums.append(_summed_squares(factor, gradients, dtype))
        return spec.tree(sums)


def _fits(leaf: Leaf, shape: torch.Size) -> bool:
    """Return whether bases are those of a parameter of some shape."""
    if isinstance(leaf, KroneckerFactor):
        return leaf.fits(shape)
    return isinstance(leaf, Tensor) and leaf.shape == shape


def _count(factor: Factor, gradients: Gradients, power: int) -> Tensor:
    """Return Σ wᵢ Tᵢ to a power, 0-d float64."""
    if gradients.filled is None or isinstance(factor, Dense):  # what is written out is one term
        return gradients.total_weight * factor.num_terms**power
    each = (gradients.filled * factor.num_terms) ** power
    return each.sum() if gradients.weights is None else (gradients.weights * each).sum()


def _as_product(factor: Factor) -> Factor:
    """Return the gradients of a vector, written out, as products with 1."""
    if not isinstance(factor, Dense) or len(factor.shape) > 1 + len(factor.outputs):
        return factor
    values = factor.values.unflatten(-1, (-1,)) if len(factor.shape) > len(factor.outputs) else factor.values[..., None]
    left = values[..., None, None, :]
    ones = left.new_ones(len(factor), *[1] * (left.ndim - 1))
    return Outer(left, ones, factor.shape[len(factor.outputs) :], factor.dtype, outputs=factor.outputs)


def _summed_squares(factor: Factor, gradients: Gradients, dtype: torch.dtype) -> Summed:
    """Return Σ wᵢ gᵢ², elementwise, summed over K outputs."""
    total = factor.second_moment(gradients.weights, accumulate_dtype(dtype))
    return Summed(total.sum(0) if factor.outputs else total, dtype if dtype.is_complex else None)
