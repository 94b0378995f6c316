"""Inner products of the gradients with directions, given or random, and products of the Fisher matrix with vectors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Op
from persample.gradients import Gradients, ParamSpec
from persample.merge import Stacked, Summed
from persample.reductions.base import Average
from persample.reductions.rows import PerSample
from persample.utils.numerics import accumulate_dtype, as_real
from persample.utils.tracing import untraced
from persample.utils.trees import Tree, leaves_like, on_one_line, structure


@dataclass(frozen=True, eq=False)
class Dot(PerSample):
    """⟨gᵢ, d⟩: inner products with a direction, ``[B]``; ``[B, K]`` with K directions.

    The result is real (complex parameters count as pairs of reals), in float32 at least.

    Args:
        direction: a tree like the parameters, of their shapes.
        stacked: the leaves of ``direction`` hold K directions each, stacked on axis 0.

    Raises:
        ArgumentError: (when used) if the direction's structure or shapes are not those of the parameters.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, Dot(torch.tensor([1.0, 0.0])))
        tensor([3., 0.])
    """

    direction: Tree
    stacked: bool = False
    uses: ClassVar[frozenset[Op]] = frozenset({Op.dot})
    live: ClassVar[tuple[str, ...]] = ("direction",)

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if the direction is not a tree like the parameters."""
        fix = "Pass a tree like the parameters (of a module: a dict by name); K directions on axis 0 need stacked=True."
        check_directions(self.direction, spec, stacked=self.stacked, argument="Dot(direction)", fix=fix)

    def lift(self, gradients: Gradients) -> Tree:
        """Return the inner products, summed over the parameters."""
        total: Tree = 0
        spec, device = gradients.spec, gradients.losses.device
        leaves = leaves_like(self.direction, spec.structure) or []
        for factor, dtype, leaf in zip(gradients.factors, spec.dtypes, leaves, strict=True):
            direction = leaf.to(device, dtype if dtype.is_complex else leaf.dtype)
            total = total + factor.dot(as_real(direction if self.stacked else direction[None]))
        return Stacked(total if self.stacked else total.squeeze(-1))


