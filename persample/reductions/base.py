"""What a reduction is: two functions, and what it refuses at the door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from persample.gradients import Gradients, ParamSpec
from persample.merge import Summed
from persample.utils.trees import tree_map


class Reduction:
    """What is asked of the per-sample gradients.

    A reduction is a frozen dataclass with two methods. ``lift`` turns the gradients of one chunk into a tree of
    mergeable leaves (``Summed``, ``Moments``, ``Stacked`` of ``persample.merge``); ``finish`` turns that tree, merged
    over all chunks, into the result. ``divides_by_weight`` says that the result is an average, so that a call whose
    weights are negative or sum to ``needs_more_than`` or less is refused before anything is computed. ``uses`` names
    the operations of ``persample.factors.Factor`` that ``lift`` and ``finish`` call: gradients are written out for all
    samples only if "materialize" is among them, or if that is smaller. ``live`` names the fields whose numbers and
    tensors may change from call to call without another program of the compiled engine.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"materialize"})
    live: ClassVar[tuple[str, ...]] = ()
    divides_by_weight = False

    @property
    def needs_more_than(self) -> float:
        """The total weight that an average must exceed."""
        return 0.0

    def check(self, spec: ParamSpec) -> None:
        """Refuse what does not fit the parameters.

        Args:
            spec: structure, names, shapes and dtypes of the parameters.
        """

    def lift(self, gradients: Gradients) -> Any:
        """Return the mergeable tree of one chunk.

        Args:
            gradients: the gradients of the chunk.
        """
        raise NotImplementedError

    def finish(self, merged: Any) -> Any:
        """Return the result.

        Args:
            merged: what ``lift`` returned, merged over all chunks.
        """
        raise NotImplementedError

    def finish_into(self, merged: Any, out: Any) -> Any:  # noqa: ARG002 (as a rule there is nothing to gain)
        """Return the result, written straight into the tensors of a previous one where that saves fresh memory.

        Args:
            merged: as for ``finish``.
            out: a previous result, or what the user took for one.
        """
        return self.finish(merged)


# What can be asked for in one call. Lists are invariant, and so of anything.
Reduce: TypeAlias = "Reduction | Mapping[Any, Reduce] | tuple[Reduce, ...] | list[Any] | None"


class Total(Reduction):
    """A reduction that adds the samples up; subclasses say what is added."""

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


class Average(Total):
    """A total divided by Σ wᵢ."""

    divides_by_weight = True

    def lift(self, gradients: Gradients) -> Any:
        """Return the sums of one chunk beside its weight."""
        return {"sums": self.sums(gradients), "weight": Summed(gradients.total_weight)}

    def finish(self, merged: Any) -> Any:
        """Return the averages in the dtypes of the parameters."""
        weight = merged["weight"].finish()
        return tree_map(lambda total: total.finish(weight), merged["sums"])
