"""Reductions that keep one row per sample: the gradients, their norms, products, projections; losses and aux."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from persample.errors import ArgumentError, LossError
from persample.gradients import Gradients, ParamSpec
from persample.merge import Stacked
from persample.numeric import accumulate_dtype, as_real
from persample.reductions.base import Reduction
from persample.trees import flatten, structure, tree_map


def widest(dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the dtype of numbers that speak of all parameters at once: the widest real one, float32 at least."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, accumulate_dtype(dtype))
    return wide


class _Rows(Reduction):
    """One row per sample: merging concatenates, nothing is left to finish."""

    def finish(self, merged: Any) -> Any:
        """Return the rows of all samples."""
        return tree_map(Stacked.finish, merged)


@dataclass(frozen=True)
class Stack(_Rows):
    """The per-sample gradients themselves: a tree like the parameters with leaves ``[B, *shape]``.

    Row i is the gradient of sample i's own loss ℓᵢ, never divided by B. ``reduce=None`` means the same.

    Example:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 2.0]), Stack())
        tensor([1., 2.])
    """

    def lift(self, gradients: Gradients) -> Any:
        """Return the factors."""
        pairs = zip(gradients.factors, gradients.spec.dtypes, strict=True)
        return gradients.spec.tree([Stacked(factor, dtype) for factor, dtype in pairs])


@dataclass(frozen=True)
class Factored(Reduction):
    """The per-sample gradients in the form they are stored in: a tree of factors, one per parameter.

    For contractions of one's own; a factor answers ``materialize``, ``squared_norms``, ``weighted_sum``, ``gram``,
    ``dot`` and more (``persample.factors.Factor``). Complex parameters appear as pairs of reals.

    Example:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 2.0]), Factored()).gram()
        tensor([[1., 2.],
                [2., 4.]])
    """

    def lift(self, gradients: Gradients) -> Any:
        """Return the factors."""
        return gradients.spec.tree([Stacked(factor) for factor in gradients.factors])

    def finish(self, merged: Any) -> Any:
        """Return the factors of all samples."""
        return tree_map(Stacked.concatenated, merged)


@dataclass(frozen=True)
class Norm(_Rows):
    """‖gᵢ‖: Euclidean norms over all parameters, ``[B]``, in the parameters' real dtype, float32 at least.

    Args:
        per_param: return a tree like the parameters instead, with each one's own norms ``[B]``.

    Example:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), torch.tensor([[3.0, 4.0], [0.0, 0.0]]), Norm())
        tensor([5., 0.])
    """

    per_param: bool = False

    def lift(self, gradients: Gradients) -> Any:
        """Return the norms."""
        dtypes = gradients.spec.dtypes
        if not self.per_param:
            return Stacked(gradients.norms, widest(dtypes))
        pairs = zip(gradients.norms_per_param, dtypes, strict=True)
        return gradients.spec.tree([Stacked(norms, accumulate_dtype(dtype)) for norms, dtype in pairs])


@dataclass(frozen=True, eq=False)
class Dot(_Rows):
    """⟨gᵢ, d⟩: inner products with a direction, ``[B]``; ``[B, K]`` with K directions.

    The result is real (complex parameters count as pairs of reals), in float32 at least.

    Args:
        direction: a tree like the parameters, of their shapes.
        stacked: the leaves of ``direction`` hold K directions each, stacked on axis 0.

    Raises:
        ArgumentError: (when used) if the direction's structure or shapes are not those of the parameters.

    Example:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, Dot(torch.tensor([1.0, 0.0])))
        tensor([3., 0.])
    """

    direction: Any
    stacked: bool = False

    def check(self, spec: ParamSpec) -> None:
        """Refuse a direction that is not like the parameters."""
        if structure(self.direction) != spec.structure:
            raise self._refused(f"the structure {spec.structure}", f"{structure(self.direction)}")
        leaves = flatten(self.direction)[0]
        count = [len(leaves[0])] if self.stacked and isinstance(leaves[0], Tensor) and leaves[0].ndim else []
        for path, shape, leaf in zip(spec.paths, spec.shapes, leaves, strict=True):
            expected = [*count, *shape]
            if not isinstance(leaf, Tensor) or list(leaf.shape) != expected or (self.stacked and not count):
                received = f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                lead = "K directions of one common K, shape [K, *]" if self.stacked and not count else "shape"
                raise self._refused(f"a tensor of {lead} {expected} for {path}", received)

    @staticmethod
    def _refused(expected: str, received: str) -> ArgumentError:
        fix = "Pass a tree like the parameters (of a module: a dict by name); K directions on axis 0 need stacked=True."
        return ArgumentError.about("Dot(direction)", expected=expected, received=received, fix=fix)

    def lift(self, gradients: Gradients) -> Any:
        """Return the inner products, summed over the parameters."""
        total: Any = 0
        for factor, leaf in zip(gradients.factors, flatten(self.direction)[0], strict=True):
            directions = as_real(leaf.detach()) if self.stacked else as_real(leaf.detach())[None]
            total = total + factor.dot(directions.to(gradients.losses.device))
        return Stacked(total if self.stacked else total.squeeze(1))


@dataclass(frozen=True)
class Project(_Rows):
    """Random projections of the gradients, ``[B, dim]``, that preserve inner products in expectation.

    Entry j is Σ over parameters of uⱼᵀ g vⱼ / √dim, with g seen as a matrix ``[o, rest]`` and u, v random signs drawn
    from (seed, the parameter's path), so every chunk and process draws the same. E⟨p(g), p(h)⟩ = ⟨g, h⟩.

    Source: random signs: Achlioptas, "Database-friendly random projections" (2003); one sign vector on each side of a
    weight gradient: LoGra, Choe et al., "What is Your Data Worth to GPT?" (2024).

    Args:
        dim: number of entries per sample, at least 1.
        seed: seed of the signs.

    Raises:
        ArgumentError: if ``dim`` is not a positive int.

    Example:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.eye(3)
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(3), x, Project(64, seed=0)).shape
        torch.Size([3, 64])
    """

    dim: int
    seed: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1:
            fix = "Choose the number of entries to keep per sample."
            raise ArgumentError.about("dim", expected="a positive int", received=repr(self.dim), fix=fix)

    def lift(self, gradients: Gradients) -> Any:
        """Return the projections, summed over the parameters."""
        total: Any = 0
        spec, device = gradients.spec, gradients.losses.device
        for factor, path, shape, dtype in zip(gradients.factors, spec.paths, spec.shapes, spec.dtypes, strict=True):
            rows = shape[0] if shape else 1
            columns = shape[1:].numel() * (2 if dtype.is_complex else 1)
            left, right = (signs.to(device) for signs in self._signs(path, rows, columns))
            total = total + factor.project(left, right)
        return Stacked(total / sqrt(self.dim))

    def _signs(self, path: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        digest = hashlib.sha256(f"{self.seed}:{path}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        left, right = (torch.randint(0, 2, (self.dim, n), generator=generator) for n in (rows, columns))
        return left * 2.0 - 1.0, right * 2.0 - 1.0


@dataclass(frozen=True)
class Loss(_Rows):
    """ℓᵢ: the losses, ``[B]``, in the dtype the loss returns.

    Example:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(2.0), torch.tensor([1.0, 3.0]), Loss())
        tensor([2., 6.])
    """

    def lift(self, gradients: Gradients) -> Any:
        """Return the losses."""
        return Stacked(gradients.losses)


@dataclass(frozen=True)
class Aux(_Rows):
    """What the loss returned beside its value, stacked: leaves ``[B, *]``.

    Raises:
        LossError: (when used) if the loss returns no aux.

    Example:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: (w * x, {"x": x}), torch.tensor(2.0), torch.tensor([1.0, 3.0]), Aux())
        {'x': tensor([1., 3.])}
    """

    def lift(self, gradients: Gradients) -> Any:
        """Return the stacked aux."""
        if not gradients.has_aux:
            raise LossError("Aux(): expected loss_fn to return (loss, aux), received a loss alone. Return both.")
        return tree_map(Stacked, gradients.aux)
