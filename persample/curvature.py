"""Products with Fisher matrices: with the empirical one in one pass, and with Kronecker factors, also solutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from persample._torch import uncaptured
from persample.errors import ArgumentError
from persample.factors.contractions import between
from persample.inputs import Engine, Outputs, Randomness
from persample.inputs.units import UnitReduce
from persample.per_sample import per_sample_grads
from persample.reductions import KroneckerFactor
from persample.reductions.directions import FisherVectorProduct
from persample.utils.numerics import as_real, full_precision, restore
from persample.utils.trees import Leaf, Tree, TreeSpec, flatten, leaves_like, on_one_line, structure, unflatten

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class _Eigen(NamedTuple):
    """The eigenvectors of S and A, ones in the place of diagonals, and the eigenvalues of both in float64."""

    left: Tensor
    of_left: Tensor
    right: Tensor
    of_right: Tensor


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
        if self.moments is None:
            return self._map(v, lambda x, place: _between(self._factors[place], x))
        return self._map(v, lambda x, place: self._in_bases(place, x, self._values[place]))

    def solve(self, v: Tree, damping: float | Tensor, *, heuristic: bool = False) -> Tree:
        """Return (F + λI)⁻¹ v exactly, or K-FAC's approximation with a damping of each factor.

        The latter is (S + √λ/π I)⁻¹ ⊗ (A + π√λ I)⁻¹, π² = (tr A / i) / (tr S / o): Martens, Grosse (2015), section 6.3.

        Args:
            v: a tree like the parameters.
            damping: λ > 0, a number or 0-d tensor.
            heuristic: whether to add the damping to S and to A.

        Raises:
            ArgumentError: if ``damping`` is not a positive number, or ``heuristic`` is used with EKFAC.
        """
        number = isinstance(damping, Real | Tensor) and not isinstance(damping, bool)
        if not number or not 0 < float(damping) < torch.inf:
            fix = "Pass λ, in the units of the squared gradients."
            raise ArgumentError.about("damping", expected="a finite number > 0", received=repr(damping), fix=fix)
        if heuristic and self.moments is not None:
            fix = "Leave heuristic=False: the exact solution costs the same."
            raise ArgumentError.about("heuristic", expected="False with moments", received="True", fix=fix)
        strength = float(damping)
        values = [_damped(x, strength) for x in self._eigen] if heuristic else [x + strength for x in self._values]
        return self._map(v, lambda x, place: self._in_bases(place, x, 1 / values[place]))

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

        sides = [factor.sides for factor in self._factors]
        sizes = [one.numel() for one in sides]

        def product(v: NDArray[np.generic]) -> NDArray[np.generic]:
            parts = torch.as_tensor(v.ravel(), dtype=torch.float64).split(sizes)
            blocks = [x.view(one).to(f.S.device) for x, one, f in zip(parts, sides, self._factors, strict=True)]
            tree = unflatten(blocks, self._structure)
            found = self.matvec(tree) if damping is None else self.solve(tree, damping, heuristic=heuristic)
            return torch.cat([x.cpu().flatten() for x in flatten(found)[0]]).numpy()

        return LinearOperator((sum(sizes), sum(sizes)), matvec=product, rmatvec=product, dtype="float64")

    @cached_property
    def _structure(self) -> TreeSpec:
        return flatten(self.factors, is_leaf=_is_factor)[1]

    @cached_property
    def _factors(self) -> list[KroneckerFactor]:
        return [_as_factor(leaf) for leaf in flatten(self.factors, is_leaf=_is_factor)[0]]

    @cached_property
    def _eigen(self) -> list[_Eigen]:
        return [_Eigen(*_eigen(factor.S), *_eigen(factor.A)) for factor in self._factors]

    @cached_property
    def _values(self) -> list[Tensor]:
        """The eigenvalues of each block, ``[o, i]`` float64."""
        if self.moments is None:
            return [_damped(eigen, 0) for eigen in self._eigen]
        return [x.double() for x in self._matrices("moments", self.moments)]

    def _in_bases(self, place: int, x: Tensor, values: Tensor) -> Tensor:
        """Return U diag(values) Uᵀ x with the eigenvectors U = U_S ⊗ U_A."""
        bases = self._factors[place]
        if self.moments is None:
            bases = KroneckerFactor(self._eigen[place].right, self._eigen[place].left)
        back = KroneckerFactor(*(basis if basis.ndim == 1 else basis.mT for basis in bases))
        return _between(back, _between(bases, x) * values.to(x.dtype))

    def _map(self, v: Tree, function: Callable[[Tensor, int], Tensor]) -> Tree:
        """Apply a function to each leaf as a matrix, in the dtype of the factors at least."""
        found = []
        pairs = zip(self._matrices("v", v), leaves_like(v, self._structure) or [], strict=True)
        for place, (x, given) in enumerate(pairs):
            product = function(x.to(torch.promote_types(x.dtype, self._factors[place].S.dtype)), place)
            found.append(restore(product.reshape(as_real(given).shape), given.dtype))
        return unflatten(found, self._structure)

    def _matrices(self, name: str, tree: Tree) -> list[Tensor]:
        """Return the tensors of a tree like the parameters as matrices ``[o, i]``."""
        leaves = leaves_like(tree, self._structure)
        fix = "Pass a tree of tensors like the parameters (of a module: a dict by name)."
        if leaves is None or not all(isinstance(x, Tensor) for x in leaves):
            expected, received = f"the structure {on_one_line(self._structure)}", on_one_line(structure(tree))
            raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
        for x, factor in zip(leaves, self._factors, strict=True):
            if not factor.fits(as_real(x).shape):
                expected, received = f"a parameter whose matrix is {list(factor.sides)}", f"shape {list(x.shape)}"
                raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
        return [as_real(x).reshape(factor.sides) for x, factor in zip(leaves, self._factors, strict=True)]


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
        KroneckerFactor(*(_eigen(x)[0] for x in leaf))
        if _is_factor(leaf)
        else restore(torch.ones_like(as_real(leaf)), leaf.dtype)
        for leaf in leaves
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


def _damped(eigen: _Eigen, damping: float) -> Tensor:
    """Return the eigenvalues of S ⊗ A, ``[o, i]``, both damped, in balance with their traces."""
    left, right = eigen.of_left, eigen.of_right
    ratio = (right.mean(-1, keepdim=True) / left.mean(-1, keepdim=True)).sqrt()
    ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1)
    left, right = left + damping**0.5 / ratio, right + damping**0.5 * ratio
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def _between(factor: KroneckerFactor, x: Tensor) -> Tensor:
    with full_precision(x.device):
        return between(factor.S.to(x.dtype), x, factor.A.to(x.dtype))


@uncaptured
def fisher_vector_product(
    loss_fn: Callable[..., Tensor | tuple[Tensor, Tree]],
    params: Tree,
    batch: Tree,
    v: Tree,
    *,
    weights: Tree = None,
    in_dims: tuple[Tree, Tree] = (None, 0),
    keep_batch_dim: bool = False,
    randomness: Randomness = "error",
    outputs: Outputs = "scalar",
    unit: int | Tensor | Sequence[int] | None = None,
    unit_reduce: UnitReduce = "sum",
    chunk_size: int | None = None,
    engine: Engine = "eager",
    out: Tree = None,
    differentiable: bool = False,
) -> Tree:
    """Compute F v = (1/n) Σ wᵢ ⟨gᵢ, v⟩ gᵢ, n = Σ wᵢ, for the empirical Fisher matrix F of per-sample gradients gᵢ.

    One forward and backward pass for any number of vectors; neither F nor the gradients are written out. With outputs
    in place of losses, F is the Gauss–Newton matrix of a squared error.

    Source: Kunstner, Balles, Hennig, "Limitations of the Empirical Fisher Approximation for Natural Gradient Descent"
    (2019), equation 3.

    Args:
        loss_fn: as in ``per_sample_grads``.
        params: as in ``per_sample_grads``.
        batch: as in ``per_sample_grads``.
        v: a tree like the parameters, of their shapes (of a module: a dict by name); or K vectors, stacked on a new
            axis 0 of every leaf.
        weights: as in ``per_sample_grads``, none negative.
        in_dims: as in ``per_sample_grads``.
        keep_batch_dim: as in ``per_sample_grads``.
        randomness: as in ``per_sample_grads``.
        outputs: as in ``per_sample_grads``; with "rows", F also sums over the K outputs of each sample.
        unit: as in ``per_sample_grads``; gᵢ is then the gradient of a unit.
        unit_reduce: as in ``per_sample_grads``.
        chunk_size: as in ``per_sample_grads``.
        engine: as in ``per_sample_grads``.
        out: as in ``per_sample_grads``.
        differentiable: as in ``per_sample_grads``.

    Returns:
        A tree like ``v``, in the dtypes of the parameters.

    Raises:
        ArgumentError: as ``per_sample_grads`` does, and if ``v`` is not a tree like the parameters.
        LossError: as ``per_sample_grads`` does.

    Examples:
        >>> import torch
        >>> x = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
        >>> fisher_vector_product(lambda w, x: w @ x, torch.zeros(2), x, torch.tensor([1.0, 0.0]))
        tensor([2.5000, 0.5000])
        >>> fisher_vector_product(lambda w, x: w @ x, torch.zeros(2), x, torch.eye(2))  # all of F
        tensor([[2.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    return per_sample_grads(
        loss_fn,
        params,
        batch,
        FisherVectorProduct(v),
        weights=weights,
        in_dims=in_dims,
        keep_batch_dim=keep_batch_dim,
        randomness=randomness,
        outputs=outputs,
        unit=unit,
        unit_reduce=unit_reduce,
        chunk_size=chunk_size,
        engine=engine,
        out=out,
        differentiable=differentiable,
    )
