"""The argument ``in_dims``: the batch axis of each leaf."""

from __future__ import annotations

from typing import Any

from persample.errors import ArgumentError
from persample.utils import trees

_CONTAINERS = {tuple, list, dict}


def split_in_dims(in_dims: Any, *, has_modules: bool) -> tuple[Any, Any]:
    """Return ``(params_dims, batch_dims)``; reject the flat form of ``torch.func.vmap``.

    Args:
        in_dims: the argument.
        has_modules: whether some parameters are modules, which all samples share.

    Raises:
        ArgumentError: if ``in_dims`` is not a pair; the message spells the pair that was probably meant.
    """
    pair = isinstance(in_dims, tuple | list)
    if pair and len(in_dims) == 2:
        if has_modules and in_dims[0] is not None:
            fix = "Stack the parameters with torch.func.stack_module_state and pass the dict."
            raise ArgumentError.about("in_dims[0]", expected="None for modules", received=repr(in_dims[0]), fix=fix)
        return in_dims[0], in_dims[1]
    meant: Any = (None, in_dims if type(in_dims) is int else 0)
    if pair and len(in_dims) > 2:
        meant = (in_dims[0], tuple(in_dims[1:]))
    fix = f"Write in_dims={meant!r}."
    raise ArgumentError.about("in_dims", expected="(params_dims, batch_dims)", received=repr(in_dims), fix=fix)


def spread_dims(argument: str, dims: Any, spec: trees.TreeSpec) -> list[int | None]:
    """Return one batch axis, or None, for every leaf.

    Args:
        argument: the name of this half of ``in_dims``, for messages.
        dims: an int, None, or a tree prefix of them; a tuple may stand for a list.
        spec: the structure of the leaves.

    Raises:
        ArgumentError: if the dims do not fit the structure or are not ints.
    """
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
