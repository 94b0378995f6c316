"""Calls like an earlier one: its program runs after two comparisons, of the arguments and by Dynamo of the loss.

The arguments of the earlier call were checked. Those of a call like it differ from them in values only, so the checks
would pass again, and what they prepare would be the same.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from persample._torch import (
    TensorGuards,
    get_dynamic_layer_stack_depth,
    get_eval_frame_callback,
    set_eval_frame,
    set_grad_enabled,
)
from persample.engines.compiled.capture import Entry, NewError, entry_of, is_nested
from persample.engines.compiled.captured_call import parameter, row_like
from persample.engines.compiled.graph import Argument, Capture, Constant, Marker, Origin, first_marker
from persample.engines.compiled.programs import DoubtfulError, Program
from persample.engines.compiled.task import Live, Task, fixed_fields, live_inputs
from persample.engines.compiled.trace import Format
from persample.inputs import check_averages, check_weights
from persample.inputs.modules import trained_parameters
from persample.inputs.params import are_hooked
from persample.pipeline import is_apart
from persample.reductions import Reduction
from persample.utils import trees
from persample.utils.trees import Leaf, Tree

_MOST = 8


class FlatParams(NamedTuple):
    """The parameters of a call, flattened."""

    names: tuple[str, ...]  # the names of the parameters of a module
    tensors: list[object]
    structure: trees.TreeSpec | None  # the structure of a tree of parameters; None for a module

    @classmethod
    def of(cls, params: object) -> FlatParams:
        """Flatten the parameters of a call."""
        if isinstance(params, nn.Module):
            named = trained_parameters(params)
            return cls(tuple(named), list(named.values()), None)
        return cls((), *trees.flatten(params))


class Asked(NamedTuple):
    """The arguments of a call, as the user passed them."""

    loss_fn: Callable[..., object]
    params: object
    batch: object
    wanted: Sequence[Reduction]
    container: trees.TreeSpec | None  # that of the reductions; None for their leaves
    out: object
    options: tuple[object, ...]
    weights: object = None
    flat_params: FlatParams | None = None  # of a module, flattened once for a stream; None to flatten them now


class Flat(NamedTuple):
    """The arguments of a call, flattened."""

    params: list[Leaf]
    batch: list[Leaf]
    out: list[Leaf]
    structures: tuple[trees.TreeSpec | None, trees.TreeSpec, trees.TreeSpec | None]
    tensors: list[Leaf]  # all tensors; or what else the user passed
    key: tuple[object, ...]  # what must be equal in a call like this one, beside tensors' formats; options last

    @classmethod
    def of(cls, asked: Asked) -> Flat:
        """Flatten the arguments of a call."""
        batch, batch_structure = trees.flatten(asked.batch)
        out, out_structure = ([], None) if asked.out is None else trees.flatten(asked.out)
        names, params, structure = asked.flat_params or FlatParams.of(asked.params)
        structures, tensors = (structure, batch_structure, out_structure), [*params, *batch, *out]
        reductions = tuple(map(fixed_fields, asked.wanted))
        key = (
            names,
            structures,
            asked.container,
            reductions,
            list(map(type, tensors)),
            asked.weights is None,
            asked.options,
        )
        return cls(params, batch, out, structures, tensors, key)


@dataclass
class EarlierCall:
    """A call whose program later calls may run."""

    key: tuple[object, ...]  # that of ``Flat``
    alike: Callable[..., bool]  # torch's comparison of tensors with those of the call: dtypes, devices, shapes, strides
    # for each leaf of the batch, a tensor like the first sample's row, which stands for those of all calls: captured
    # losses read no values. None for a leaf that all samples share.
    rows: list[Tensor | None]
    unpack: bool  # whether the batch is passed as positional arguments
    is_list: bool  # whether these are the leaves of the batch
    capture: Capture
    # for each input of the graph, the place of a parameter or leaf, or of what the loss closed over; or a constant.
    # Empty where all are tensors made for this call, which nothing else can be.
    inputs: list[int | Origin]
    closed_over: list[int]  # for each tensor that the loss closed over, its place among the inputs of the graph
    live: Live  # the numbers and tensors of reductions that may change
    size: int  # the number of samples, or of units
    program: Program

    def matches(self, flat: Flat) -> bool:
        """Return whether a call differs from this one in values only, as far as its arguments tell."""
        return (
            self.key == flat.key
            and not any(map(is_nested, flat.tensors))
            and self.alike(*flat.tensors)
            and not are_hooked(flat.params)
        )

    def find(self, asked: Asked, flat: Flat, entry: Entry) -> tuple[Marker | None, list[Leaf]]:
        """Run the captured loss for a call that matches this one; all calls that match it would run it alike.

        Returns a marker of its graph, or None if it computes nothing; and the tensors that the loss was called with.
        """
        structure, params = flat.structures[0], flat.params
        args = asked.params
        if structure is not None:
            params = list(map(parameter, params))
            args = trees.unflatten(params, structure)
        rows = [x.detach() if row is None else row for row, x in zip(self.rows, flat.batch)]  # noqa: B905 (equally long)
        sample = rows if self.is_list else trees.unflatten(rows, flat.structures[1])
        set_grad_enabled(True)
        try:
            returned = entry.find(asked.loss_fn, args, *(sample if self.unpack else (sample,)))
        finally:
            set_grad_enabled(False)
        return first_marker(returned), [*params, *rows]

    def taken(
        self, asked: Asked, flat: Flat, marker: Marker | None, given: list[Leaf]
    ) -> tuple[list[Tensor], Tensor | None] | None:
        """Return the inputs of the program, from what ``find`` returned, and the weights; None for another loss."""
        if marker is None or marker.capture.twin is not self.capture:
            return None
        if self.inputs and _places(marker.inputs, given) != self.inputs:
            return None
        live = live_inputs(asked.wanted, flat.params[0].device, self.live)
        weights = check_weights(asked.weights, self.size)
        if asked.container is not None and not (live is self.live and weights is None):
            check_averages(asked.wanted, weights, self.size)  # of streams they are checked over all batches
        if live.form != self.live.form:
            return None
        own = [x.clone() for x in live.tensors]  # a reduction may write into its numbers
        of_samples = [] if weights is None else [weights.to(flat.params[0].device)]
        closed_over = [marker.inputs[place] for place in self.closed_over]
        read = [*flat.params, *flat.batch, *closed_over, *of_samples, *own]
        if asked.out is not None and not is_apart(asked.out, read):
            return None
        return [*read, *flat.out], weights


def _places(inputs: Sequence[Leaf], given: Sequence[Tensor]) -> list[int | Origin]:
    known = dict(zip(map(id, given), itertools.count()))
    return [known.setdefault(id(x), len(known)) if isinstance(x, Tensor) else Constant(x) for x in inputs]


def remember(asked: Asked, task: Task, program: Program) -> None:
    """Let later calls run the program of this one, if they are told by comparing tensors."""
    call, fn = task.call, task.loss
    if call.weights is not None and (asked.weights is None or call.units is not None):
        return  # weights that the user did not pass so
    flat, entry = Flat.of(asked), entry_of(asked.loss_fn)
    used = [*call.params, *call.leaves[: len(flat.batch)], *task.written]
    if len(used) != len(flat.tensors) or not all(map(_is_same, used, flat.tensors)) or not _is_plain():
        return
    count = len(flat.params) + len(flat.batch)
    inputs: list[int | Origin] = [x.index if isinstance(x, Argument) else x for x in fn.inputs]
    kept = {x.index for x in (*fn.inputs, *fn.leaves) if isinstance(x, Argument) and x.index >= count}
    unpack = type(asked.batch) in (tuple, list)
    if fn.capture is None or any(task.functions) or not kept.issubset(inputs):
        return
    are_own = not kept and not isinstance(asked.params, nn.Module) and all(isinstance(x, int) for x in inputs)
    pairs = zip(flat.batch, call.leaves_batched, strict=False)
    earlier = EarlierCall(
        (*flat.key[:-1], copy.deepcopy(asked.options)),  # in_dims may be a list, and change
        TensorGuards(*flat.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check,
        [row_like(x, call.loss.keep_batch_dim) if split else None for x, split in pairs],
        unpack,
        unpack and trees.is_flat(flat.structures[1]),
        fn.capture,
        [] if are_own else inputs,
        [inputs.index(place) for place in sorted(kept)],
        live_inputs(asked.wanted, flat.params[0].device),
        call.count,
        program,
    )
    entry.calls = [earlier, *entry.calls][:_MOST]


def _is_same(x: Tensor, y: object) -> bool:
    """Return whether two tensors have the same memory and format."""
    return isinstance(y, Tensor) and x.data_ptr() == y.data_ptr() and Format.of(x) == Format.of(y)


def _is_plain() -> bool:
    """Return whether no transform, inference mode or autocast surrounds the call."""
    inside = get_dynamic_layer_stack_depth() or torch.is_inference_mode_enabled()
    return not (inside or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))


def repeated(asked: Asked) -> tuple[Tree, int, Tensor | None] | None:
    """Return the result of a call by the program of an earlier one like it, the number of its samples, and weights.

    None if there is no such program.
    """
    entry = entry_of(asked.loss_fn)
    if not entry.calls or entry.changes_modules or not _is_plain():
        return None
    flat = Flat.of(asked)
    recording, callback = torch.is_grad_enabled(), get_eval_frame_callback()
    try:  # a signal cannot come between ``try`` or ``finally`` and a C call in its first statement
        set_grad_enabled(False)
        found = None
        for call in filter(lambda call: call.matches(flat), entry.calls):
            found = found or call.find(asked, flat, entry)  # once: the loss may count its calls
            if (ready := call.taken(asked, flat, *found)) is not None:
                inputs, weights = ready
                results = call.program(inputs)
                if asked.container is not None:
                    results = trees.unflatten(results, asked.container) if asked.out is None else asked.out
                return results, call.size, weights
    except (DoubtfulError, NewError):
        pass
    finally:
        set_grad_enabled(recording)
        set_eval_frame(callback)
    return None
