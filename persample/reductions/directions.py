"""Reductions to inner products with directions: given ones, or random ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.gradients import Gradients, ParamSpec
from persample.merge import Stacked
from persample.reductions.per_sample import Rows
from persample.utils.dtypes import as_real
from persample.utils.tracing import untraced
from persample.utils.trees import leaves_like, structure


@dataclass(frozen=True, eq=False)
class Dot(Rows):
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

    direction: Any
    stacked: bool = False
    uses: ClassVar[frozenset[str]] = frozenset({"dot"})
    live: ClassVar[tuple[str, ...]] = ("direction",)

    def check(self, spec: ParamSpec) -> None:
        """Refuse a direction that is not like the parameters."""
        leaves = leaves_like(self.direction, spec.structure)
        if leaves is None:
            raise self._refused(f"the structure {spec.structure}", f"{structure(self.direction)}")
        count: list[int] | None = None
        for path, shape, dtype, leaf in zip(spec.paths, spec.shapes, spec.dtypes, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                raise self._refused(f"a tensor for {path}", type(leaf).__name__)
            if leaf.is_complex() and not dtype.is_complex:
                raise self._refused(f"real numbers for {path}", f"{leaf.dtype}")
            lead = list(leaf.shape[: leaf.ndim - len(shape)]) if self.stacked else []
            count = lead if count is None else count
            if len(lead) != self.stacked or lead != count or leaf.shape[len(lead) :] != shape:
                known = len(count) == self.stacked
                expected = (
                    f"shape {[*count, *shape]}" if known else f"K directions of one common K, [K, *{list(shape)}],"
                )
                raise self._refused(f"{expected} for {path}", f"shape {list(leaf.shape)}")

    @staticmethod
    def _refused(expected: str, received: str) -> ArgumentError:
        fix = "Pass a tree like the parameters (of a module: a dict by name); K directions on axis 0 need stacked=True."
        return ArgumentError.about("Dot(direction)", expected=expected, received=received, fix=fix)

    def lift(self, gradients: Gradients) -> Any:
        """Return the inner products, summed over the parameters."""
        total: Any = 0
        spec, device = gradients.spec, gradients.losses.device
        leaves = leaves_like(self.direction, spec.structure) or []
        for factor, dtype, leaf in zip(gradients.factors, spec.dtypes, leaves, strict=True):
            direction = leaf.detach().to(device, dtype if dtype.is_complex else leaf.dtype)
            total = total + factor.dot(as_real(direction if self.stacked else direction[None]))
        return Stacked(total if self.stacked else total.squeeze(1))


@dataclass(frozen=True)
class Project(Rows):
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

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.eye(3)
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(3), x, Project(64, seed=0)).shape
        torch.Size([3, 64])
    """

    dim: int
    seed: int
    uses: ClassVar[frozenset[str]] = frozenset({"project"})

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
        with untraced():  # constants: a program must not draw them again
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            left, right = (torch.randint(0, 2, (self.dim, n), generator=generator) for n in (rows, columns))
            return left * 2.0 - 1.0, right * 2.0 - 1.0
