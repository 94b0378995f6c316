"""A call whose loss is a captured graph: the tensors that the loss closed over become leaves that all samples share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from persample._torch import buffer_slots
from persample.engines.compiled.capture import entry_of
from persample.engines.compiled.graph import Capture, Captured, Constant, Marker, Origin, Output
from persample.engines.compiled.trace import Format, TraceError
from persample.inputs.batch import check_kind
from persample.inputs.call import Call
from persample.inputs.modules import ParamTree
from persample.utils import trees
from persample.utils.numerics import is_folded, storage_key
from persample.utils.trees import Leaf

_NUMBERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.float64}


@dataclass(frozen=True)
class GraphFunction:
    """A captured function, by the origins of the inputs of its graph and its results; equal ones compute the same."""

    capture: Capture | None  # the graph, or None if the function computes nothing
    inputs: tuple[Origin, ...]  # the origins of the inputs of the graph
    # the origins of the leaves of what the function returns
    leaves: tuple[Origin, ...] = field(compare=False)  # the graph determines them
    structure: trees.TreeSpec
    constants: str  # the constants that the function returns, as text, which tells 1 from True
    copied: frozenset[int]  # the arguments that the function gets copies of, so that its writes to them are discarded

    def __call__(self, first: Sequence[Tensor], *rest: Leaf) -> object:
        """Return what the function returns for one sample; last come the tensors that the function closed over."""
        given = [*first, *rest]

        def found(origin: Origin) -> object:
            if isinstance(origin, Output):
                return outputs[origin.index]
            if isinstance(origin, Constant):
                return origin.value
            return given[origin.index].clone() if origin.index in self.copied else given[origin.index]

        outputs = self.capture.run(*map(found, self.inputs)) if self.capture else ()
        return trees.unflatten(list(map(found, self.leaves)), self.structure)


def captured_call(call: Call) -> Call:
    """Return the same call with its loss captured, called with the first sample."""
    loss, tree = call.loss, call.loss.params
    params, _ = call.at(0)
    pairs = zip(tree.slots, tree.tensors, params, strict=True)
    values = [own if isinstance(slot, str) else parameter(x) for slot, own, x in pairs]
    values = [row(x) if split else x for x, split in zip(values, call.params_batched, strict=True)]
    pairs_of_batch = zip(call.leaves, call.leaves_batched, strict=True)
    sample = [_first_row(x, loss.keep_batch_dim) if split else x for x, split in pairs_of_batch]
    with torch.enable_grad():
        capture = functools.partial(entry_of(loss.fn).capture, loss.fn)

        def captured_and_stored() -> tuple[Captured, set[int], bool]:
            found = capture(tree.arguments(values), *loss.arguments(sample))
            return (
                found,
                _stored(tree.parts.values()) if len(found.returned) < found.num_outputs else set(),
                bool(tree.inside.changed()),  # since ``unchanged`` began
            )

        before = [(x, x.requires_grad, x.grad) for _, x in tree.owned]
        captured, stored, changes = tree.unchanged(captured_and_stored)
        for x, requires_grad, grad in before:
            if x.requires_grad != requires_grad or x.grad is not grad:
                x.requires_grad, x.grad = requires_grad, grad
                raise TraceError(f"it changes requires_grad or grad of {tree.names[id(x)]}")
        if changes:
            entry_of(loss.fn).changes_modules = True
    buffers = [x for part in tree.parts.values() for x in part.buffers(recurse=False)]
    written = {tree.names.get(storage_key(x)) for x in captured.written} - {None}
    if written:
        raise TraceError(f"it writes into {', '.join(map(str, written))}")
    split = [*call.params_batched, *call.leaves_batched]
    fn, closed_over = _graph_function(captured, [*values, *sample], split, buffers, stored)
    batched = (*call.leaves_batched, *(False for _ in closed_over))
    graph_loss = replace(loss, fn=fn, params=_flat(params), batch=_listed(len(batched)), batched=batched, unpack=True)
    return replace(call, loss=graph_loss, leaves=(*call.leaves, *closed_over), leaves_batched=batched)


def parameter(x: Tensor) -> Tensor:
    """Return a tensor of ``params`` as the loss sees it: it requires a gradient, as on the other engines."""
    return x.detach().requires_grad_()


def plain(x: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values: compiled code does not see that a view is negative."""
    return x.resolve_neg().resolve_conj()


