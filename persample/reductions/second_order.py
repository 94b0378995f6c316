"""The natural gradient: the mean gradient, preconditioned by the Fisher matrix, in the space of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from persample.errors import ArgumentError, LossError
from persample.factors import Factor, Op, contractions
from persample.factors.linear_system import float64_gram, least_squares, solve_weighted
from persample.gradients import Gradients, ParamSpec, weighted_sums
from persample.merge import AnyOf, Stacked
from persample.reductions.directions import check_directions
from persample.reductions.leverage import Solution, is_number, like, of_each, weights_of
from persample.utils.numerics import accumulate_dtype, as_real, restore
from persample.utils.tracing import is_batched
from persample.utils.trees import Leaf, Tree, TreeSpec, flatten, leaves_like, unflatten


@dataclass(frozen=True, eq=False)
class NaturalGradient(Solution):
    """(F + λI)⁻¹ (1/n) Σ wᵢ vᵢ gᵢ with F = (1/n) Σ wᵢ gᵢ gᵢᵀ, n = Σ wᵢ: the mean gradient, preconditioned.

    Returns a tree like the parameters, in their dtypes. F, the empirical Fisher matrix, is never formed: with the rows
    √wᵢ gᵢ of a matrix G, the result is Gᵀ (GGᵀ/n + λI)⁻¹ (√w∘v) / n, one Gram matrix and one weighted sum of the same
    factors. The system is ``[B, B]``, in float64. λ = 0 gives the solution of minimum norm. The relative error is about
    eps · ‖F + λI‖ / λ for the eps of the parameters' dtype. Weights must not be negative and must not sum to 0. Pairs
    span chunks, so the factors of all samples are kept until the end.

    The result u minimizes (1/n) Σ wᵢ (⟨gᵢ, u⟩ − vᵢ)² + λ ‖u − μ p‖², for the ``previous`` result p, or for
    p = 0: u = μ p + (F + λI)⁻¹ (1/n) Σ wᵢ (vᵢ − μ ⟨gᵢ, p⟩) gᵢ. Directions that a batch does not show keep what earlier
    batches found (SPRING, with gradients of log ψ and local energies, both ``centered``).

    Source: Amari, "Natural Gradient Works Efficiently in Learning" (1998); solved for the samples as in Ren, Goldfarb,
    "Efficient Subsampled Gauss-Newton and Natural Gradient Methods for Training Neural Networks" (2019). SPRING:
    Goldshlager, Abrahamsen, Lin, "A Kaczmarz-inspired approach to accelerate the optimization of neural network
    wavefunctions" (2024).

    Args:
        damping: λ >= 0, a number or 0-d tensor.
        targets: the vᵢ, a tensor ``[B]`` or B numbers (``[B, K]`` for losses with K outputs, over which F also
            sums), or a function from one sample's aux to its vᵢ (under ``torch.vmap``); ones by default. The compiled
            engine treats the function as a constant: define it once, not in every call.
        per_param: solve for each parameter by itself, as if F were block-diagonal.
        centered: subtract the mean from gradients and targets, as if F were their covariance matrix.
        previous: p, the last result, which the caller keeps: a tree like the parameters, or None (before the first
            step) for zeros. A compiled program takes either; zeros and trees share one.
        momentum: μ from 0 to 1, a number or 0-d tensor.
        solver: "gram", or "qr" for a QR factorization of the gradients written out, ``[B, P]`` float64. It does not
            square their condition number, which pays with float64 parameters and a λ that is 0 or tiny. If less than
            half of the digits are right, a ``ConditionWarning`` says how many. Differentiated results take "gram".

    Raises:
        ArgumentError: if ``damping`` is negative or not finite, ``targets`` are not B real numbers, ``momentum`` is not
            from 0 to 1, ``solver`` is another, or (when used) ``previous`` is not like the parameters.
        LossError: (when used) if ``targets`` is a function and the loss returns no aux.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, NaturalGradient(0.5))
        tensor([0.4000, 0.5000])
    """

    targets: Tensor | Sequence[float] | Callable[[Leaf], Tensor] | None = None
    per_param: bool = False
    centered: bool = False
    previous: Tree = None
    momentum: float | Tensor = 0.95
    solver: Literal["gram", "qr"] = "gram"
    live: ClassVar[tuple[str, ...]] = ("damping", "targets", "previous", "momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.momentum) or not (is_batched(self.momentum) or 0 <= self.momentum <= 1):
            fix = "Pass how much of the previous result to keep."
            raise ArgumentError.about(
                "momentum", expected="a number from 0 to 1", received=repr(self.momentum), fix=fix
            )
        if self.solver not in ("gram", "qr"):
            expected, fix = "'gram' or 'qr'", "Pick one of them."
            raise ArgumentError.about("solver", expected=expected, received=repr(self.solver), fix=fix)
        object.__setattr__(self, "targets", _as_tensor(self.targets))
        x: Tree = self.targets
        is_real = isinstance(x, Tensor) and x.ndim in {1, 2} and not x.is_complex()
        if not (is_real or x is None or callable(x)):
            received = _described(x) if isinstance(x, Tensor) else x
            raise self._rejected(
                "a real tensor [B] ([B, K] of K outputs), or a function of one sample's aux", f"{received}"
            )

    @staticmethod
    def _rejected(expected: str, received: str) -> ArgumentError:
        return ArgumentError.about("targets", expected=expected, received=received, fix="Pass one number per sample.")

    @property
    def uses(self) -> frozenset[Op]:  # type: ignore[override]
        solved = super().uses if self.solver == "gram" else frozenset({Op.materialize})
        return solved | ({Op.dot} if self.previous is not None else set())

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if the previous result is not a tree like the parameters."""
        if self.previous is not None:
            fix = "Pass the last result, a tree like the parameters (of a module: a dict by name), or None."
            check_directions(self.previous, spec, stacked=False, argument="previous", fix=fix)

    def lift(self, gradients: Gradients) -> Tree:
        """Return factors, weights, and targets that are read from aux."""
        pairs = zip(gradients.weighted_factors, gradients.spec.dtypes, strict=True)
        from_aux, losses = callable(self.targets), gradients.losses
        targets = self._from_aux(gradients) if from_aux else torch.ones_like(losses, dtype=torch.float64)
        return {
            "factors": gradients.spec.tree([Stacked(factor, dtype) for factor, dtype in pairs]),
            "weights": weights_of(gradients),
            "is_weighted": AnyOf(gradients.weights is not None),
            "targets": Stacked(targets),
        }

    def _from_aux(self, gradients: Gradients) -> Tensor:
        if not gradients.has_aux:
            raise LossError(
                "NaturalGradient(targets): expected loss_fn to return (loss, aux), from which the function reads the "
                "targets, received a loss alone. Return both."
            )
        if gradients.are_of_units:
            expected = "one number for each unit, as aux are of samples"
            raise self._rejected(expected, "a function of aux")
        device = gradients.losses.device
        targets = torch.vmap(lambda aux: torch.as_tensor(self.targets(aux), device=device))(gradients.aux)  # type: ignore[operator, misc]
        if targets.shape == gradients.losses.shape[:1] and gradients.losses.shape[1:].numel() == 1:  # aux lost its axis
            targets = targets.reshape(gradients.losses.shape)
        if targets.shape != gradients.losses.shape or targets.is_complex():
            count = gradients.losses.shape[1:].numel()
            expected = "one real number" if gradients.losses.ndim == 1 else f"a real tensor [{count}]"
            raise self._rejected(f"a function that returns {expected}", f"one that returns {_described(targets)}")
        return targets.double()

    def finish(self, merged: Tree) -> Tree:
        """Return the solution in the dtypes of the parameters."""
        leaves, structure = flatten(merged["factors"])
        factors, dtypes = [leaf.concatenated() for leaf in leaves], [leaf.dtype for leaf in leaves]
        weights, targets = merged["weights"].finish(), merged["targets"].finish()
        if isinstance(self.targets, Tensor):
            if self.targets.shape != factors[0].sizes:
                raise self._rejected(f"shape {list(factors[0].sizes)}", f"shape {list(self.targets.shape)}")
            targets = self.targets.to(weights)
        is_weighted = merged["is_weighted"].value
        if is_weighted:
            unused = (of_each(weights, targets.shape) == 0) & ~targets.isfinite()
            targets = torch.where(unused, 0, targets)
        kept = [None] * len(factors) if self.previous is None else self._kept(factors, structure)
        groups = [[x] for x in zip(factors, dtypes, kept, strict=True)]
        groups = groups if self.per_param else [[x for group in groups for x in group]]
        sums = [total for group in groups for total in self._sums(group, weights, targets, is_weighted)]
        return unflatten([restore(x, dtype) for x, dtype in zip(sums, dtypes, strict=True)], structure)

    def _kept(self, factors: Sequence[Factor], structure: TreeSpec) -> list[Tensor | None]:
        """Return μ p for each parameter, real."""
        pairs = zip(leaves_like(self.previous, structure) or [], factors, strict=True)
        wide = [as_real(leaf).to(x.device, accumulate_dtype(leaf.dtype)) for leaf, x in pairs]
        return [x * like(self.momentum, x) for x in wide]

    def _sums(
        self,
        group: Sequence[tuple[Factor, torch.dtype, Tensor | None]],
        weights: Tensor,
        targets: Tensor,
        is_weighted: bool,
    ) -> list[Tensor]:
        factors, dtypes, kept = zip(*group, strict=True)
        for factor, x in zip(factors, kept, strict=True):
            targets = targets if x is None else targets - factor.dot(x[None]).squeeze(-1)
        is_recorded = self.is_recorded(weights, targets, *(x for factor in factors for x in factor.tensors))
        if self.solver == "qr" and not is_recorded:
            sums = self._by_rows(factors, weights, targets, dtypes)
        else:
            is_plain = is_recorded and not self.minimum_norm
            sums = self._by_gram(factors, weights, targets, dtypes, is_weighted=is_weighted, is_plain=is_plain)
        return [total if x is None else total + x for total, x in zip(sums, kept, strict=True)]

    def _by_gram(
        self,
        factors: Sequence[Factor],
        weights: Tensor,
        targets: Tensor,
        dtypes: Sequence[torch.dtype],
        *,
        is_weighted: bool,
        is_plain: bool,
    ) -> list[Tensor]:
        if is_plain:
            coefficients = self._plain_coefficients(factors, weights, targets)
        else:
            coefficients = self._coefficients(factors, weights, targets, dtypes, is_weighted)
        # Of more samples than parameters, targets have a part that no update fits. It cancels in the sum, and what
        # rounding leaves of it is divided by λ.
        is_tall = targets.numel() > sum(prod(factor.shape) for factor in factors)
        wide = [torch.float64 if is_tall else accumulate_dtype(dtype) for dtype in dtypes]
        sums = weighted_sums(factors, [coefficients.view(targets.shape)] * len(factors), wide)
        return [total.sum(0) for total in sums] if targets.ndim > 1 else sums

    def _by_rows(
        self, factors: Sequence[Factor], weights: Tensor, targets: Tensor, dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Return the solution of minimum norm from the gradients written out, without their Gram matrix."""
        root, n = weights.sqrt(), weights.sum()
        each = of_each(root, targets.shape).flatten()
        rows = torch.cat([contractions.flat(factor.rows_of(factor.materialize())).double() for factor in factors], 1)
        rows, right = each[:, None] * rows, each * targets.flatten()
        if self.centered:
            rows, right = _centered(rows, root, root, n), _centered(right, root, root, n)
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        flat = least_squares(rows, n * like(self.damping, rows), right, eps=eps)
        shapes = [factor.shape[len(factor.outputs) :] for factor in factors]
        parts = zip(flat.split([*map(prod, shapes)]), shapes, strict=True)
        return [x.reshape(shape).clone() for x, shape in parts]  # complex numbers begin at even places of their memory

    def _coefficients(
        self,
        factors: Sequence[Factor],
        weights: Tensor,
        targets: Tensor,
        dtypes: Sequence[torch.dtype],
        is_weighted: bool,
    ) -> Tensor:
        root, n = weights.sqrt(), weights.sum()
        each = of_each(root, targets.shape).flatten()  # of every row of the Gram matrix
        gram = float64_gram(factors, each if is_weighted else None, lower=not self.centered)
        right = each * targets.flatten()
        scale = None
        if self.centered:
            scale = gram.trace()  # of which the centered matrix has the rounding errors
            gram, right = _centered(_centered(gram, root, root, n).T, root, root, n), _centered(right, root, root, n)
        solution = self.solved(gram, n, right[:, None], dtypes, scale)[0][:, 0]
        if self.centered:  # again: what rounding adds along √w is divided by λ, and the gradients are not centered
            solution = _centered(solution, root, root, n)
        return each * solution

    def _plain_coefficients(self, factors: Sequence[Factor], weights: Tensor, targets: Tensor) -> Tensor:
        """Return the same for λ > 0 without √w, which has no derivative where a weight is 0."""
        gram, ones, n = float64_gram(factors), torch.ones_like(weights), weights.sum()
        each, right = of_each(weights, targets.shape).flatten(), targets.flatten()
        if self.centered:
            gram = _centered(_centered(gram, ones, weights, n).T, ones, weights, n)
            right = _centered(right, ones, weights, n)
        solution = solve_weighted(gram, each, n, like(self.damping, gram), right[:, None])[:, 0]
        return each * (_centered(solution, ones, weights, n) if self.centered else solution) / n


def _centered(x: Tensor, along: Tensor, by: Tensor, n: Tensor) -> Tensor:
    """Return (I − abᵀ/n) x: of rows √wᵢ hᵢ, √wᵢ (hᵢ − h̄) for a = b = √w; of rows hᵢ, hᵢ − h̄ for a = 1 and b = w.

    Of K outputs each is centered by itself.
    """
    rows = x.reshape(len(along), x.numel() // len(along))
    return (rows - torch.outer(along, (by @ rows) / n)).view(x.shape)


def _as_tensor(targets: object) -> Tree:
    """Return a list or an array of numbers as a tensor, and anything else unchanged."""
    if not isinstance(targets, list | tuple | np.ndarray):
        return targets
    try:
        return torch.as_tensor(targets, dtype=None if isinstance(targets, np.ndarray) else torch.float64, device="cpu")
    except (TypeError, ValueError):
        return targets


def _described(x: object) -> str:
    return f"shape {list(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
