"""Argument checks of ``composite_grads`` beyond those of all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from persample import inputs
from persample.composite.batch_norm import CHOOSE, RULES
from persample.errors import ArgumentError
from persample.inputs.loss import SampleLoss
from persample.inputs.modules import ParamTree
from persample.reductions import Aux, Loss, Reduction, Sum
from persample.reductions.base import SumOverSamples
from persample.utils import trees


def check_options(*, engine: Any, chunk_size: Any, batch_norm: Any, batched: bool, keep_batch_dim: bool) -> None:
    """Reject unknown options and combinations that exclude each other."""
    inputs.check_choice("engine", engine, ("eager", "loop"))
    inputs.check_loop(engine)
    inputs.check_choice("batch_norm", batch_norm, RULES)
    inputs.check_chunk_size(chunk_size)
    if batched and keep_batch_dim:
        fix = "With batched=True encode_fn receives chunks of chunk_size samples; leave keep_batch_dim=False."
        raise ArgumentError.about("keep_batch_dim", expected="one of the two", received="batched=True, too", fix=fix)
    if batch_norm != "refuse" and not batched:
        raise ArgumentError.about("batch_norm", expected="'refuse' for single samples", received=batch_norm, fix=CHOOSE)


def check_reductions(
    reduce: Any, *, batched: bool, batch_norm: str, accumulate: bool
) -> tuple[list[Reduction], trees.TreeSpec]:
    """Return the reductions as a list, and the structure of their container."""
    requested, container = inputs.reductions(reduce)
    for one in requested:
        if isinstance(one, Loss | Aux):
            fix = "Leave it out: the loss is returned beside the gradients."
            expected = "reductions of gradients (the samples have no losses of their own)"
            raise ArgumentError.about("reduce", expected=expected, received=f"{type(one).__name__}()", fix=fix)
        if batched and type(one) is not Sum:
            fix = "Write encode_fn for one sample, or with keep_batch_dim=True for a batch of one."
            fix = fix if batch_norm == "refuse" else CHOOSE
            expected = "Sum() with batched=True, which does not tell samples apart"
            raise ArgumentError.about("reduce", expected=expected, received=f"{type(one).__name__}()", fix=fix)
    if accumulate and not isinstance(reduce, SumOverSamples):
        fix = "Ask for Sum() (the default) or ClippedSum(C), or pass one of the results to set_grads yourself."
        expected = "a single sum over the samples with accumulate=True"
        raise ArgumentError.about("reduce", expected=expected, received=repr(reduce), fix=fix)
    return requested, container


def check_parameters(
    encoder: SampleLoss, loss_params: ParamTree | None, requested: Sequence[Reduction], *, accumulate: bool
) -> None:
    """Reject parameters that a reduction does not fit, or that have no ``.grad`` to accumulate into."""
    for reduction in requested:
        reduction.check(encoder.spec)
    for tree in (encoder.params, loss_params) if accumulate else ():
        for name, tensor in zip(tree.paths, tree.tensors, strict=True) if tree is not None else ():
            if not (tensor.requires_grad and tensor.is_leaf):
                received = "one that was computed" if tensor.requires_grad else "one without requires_grad"
                fix = "Pass the module, or leave accumulate=False and use the returned gradients."
                expected = "a leaf tensor that requires a gradient, for accumulate=True"
                raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
