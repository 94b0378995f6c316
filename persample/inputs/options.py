"""Options, from ``reduce`` and ``engine`` to ``memory`` and ``weights``, and derivatives around a call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from persample import _torch
from persample._torch import transforms
from persample.errors import ArgumentError
from persample.factors.cost_model import Memory
from persample.inputs.batch import as_tensors, check_kind
from persample.inputs.units import UnitReduce
from persample.reductions import Reduction, Stack
from persample.utils import trees
from persample.utils.tracing import is_batched, is_inside

Engine: TypeAlias = Literal["eager", "traced", "compiled", "loop", "auto"]
Randomness: TypeAlias = Literal["error", "same", "different"]
Outputs: TypeAlias = Literal["scalar", "rows"]
_ENGINES, _RANDOMNESS, _OUTPUTS, _UNIT_REDUCE = (get_args(x) for x in (Engine, Randomness, Outputs, UnitReduce))


def check_options(
    *,
    engine: str,
    randomness: str,
    chunk_size: int | None,
    memory: Memory = None,
    outputs: str = "scalar",
    unit_reduce: str = "sum",
) -> None:
    """Reject invalid options."""
    check_choices(
        engine=(engine, _ENGINES),
        randomness=(randomness, _RANDOMNESS),
        outputs=(outputs, _OUTPUTS),
        unit_reduce=(unit_reduce, _UNIT_REDUCE),
    )
    check_loop(engine)
    check_chunk_size(chunk_size)
    is_word = memory is None or (isinstance(memory, str) and memory == "low")
    if not is_word and not (type(memory) is int and memory >= 0):
        fix = "Pass the bytes that written-out gradients may take, 'low' for as few as possible, or None."
        raise ArgumentError.about("memory", expected="bytes, 'low' or None", received=repr(memory), fix=fix)


def check_loop(engine: str) -> None:
    """Reject the loop engine inside of the caller's transforms, which plain autograd cannot handle."""
    if engine == "loop" and (around := transforms()):
        expected = f"an engine that works under torch.func.{around[0]}"
        fix = (
            "Pass engine='eager'; or differentiate by plain autograd, outside of torch.func, with differentiable=True."
        )
        raise ArgumentError.about("engine", expected=expected, received="'loop'", fix=fix)


def check_out(out: object, *, differentiated: bool) -> None:
    """Reject ``out`` where derivatives or transforms of the caller's act on the results, or without memory."""
    if differentiated or transforms():
        around = "torch.func's transforms" if transforms() else "differentiable=True"
        fix = "Leave it out: memory that is written again cannot be part of a graph or of a larger batch."
        raise ArgumentError.about("out", expected=f"None with {around}", received="a previous result", fix=fix)
    for x in trees.flatten(out)[0]:
        if isinstance(x, Tensor):
            check_kind("out", x)
            try:
                x.untyped_storage().data_ptr()
            except RuntimeError as error:
                received, fix = "a wrapper of a tensor", "Pass what the same call returned before."
                raise ArgumentError.about("out", expected="tensors with memory", received=received, fix=fix) from error


def check_chunk_size(chunk_size: object) -> None:
    """Reject an invalid chunk size."""
    if chunk_size is not None and not (type(chunk_size) is int and chunk_size > 0):
        fix = "Pass how many samples to process at a time, or None for all."
        raise ArgumentError.about("chunk_size", expected="a positive int or None", received=repr(chunk_size), fix=fix)


def check_choices(**options: tuple[Any, Sequence[str]]) -> None:
    """Reject an option that is none of its allowed words."""
    for argument, (value, choices) in options.items():
        if not isinstance(value, str) or value not in choices:
            expected = " or ".join(repr(name) for name in choices)
            received = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ArgumentError.about(argument, expected=expected, received=received, fix="Pick one of them.")


def reductions(reduce: object, *apart: object) -> tuple[list[Reduction], trees.TreeSpec]:
    """Return the reductions of a call as a list, and the structure of their container; reject arguments after them."""
    leaves, container = trees.flatten(reduce)
    for leaf in (*leaves, *apart):
        if leaf is not None and not isinstance(leaf, Reduction):
            named = isinstance(leaf, type) and issubclass(leaf, Reduction)
            fix = f"Call it: {leaf.__name__}(…)." if named else "Pass for example Mean(), or {'update': Mean()}."
            received = repr(leaf)
            if isinstance(leaf, Tensor | np.ndarray):
                received = f"a tensor of shape {list(leaf.shape)}"
                fix = "All that the loss takes of a sample is one argument, batch, a tuple: pass (x, y), not x, y."
            raise ArgumentError.about("reduce", expected="reductions such as Mean()", received=received, fix=fix)
    if not leaves or apart:
        received = f"{1 + len(apart)} arguments" if apart else f"an empty {reduce!r}"
        fix = "Pass None for the per-sample gradients, several reductions in a tuple or dict, and options by name."
        raise ArgumentError.about("reduce", expected="a reduction", received=received, fix=fix)
    return [Stack() if leaf is None else leaf for leaf in leaves], container


_CONSTANTS = "If constants are meant, call it under torch.no_grad(), or before the differentiated function."


