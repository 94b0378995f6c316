"""``Curvature``: products with Kronecker-factored Fisher matrices, and with their damped inverses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import between
from persample.reductions import KroneckerFactor
from persample.utils.numerics import as_real, restore
from persample.utils.trees import Leaf, Tree, TreeSpec, flatten, leaves_like, on_one_line, structure, unflatten

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


@dataclass(frozen=True, eq=False)
class Curvature:
    """F ≈ S ⊗ A of each parameter, or that of EKFAC, U diag(moments) Uᵀ: products, and solutions of damped systems.

    Vectors are trees like the parameters; results have their dtypes. ``solve`` computes eigenvectors once, in float64.

    Args:
        factors: what ``KroneckerFactors`` returns; or, with ``moments``, the ``eigenbases`` of these.
        moments: what ``EigenMoment`` returns.

    Raises:
        ArgumentError: (when used) if moments or vectors are not like the parameters.

    Examples:
        >>> import torch
        >>> from persample import KroneckerFactors, per_sample_grads
        >>> def loss(w, x):
        ...     return torch.nn.functional.linear(x, w).sum()
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> curvature = Curvature(per_sample_grads(loss, torch.ones(1, 2), x, KroneckerFactors()))
        >>> curvature.matvec(torch.ones(1, 2))
        tensor([[4.5000, 8.0000]])
        >>> curvature.solve(torch.ones(1, 2), damping=0.5)
        tensor([[0.2000, 0.1176]])
    """

    factors: Tree
    moments: Tree = None

    def matvec(self, v: Tree) -> Tree:
        """Return F v, for a tree ``v`` like the parameters."""
        return self._map(_product if self.moments is None else _product_by_moments, v)

    def solve(self, v: Tree, damping: float | Tensor, *, heuristic: bool = False) -> Tree:
        """Return (F + λI)⁻¹ v, exactly; or with the damping of each factor that K-FAC uses in its place.

        That is (S + √λ/π I)⁻¹ ⊗ (A + π√λ I)⁻¹, with π² = (tr A / i) / (tr S / o): Martens, Grosse (2015), section 6.3.

        Args:
            v: a tree like the parameters.
            damping: λ > 0, a number or 0-d tensor.
            heuristic: whether to add the damping to S and to A.

        Raises:
            ArgumentError: if ``damping`` is not a positive number, or ``heuristic`` is asked of EKFAC.
        """
        strength = _checked(damping)
        if heuristic and self.moments is not None:
            fix = "Leave heuristic=False: the exact solution costs the same."
            raise ArgumentError.about("heuristic", expected="False with moments", received="True", fix=fix)

        def solution(x: Tensor, block: _Block) -> Tensor:
            values = block.eigenvalues(strength) if heuristic else block.values + strength
            return block.between_bases(x, lambda inner: inner / values.to(x.dtype))

        return self._map(solution, v)

    def to_scipy(self, damping: float | Tensor | None = None, *, heuristic: bool = False) -> LinearOperator:
        """Return F as an operator on vectors of NumPy, or with ``damping`` what ``solve`` computes.

        Args:
            damping: λ > 0; None for F itself.
            heuristic: as in ``solve``.

        Returns:
            A symmetric ``scipy.sparse.linalg.LinearOperator`` ``[P, P]`` of float64: all parameters, flattened, in the
            order of the tree; complex ones as pairs of reals.

        Raises:
            ArgumentError: as ``solve`` does.
        """
        from scipy.sparse.linalg import LinearOperator

        sizes = [block.sides.numel() for block in self._blocks]

        def product(v: NDArray[np.generic]) -> NDArray[np.generic]:
            parts = torch.as_tensor(v.ravel(), dtype=torch.float64).split(sizes)
            tensors = [x.to(block.factor.S.device) for x, block in zip(parts, self._blocks, strict=True)]
            tree = unflatten(tensors, self._structure)
            found = self.matvec(tree) if damping is None else self.solve(tree, damping, heuristic=heuristic)
            return torch.cat([x.cpu().flatten() for x in flatten(found)[0]]).numpy()

        shape = (sum(sizes), sum(sizes))
        return LinearOperator(shape, matvec=product, rmatvec=product, dtype="float64")

    @cached_property
    def _structure(self) -> TreeSpec:
        return flatten(self.factors, is_leaf=_is_factor)[1]

    @cached_property
    def _blocks(self) -> list[_Block]:
        leaves = [_as_factor(leaf) for leaf in flatten(self.factors, is_leaf=_is_factor)[0]]
        if self.moments is None:
            return [_Block(leaf) for leaf in leaves]
        moments = self._like_params("moments", self.moments)
        return [
            _Block(leaf, _Block(leaf).viewed("moments", as_real(x))) for leaf, x in zip(leaves, moments, strict=True)
        ]

    def _like_params(self, name: str, tree: Tree) -> list[Tensor]:
        """Return the tensors of a tree like the parameters."""
        leaves = leaves_like(tree, self._structure)
        if leaves is None or not all(isinstance(x, Tensor) for x in leaves):
            expected, received = f"the structure {on_one_line(self._structure)}", on_one_line(structure(tree))
            fix = "Pass a tree of tensors like the parameters (of a module: a dict by name)."
            raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
        return leaves

    def _map(self, function: Callable[[Tensor, _Block], Tensor], v: Tree) -> Tree:
        """Apply a function to each leaf as a matrix, in the dtype of the factors at least."""
        found = []
        for x, block in zip(self._like_params("v", v), self._blocks, strict=True):
            real = as_real(x)
            matrix = block.viewed("v", real).to(torch.promote_types(real.dtype, block.factor.S.dtype))
            found.append(restore(function(matrix, block).reshape(real.shape), x.dtype))
        return unflatten(found, self._structure)


@dataclass(frozen=True, eq=False)
class _Block:
    """The block of one parameter: its factors, or their eigenvectors and the second moments ``[o, i]`` between them."""

    factor: KroneckerFactor
    moments: Tensor | None = None

    @property
    def sides(self) -> torch.Size:
        """The shape of a vector: o and i, perhaps after G."""
        left, right = self.factor.S, self.factor.A
        return torch.Size((*left.shape[:-2], left.shape[-1], right.shape[-1]))

    def viewed(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as a matrix."""
        if x.numel() != self.sides.numel():
            expected, received = f"{self.sides.numel()} numbers for {list(self.sides)}", f"shape {list(x.shape)}"
            fix = "Pass a tree like the parameters, of their shapes."
            raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
        return x.reshape(self.sides)

    @cached_property
    def _eigen(self) -> list[tuple[Tensor, Tensor]]:
        return [_eigen(x) for x in (self.factor.S, self.factor.A)]

    @cached_property
    def values(self) -> Tensor:
        """The eigenvalues of the block, ``[o, i]``."""
        return self.eigenvalues(0) if self.moments is None else self.moments.double()

    def eigenvalues(self, damping: float) -> Tensor:
        """Return the eigenvalues of S ⊗ A, both damped so that the norms of what is added are balanced."""
        (_, left), (_, right) = self._eigen
        ratio = (right.mean(-1, keepdim=True) / left.mean(-1, keepdim=True)).sqrt()
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1)
        left, right = left + damping**0.5 / ratio, right + damping**0.5 * ratio
        return left.unsqueeze(-1) * right.unsqueeze(-2)

    def between_bases(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return U f(Uᵀ x), U = U_S ⊗ U_A."""
        bases = [vectors for vectors, _ in self._eigen] if self.moments is None else [self.factor.S, self.factor.A]
        left, right = (basis.to(x.dtype) for basis in bases)
        inner = function(between(left, x, right))
        left, right = (basis if basis.ndim == 1 else basis.mT for basis in (left, right))
        return between(left, inner, right)


def eigenbases(factors: Tree) -> Tree:
    """Return the eigenvectors U_S and U_A of Kronecker factors: the argument of ``EigenMoment``.

    Args:
        factors: what ``KroneckerFactors`` returns.

    Returns:
        The same tree with leaves ``KroneckerFactor(A=U_A, S=U_S)``, whose columns are eigenvectors, in the order of
        their eigenvalues; ones in the place of diagonals. They are computed in float64.

    Examples:
        >>> import torch
        >>> eigenbases(KroneckerFactor(A=torch.eye(1), S=torch.tensor([[2.0, 0.0], [0.0, 1.0]]))).S.abs()
        tensor([[0., 1.],
                [1., 0.]])
    """
    leaves, tree = flatten(factors, is_leaf=_is_factor)
    found = [
        KroneckerFactor(*(_eigen(x)[0] for x in leaf)) if _is_factor(leaf) else torch.ones_like(leaf) for leaf in leaves
    ]
    return unflatten(found, tree)


def _is_factor(x: Leaf) -> bool:
    return isinstance(x, KroneckerFactor)


def _as_factor(leaf: Leaf) -> KroneckerFactor:
    """Return a diagonal as the factor S of a column."""
    if isinstance(leaf, KroneckerFactor):
        return leaf
    diagonal = as_real(leaf).flatten()
    return KroneckerFactor(diagonal.new_ones(1), diagonal)


def _eigen(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors of a factor, and its eigenvalues in float64."""
    if x.ndim == 1:
        return torch.ones_like(x), x.double()
    values, vectors = torch.linalg.eigh(x.double())
    return vectors.to(x.dtype), values.clamp_min(0)


def _product(x: Tensor, block: _Block) -> Tensor:
    return between(block.factor.S.to(x.dtype), x, block.factor.A.to(x.dtype))


def _product_by_moments(x: Tensor, block: _Block) -> Tensor:
    return block.between_bases(x, lambda inner: inner * block.values.to(x.dtype))


def _checked(damping: float | Tensor) -> float:
    number = isinstance(damping, Real | Tensor) and not isinstance(damping, bool)
    if not number or not 0 < float(damping) < torch.inf:
        fix = "Pass λ, in the units of the squared gradients."
        raise ArgumentError.about("damping", expected="a finite number > 0", received=repr(damping), fix=fix)
    return float(damping)
