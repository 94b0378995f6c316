"""Inner products and cosines of all pairs of samples, of one batch or of two."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Factor, Op
from persample.gradients import Gradients, ParamSpec, squared_norms_per_factor
from persample.merge import Stacked
from persample.reductions.base import Reduction
from persample.reductions.norms import check_metric, in_metric, scaled_by_metric
from persample.utils.numerics import root
from persample.utils.trees import Tree, flatten, leaves_like, on_one_line, structure

Rows: TypeAlias = Literal["all", "own", "trace"]


@dataclass(frozen=True, eq=False)
class Gram(Reduction):
    """⟨gᵢ, gⱼ⟩: the ``[B, B]`` matrix of inner products over all parameters, real, in float32 at least.

    For losses with K outputs ``[B, K, B, K]``: the empirical neural tangent kernel.

    With the gradients hⱼ of another batch, or of another loss, ⟨gᵢ, hⱼ⟩, ``[B, B']``. Pairs span chunks, so the factors
    of all samples are kept until the end, except with ``rows="own"``.

    Args:
        other: the hⱼ, as ``Factored()`` returns them for the same parameters; None for the gⱼ.
        rows: the pairs, of losses with K outputs: "all"; "own" for ⟨gᵢₖ, gᵢₗ⟩ of the outputs of each sample,
            ``[B, K, K]``; "trace" for Σₖ ⟨gᵢₖ, hⱼₖ⟩, ``[B, B']``. With one output, "own" are the squares ``[B]``.
        metric: D as in ``Norm``: the inner products are gᵢᵀ D⁻¹ gⱼ.

    Raises:
        ArgumentError: if ``rows`` is none of these, or "own" comes with ``other``; (when used) if ``other`` or
            ``metric`` is not like the parameters, ``metric`` not positive, or ``other`` has another K under "trace".

    Examples:
        >>> import torch
        >>> from persample import Factored, per_sample_grads
        >>> def loss(w, x):
        ...     return w * x
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0])
        >>> per_sample_grads(loss, w, x, Gram())
        tensor([[1., 2.],
                [2., 4.]])
        >>> test = per_sample_grads(loss, w, torch.tensor([3.0]), Factored())
        >>> per_sample_grads(loss, w, x, Gram(test))
        tensor([[3.],
                [6.]])
        >>> def losses(w, x):  # two outputs
        ...     return torch.stack([w * x, -w])
        >>> per_sample_grads(losses, w, x, Gram(rows="own"), outputs="rows")
        tensor([[[ 1., -1.],
                 [-1.,  1.]],
        <BLANKLINE>
                [[ 4., -2.],
                 [-2.,  1.]]])
        >>> per_sample_grads(losses, w, x, Gram(rows="trace"), outputs="rows")
        tensor([[2., 3.],
                [3., 5.]])
    """

    other: Tree = None
    rows: Rows = field(default="all", kw_only=True)
    metric: Tree = field(default=None, kw_only=True)
    uses: ClassVar[frozenset[Op]] = frozenset({Op.gram})
    live: ClassVar[tuple[str, ...]] = ("other", "metric")

    def __post_init__(self) -> None:
        """Reject unknown rows, and the outputs of other samples beside the own."""
        name = f"{type(self).__name__}(rows)"
        if self.rows not in ("all", "own", "trace"):
            fix = "Pick one of them."
            raise ArgumentError.about(name, expected="'all', 'own' or 'trace'", received=repr(self.rows), fix=fix)
        if self.rows == "own" and self.other is not None:
            expected, fix = "'all' or 'trace' with other", "Leave other out: 'own' are pairs within one sample."
            raise ArgumentError.about(name, expected=expected, received="'own'", fix=fix)

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if ``other`` are not factors of gradients of the parameters."""
        check_metric(self.metric, spec)
        if self.other is None:
            return
        leaves = leaves_like(self.other, spec.structure)
        if leaves is None and isinstance(self.other, Tensor):
            raise self._rejected("the factors of gradients", "a tensor")
        if leaves is None:
            raise self._rejected(f"the structure {on_one_line(spec.structure)}", on_one_line(structure(self.other)))
        for path, shape, dtype, leaf in zip(spec.paths, spec.shapes, spec.dtypes, leaves, strict=True):
            if not isinstance(leaf, Factor):
                raise self._rejected(f"a factor for {path}", type(leaf).__name__)
            expected = (*shape, 2) if dtype.is_complex else tuple(shape)
            if leaf.shape[len(leaf.outputs) :] != expected:
                raise self._rejected(f"shape {list(expected)} for {path}", f"shape {list(leaf.shape)}")

    def _rejected(self, expected: str, received: str) -> ArgumentError:
        fix = "Pass what per_sample_grads returns for the other batch, the same parameters, and Factored()."
        return ArgumentError.about(f"{type(self).__name__}(other)", expected=expected, received=received, fix=fix)

    def lift(self, gradients: Gradients) -> Tree:
        """Return the factors; of own rows the inner products themselves."""
        return self.lifted(in_metric(gradients, self.metric))

    def lifted(self, gradients: Gradients) -> Tree:
        """Return what ``lift`` does, of gradients in the metric."""
        factors = gradients.factors
        if self.rows == "own":
            return Stacked(functools.reduce(torch.add, (factor.own_gram() for factor in factors)))
        if self.rows == "trace":
            self._check_outputs(gradients.losses.shape[1:])
        pairs = zip(factors, gradients.spec.dtypes, strict=True)
        return gradients.spec.tree([Stacked(factor, dtype) for factor, dtype in pairs])

    def _check_outputs(self, outputs: torch.Size) -> None:
        """Reject factors of losses with another number of outputs, whose traces do not exist."""
        for leaf in flatten(self.other)[0] if self.other is not None else []:
            if leaf.outputs != tuple(outputs):
                mine, theirs = (f"{shape[0]} outputs" if shape else "one output" for shape in (outputs, leaf.outputs))
                raise self._rejected(f"gradients of {mine}, for rows='trace'", theirs)

    def finish(self, merged: Tree) -> Tensor:
        """Return the inner products, summed over the parameters."""
        if self.rows == "own":
            return merged.finish()
        return self._summed(self.factors(merged), self._others(merged))

    def block(self, left: object, right: object) -> Tensor:
        """Return the pairs of the merged leaves of some samples with those of others, ``[B, B']``."""
        return self._summed(self.factors(left), self.factors(right))

    def _summed(self, factors: Sequence[Factor], others: Sequence[Factor] | None) -> Tensor:
        """Return the inner products of gradients, with themselves or with others, over all parameters."""
        pairs = zip(factors, [None] * len(factors) if others is None else others, strict=True)
        trace = self.rows == "trace"
        return functools.reduce(torch.add, (one.trace_gram(two) if trace else one.gram(two) for one, two in pairs))

    def factors(self, merged: object) -> list[Factor]:
        """Return the factors whose inner products are the result."""
        return [leaf.concatenated() for leaf in flatten(merged)[0]]

    def _others(self, merged: object) -> list[Factor] | None:
        """Return the factors of the other batch, in the order of the parameters; None without one."""
        if self.other is None:
            return None
        mine, structure = flatten(merged)
        others = leaves_like(self.other, structure) or []
        others = [other.to(leaf.rows.device) for other, leaf in zip(others, mine, strict=True)]
        return scaled_by_metric(others, self.metric, structure, [leaf.dtype for leaf in mine])


