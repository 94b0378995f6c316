"""Everything the door refuses. What is past it is trusted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedTensorMixin

from persample import trees
from persample.errors import ArgumentError
from persample.gradients import ParamSpec
from persample.loss import SampleLoss
from persample.modules import ParamTree, take_apart
from persample.reductions import Reduction, Stack
from persample.samples import Samples


def choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        expected = " or ".join(repr(name) for name in choices)
        raise ArgumentError.about(argument, expected=expected, received=repr(value), fix="Pick one of them.")


def options(chunk_size: Any, randomness: Any) -> None:
    """Refuse a chunk size or a kind of randomness that ``torch.func.vmap`` would not take."""
    choice("randomness", randomness, ("error", "same", "different"))
    whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is not None and not (whole and chunk_size > 0):
        fix = "Pass how many samples to process at a time, or None for all."
        raise ArgumentError.about("chunk_size", expected="a positive int or None", received=repr(chunk_size), fix=fix)


def reductions(reduce: Any) -> tuple[list[Reduction], trees.TreeSpec]:
    """Return the reductions asked for as a list, and the container they came in."""
    leaves, spec = trees.flatten(reduce)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Reduction):
            named = isinstance(leaf, type) and issubclass(leaf, Reduction)
            fix = f"Call it: {leaf.__name__}()." if named else "Pass for example Mean(), or {'update': Mean()}."
            raise ArgumentError.about("reduce", expected="reductions such as Mean()", received=repr(leaf), fix=fix)
    if not leaves:
        fix = "Name at least one, or pass None for the per-sample gradients."
        raise ArgumentError.about("reduce", expected="a reduction", received=f"an empty {reduce!r}", fix=fix)
    return [Stack() if leaf is None else leaf for leaf in leaves], spec


def params_tree(params: Any) -> ParamTree:
    """Return the parameters taken apart; refuse what cannot be differentiated."""
    tree = take_apart(params)
    for module in tree.modules:
        _module(module)
    for path, leaf in zip(tree.paths, tree.tensors, strict=True):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            continue
        received = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
        fix = "Convert it (torch.as_tensor(x, dtype=torch.float32)), or pass what is not learned in batch."
        raise ArgumentError.about(path, expected="a floating or complex tensor", received=received, fix=fix)
    if not tree.tensors:
        fix = "Pass dict(model.named_parameters()) or a module with at least one parameter that requires_grad."
        raise ArgumentError.about("params", expected="at least one floating tensor", received="none", fix=fix)
    return tree


def _module(module: nn.Module) -> None:
    for name, part in module.named_modules():
        label = f"{name!r} ({type(part).__name__})" if name else type(part).__name__
        if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
            raise ArgumentError.about(
                "params",
                expected="a module whose samples do not influence each other",
                received=f"{label} in train mode, which updates running statistics from the whole batch",
                fix="Call .eval() on it, replace it by GroupNorm, or build it with track_running_stats=False.",
            )
    for name, param in module.named_parameters():
        if isinstance(param, UninitializedTensorMixin):
            fix = "Run one forward pass first, so that lazy modules learn their shapes."
            raise ArgumentError.about(f"params[{name!r}]", expected="a tensor", received="uninitialized", fix=fix)


def in_dims_pair(in_dims: Any) -> tuple[Any, Any]:
    """Return the two halves of ``in_dims``; refuse the flat form of ``torch.func.vmap``."""
    if isinstance(in_dims, tuple | list) and len(in_dims) == 2:
        return in_dims[0], in_dims[1]
    if isinstance(in_dims, tuple | list) and len(in_dims) > 2:
        fix = f"Write in_dims={(in_dims[0], tuple(in_dims[1:]))!r}: the batch's own dims as one entry."
    else:
        fix = f"Write in_dims=(None, {in_dims if isinstance(in_dims, int) else 0!r})."
    raise ArgumentError.about("in_dims", expected="(params_dims, batch_dims)", received=repr(in_dims), fix=fix)


def spread(argument: str, dims: Any, tree_spec: trees.TreeSpec, *, as_tuple: bool) -> list[int | None]:
    """Return one batch axis, or None, for every leaf.

    Args:
        argument: how the caller knows these dims.
        dims: an int, None, or a tree prefix of them.
        tree_spec: the structure to fill.
        as_tuple: the tree is a plain list, for which a tuple of dims is as good (and the other way round).

    Returns:
        The axes, in flattening order.
    """
    if as_tuple and isinstance(dims, tuple | list):
        dims = tree_spec.type(dims)
    flat = trees.broadcast_prefix(dims, tree_spec)
    if flat is None or any(not (dim is None or type(dim) is int) for dim in flat):
        fix = f"Match the structure {tree_spec}, where one entry may stand for a whole subtree."
        raise ArgumentError.about(argument, expected="int, None or a tree prefix of them", received=repr(dims), fix=fix)
    return flat


def batch_leaves(batch: Any, like: Tensor) -> tuple[list[Any], list[str], trees.TreeSpec]:
    """Return the leaves of a batch as tensors where they are arrays, their names and their structure.

    Args:
        batch: any pytree.
        like: the parameter whose dtype floating NumPy arrays take, and whose device all arrays take.
    """
    leaves, spec = trees.flatten(batch)
    names = trees.paths(batch, "batch")
    pairs = zip(names, leaves, strict=True)
    return [_as_tensor(path, leaf, like) if isinstance(leaf, np.ndarray) else leaf for path, leaf in pairs], names, spec


def _as_tensor(path: str, array: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    if array.dtype.kind not in "biufc":
        fix = "Convert it to numbers; episodes of different lengths need padding to one length, and a mask."
        raise ArgumentError.about(path, expected="an array of numbers", received=f"dtype {array.dtype}", fix=fix)
    native = np.require(array.astype(array.dtype.newbyteorder("="), copy=False), requirements=["C", "W"])
    tensor = torch.from_numpy(native)
    dtype = tensor.dtype
    if tensor.is_floating_point():
        dtype = like.dtype.to_real()
    elif tensor.is_complex():
        dtype = like.dtype.to_complex()
    return tensor.to(device=like.device, dtype=dtype)


def front(path: str, leaf: Any, dim: int | None, *, constants: bool) -> tuple[Any, bool]:
    """Return a leaf with its batch axis first, and whether it has one.

    Args:
        path: the leaf's name.
        leaf: a tensor, or what passes through.
        dim: the batch axis, or None.
        constants: whether numbers, strings and None may stand where an axis is asked for.
    """
    if not isinstance(leaf, Tensor):
        if (
            dim is None
            or constants
            and (leaf is None or isinstance(leaf, str | bytes | int | float | complex | np.generic))
        ):
            return leaf, False
        fix = "Convert it to a tensor, or pass it unbatched with None in in_dims."
        raise ArgumentError.about(path, expected="a tensor or NumPy array", received=type(leaf).__name__, fix=fix)
    leaf = leaf.detach()
    if leaf.is_nested:
        raise ArgumentError.about(path, expected="a dense tensor", received="a nested tensor", fix=PAD)
    if dim is None:
        return leaf, False
    if not -leaf.ndim <= dim < leaf.ndim:
        received = "a scalar" if leaf.ndim == 0 else f"shape {list(leaf.shape)}"
        fix = "Give every sample its row, or mark what all samples share with None: in_dims=(None, (0, None))."
        raise ArgumentError.about(path, expected=f"a batch axis {dim}", received=received, fix=fix)
    return leaf.movedim(dim, 0), True


PAD = "Pad episodes of different lengths to one length (torch.nn.utils.rnn.pad_sequence) and pass a mask beside them."


def common_size(names: Sequence[str], leaves: Sequence[Any], batched: Sequence[bool]) -> int:
    """Return B; refuse leaves that disagree about it, or none at all."""
    sizes = {name: leaf.shape[0] for name, leaf, split in zip(names, leaves, batched, strict=True) if split}
    if not sizes:
        fix = "Pass tensors with a leading batch axis; a batch of one still has an axis of 1."
        raise ArgumentError.about("batch", expected="at least one tensor with a batch axis", received="none", fix=fix)
    if len(set(sizes.values())) > 1:
        tails = {(leaf.shape[1:], leaf.dtype) for leaf, split in zip(leaves, batched, strict=True) if split}
        fix = "Give all the same number of rows, or mark what all samples share with None in in_dims."
        raise ArgumentError.about(
            "batch",
            expected="leaves of one common batch size",
            received=", ".join(f"{name}: {size}" for name, size in sizes.items()),
            fix=f"If these are episodes: {PAD[0].lower()}{PAD[1:]}" if len(tails) == 1 and len(sizes) > 1 else fix,
        )
    return next(iter(sizes.values()))


def sample_weights(weights: Any, size: int, wanted: Sequence[Reduction], device: torch.device) -> Tensor | None:
    """Return the weights as ``[B]`` float64; refuse those that a requested average cannot divide by."""
    if weights is not None:
        try:
            weights = torch.as_tensor(weights, device=device).detach()
        except (TypeError, ValueError, RuntimeError):
            weights = torch.empty(0, dtype=torch.complex64) if weights is None else weights
        real = isinstance(weights, Tensor) and not weights.is_complex()
        if not real or weights.shape != (size,) or not weights.double().isfinite().all():
            what = f"{weights.dtype} of shape {list(weights.shape)}" if isinstance(weights, Tensor) else repr(weights)
            received = f"{what} with NaN or infinity" if real and weights.shape == (size,) else what
            fix = "Pass one weight per sample; leave samples out with weight 0."
            raise ArgumentError.about("weights", expected=f"{size} finite real numbers", received=received, fix=fix)
        weights = weights.double()
    total = float(size) if weights is None else float(weights.sum())
    negative = weights is not None and bool((weights < 0).any())
    for reduction in wanted:
        if reduction.divides_by_weight and (negative or total <= reduction.needs_more_than):
            source = "samples" if weights is None else "negative weights" if negative else "total weight"
            received = source if negative else f"{total:g} {source}"
            fix = (
                "An average needs positive weights; sums such as Sum() take any."
                if weights is not None
                else ("Leave empty batches out, or ask for sums such as Sum().")
            )
            expected = f"more than {reduction.needs_more_than:g} samples (or total weight, none negative)"
            raise ArgumentError.about(f"{type(reduction).__name__}()", expected=expected, received=received, fix=fix)
    return weights


def signature(loss: SampleLoss, leaves: Sequence[Any], params: Any) -> None:
    """Refuse a loss that cannot take the arguments it is about to get."""
    if not callable(loss.fn):
        fix = "Pass a function of (params, *sample)."
        raise ArgumentError.about("loss_fn", expected="a function", received=type(loss.fn).__name__, fix=fix)
    arguments = trees.unflatten(list(leaves), loss.batch) if loss.unpack else (None,)
    try:
        inspect.signature(loss.fn).bind(params, *arguments)
    except ValueError:  # builtins have no signature to look at
        return
    except TypeError as error:
        unpacked = "a plain tuple or list, whose entries become positional arguments" if loss.unpack else "one argument"
        raise ArgumentError.about(
            "loss_fn",
            expected=f"to take (params, *sample) with {len(arguments)} sample argument(s)",
            received=f"{inspect.signature(loss.fn)} ({error})",
            fix=f"The batch is {unpacked}; to pass several samples, stack them into one tensor with a batch axis.",
        ) from error


def call(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    in_dims: Any,
    keep_batch_dim: bool,
    wanted: Sequence[Reduction],
    weights: Any,
) -> tuple[SampleLoss, Samples]:
    """Return the loss and the samples of a call in the form the engines take; refuse what they cannot.

    Args:
        loss_fn: the user's loss.
        params: the user's parameters.
        batch: the user's batch.
        in_dims: batch axes of both.
        keep_batch_dim: each sample keeps an axis of 1.
        wanted: the reductions asked for.
        weights: one per sample, or None.
    """
    tree = params_tree(params)
    params_dims, batch_dims = in_dims_pair(in_dims)
    if tree.modules and params_dims is not None:
        fix = "Stack the parameters with torch.func.stack_module_state and pass the dict."
        raise ArgumentError.about("in_dims[0]", expected="None for nn.Modules", received=repr(params_dims), fix=fix)
    leaves, names, batch_spec = batch_leaves(batch, tree.tensors[0])
    unpack = type(batch) in (tuple, list)
    fronts = [
        front(path, leaf, dim, constants=False)
        for path, leaf, dim in zip(
            tree.paths, tree.tensors, spread("in_dims[0]", params_dims, tree.result, as_tuple=False), strict=True
        )
    ] + [
        front(path, leaf, dim, constants=True)
        for path, leaf, dim in zip(
            names, leaves, spread("in_dims[1]", batch_dims, batch_spec, as_tuple=unpack), strict=True
        )
    ]
    values, batched = zip(*fronts, strict=True)
    count = len(tree.tensors)
    size = common_size([*tree.paths, *names], values, batched)
    shapes = tuple(x.shape[1:] if split else x.shape for x, split in fronts[:count])
    spec = ParamSpec(tree.result, tree.paths, shapes, tuple(x.dtype for x in values[:count]))
    loss = SampleLoss(loss_fn, tree, spec, batch_spec, batched[count:], unpack, keep_batch_dim)
    signature(loss, leaves, params)
    for reduction in wanted:
        reduction.check(spec)
    checked_weights = sample_weights(weights, size, wanted, values[0].device)
    return loss, Samples(size, values[:count], batched[:count], values[count:], batched[count:], checked_weights)
