"""Functions of torch with effects beyond their result: they read or change autograd's state, or write into tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from persample._torch import OpOverload, backward_hooks_getter, schema

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING = {"__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
_ATTRIBUTES = ("requires_grad", "grad_fn", "is_leaf", "grad", "output_nr", "retains_grad")
_AUTOGRAD = {torch.autograd.grad, Tensor.backward, backward_hooks_getter} | {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)
}
_HOOKS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}


@functools.cache
def is_pure(func: Any) -> bool:
    """Return whether a function of torch has no effects if it is called without keyword arguments.

    Examples:
        >>> is_pure(Tensor.add), is_pure(Tensor.add_), is_pure(Tensor.is_leaf.__get__)
        (True, False, False)
    """
    return not (uses_autograd(func) or _writes(func) or _write_options(func))


@functools.cache
def uses_autograd(func: Any) -> bool:
    """Return whether a function of torch differentiates, asks about the autograd graph, or registers a hook.

    Examples:
        >>> [uses_autograd(func) for func in (Tensor.is_leaf.__get__, Tensor.register_hook, Tensor.shape.__get__)]
        [True, True, False]
    """
    return func in _AUTOGRAD or _name(func) in _HOOKS


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that a call of a function of torch writes into.

    Examples:
        >>> x, relu = torch.zeros(2), torch.nn.functional.relu
        >>> calls = [(Tensor.add_, (x, 1), {}), (torch.add, (x, 1), {}), (relu, (x, True), {}), (relu, (x,), {})]
        >>> [len(written_tensors(*call)) for call in calls]
        [1, 0, 1, 0]
    """
    positions = _write_options(func)
    given = {name: args[place] for name, place in positions.items() if place < len(args)} | dict(kwargs)
    written = [given.get("out")]
    if _writes(func):
        written.append(args[0] if args else next(iter(kwargs.values())))
    if given.get("inplace"):
        written.append(given["input"])
    if given.get("max_norm") is not None:
        written.append(given["weight"])
    flat = [y for x in written for y in (x if isinstance(x, list | tuple) else [x])]
    return [x for x in flat if isinstance(x, Tensor)]


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


@functools.cache
def _writes(func: Any) -> bool:
    """Return whether a function always writes, into its first argument or ``out``."""
    if isinstance(func, OpOverload):
        return schema(func).is_mutable
    name = _name(func)
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def _write_options(func: Any) -> Mapping[str, int]:
    """Return the positions of a function's arguments, by name, if one of these makes it write; else nothing."""
    if not isinstance(func, FunctionType):
        return {}
    code = func.__code__
    positions = {name: place for place, name in enumerate(code.co_varnames[: code.co_argcount])}
    return positions if positions.keys() & {"inplace", "max_norm"} else {}
