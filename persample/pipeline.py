"""The pipeline from a call to its results: on every chunk an engine and ``lift``; then merge and ``finish``.

Each tensor of a result has memory of its own, or that of ``out``, a previous result that is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.gradients import Gradients
from persample.inputs.call import Call, NotConnectedError
from persample.merge import Stacked, merge_all
from persample.reductions.base import Reductions
from persample.unit_gradients import in_first_order, of_units
from persample.utils import rng, trees
from persample.utils.numerics import full_precision, is_folded, memory
from persample.utils.tracing import is_traced, is_wrapped
from persample.utils.trees import Leaf, Tree

Engine: TypeAlias = Callable[[Call, frozenset[str]], Gradients]  # (chunk, operations that ``lift`` calls) -> Gradients
Lift: TypeAlias = Callable[[Call], Tree]  # from a chunk to the result of ``Reductions.lift``


def lift_by(engine: Engine, reductions: Reductions) -> Lift:
    """Return the function that computes the gradients of a chunk, of its units if it has some, and lifts them."""

    def lift(chunk: Call) -> Tree:
        lifted = reductions.lift
        if chunk.is_sharded:  # importing DTensor takes a second
            from persample.sharded_gradients import ShardedGradients

            def lifted(gradients: Gradients) -> Tree:
                return reductions.lift(ShardedGradients.of(gradients, chunk.loss.params.tensors))

        if chunk.units is None:
            return lifted(engine(chunk, reductions.required_ops))
        return merge_all(map(lifted, of_units(chunk, engine, reductions.required_ops)))

    return lift


def lift_chunks(chunks: Iterable[Call], engine: Engine, reductions: Reductions) -> Tree:
    """Lift the gradients of every chunk and merge the leaves."""
    return merge_all(map(lift_by(engine, reductions), chunks))


def finish(call: Call, lifted: Tree, reductions: Reductions) -> list[Leaf]:
    """Return the result of every reduction."""
    leaves, connected = lifted
    if not connected.value:
        raise NotConnectedError
    return reductions.finish(leaves, call.params[0].device)


def run(call: Call, lift: Lift, reductions: Reductions, chunk_size: int | None) -> list[Leaf]:
    """Compute the result of every reduction, chunk by chunk."""
    chunks = call.chunks(chunk_size)
    if call.randomness == "same":
        chunks = rng.replayed(chunks)
    lifted = merge_all(map(lift, chunks))
    return finish(call, lifted if call.order is None else in_first_order(call.order, lifted, reductions), reductions)


def owned(result: object, inputs: Sequence[Tensor]) -> Tree:
    """Copy the tensors of a result that share memory, so that a write to one of them changes no other.

    Gradients may share memory with each other (two biases that are added), or repeat one number (a bias that is added
    to every element). An auxiliary output of the loss may be an input of the loss.
    """
    leaves, structure = trees.flatten(result)
    taken = set(map(memory, inputs))
    for place, x in enumerate(leaves):
        if isinstance(x, Tensor) and not is_wrapped(x):
            own = memory(x)
            if own in taken or (not x.is_contiguous() and is_folded(x)):
                leaves[place] = x.clone(memory_format=torch.contiguous_format)
                own = memory(leaves[place])
            taken.add(own)
    return trees.unflatten(leaves, structure)


def write_into(out: object, result: object) -> Tree:
    """Write a result into the storage of a previous one, and return that.

    ``out`` has the same structure, shapes, dtypes and devices; else it is an ``ArgumentError``, and nothing is written.
    ``Stacked`` rows are written straight into ``out`` if they fit.
    """
    leaves, structure = trees.flatten(result)
    targets = trees.leaves_like(out, structure)
    fix = "Pass what the same call returned before."
    if targets is None:
        expected, received = f"the structure {trees.on_one_line(structure)}", trees.on_one_line(trees.structure(out))
        raise ArgumentError.about("out", expected=expected, received=received, fix=fix)
    seen: dict[int, list[Tensor]] = {}  # only tensors of one storage can overlap
    for path, leaf, target in zip(trees.paths(result, "out"), leaves, targets, strict=True):
        fits = isinstance(leaf, Stacked) and leaf.fits(target)
        values = leaf.finish() if isinstance(leaf, Stacked) and not fits else leaf
        if not fits and not isinstance(values, Tensor):
            fix = "Leave out=None for Factored()."
            raise ArgumentError.about(path, expected="a result of tensors", received=type(leaf).__name__, fix=fix)
        if not fits and (not isinstance(target, Tensor) or _format(target) != _format(values)):
            received = _format(target) if isinstance(target, Tensor) else type(target).__name__
            raise ArgumentError.about(path, expected=_format(values), received=received, fix=fix)
        others = seen.setdefault(id(target) if is_traced(target) else memory(target), [])
        shared = is_folded(target) or any(_overlap(target, other) for other in others)
        if shared or target.is_inference():
            received = "one that repeats" if shared else "an inference tensor"
            raise ArgumentError.about(path, expected="memory of its own", received=received, fix=fix)
        if target.requires_grad:
            expected = "a tensor that does not require grad, as results never do"
            raise ArgumentError.about(path, expected=expected, received="one that does", fix=fix)
        others.append(target)
    for leaf, target in zip(leaves, targets, strict=True):
        with full_precision(target.device):
            values = leaf.finish(target) if isinstance(leaf, Stacked) else leaf
        if values is not target:
            target.copy_(values)
    return out


def is_apart(out: object, inputs: Sequence[Leaf]) -> bool:
    """Return whether a previous result can be written while the inputs are still read: they share no memory."""
    leaves = trees.flatten(out)[0]
    if not all(isinstance(x, Tensor) for x in leaves):
        return False
    if any(is_wrapped(x) or x.is_inference() or is_folded(x) or x.is_neg() or x.requires_grad for x in leaves):
        return False
    taken = {memory(x) for x in inputs if isinstance(x, Tensor)}
    own = [memory(x) for x in leaves]
    return len(set(own)) == len(own) and taken.isdisjoint(own)


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one storage, neither of which is folded, have an element in common."""
    if x is y or is_wrapped(x) or is_traced(x):
        return x is y
    if not (x.numel() and y.numel()):
        return False
    spans = [range(start := z.data_ptr(), start + z.element_size() * _span(z)) for z in (x, y)]
    if spans[0].stop <= spans[1].start or spans[1].stop <= spans[0].start:
        return False
    if x.element_size() != y.element_size():
        return True
    # The spans of two columns of a matrix overlap, their elements do not: mark those of one, and look for marks.
    first = min(x.storage_offset(), y.storage_offset())
    marks = torch.zeros(max(_span(z) + z.storage_offset() - first for z in (x, y)), dtype=torch.bool, device=x.device)
    marks.as_strided(x.shape, x.stride(), x.storage_offset() - first).fill_(1)
    return bool(marks.as_strided(y.shape, y.stride(), y.storage_offset() - first).any())


def _span(x: Tensor) -> int:
    return 1 + sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))


def _format(x: Tensor) -> str:
    return f"shape {list(x.shape)}, {x.dtype} on {x.device}"
