"""Reductions in words: their classes, and their options with the numbers of tensors hashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from persample.factors import Factor
from persample.reductions.base import Reduction
from persample.utils import trees
from persample.utils.digest import digest, name_of


def described(reductions: Sequence[Reduction], container: trees.TreeSpec) -> str:
    """Return the reductions of a call in words.

    Args:
        reductions: the reductions.
        container: the structure of their container.

    Examples:
        >>> from persample import Norm, Sum
        >>> described([Sum(), Norm()], trees.structure((1, 2)))
        "('Sum()', 'Norm(per_param=False)')"
    """
    return str(trees.unflatten(list(map(in_words, reductions)), container))


def in_words(reduction: Reduction) -> str:
    """Return the class and options of a reduction; functions are told by their names alone.

    Examples:
        >>> from persample import ClippedMean
        >>> in_words(ClippedMean(1.0))
        'ClippedMean(max_norm=1.0, per_param=False)'
    """
    given: dict[str, Any] = (
        {one.name: getattr(reduction, one.name) for one in fields(reduction)} if is_dataclass(reduction) else {}
    )
    listed = (f"{name}={_value(value)}" for name, value in given.items())
    return f"{type(reduction).__name__}({', '.join(listed)})"


def _value(value: Any) -> str:
    if callable(value) and not isinstance(value, nn.Module):
        return name_of(value)
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return digest(trees.tree_map(lambda leaf: leaf.tensors if isinstance(leaf, Factor) else leaf, value))
