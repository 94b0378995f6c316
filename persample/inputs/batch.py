"""The arguments ``batch`` and ``in_dims``: arrays become tensors, batch axes come first, and their sizes must agree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from persample._torch import FakeTensor, FakeTensorMode, get_dispatch_mode_stack
from persample.errors import ArgumentError
from persample.utils import trees
from persample.utils.tracing import is_wrapped
from persample.utils.trees import Leaf, Tree

_PAD = (
    "Stack a list of samples (torch.stack, torch.utils.data.default_collate). Pad episodes of different lengths to one "
    "length (torch.nn.utils.rnn.pad_sequence) and pass a mask beside them."
)
_OTHER_LOSS = "Samples of another loss (boundary points) go to accumulate({name: loss}, params, [{name: batch}])."
_SHOWN = 4  # leaves in a message
PLAIN = {Tensor, nn.Parameter}
_CONSTANTS = (str, bytes, int, float, complex, np.generic, type(None))


def as_tensors(names: Sequence[str], leaves: Sequence[Leaf], like: Tensor) -> list[Leaf]:
    """Return NumPy arrays as tensors on the parameters' device, and any other leaf unchanged."""
    check_kinds(names, leaves)
    pairs = zip(names, leaves, strict=True)
    return [_as_tensor(name, leaf, like) if isinstance(leaf, np.ndarray) else leaf for name, leaf in pairs]