class NestedCallError(ArgumentError):
    """Raised where plain autograd differentiates a loss, and a call inside of it would return constants."""


def is_differentiated(called: str, *, requested: bool) -> bool:
    """Return whether the caller differentiates the results, so that every step must be differentiable."""
    _check_forward_mode(called)
    if any(map(_differentiates, _torch.transforms())):
        return True
    if not torch.is_grad_enabled():
        return False
    if (outer := is_inside()) and not requested:
        expected = f"differentiable=True inside {outer}, which is differentiated"
        raise NestedCallError.about(called, expected=expected, received="differentiable=False", fix=_CONSTANTS)
    return requested


def check_outside(called: str, instead: str) -> None:
    """Reject a call inside of a derivative or of vmap, for functions whose results would be constants there.

    ``torch.no_grad()`` inside of a derivative is accepted: it says that constants are meant.
    """
    _check_forward_mode(called)
    around = [f"torch.func.{name}" for name in _torch.transforms() if name == "vmap" or _differentiates(name)]
    if (outer := is_inside()) and torch.is_grad_enabled():
        around = [f"{outer}, which is differentiated"]
    if around:
        expected, received = "to be called outside of transforms and losses", f"a call inside {around[0]}"
        raise ArgumentError.about(called, expected=expected, received=received, fix=f"{instead} {_CONSTANTS}")


def _differentiates(transform: str) -> bool:
    return transform == "jvp" or (transform == "grad" and torch.is_grad_enabled())


def _check_forward_mode(called: str) -> None:
    if not _torch.transforms() and _torch.is_forward_mode():
        fix = "Use torch.func.jvp; or call it before the level is entered, if constants are meant."
        expected, received = "torch.func for forward mode", "a call inside a level of torch.autograd.forward_ad"
        raise ArgumentError.about(called, expected=expected, received=received, fix=fix)


_divides_by_weight = operator.attrgetter("divides_by_weight")


def check_weights(weights: object, size: int, *, keep_graph: bool = False) -> Tensor | None:
    """Return the weights as ``[B]`` float64 on the CPU, where they are checked; those of a GPU are read once."""
    if weights is None:
        return None
    weights = as_tensors(["weights"], [weights], torch.empty(0, dtype=torch.float64, device="cpu"))[0]
    try:
        dtype = None if isinstance(weights, Tensor) else torch.float64  # Python floats are doubles
        tensor = torch.as_tensor(weights, dtype=dtype, device="cpu")
        tensor = tensor if keep_graph else tensor.detach()
        received = f"shape {list(tensor.shape)}, {tensor.dtype}"
        valid = tensor.shape == (size,) and not tensor.is_complex()
    except (TypeError, ValueError, RuntimeError):
        valid, received = False, repr(weights)
    sizes = tensor.double().abs() if valid and not is_batched(tensor) else None
    if sizes is not None and not bool(((sizes == 0) | ((sizes > 1e-30) & (sizes < 1e30))).all()):
        valid, received = False, "NaN or infinity or numbers beyond 1e±30 among them"
    if not valid:
        fix = "Pass one number per sample, shape [B]; a weight of 0 leaves a sample out."
        raise ArgumentError.about("weights", expected=f"{size} finite real numbers", received=received, fix=fix)
    return tensor.double()


class TotalWeight(NamedTuple):
    """The weights of the samples of a call, or of several batches."""

    total: float = 0.0  # Σ wᵢ
    least: float = float("inf")  # the smallest weight, ∞ without samples
    given: bool = False

    @classmethod
    def of(cls, weights: Tensor | None, size: int) -> TotalWeight:
        """Return the total of ``weights [B]``, or of B ones."""
        if weights is None:
            return cls(float(size))
        weights = weights.detach()
        return cls(float(weights.sum()), float(weights.min()) if size else float("inf"), given=True)

    def merge(self, other: TotalWeight) -> TotalWeight:
        """Return the total of both sets of samples."""
        least = min(self.least, other.least)
        return TotalWeight(self.total + other.total, least, self.given or other.given)

    def check(self, wanted: Sequence[Reduction]) -> None:
        """Reject averages without samples, with negative weights, or with weights that sum to too little."""
        for reduction in filter(_divides_by_weight, wanted):
            bound = reduction.needs_more_than
            if self.total > bound and self.least >= 0:
                continue
            name = f"{type(reduction).__name__}()"
            received, fix = f"B = {self.total:.0f}", "Take more samples, leave such a batch out, or ask for a sum."
            if self.given:
                received = f"weights that sum to {self.total:g}, the smallest {self.least:g}"
                fix = f"An average takes weights >= 0 with a sum of more than {bound:g}; sums such as Sum() take any."
            expected = f"samples (or their weights, none negative) that add up to more than {bound:g}"
            raise ArgumentError.about(name, expected=expected, received=received, fix=fix)


def check_averages(wanted: Sequence[Reduction], weights: Tensor | None, size: int) -> None:
    """Reject averages that have no divisor."""
    if any(map(_divides_by_weight, wanted)) and not is_batched(weights):
        TotalWeight.of(weights, size).check(wanted)