def check_directions(direction: object, spec: ParamSpec, *, stacked: bool, argument: str, fix: str) -> None:
    """Check that a direction is a tree like the parameters, of their shapes."""

    def rejected(expected: str, received: str) -> ArgumentError:
        return ArgumentError.about(argument, expected=expected, received=received, fix=fix)

    leaves = leaves_like(direction, spec.structure)
    if leaves is None:
        raise rejected(f"the structure {on_one_line(spec.structure)}", on_one_line(structure(direction)))
    count: list[int] | None = None
    for path, shape, dtype, leaf in zip(spec.paths, spec.shapes, spec.dtypes, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise rejected(f"a tensor for {path}", type(leaf).__name__)
        if leaf.is_complex() and not dtype.is_complex:
            raise rejected(f"real numbers for {path}", f"{leaf.dtype}")
        lead = list(leaf.shape[: leaf.ndim - len(shape)]) if stacked else []
        count = lead if count is None else count
        if len(lead) != stacked or lead != count or leaf.shape[len(lead) :] != shape:
            known = len(count) == stacked
            expected = f"shape {[*count, *shape]}" if known else f"K directions of one common K, [K, *{list(shape)}],"
            raise rejected(f"{expected} for {path}", f"shape {list(leaf.shape)}")


@dataclass(frozen=True)
class Project(PerSample):
    """Random projections of the gradients, ``[B, dim]``, that preserve inner products in expectation.

    Entry j is Σ over parameters of uⱼᵀ g vⱼ / √dim, with g seen as a matrix ``[o, rest]`` and u, v random signs drawn
    from (seed, the parameter's path), so that all chunks and processes draw the same signs. E⟨p(g), p(h)⟩ = ⟨g, h⟩.

    Source: random signs: Achlioptas, "Database-friendly random projections" (2003); one sign vector on each side of a
    weight gradient: LoGra, Choe et al., "What is Your Data Worth to GPT?" (2024).

    Args:
        dim: number of entries per sample, at least 1.
        seed: seed of the signs.

    Raises:
        ArgumentError: if ``dim`` is not a positive int.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.eye(3)
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(3), x, Project(64, seed=0)).shape
        torch.Size([3, 64])
    """

    dim: int
    seed: int
    uses: ClassVar[frozenset[Op]] = frozenset({Op.project})

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1:
            fix = "Choose the number of entries to keep per sample."
            raise ArgumentError.about("dim", expected="a positive int", received=repr(self.dim), fix=fix)

    def lift(self, gradients: Gradients) -> Tree:
        """Return the projections, summed over the parameters."""
        total: Tree = 0
        spec, device = gradients.spec, gradients.losses.device
        columns_of_spec = spec.paths, spec.shapes, spec.dtypes
        for factor, path, shape, dtype in zip(gradients.factors, *columns_of_spec, strict=True):
            rows = shape[0] if shape else 1
            columns = shape[1:].numel() * (2 if dtype.is_complex else 1)
            left, right = self._signs(path, rows, columns, device)
            total = total + factor.project(left, right)
        return Stacked(total / sqrt(self.dim))

    def _signs(self, path: str, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        digest = hashlib.sha256(f"{self.seed}:{path}".encode()).digest()
        with untraced():  # signs are constants of a compiled program
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
            options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
            left, right = (torch.randint(0, 2, (self.dim, n), **options) for n in (rows, columns))
            return left.mul_(2).sub_(1).to(device), right.mul_(2).sub_(1).to(device)


@dataclass(frozen=True, eq=False)
class FisherVectorProduct(Average):
    """(1/n) Σ wᵢ ⟨gᵢ, v⟩ gᵢ, n = Σ wᵢ: the product of the empirical Fisher matrix and a vector.

    Returns a tree like the parameters, in their dtypes. With K vectors, each leaf has a leading axis of K. Of losses
    with several outputs, F adds up over these, too.

    Args:
        v: a tree like the parameters, of their shapes; or with one more axis, of K vectors, in front of each.

    Raises:
        ArgumentError: (when used) if the structure or shapes are not those of the parameters.
    """

    v: Tree
    uses: ClassVar[frozenset[Op]] = frozenset({Op.dot, Op.weighted_sum})
    live: ClassVar[tuple[str, ...]] = ("v",)

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if the vectors are not trees like the parameters."""
        fix = "Pass a tree like the parameters (of a module: a dict by name), or K of them stacked on a new axis 0."
        check_directions(self.v, spec, stacked=(stacked := self._is_stacked(spec)), argument="v", fix=fix)
        if stacked and not len((leaves_like(self.v, spec.structure) or [])[0]):
            raise ArgumentError.about("v", expected="one vector or more", received="none", fix=fix)

    def _is_stacked(self, spec: ParamSpec) -> bool:
        leaves = leaves_like(self.v, spec.structure) or []
        return bool(leaves) and isinstance(leaves[0], Tensor) and leaves[0].ndim > len(spec.shapes[0])

    def sums(self, gradients: Gradients) -> Tree:
        """Return the sums of one chunk: for each vector inner products, and a sum weighted by them."""
        spec = gradients.spec
        products = Dot(self.v, stacked=(stacked := self._is_stacked(spec))).lift(gradients).rows.double()
        wide = [accumulate_dtype(dtype) for dtype in spec.dtypes]
        totals = [gradients.sums([c] * len(wide), wide) for c in (products.unbind(-1) if stacked else [products])]
        if gradients.losses.ndim > 1:  # F adds up over K outputs
            totals = [[x.sum(0) for x in total] for total in totals]
        columns = [torch.stack(column) if stacked else column[0] for column in zip(*totals, strict=True)]
        return spec.tree([Summed(x, dtype) for x, dtype in zip(columns, spec.dtypes, strict=True)])
