"""The base classes of reductions; the reductions of one call, in one pass over the gradients; both in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn

from persample.clipping import Rule
from persample.errors import ArgumentError
from persample.factors import Factor, Op
from persample.gradients import Gradients, ParamSpec
from persample.merge import AnyOf, Summed, divided
from persample.utils import trees
from persample.utils.numerics import full_precision
from persample.utils.trees import Leaf, Tree, digest, flatten, name_of, tree_map, unflatten


class Reduction:
    """A quantity computed from the per-sample gradients.

    A reduction is a frozen dataclass with two methods. ``lift`` turns the gradients of one chunk into a tree of
    mergeable leaves (``Summed``, ``Moments``, ``Stacked`` of ``persample.merge``). ``finish`` turns that tree, merged
    over all chunks, into the result.

    Attributes:
        uses: the operations (``persample.factors.Op``) of ``persample.factors.Factor`` that ``lift`` and ``finish``
            call. Per-sample gradients are materialized for all samples only if ``materialize`` is one of them, or if
            that takes less memory.
        live: the fields whose numbers, tensors and factors may change between calls without a new program of the
            compiled engine; None or a function in such a field is a constant.
        functions_of_a_norm: the fields that are functions from one norm to a number; what they close over may change.
            What else a field refers to must be hashable, and must not change.
        divides_by_weight: whether the result is an average. A call is then rejected, before anything is computed, if a
            weight is negative or if the weights sum to ``needs_more_than`` or less.
        rows_of_samples: whether rows are those of samples, and not those of units.
        returns_ids: whether the result has the ids of units.
        returns_rows: whether ``finish`` only finishes ``Stacked`` leaves, which ``out=`` can then take directly.
    """

    uses: ClassVar[frozenset[Op]] = frozenset({Op.materialize})
    live: ClassVar[tuple[str, ...]] = ()
    functions_of_a_norm: ClassVar[tuple[str, ...]] = ()
    divides_by_weight = False
    rows_of_samples = False
    returns_ids = False
    returns_rows = False

    @property
    def needs_more_than(self) -> float:
        """The bound that the total weight of an average must exceed."""
        return 0.0

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if the reduction does not fit the parameters.

        Args:
            spec: the structure, names, shapes and dtypes of the parameters.
        """

    def sensitivity(
        self,
        adjacency: Adjacency = "add-remove",
        *,
        size: int | None = None,
        num_params: int | Mapping[str, int] | None = None,
    ) -> float:
        """Return the L2 sensitivity: how far one unit (a sample, or several with ``unit``) can move the result.

        It is C for a sum of parts of norm C, 2C if a unit is replaced, and 2C/n for a mean of n. The noise of a
        Gaussian mechanism has this standard deviation times the noise multiplier. Gradients are finite; samples without
        units have weights of at most 1 in size, and none in a mean; losses have one output (of K, each is clipped by
        itself: √K times as much). In another ``metric`` D, C is C √(max D), in the
        Euclidean norm.

        Source: Dwork, Roth, "The Algorithmic Foundations of Differential Privacy" (2014), definition 3.8.

        Args:
            adjacency: "add-remove" if neighbouring batches differ by one more unit, "replace-one" if one unit is
                another.
            size: n, the number of units in a mean.
            num_params: with ``per_param``, the number of parameter tensors, or that of each name.

        Raises:
            ArgumentError: if no bound is known, as of a mean under "add-remove", or an argument is missing.

        Examples:
            >>> from persample import ClippedMean, ClippedSum
            >>> ClippedSum(0.5).sensitivity("add-remove"), ClippedSum(0.5).sensitivity("replace-one")
            (0.5, 1.0)
            >>> ClippedMean(0.5).sensitivity("replace-one", size=100)
            0.01
        """
        if adjacency not in ("add-remove", "replace-one"):
            expected = "'add-remove' or 'replace-one'"
            raise ArgumentError.about("adjacency", expected=expected, received=repr(adjacency), fix="Pick one of them.")
        largest = self.largest_part(num_params)
        if not self.divides_by_weight:
            return largest if adjacency == "add-remove" else 2 * largest
        if adjacency == "add-remove":
            expected = "'replace-one' for a mean, whose divisor changes with a unit"
            fix = "Use the sum, such as ClippedSum, and divide by a public number."
            raise ArgumentError.about("adjacency", expected=expected, received="'add-remove'", fix=fix)
        if not isinstance(size, int) or size < 1:
            fix = "Pass the number of units (samples) in the mean."
            raise ArgumentError.about("size", expected="a positive int for a mean", received=repr(size), fix=fix)
        return 2 * largest / size

    def largest_part(self, num_params: int | Mapping[str, int] | None) -> float:  # noqa: ARG002 (as subclasses have)
        """Return C, the largest norm of one unit's part of the sum."""
        fix = "Use ClippedSum(C), or WeightedSum with a rule of persample.clipping."
        received = f"{type(self).__name__}, which one unit may move by any amount"
        raise ArgumentError.about("sensitivity", expected="a clipped sum or mean", received=received, fix=fix)

    def lift(self, gradients: Gradients) -> Tree:
        """Return the mergeable leaves of one chunk.

        Args:
            gradients: the gradients of the chunk.
        """
        raise NotImplementedError

    def finish(self, merged: object) -> Tree:
        """Return the result.

        Args:
            merged: the tree that ``lift`` returns, merged over all chunks.
        """
        raise NotImplementedError


