"""A call whose loss is a captured graph: the tensors that the loss closed over become leaves that all samples share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from persample.engines.compiled.capture import Capture, Captured, Marker, UncapturableError, capture
from persample.inputs.call import Call
from persample.inputs.modules import ParamTree
from persample.utils import trees


@dataclass(frozen=True)
class Argument:
    """The place of a tensor among the parameters, the leaves of the sample, and the tensors that the loss closed over.

    Args:
        index: the place.
        is_buffer: whether it is a buffer of the user's modules, so that writes to it are discarded.
    """

    index: int
    is_buffer: bool = False


@dataclass(frozen=True)
class GraphFunction:
    """A captured function: which argument each input of its graph is, and what it returns.

    Equal objects compute the same, so they are part of the keys of programs.

    Args:
        capture: the graph, or None if the function computes nothing.
        inputs: an argument for each input of the graph, or a size.
        returned: what the function returns: outputs of the graph, arguments, and constants.
        structure: the structure of what the function returns.
        sliced: the place of an argument that has one row per sample.
    """

    capture: Capture | None
    inputs: tuple[Any, ...]
    returned: tuple[Any, ...] = field(compare=False)  # the graph determines it
    structure: trees.TreeSpec
    sliced: int

    @property
    def programs(self) -> dict[Hashable, Any]:
        """The programs compiled from the graph; a function without a graph keeps none."""
        return self.capture.programs if self.capture else {}

    def __call__(self, first: Sequence[Tensor], *rest: Any) -> Any:
        """Return what the function returns for one sample.

        Args:
            first: the parameters, or what else comes first.
            *rest: the other arguments, then the tensors that the function closed over.
        """
        given = [*first, *rest]

        def taken(x: Any) -> Any:
            if not isinstance(x, Argument):
                return x
            return given[x.index].clone() if x.is_buffer else given[x.index]

        outputs = self.capture.run(given[self.sliced], *map(taken, self.inputs)) if self.capture else ()
        found = [outputs[x.index] if isinstance(x, Output) else taken(x) for x in self.returned]
        return trees.unflatten(found, self.structure)


@dataclass(frozen=True)
class Output:
    """The place of a tensor among the outputs of a graph.

    Args:
        index: the place.
    """

    index: int


def captured_call(call: Call) -> Call:
    """Return the same call with its loss captured, called with the first sample.

    Args:
        call: the call, at least one sample.

    Raises:
        UncapturableError: if Dynamo cannot capture the loss as one graph.
    """
    loss, tree = call.loss, call.loss.params
    params, leaves = call.at(0)
    # The parameters require gradients inside of the loss, as they do on the other engines; modules hold theirs.
    pairs = zip(tree.slots, tree.tensors, params, strict=True)
    values = [own if isinstance(slot, str) else x.detach().requires_grad_() for slot, own, x in pairs]
    sample = loss.shaped(leaves)
    given = [*values, *sample]
    sliced = [*call.params_batched, *call.leaves_batched].index(True)
    buffers = [x for part in tree.parts.values() for x in part.buffers(recurse=False)]
    captured = tree.unchanged(lambda: capture(loss.fn, tree.arguments(values), *loss.arguments(sample)))
    fn, closed_over = _graph_function(captured, given, sliced, buffers)
    batched = (*call.leaves_batched, *(False for _ in closed_over))
    graph_loss = replace(loss, fn=fn, params=_flat(params), batch=_listed(len(batched)), batched=batched, unpack=True)
    return replace(call, loss=graph_loss, leaves=(*call.leaves, *closed_over), leaves_batched=batched)


def captured_function_of_a_norm(function: Callable[[Tensor], Any], device: torch.device) -> tuple[GraphFunction, Any]:
    """Capture a function from one norm to a number.

    Args:
        function: the function.
        device: the device of the norms.

    Returns:
        The captured function, and the tensors that it closed over.

    Raises:
        UncapturableError: if Dynamo cannot capture the function as one graph.
    """
    norm = torch.zeros((), dtype=torch.float64, device=device)
    return _graph_function(capture(function, norm), [norm], 0)


def _graph_function(
    captured: Captured, given: Sequence[Any], sliced: int, buffers: Sequence[Tensor] = ()
) -> tuple[GraphFunction, list[Tensor]]:
    """Return a captured function, and the tensors that it closed over.

    Args:
        captured: what the capture gave.
        given: the arguments that the function was called with.
        sliced: the place of an argument that has one row per sample.
        buffers: the buffers of the modules among the parameters.
    """
    returned, structure = trees.flatten(captured.returned)
    _check_stores(captured, returned)
    places = {id(x): Argument(place) for place, x in enumerate(given) if isinstance(x, Tensor)}
    are_buffers = set(map(id, buffers))
    closed_over = list[Tensor]()

    def placed(x: Any) -> Any:
        if isinstance(x, Marker):
            return Output(x.index)
        if not isinstance(x, Tensor):
            return x
        if id(x) not in places:
            places[id(x)] = Argument(len(given) + len(closed_over), id(x) in are_buffers)
            closed_over.append(x.detach())
        return places[id(x)]

    inputs, outputs = tuple(map(placed, captured.inputs)), tuple(map(placed, returned))
    return GraphFunction(captured.capture, inputs, outputs, structure, sliced), closed_over


def _check_stores(captured: Captured, returned: Sequence[Any]) -> None:
    known = {x.index for x in returned if isinstance(x, Marker)}
    if captured.capture is not None and len(known) < captured.capture.num_outputs:
        raise UncapturableError("it keeps a tensor in an object outside: return the tensor in aux instead")


def _flat(tensors: Sequence[Tensor]) -> ParamTree:
    names, structure = tuple(map(str, range(len(tensors)))), _listed(len(tensors))
    return ParamTree(tuple(tensors), structure, names, tuple(tensors), structure, tuple(range(len(tensors))))


def _listed(length: int) -> trees.TreeSpec:
    return trees.structure([None] * length)