def row(x: Tensor) -> Tensor:
    """Return a tensor of the first sample as Dynamo gets it: the other samples' values differ.

    Of a 0-d ``Tensor`` of these dtypes Dynamo takes ``int(x)`` to be a constant, which it guards; of a ``Parameter`` it
    does not.
    """
    is_number = x.ndim == 0 and x.dtype in _NUMBERS
    return nn.Parameter(x, requires_grad=x.requires_grad) if is_number else x


def _first_row(x: Tensor, keep_batch_dim: bool) -> Tensor:
    """Return the first sample's row, not as a view: of views torch's records of a capture are never freed.

    It has memory of its own, by which a view of it is known; but for rows whose elements share memory.
    """
    first = x[0].unsqueeze(0) if keep_batch_dim else x[0]
    taken = row(first if is_folded(first) else Format.of(first).empty().copy_(first))
    return taken if isinstance(taken, nn.Parameter) else taken.detach()


def row_like(x: Tensor, keep_batch_dim: bool) -> Tensor:
    """Return a tensor without values of the format of the first sample's row, as Dynamo gets it."""
    return row(Format.of(_first_row(x, keep_batch_dim)).empty())


def captured_function_of_a_norm(
    function: Callable[[Tensor], object], device: torch.device
) -> tuple[GraphFunction, list[Tensor]]:
    """Return a function from one norm to a number, captured, and the tensors that it closed over."""
    norm = torch.zeros((), dtype=torch.float64, device=device)
    with torch.enable_grad():
        captured = entry_of(function).capture(function, norm)
    return _graph_function(captured, [norm], [True])


def _graph_function(
    captured: Captured,
    given: Sequence[object],
    batched: Sequence[bool],
    buffers: Sequence[Tensor] = (),
    stored: Set[int] = frozenset(),
) -> tuple[GraphFunction, list[Tensor]]:
    """Return a captured function, and the tensors that it closed over.

    ``given`` are the arguments that it was called with, ``batched`` those with one row per sample; ``buffers`` are
    those of the modules among the parameters, ``stored`` the outputs that were found in these modules.
    """
    if len(captured.returned | stored) < captured.num_outputs:
        raise TraceError("it keeps a tensor in an object outside: return the tensor in aux instead")
    inputs, leaves, closed_over = captured.origins(given, batched)
    own = {storage_key(x) for x, split in zip(given, batched, strict=True) if split and isinstance(x, Tensor)}
    for x in closed_over:
        check_kind("a tensor that loss_fn reads", x)
        if storage_key(x) in own:  # Dynamo records neither x.data nor x.T of a vector
            raise TraceError("it returns a view of an argument that Dynamo does not record: return a copy of it")
    constants = repr([x for x in leaves if isinstance(x, Constant)])
    are_buffers = set(map(id, buffers))
    copied = frozenset(len(given) + n for n, x in enumerate(closed_over) if id(x) in are_buffers)
    fn = GraphFunction(captured.capture, inputs, leaves, captured.structure, constants, copied)
    return fn, [plain(x.detach()) for x in closed_over]


def _stored(parts: Iterable[nn.Module]) -> set[int]:
    """Return the places of the outputs that a captured function left in modules."""
    held = (x for part in parts for slots in (vars(part), buffer_slots(part)) for x in slots.values())
    return {x.index for x in held if isinstance(x, Marker)}


def _flat(tensors: Sequence[Tensor]) -> ParamTree:
    names, structure = tuple(map(str, range(len(tensors)))), _listed(len(tensors))
    return ParamTree(tuple(tensors), structure, names, tuple(tensors), structure, tuple(range(len(tensors))))


def _listed(length: int) -> trees.TreeSpec:
    return trees.structure([None] * length)
