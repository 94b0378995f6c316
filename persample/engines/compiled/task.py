"""The computation that is compiled: one chunk of a call, as a function of one flat list of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from persample import pipeline
from persample.clipping import Rule
from persample.engines.compiled.captured_call import GraphFunction, captured_call, captured_function_of_a_norm, plain
from persample.engines.compiled.trace import Format, Outline, pack
from persample.engines.uncompiled import eager
from persample.errors import ArgumentError
from persample.factors import Factor
from persample.factors.cost_model import Budget
from persample.inputs.call import Call
from persample.pipeline import write_into
from persample.reductions import Reduction
from persample.reductions.base import Reductions
from persample.utils import trees
from persample.utils.trees import Leaf, Tree
from persample.vmap_rules import VmapRules


class FunctionKey(NamedTuple):
    """Where a reduction has a function of a norm: its field, and there the name of a group of parameters, or None."""

    field: str
    group: str | None


_Functions: TypeAlias = Mapping[FunctionKey, tuple[GraphFunction, list[Tensor]]]


class UnfinishedError(Exception):
    """Raised if the ``finish`` of a reduction failed; the engine can run that step eagerly."""


@dataclass(frozen=True)
class Task:
    """One chunk of one call."""

    reductions: Reductions
    call: Call  # the chunk, not empty
    finishes: bool  # whether to compute the finished results, instead of the mergeable leaves of this chunk
    engine: str  # "compiled" if Inductor compiles the graph, "traced" if it runs operation by operation
    container: trees.TreeSpec = field(default_factory=trees.leaf_structure)  # of the results
    out: object = None  # a previous result to write into, which shares no memory with the inputs; None for fresh memory
    functions: Sequence[_Functions] = ()  # for every reduction, those of a norm as graphs, with closed-over tensors

    def captured(self) -> Task:
        """Return the same task with the loss, and the functions of reductions, captured as graphs."""
        device = self.call.params[0].device
        functions = [
            {key: captured_function_of_a_norm(function, device) for key, function in _functions_of_a_norm(r).items()}
            for r in self.reductions.reductions
        ]
        return replace(self, call=captured_call(self.call), functions=functions)

    @property
    def compiles(self) -> bool:
        """Whether Inductor compiles the graph."""
        return self.engine == "compiled"

    @property
    def loss(self) -> GraphFunction:
        """The captured loss."""
        return cast("GraphFunction", self.call.loss.fn)

    @cached_property
    def read(self) -> list[Tensor]:
        """The tensors that the program reads."""
        leaves = [x for x in self.call.leaves if isinstance(x, Tensor)]
        weights = [] if self.call.weights is None else [self.call.weights]
        return [*map(plain, [*self.call.params, *leaves, *weights]), *self._ids, *self._live[0]]

    @property
    def _ids(self) -> list[Tensor]:
        units = self.call.units
        return [] if units is None or units.ids is None else [units.ids]

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the program writes."""
        return [] if self.out is None else trees.flatten(self.out)[0]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The inputs of the program: the tensors that it reads, then those that it writes."""
        return [*self.read, *self.written]

    @property
    def batched(self) -> list[bool]:
        """For each of the tensors, whether it holds one row per sample, on axis 0."""
        leaves = zip(self.call.leaves, self.call.leaves_batched, strict=True)
        split = [*self.call.params_batched, *(batched for x, batched in leaves if isinstance(x, Tensor))]
        weights = [] if self.call.weights is None else [True]
        others = (*self._ids, *self._live[0])
        return [*split, *weights, *(False for _ in others), *(True for _ in self.written)]

    @cached_property
    def _live(self) -> tuple[list[Tensor], Outline]:
        kept = [{name: kept for name, (_, kept) in functions.items()} for functions in self.functions]
        fields = list(map(_live_fields, self.reductions.reductions))
        return _as_inputs((fields, kept), self.call.params[0].device)

    @property
    def structure(self) -> Hashable:
        """What the program depends on beside the formats of its tensors, as a key."""
        call, loss = self.call, self.call.loss
        graphs = tuple((name, graph) for functions in self.functions for name, (graph, _) in functions.items())
        return (
            (loss.fn, tuple(map(_key, self.reductions.reductions)), graphs),
            (loss.spec.structure, loss.spec.paths, loss.batch, loss.unpack, loss.keep_batch_dim, loss.outputs),
            (call.params_batched, call.leaves_batched, call.weights is None),
            call.units and (call.units.sizes, call.units.scale, call.units.ids is None),
            (call.randomness, call.budget.allowance, self.finishes, self.engine, self._live[1]),
            (self.container, self.out is None or trees.structure(self.out)),
        )

    def __call__(self, tensors: Sequence[Tensor]) -> object:
        """Run the pipeline on other tensors, perhaps of other sizes; None if the results were written into ``out``."""
        given, (live, outline) = iter(tensors), self._live
        params = tuple(next(given) for _ in self.call.params)
        leaves = tuple(next(given) if isinstance(x, Tensor) else x for x in self.call.leaves)
        weights = None if self.call.weights is None else next(given)
        units = self.call.units and replace(self.call.units, ids=next(given) if self._ids else None)
        fields = outline.filled([next(given) for _ in live])
        new = zip(self.reductions.reductions, *fields, self.functions, strict=True)
        reductions = Reductions([_changed(*parts) for parts in new], keep_factored=True)
        split = [*self.call.params_batched, *self.call.leaves_batched]
        size = next(len(x) for x, batched in zip([*params, *leaves], split, strict=True) if batched)
        # The plan is that of the sizes for which the program is made; those of tracing, and of its use, may be others.
        # So the bound on elements grows with the number of samples in the trace.
        allowance, in_fresh_memory, kept = self.call.budget
        budget = Budget(allowance, in_fresh_memory, kept * size / self.call.size)
        call = replace(self.call, size=size, params=params, leaves=leaves, weights=weights, planned=budget, units=units)
        lifted = pipeline.lift_chunks([call], eager, reductions)
        try:
            results = replace(self, call=call, reductions=reductions).last_step(lifted)
        except RuntimeError as error:  # what a trace refuses
            raise UnfinishedError(str(error)) from error
        if self.out is None:
            return results
        out = trees.unflatten([next(given) for _ in self.written], trees.structure(self.out))
        write_into(out, trees.unflatten(results, self.container))
        return None

    def last_step(self, lifted: object) -> Tree:
        """Return the results if ``finishes``, else the leaves."""
        return pipeline.finish(self.call, lifted, self.reductions) if self.finishes else lifted


def _as_inputs(fields: Tree, device: torch.device) -> tuple[list[Tensor], Outline]:
    return pack(trees.tree_map(lambda x: _as_input(x, device), fields))


def _as_input(x: Leaf, device: torch.device) -> Leaf:
    if isinstance(x, Rule):
        return replace(x, max_norm=_as_input(x.max_norm, device))
    if isinstance(x, Tensor):
        return x.detach().to(device)
    return x if isinstance(x, Factor) else torch.full((), x, dtype=torch.float64, device=device)


class Live(NamedTuple):
    """The numbers and tensors of reductions that may change between calls, as inputs of a program."""

    tensors: list[Tensor]
    form: tuple[list[Format], Outline]  # their formats, and where they belong
    text: list[str] | None = None  # the numbers as text, which tells -0.0 from 0.0 and 1.0 from 1, or None


def live_inputs(reductions: Sequence[Reduction], device: torch.device, earlier: Live | None = None) -> Live:
    """Return the numbers and tensors of reductions that may change; ``earlier`` where the numbers are the same."""
    fields = [_live_fields(r) for r in reductions if r.live]
    numbers = [x for found in fields for x in found.values()]
    text = list(map(repr, numbers)) if all(type(x) in (float, int, bool) for x in numbers) else None
    if earlier is not None and text is not None and text == earlier.text:
        return earlier
    tensors, outline = _as_inputs(fields, device)
    return Live(tensors, (list(map(Format.of, tensors)), outline), text)


def fixed_fields(reduction: Reduction) -> tuple[type, tuple[tuple[str, type, object], ...]]:
    """Return what a program depends on of a reduction: its class and the fields that may not change."""
    changing = {*_live_fields(reduction), *reduction.functions_of_a_norm}
    return type(reduction), tuple((name, type(x), x) for name, x in vars(reduction).items() if name not in changing)


def _key(reduction: Reduction) -> Hashable:
    """Return the fixed fields as a part of a key."""
    kind, fields = fixed_fields(reduction)
    for name, _, x in fields:
        if isinstance(x, Tensor) or not isinstance(x, Hashable):
            raise ArgumentError.about(
                f"{kind.__name__}.{name}",
                expected="a value that can be hashed, because the compiled engine takes it for a constant",
                received=type(x).__name__,
                fix="List the field in the class attribute `live` if it holds numbers or tensors, or make it a tuple.",
            )
    return kind, fields


def _live_fields(reduction: Reduction) -> dict[str, Leaf]:
    found = {name: getattr(reduction, name) for name in reduction.live}
    return {name: x for name, x in found.items() if x is not None and not any(map(callable, trees.flatten(x)[0]))}


def _functions_of_a_norm(reduction: Reduction) -> dict[FunctionKey, Callable[[Tensor], Leaf]]:
    """Return the functions of a norm by their fields, and by their names in it where it has several."""
    found: dict[FunctionKey, Callable[[Tensor], Leaf]] = {}
    for field_name in set(reduction.functions_of_a_norm) - _live_fields(reduction).keys():
        given = getattr(reduction, field_name)
        for name, x in given.items() if isinstance(given, Mapping) else [(None, given)]:
            found[FunctionKey(field_name, name)] = x.scale if isinstance(x, Rule) else x
    return found


def _changed(
    reduction: Reduction, numbers: Mapping[str, Leaf], kept: Mapping[FunctionKey, list[Tensor]], functions: _Functions
) -> Reduction:
    changed = copy.copy(reduction)  # a constructor would check the fields again, which fails on traced tensors
    fields = dict(numbers)
    for key, (graph, _) in functions.items():
        one = partial(_of_norm, graph, kept[key])
        fields[key.field] = one if key.group is None else {**fields.get(key.field, {}), key.group: one}
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed


def _of_norm(graph: GraphFunction, closed_over: Sequence[Tensor], norm: Tensor) -> object:
    with VmapRules():
        return graph([norm], *closed_over)
