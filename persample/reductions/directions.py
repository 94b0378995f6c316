"""Inner products of the gradients with directions, given or random, and products of the Fisher matrix with vectors."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Factor, Op
from persample.gradients import Gradients, ParamSpec
from persample.merge import Stacked, Summed
from persample.reductions.base import Average, check_positive
from persample.reductions.rows import PerSample
from persample.utils.numerics import accumulate_dtype, as_real
from persample.utils.tracing import untraced
from persample.utils.trees import Leaf, Tree, leaves_like, on_one_line, structure

# Left and right signs, [D, o] and [D', rest].
Signs: TypeAlias = tuple[Tensor, Tensor]
_HOW_MUCH = "Choose how much to keep of each sample."


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
        check_positive("dim", self.dim, _HOW_MUCH)

    def lift(self, gradients: Gradients) -> Tree:
        """Return the projections, summed over the parameters."""
        parts = [factor.project(*signs) for factor, signs in _with_signs(gradients, self._signs)]
        return Stacked(functools.reduce(torch.add, parts) / sqrt(self.dim))

    def _signs(self, path: str, rows: int, columns: int, device: torch.device) -> Signs:
        return _drawn(self.seed, path, ((self.dim, rows), (self.dim, columns)), device)


@dataclass(frozen=True)
class Sketch(PerSample):
    """Random projections of each parameter's gradient from both sides: a tree like the parameters, ``[B, rank²]``.

    They are U g Vᵀ / rank with g seen as a matrix ``[o, rest]`` and random signs ``U [rank, o]``, ``V [rank, rest]``,
    drawn as those of ``Project``. A vector, a single row or a single column has rank² projections of itself.
    E⟨s(g), s(h)⟩ = ⟨g, h⟩. ``Project(rank²)`` has the same number of entries and is more precise (an inner product errs
    by about 1/rank of ‖g‖ ‖h‖, here by its root). Use ``Sketch`` where that costs too much, because it multiplies
    signals and inputs by rank signs instead of rank², or where each parameter needs its own projections. The result is
    real, in float32 at least.

    Source: LoGra: Choe et al., "What is Your Data Worth to GPT?" (2024).

    Args:
        rank: number of signs on each side, at least 1.
        seed: seed of the signs.
        per_param: False for the sum over the parameters, ``[B, rank²]``.

    Raises:
        ArgumentError: if ``rank`` is not a positive int.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.eye(3)
        >>> per_sample_grads(lambda w, x: (w @ x).sum(), torch.ones(2, 3), x, Sketch(8, seed=0)).shape
        torch.Size([3, 64])
    """

    rank: int
    seed: int
    per_param: bool = True
    uses: ClassVar[frozenset[Op]] = frozenset({Op.sketch})

    def __post_init__(self) -> None:
        check_positive("rank", self.rank, _HOW_MUCH)

    def lift(self, gradients: Gradients) -> Tree:
        pairs = _with_signs(gradients, self._signs)
        parts = [factor.sketch(*signs).flatten(-2) / self.rank for factor, signs in pairs]
        if self.per_param:
            return gradients.spec.tree(list(map(Stacked, parts)))
        return Stacked(functools.reduce(torch.add, parts))

    def _signs(self, path: str, rows: int, columns: int, device: torch.device) -> Signs:
        """Return U and V; the only sign of an axis of size 1 is 1, and the other axis has rank² of them."""
        if rows > 1 < columns:
            return _drawn(self.seed, path, ((self.rank, rows), (self.rank, columns)), device)
        (signs,) = _drawn(self.seed, path, ((self.rank**2, max(rows, columns)),), device)
        one = signs.new_ones(1, 1)
        return (one, signs) if columns > 1 else (signs, one)


def _with_signs(gradients: Gradients, signs: Callable[..., Signs]) -> Iterator[tuple[Factor, Signs]]:
    """Yield each factor with the signs of its rows and columns."""
    spec, device = gradients.spec, gradients.losses.device
    for factor, path, shape, dtype in zip(gradients.factors, spec.paths, spec.shapes, spec.dtypes, strict=True):
        columns = shape[1:].numel() * (2 if dtype.is_complex else 1)
        yield factor, signs(path, shape[0] if shape else 1, columns, device)


def _drawn(seed: int, path: str, shapes: Sequence[tuple[int, int]], device: torch.device) -> Leaf:
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    with untraced():  # signs are constants of a compiled program
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
        bits = (torch.empty(shape, dtype=torch.bool, device="cpu").random_(generator=generator) for shape in shapes)
        return tuple(x.float().mul_(2).sub_(1).to(device) for x in bits)


@dataclass(frozen=True, eq=False)
class FisherVectorProduct(Average):
    """(1/n) Σ wᵢ ⟨gᵢ, v⟩ gᵢ, n = Σ wᵢ: the product of the empirical Fisher matrix and a vector.

    Returns a tree like the parameters, in their dtypes. With K vectors, each leaf has a leading axis of K. Of losses
    with several outputs, F adds up over these, too.

    Raises:
        ArgumentError: (when used) if the structure or shapes are not those of the parameters.
    """

    v: Tree  # a tree like the parameters, of their shapes; or with one more axis, of K vectors, in front of each
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
