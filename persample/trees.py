"""Pytrees: nested containers of tensors, flattened to lists and back.

This is the one place that touches ``torch.utils._pytree``, which torch.func itself is built on: what torch.func
accepts as a tree (dicts, tuples, NamedTuples, registered dataclasses, TensorDicts) is a tree here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

TreeSpec = pytree.TreeSpec
flatten = pytree.tree_flatten
unflatten = pytree.tree_unflatten
tree_map = pytree.tree_map
structure = pytree.tree_structure


def paths(tree: Any, root: str) -> list[str]:
    """Name every leaf of a tree the way Python would index it.

    Args:
        tree: any pytree.
        root: what the tree itself is called.

    Returns:
        One path per leaf, in flattening order.

    Example:
        >>> paths({"actor": {"w": 1}, "critic": [2]}, "params")
        ["params['actor']['w']", "params['critic'][0]"]
    """
    try:
        keyed, _ = pytree.tree_flatten_with_path(tree)
    except ValueError:  # a node registered without names for its children
        return [f"{root}<leaf {i}>" for i in range(structure(tree).num_leaves)]
    return [root + pytree.keystr(path) for path, _ in keyed]


def broadcast_prefix(prefix: Any, spec: TreeSpec) -> list[Any] | None:
    """Spread a tree prefix over the leaves of a tree, as ``in_dims`` of ``torch.func.vmap`` does.

    Args:
        prefix: a tree whose leaves stand for whole subtrees.
        spec: the structure to fill.

    Returns:
        One value per leaf of ``spec``, or None if the prefix does not fit.

    Example:
        >>> broadcast_prefix((None, 0), structure(("theta", {"s": 1, "r": 2})))
        [None, 0, 0]
    """
    return pytree._broadcast_to_and_flatten(prefix, spec)  # noqa: SLF001 (vmap's own rule for in_dims)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to the tensors of a tree and leave every other leaf as it is.

    Args:
        fn: what to do with each tensor.
        tree: any pytree.

    Returns:
        The tree with its tensors replaced.

    Example:
        >>> map_tensors(lambda x: x.tolist(), {"x": torch.zeros(1), "name": "cart"})
        {'x': [0.0], 'name': 'cart'}
    """
    return tree_map(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def stop_gradient(tree: Any) -> Any:
    """Treat the tensors of a tree as constants: no gradient flows back through them.

    The counterpart of ``jax.lax.stop_gradient``, for the targets of semi-gradient methods such as TD(0).

    Args:
        tree: a tensor or any pytree of tensors, of any shapes and dtypes; other leaves pass through.

    Returns:
        The same tree with detached tensors.

    Example:
        >>> v = torch.tensor(2.0, requires_grad=True)
        >>> torch.autograd.grad(v * stop_gradient(v), v)
        (tensor(2.),)
    """
    return map_tensors(torch.Tensor.detach, tree)
