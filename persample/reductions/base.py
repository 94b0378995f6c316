"""The base classes of reductions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from persample.gradients import Gradients, ParamSpec
from persample.merge import Summed, divided
from persample.utils.trees import flatten, tree_map, unflatten


class Reduction:
    """A quantity computed from the per-sample gradients.

    A reduction is a frozen dataclass with two methods. ``lift`` turns the gradients of one chunk into a tree of
    mergeable leaves (``Summed``, ``Moments``, ``Stacked`` of ``persample.merge``). ``finish`` turns that tree, merged
    over all chunks, into the result.

    Attributes:
        uses: the operations of ``persample.factors.Factor`` that ``lift`` and ``finish`` call. Per-sample gradients are
            materialized for all samples only if "materialize" is one of them, or if that takes less memory.
        live: the fields whose numbers, tensors and factors may change between calls without a new program of the
            compiled engine; None or a function in such a field is a constant.
        functions_of_a_norm: the fields that are functions from one norm to a number; what they close over may change.
            What else a field refers to must be hashable, and must not change.
        divides_by_weight: whether the result is an average. A call is then rejected, before anything is computed, if a
            weight is negative or if the weights sum to ``needs_more_than`` or less.
        returns_rows: whether ``finish`` only finishes ``Stacked`` leaves, which ``out=`` can then take directly.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"materialize"})
    live: ClassVar[tuple[str, ...]] = ()
    functions_of_a_norm: ClassVar[tuple[str, ...]] = ()
    divides_by_weight = False
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

    def lift(self, gradients: Gradients) -> Any:
        """Return the mergeable leaves of one chunk.

        Args:
            gradients: the gradients of the chunk.
        """
        raise NotImplementedError

    def finish(self, merged: Any) -> Any:
        """Return the result.

        Args:
            merged: the tree that ``lift`` returns, merged over all chunks.
        """
        raise NotImplementedError


# The argument ``reduce`` of one call. Lists are invariant in Python's types, hence list[Any].
Reduce: TypeAlias = "Reduction | Mapping[Any, Reduce] | tuple[Reduce, ...] | list[Any] | None"


class SumOverSamples(Reduction):
    """A reduction that is a sum over samples; subclasses define its terms."""

    def sums(self, gradients: Gradients) -> Any:
        """Return a tree of ``Summed`` like the parameters.

        Args:
            gradients: the gradients of one chunk.
        """
        raise NotImplementedError

    def lift(self, gradients: Gradients) -> Any:
        """Return the sums of one chunk."""
        return self.sums(gradients)

    def finish(self, merged: Any) -> Any:
        """Return the sums in the dtypes of the parameters."""
        return tree_map(Summed.finish, merged)


class Average(SumOverSamples):
    """A sum over samples divided by Σ wᵢ."""

    divides_by_weight = True

    def lift(self, gradients: Gradients) -> Any:
        """Return the sums of one chunk, and its total weight."""
        return {"sums": self.sums(gradients), "weight": Summed(gradients.total_weight)}

    def finish(self, merged: Any) -> Any:
        """Return the averages in the dtypes of the parameters."""
        weight = merged["weight"].finish()
        sums, structure = flatten(merged["sums"])
        return unflatten(divided(sums, weight), structure)
