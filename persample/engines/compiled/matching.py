"""Fast flattening and rebuilding, specialized to the structure of one tree: general pytree functions cost more."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from persample.engines.compiled.packing import Slot, unpack

_TENSORS = {Tensor, nn.Parameter, nn.Buffer}
_CONSTANTS = {int, float, bool, str, bytes, complex, type(None)}
Take = Callable[[Any, list[Any]], bool]


def taker(tree: Any, leaf: Callable[[Any], Take | None]) -> Take | None:
    """Return a function that appends the leaves of another tree to a list, and returns whether its structure is equal.

    Args:
        tree: nested tuples, lists and dicts.
        leaf: from a leaf to the same kind of function, or to None if the leaf is not supported.

    Returns:
        The function, or None if the tree contains an unsupported leaf.
    """
    kind = type(tree)
    if kind in {tuple, list}:
        children = [taker(child, leaf) for child in tree]
        return None if None in children else _row(kind, children)
    if kind is dict:
        children = [taker(child, leaf) for child in tree.values()]
        return None if None in children else _dict(list(tree), children)
    return leaf(tree)


def tensor(x: Any) -> Take | None:
    """Return a taker that appends any tensor, or one that requires a constant equal to this one.

    Args:
        x: a tensor or a constant.

    Returns:
        The taker, or None if the leaf is neither.
    """
    if type(x) in _TENSORS:
        return any_of(_TENSORS)
    return equal(x) if type(x) in _CONSTANTS else None


def equal(x: Any) -> Take:
    """Return a taker that appends nothing and requires an equal constant, or the same object if ``x`` is no constant.

    Args:
        x: the leaf.
    """
    if type(x) in _CONSTANTS:
        said = repr(x)  # unlike ==, repr makes nan equal to itself, and -0.0 unequal to 0.0
        return lambda y, _: type(y) is type(x) and repr(y) == said
    return lambda y, _: y is x


def any_of(kinds: Container[type]) -> Take:
    """Return a taker that appends the leaf and requires one of some classes.

    Args:
        kinds: the classes.
    """

    def take(x: Any, leaves: list[Any]) -> bool:
        leaves.append(x)
        return type(x) in kinds

    return take


def _row(kind: Any, children: Sequence[Any]) -> Take:
    count = len(children)

    def take(x: Any, leaves: list[Any]) -> bool:
        if type(x) is not kind or len(x) != count:
            return False
        for child, value in zip(children, x):  # noqa: B905, SIM110 (a plain loop is faster, and this runs in each call)
            if not child(value, leaves):
                return False
        return True

    return take


def _dict(names: Sequence[Any], children: Sequence[Any]) -> Take:
    row = _row(list, children)

    def take(x: Any, leaves: list[Any]) -> bool:
        return type(x) is dict and list(x) == names and row([*x.values()], leaves)

    return take


def maker(outline: Any) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function from tensors to the tree, as ``unpack`` builds it, specialized to one outline.

    Args:
        outline: a tree with slots.
    """
    kind = type(outline)
    if kind is Slot:
        return itemgetter(outline.index)
    if kind not in {list, tuple, dict}:
        return lambda tensors: unpack(outline, tensors)
    made = [maker(child) for child in (outline.values() if kind is dict else outline)]
    if kind is dict:
        pairs = list(zip(outline, made, strict=True))
        return lambda tensors: {name: child(tensors) for name, child in pairs}
    return lambda tensors: kind([child(tensors) for child in made])
