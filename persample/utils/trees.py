"""Pytrees: nested containers of tensors, flattened to lists and back.

Both torch.func and this file use torch's pytrees, so they accept the same trees: dicts, tuples, NamedTuples, registered
dataclasses, TensorDicts.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from persample import _torch

# A tree as its owner built it, and one of its leaves: only the owner knows their types.
Tree: TypeAlias = Any
Leaf: TypeAlias = Any

TreeSpec = _torch.TreeSpec
_KINDS = {dict, tuple, list}
_LEAVES: set[type] = {Tensor, torch.nn.Parameter, type(None)}
_Kind = TypeVar("_Kind", bound=type)


def leaf(kind: _Kind) -> _Kind:
    """Mark a class that is no registered container as always a leaf: ``flatten`` skips torch's check of it."""
    _LEAVES.add(kind)
    return kind


def structure(tree: object) -> TreeSpec:
    """Return the structure of a tree."""
    return _torch.tree_flatten(tree)[1]


def is_flat(spec: TreeSpec) -> bool:
    """Return whether a structure is one container whose children are all leaves."""
    return spec.num_leaves == spec.num_nodes - 1


def on_one_line(structure: TreeSpec) -> str:
    """Return a structure on one line, for messages."""
    return " ".join(str(structure).split())


def flatten(tree: object, is_leaf: Callable[[Tree], bool] | None = None) -> tuple[list[Leaf], TreeSpec]:
    """Return the leaves and the structure of a tree, as torch does; faster for dicts, lists and tuples of tensors."""
    if is_leaf is None and type(tree) in _LEAVES:
        return [tree], leaf_structure()
    leaves: list[Leaf] = []
    if is_leaf is None and (outline := _outline(tree, leaves)) is not None:
        return leaves, _structure_of(outline)
    return _torch.tree_flatten(tree, is_leaf)


def _outline(tree: Tree, leaves: list[Leaf]) -> Tree:
    """Return a key of the structure of built-in containers, and collect the leaves; None if others are among them."""
    kind: type[Tree] = type(tree)
    if kind not in _KINDS or (kind is dict and not {str}.issuperset(map(type, tree))):
        return None
    outline = [kind, tuple(tree) if kind is dict else ()]
    for part in tree.values() if kind is dict else tree:
        if type(part) in _LEAVES:  # without a call
            leaves.append(part)
            outline.append(())
        else:
            outline.append(_outline(part, leaves))
    return None if None in outline else tuple(outline)


@functools.cache
def leaf_structure() -> TreeSpec:
    """Return the structure of a single leaf."""
    return structure(None)


@functools.lru_cache(256)
def _structure_of(outline: object) -> TreeSpec:
    return structure(_of_nones(outline))


def _of_nones(outline: Tree) -> Tree:
    if not outline:
        return None
    kind, names, *parts = outline
    nodes = list(map(_of_nones, parts))
    return dict(zip(names, nodes, strict=True)) if kind is dict else kind(nodes)


def unflatten(leaves: list[Leaf], spec: TreeSpec) -> Tree:
    """Return the tree with given leaves, in the order of ``flatten``, and structure."""
    kind = spec.type
    if len(leaves) != spec.num_leaves or (kind is not None and kind not in _KINDS):
        return spec.unflatten(leaves)  # which also raises the error
    if kind is None:
        return leaves[0]
    parts: Iterable[Leaf] = leaves
    if not is_flat(spec):
        rest = iter(leaves)
        parts = [unflatten([*islice(rest, part.num_leaves)], part) for part in spec.children()]
    return dict(zip(spec.context, parts, strict=True)) if kind is dict else kind(parts)


def tree_map(fn: Callable[..., Leaf], tree: object, *others: Tree) -> Tree:
    """Apply a function to the leaves of a tree, each with what the other trees have at its place.

    Examples:
        >>> tree_map(lambda x, y: x - y, {"a": 5, "b": [6]}, {"a": 2, "b": [1]})
        {'a': 3, 'b': [5]}
    """
    leaves, spec = flatten(tree)
    return unflatten(list(map(fn, leaves, *map(spec.flatten_up_to, others))), spec)