@dataclass(frozen=True, eq=False)
class CosineSimilarity(Gram):
    """⟨gᵢ, gⱼ⟩ / (‖gᵢ‖ ‖gⱼ‖): the ``[B, B]`` matrix of cosines, 0 where a gradient is zero.

    With the gradients hⱼ of another batch, or of another loss, ⟨gᵢ, hⱼ⟩ / (‖gᵢ‖ ‖hⱼ‖), ``[B, B']``.

    Args:
        other: the hⱼ, as ``Factored()`` returns them for the same parameters; None for the gⱼ.
        rows: the pairs as in ``Gram``: "own" for the cosines of the outputs of each sample, ``[B, K, K]``; "trace" for
            those of the gradients of all K outputs together, ``[B, B']``.
        metric: D as in ``Norm``: the cosines of the D⁻¹ᐟ² gᵢ.

    Raises:
        ArgumentError: as ``Gram``.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, CosineSimilarity())
        tensor([[1., 1., 0.],
                [1., 1., 0.],
                [0., 0., 1.]])
    """

    uses: ClassVar[frozenset[Op]] = frozenset({Op.gram, Op.squared_norms})

    def lifted(self, gradients: Gradients) -> Tree:
        """Return the factors and the norms, of gradients in the metric; of own rows the cosines themselves."""
        if self.rows == "own":
            unit = _of_unit_norm(gradients.factors, gradients.norms)
            return super().lifted(replace(gradients, factors=tuple(unit)))
        return {"factors": super().lifted(gradients), "norms": Stacked(self._norms(gradients.norms))}

    def _norms(self, norms: Tensor) -> Tensor:
        """Return the norms by which gradients are divided: of traces, those of all outputs together."""
        return norms if self.rows != "trace" else torch.linalg.vector_norm(norms.unsqueeze(-1).flatten(1), dim=1)

    def factors(self, merged: Tree) -> list[Factor]:
        """Return the factors of the gradients scaled to length 1, because products of small ones may underflow."""
        return _of_unit_norm(super().factors(merged["factors"]), merged["norms"].finish())

    def _others(self, merged: Tree) -> list[Factor] | None:
        others = super()._others(merged["factors"])
        if others is None:
            return None
        return _of_unit_norm(others, self._norms(root(torch.stack(squared_norms_per_factor(others)).sum(0))))


def _of_unit_norm(factors: Sequence[Factor], norms: Tensor) -> list[Factor]:
    zero = norms == 0
    inverse = torch.where(zero, 0, 1 / torch.where(zero, 1, norms))
    return [factor.scale_rows(inverse) for factor in factors]