def check_positive(argument: str, number: object, fix: str) -> None:
    """Reject what is no positive int."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ArgumentError.about(argument, expected="a positive int", received=repr(number), fix=fix)


Adjacency: TypeAlias = Literal["add-remove", "replace-one"]
# The argument ``reduce`` of one call. Lists are invariant in Python's types, hence list[Leaf].
Reduce: TypeAlias = "Reduction | Mapping[Any, Reduce] | tuple[Reduce, ...] | list[Leaf] | None"


class SumOverSamples(Reduction):
    """A reduction that is a sum over samples; subclasses define its terms."""

    def sums(self, gradients: Gradients) -> Tree:
        """Return a tree of ``Summed`` like the parameters."""
        raise NotImplementedError

    def lift(self, gradients: Gradients) -> Tree:
        """Return the sums of one chunk."""
        return self.sums(gradients)

    def finish(self, merged: object) -> Tree:
        """Return the sums in the dtypes of the parameters."""
        return tree_map(Summed.finish, merged)


class Average(SumOverSamples):
    """A sum over samples divided by Σ wᵢ."""

    divides_by_weight = True

    def lift(self, gradients: Gradients) -> Tree:
        """Return the sums of one chunk, and its total weight."""
        return {"sums": self.sums(gradients), "weight": Summed(gradients.total_weight)}

    def finish(self, merged: Tree) -> Tree:
        """Return the averages in the dtypes of the parameters."""
        weight = merged["weight"].finish()
        sums, structure = flatten(merged["sums"])
        return unflatten(divided(sums, weight), structure)


@dataclass(frozen=True)
class Reductions:
    """The reductions of one call."""

    reductions: Sequence[Reduction]
    keep_factored: bool = False  # whether factors are kept even for reductions that return the gradients
    keep_stacked: bool = False  # whether rows stay ``Stacked``, which ``write_into`` writes straight into ``out``

    @cached_property
    def required_ops(self) -> frozenset[Op]:
        """The operations of ``persample.factors.Factor`` that ``lift`` calls."""
        used = frozenset[Op]().union(*[reduction.uses for reduction in self.reductions])
        return used - {Op.materialize} if self.keep_factored else used

    def lift(self, gradients: Gradients) -> Tree:
        """Return the mergeable leaves of every reduction, and whether the loss depends on any parameter."""
        with full_precision(gradients.losses.device):
            return [reduction.lift(gradients) for reduction in self.reductions], AnyOf(gradients.connected)

    def finish(self, lifted: Sequence[Leaf], device: torch.device) -> list[Leaf]:
        """Return the result of every reduction, from its leaves merged over all chunks."""
        with full_precision(device):
            pairs = zip(self.reductions, lifted, strict=True)
            return [x if self.keep_stacked and r.returns_rows else r.finish(x) for r, x in pairs]


def described(reductions: Sequence[Reduction], container: trees.TreeSpec) -> str:
    """Return the reductions of a call in words."""
    return str(trees.unflatten(list(map(in_words, reductions)), container))


def in_words(reduction: Reduction | Rule) -> str:
    """Return the class and options of a reduction, or of a rule; functions by their names alone."""
    given: dict[str, Any] = (
        {one.name: getattr(reduction, one.name) for one in fields(reduction)} if is_dataclass(reduction) else {}
    )
    listed = (f"{name}={_value(value)}" for name, value in given.items())
    return f"{type(reduction).__name__}({', '.join(listed)})"


def _value(value: object) -> str:
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return f"{{{', '.join(f'{name!r}: {_value(x)}' for name, x in value.items())}}}"
    if isinstance(value, Rule):
        return in_words(value)
    if callable(value) and not isinstance(value, nn.Module):
        return name_of(value)
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return digest(trees.tree_map(lambda leaf: leaf.tensors if isinstance(leaf, Factor) else leaf, value))