def paths(tree: Tree, root: str) -> list[str]:
    """Return a name for every leaf of a tree: the Python expression that indexes it.

    Examples:
        >>> paths({"actor": {"w": 1}, "critic": [2]}, "params")
        ["params['actor']['w']", "params['critic'][0]"]
    """
    if type(tree) in _KINDS:  # the usual case, ten times as fast as torch's function
        found = []
        for key, child in tree.items() if type(tree) is dict else enumerate(tree):
            path = f"{root}[{key!r}]"
            found += [path] if type(child) in _LEAVES else paths(child, path)
        return found
    if type(tree) in _LEAVES or structure(tree) == leaf_structure():
        return [root]
    try:
        keyed, _ = _torch.tree_flatten_with_path(tree)
    except ValueError:  # a node registered without names for its children
        return [f"{root}<leaf {i}>" for i in range(structure(tree).num_leaves)]
    return [root + "".join(map(str, path)) for path, _ in keyed]


def broadcast_prefix(prefix: object, spec: TreeSpec) -> list[Leaf] | None:
    """Return the value of a tree prefix for every leaf of ``spec``, or None if the prefix does not fit.

    A leaf of the prefix holds for a whole subtree. Dicts match by key, in any order.

    Examples:
        >>> broadcast_prefix((None, 0), structure(("theta", {"s": 1, "r": 2})))
        [None, 0, 0]
    """
    numbered = unflatten(list(torch.arange(spec.num_leaves, device="cpu")), spec)
    values, outline = flatten(prefix)
    subtrees = leaves_like(numbered, outline)
    if subtrees is None:
        return None
    spread: list[Leaf] = [None] * spec.num_leaves
    for value, subtree in zip(values, subtrees, strict=True):
        for position in flatten(subtree)[0]:
            spread[int(position)] = value
    return spread


def leaves_like(tree: object, spec: TreeSpec) -> list[Leaf] | None:
    """Return the subtrees at the leaves of another structure, dicts by key; None if the tree does not fit."""
    try:
        return spec.flatten_up_to(tree)
    except ValueError:
        return None


def map_tensors(fn: Callable[[torch.Tensor], Leaf], tree: object) -> Tree:
    """Apply a function to the tensors of a tree and leave every other leaf as it is."""
    leaves, spec = flatten(tree)
    return unflatten([fn(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def stop_gradient(tree: object) -> Tree:
    """Treat the tensors of a tree as constants: no gradient flows back through them.

    The counterpart of ``jax.lax.stop_gradient``, for the targets of semi-gradient methods such as TD(0).

    Args:
        tree: a tensor or any pytree of tensors, of any shapes and dtypes; other leaves pass through.

    Returns:
        The same tree with detached tensors.

    Examples:
        >>> v = torch.tensor(2.0, requires_grad=True)
        >>> torch.autograd.grad(v * stop_gradient(v), v)
        (tensor(2.),)
    """
    if isinstance(tree, Tensor):
        return tree.detach()
    # Not ``map_tensors``, whose cache torch.compile warns of when a loss calls this function.
    leaves, spec = _torch.tree_flatten(tree)
    return spec.unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def as_array(x: Tensor) -> NDArray[np.generic]:
    """Return a tensor as an array; bfloat16, which NumPy does not have, as the integers of the same bits."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def digest(tree: object) -> str:
    """Return a hash of the names, dtypes, shapes and elements of the tensors of a tree."""
    hashed = hashlib.sha256()
    for name, leaf in zip(paths(tree, ""), flatten(tree)[0], strict=True):
        facts = f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor | np.ndarray) else type(leaf).__name__
        hashed.update(f"{name} {facts}\n".encode())
        if isinstance(leaf, Tensor | np.ndarray):
            hashed.update((as_array(leaf) if isinstance(leaf, Tensor) else leaf).tobytes())
    return hashed.hexdigest()[:16]


def name_of(function: object) -> str:
    """Return the import path of a function, or that of the class of another callable."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
