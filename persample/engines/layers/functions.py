"""What functions of torch do beside computing, told by their names."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor

from persample._torch import OpOverload, backward_hooks_getter, schema

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING = {"__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
_ATTRIBUTES = ("requires_grad", "grad_fn", "is_leaf", "grad", "output_nr", "retains_grad")
_GETTERS = {backward_hooks_getter, *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)}
_HOOKS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}


@functools.cache
def only_computes(func: Any) -> bool:
    """Return whether a function does nothing else, unless keyword arguments ask for more.

    Args:
        func: a function of torch, as modes see it.

    Examples:
        >>> only_computes(Tensor.add), only_computes(Tensor.add_), only_computes(Tensor.is_leaf.__get__)
        (True, False, False)
    """
    return not (asks(func) or _writes(func) or _places(func))


@functools.cache
def adds(func: Any) -> bool:
    """Return whether a function adds two tensors, perhaps in place.

    Args:
        func: a function of torch, as modes see it.

    Examples:
        >>> adds(Tensor.add), adds(Tensor.__radd__), adds(Tensor.matmul)
        (True, True, False)
    """
    return _name(func) in {"add", "add_", "__add__", "__radd__", "__iadd__"}


@functools.cache
def asks(func: Any) -> bool:
    """Return whether a function tells how a tensor is differentiated, or puts a hook there.

    Args:
        func: a function of torch, as modes see it.

    Examples:
        >>> asks(Tensor.requires_grad.__get__), asks(Tensor.register_hook), asks(Tensor.shape.__get__)
        (True, True, False)
    """
    return func in _GETTERS or _name(func) in _HOOKS


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what a call writes into, beside the result that it makes.

    Args:
        func: a function of torch, as modes see it.
        args: its arguments.
        kwargs: its keyword arguments.

    Examples:
        >>> import torch
        >>> x, relu = torch.zeros(2), torch.nn.functional.relu
        >>> calls = [(Tensor.add_, (x, 1), {}), (torch.add, (x, 1), {}), (relu, (x, True), {}), (relu, (x,), {})]
        >>> [len(written(*call)) for call in calls]
        [1, 0, 1, 0]
    """
    if _writes(func):
        return [args[0]]
    places = _places(func)
    if not places and "out" not in kwargs:
        return []
    given = {name: args[place] for name, place in places.items() if place < len(args)} | dict(kwargs)
    found = [given["out"]] if "out" in given else []
    if given.get("inplace"):
        found.append(given["input"])
    if given.get("max_norm") is not None:
        found.append(given["weight"])
    return found


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


@functools.cache
def _writes(func: Any) -> bool:
    if isinstance(func, OpOverload):
        return schema(func).is_mutable
    name = _name(func)
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def _places(func: Any) -> Mapping[str, int]:
    """Return where the arguments stand of a function that can be asked to write in place."""
    if not isinstance(func, FunctionType):
        return {}
    code = func.__code__
    places = {name: place for place, name in enumerate(code.co_varnames[: code.co_argcount])}
    return places if places.keys() & {"inplace", "max_norm"} else {}