def _as_tensor(path: str, leaf: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    if leaf.dtype.kind not in "biufc":
        fix = f"Convert it to numbers. {_PAD}"
        raise ArgumentError.about(path, expected="an array of numbers", received=f"dtype {leaf.dtype}", fix=fix)
    if isinstance(leaf, np.ma.MaskedArray):
        fix = "Fill it (.filled(0)) and pass its mask as a leaf of its own."
        raise ArgumentError.about(path, expected="an array without a mask", received="a masked array", fix=fix)
    # torch accepts native byte order, positive strides and at most doubles, and warns of read-only memory.
    dtype = {"g": np.dtype("d"), "G": np.dtype("D")}.get(leaf.dtype.char, leaf.dtype.newbyteorder("="))
    native = np.require(leaf.astype(dtype, copy=False), requirements=["C", "W"])
    if leaf.dtype.kind == "f":
        return torch.from_numpy(native).to(device=like.device, dtype=like.dtype.to_real())
    if leaf.dtype.kind == "c":
        return torch.from_numpy(native).to(device=like.device, dtype=like.dtype.to_complex())
    return torch.from_numpy(native).to(device=like.device)


def as_dicts(batch: Any) -> Any:
    """Return a batch with dicts in place of mappings that are no pytrees, such as a ``UserDict`` or ``BatchEncoding``.

    Examples:
        >>> from collections import UserDict
        >>> as_dicts((UserDict(ids=[1, 2]), 3))
        ({'ids': [1, 2]}, 3)
    """
    children = batch.values() if type(batch) is dict else batch if type(batch) in {tuple, list} else (batch,)
    if PLAIN.issuperset(map(type, children)):  # the usual case
        return batch
    leaves, structure = trees.flatten(batch)
    if not any(isinstance(x, Mapping) for x in leaves):
        return batch
    return trees.unflatten([as_dicts(dict(x)) if isinstance(x, Mapping) else x for x in leaves], structure)


def sample_structure(
    batch: object, structure: trees.TreeSpec, dims: Sequence[int | None], rows: int | slice
) -> trees.TreeSpec:
    """Return the structure of samples (one, or several ``rows``): the batch's, but TensorDicts store a batch size."""
    if type(batch) in {tuple, list} and trees.is_flat(structure):  # the common case
        return structure
    nodes, outer = trees.flatten(batch, is_leaf=_is_tensordict)
    if not any(map(_is_tensordict, nodes)):
        return structure
    remaining = iter(dims)
    for index, node in enumerate(nodes):
        own = {next(remaining) for _ in range(trees.structure(node).num_leaves)}
        if _is_tensordict(node) and own == {0} and node.batch_size[:1].numel():
            nodes[index] = node[rows]
    return trees.structure(trees.unflatten(nodes, outer))


def _is_tensordict(node: object) -> bool:
    return hasattr(type(node), "auto_batch_size_")  # tensordict is no dependency of ours


def batch_axes_first(
    names: Sequence[str], leaves: Sequence[Leaf], dims: Sequence[int | None], argument: str, *, keep_graph: bool = False
) -> tuple[tuple[Leaf, ...], tuple[bool, ...], int]:
    """Return the leaves with their batch axes first, for each whether it has one, and B."""
    values, batched = [], []
    rows: dict[str, Tensor] = {}
    for name, leaf, dim in zip(names, leaves, dims, strict=True):
        is_tensor = isinstance(leaf, Tensor)
        if not is_tensor and dim is not None and not isinstance(leaf, _CONSTANTS):
            _refuse(name, leaf)
        value = leaf
        if is_tensor:
            try:  # autograd rejects inference tensors, but not their clones
                value = leaf.clone() if leaf.is_inference() else leaf if keep_graph else leaf.detach()
            except RuntimeError as error:
                if not is_wrapped(leaf):
                    raise
                fix = "Use it inside of the function that was transformed, or return it from there."
                received = "one of a torch.func transform that has ended"
                raise ArgumentError.about(name, expected="a tensor with values", received=received, fix=fix) from error
            if dim is not None:
                if not -leaf.ndim <= dim < leaf.ndim:
                    _refuse_axis(name, leaf, dim)
                value = rows[name] = value.movedim(dim, 0) if dim else value
        values.append(value)
        batched.append(is_tensor and dim is not None)
    return tuple(values), tuple(batched), _common_size(rows, argument)


def _refuse(path: str, leaf: object) -> NoReturn:
    fix = "Convert it to a tensor, or pass it unsliced with None in in_dims."
    if isinstance(leaf, nn.Module):
        fix = "Pass the parameters before the batch: per_sample_grads(loss_fn, module, batch)."
    elif isinstance(leaf, DataLoader | Iterator):
        fix = "Pass one of its batches, or all of them to accumulate(loss_fn, params, batches)."
    raise ArgumentError.about(path, expected="a tensor or NumPy array", received=type(leaf).__name__, fix=fix)


def _refuse_axis(path: str, leaf: Tensor, dim: int) -> NoReturn:
    received = f"shape {list(leaf.shape)}" if leaf.ndim else "a scalar"
    fix = (
        "Give every sample its row (torch.utils.data.default_collate makes a batch of a list of samples), or mark "
        "what all samples share with None, as in in_dims=(None, (0, None))."
    )
    raise ArgumentError.about(path, expected=f"a batch axis {dim}", received=received, fix=fix)


def check_kinds(names: Sequence[str], leaves: Sequence[Leaf]) -> None:
    """Reject tensors that are not dense blocks."""
    for name, x in zip(names, leaves, strict=True):
        is_usual = type(x) in PLAIN and x.layout == torch.strided and not (x.is_nested or x.is_quantized)
        if not is_usual and isinstance(x, Tensor):
            check_kind(name, x)


def check_kind(path: str, x: Tensor) -> None:
    """Reject a tensor that is not one dense block: operations on it may even end the process."""
    expected, received, fix = "a dense tensor", "", ""
    if is_lazy(x):
        expected, received = "a tensor", "an uninitialized one"
        fix = "Run one forward pass first, so that lazy modules learn their shapes."
    elif x.is_nested:
        expected, received, fix = "a tensor of one length", "a nested tensor", _PAD
    elif x.layout != torch.strided:
        received, fix = f"layout {x.layout}", "Convert it with .to_dense()."
    elif x.is_quantized:
        received, fix = f"a quantized one, {x.dtype}", "Convert it with .dequantize()."
    elif isinstance(x, torch.masked.MaskedTensor):
        received, fix = "a masked one", "Pass x.to_tensor(0) and, as a leaf of its own, x.get_mask()."
    elif isinstance(x, FakeTensor) and not any(isinstance(mode, FakeTensorMode) for mode in get_dispatch_mode_stack()):
        expected, received, fix = "a tensor with values", "a fake one", "Make the call under its FakeTensorMode."
    if fix:
        raise ArgumentError.about(path, expected=expected, received=received, fix=fix)


def _common_size(rows: Mapping[str, Tensor], argument: str) -> int:
    sizes = {name: int(leaf.shape[0]) for name, leaf in rows.items()}
    if not sizes:
        fix = "Pass tensors with a leading batch axis; a batch of one still has an axis of 1."
        raise ArgumentError.about(argument, expected="at least one tensor with a batch axis", received="none", fix=fix)
    if len(set(sizes.values())) > 1:
        rest = f" and {len(sizes) - _SHOWN} more" if len(sizes) > _SHOWN else ""
        fix = f"Give all the same number of rows, or set in_dims: an axis, or None for what all share. {_OTHER_LOSS}"
        if _are_samples(rows, argument):
            fix = f"{_PAD} {_OTHER_LOSS}" if rest else f"{fix} {_PAD}"
        received = ", ".join(f"{name}: {size}" for name, size in [*sizes.items()][:_SHOWN]) + rest
        raise ArgumentError.about(argument, expected="leaves of one common batch size", received=received, fix=fix)
    return next(iter(sizes.values()))


def _are_samples(rows: Mapping[str, Tensor], argument: str) -> bool:
    """Return whether leaves, or those of one part of a batch, look like a list of samples: the same fields in each."""
    for depth in (0, 1):
        index = re.compile(rf"^({re.escape(argument)}(?:\[[^\]]*\]){{{depth}}})\[\d+\]")
        kinds = {(index.sub(r"\1", name), leaf.shape[1:], leaf.dtype) for name, leaf in rows.items()}
        if len(kinds) == len({field for field, *_ in kinds}) < len(rows):
            return True
    return False


_CONTAINERS = {tuple, list, dict}


def split_in_dims(in_dims: Tree) -> tuple[Tree, Tree]:
    """Return ``(params_dims, batch_dims)``; reject the flat form of ``torch.func.vmap``."""
    pair = isinstance(in_dims, tuple | list)
    if pair and len(in_dims) == 2:
        return in_dims[0], in_dims[1]
    meant: Any = (None, in_dims if type(in_dims) is int else 0)
    if pair and len(in_dims) > 2:
        meant = (in_dims[0], tuple(in_dims[1:]))
    fix = f"Write in_dims={meant!r}."
    raise ArgumentError.about("in_dims", expected="(params_dims, batch_dims)", received=repr(in_dims), fix=fix)


def dims_of_leaves(argument: str, dims: object, spec: trees.TreeSpec) -> list[int | None]:
    """Return one batch axis, or None, for every leaf."""
    if dims is None or type(dims) is int:
        return [dims] * spec.num_leaves
    if isinstance(dims, tuple | list) and spec.type in (tuple, list):
        dims = spec.type(dims)
    flat = trees.broadcast_prefix(dims, spec)
    if flat is None or any(not (dim is None or type(dim) is int) for dim in flat):
        expected = f"an int, None, or a tree prefix of them for {spec.num_leaves} leaves"
        like = (
            trees.unflatten([0] * spec.num_leaves, spec) if trees.is_flat(spec) and spec.type in _CONTAINERS else spec
        )
        fix = f"Match the structure {like}, where one entry may stand for a whole subtree."
        raise ArgumentError.about(argument, expected=expected, received=repr(dims), fix=fix)
    return flat
