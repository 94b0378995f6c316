"""Functions of torch with effects beyond their result: they read or change a tensor's state, or write into tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from persample._torch import OpOverload, backward_hooks_getter, private_reads, schema
from persample.errors import LossError
from persample.utils.flags import flags, is_inside, owner_inside
from persample.utils.strides import storage_key

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING = {"__set__", "__delete__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
_ATTRIBUTES = ("requires_grad", "grad_fn", "is_leaf", "grad", "output_nr", "retains_grad", *private_reads[:2])
_AUTOGRAD = {torch.autograd.grad, Tensor.backward, backward_hooks_getter} | {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)
}
# By name: hooks; and memory, since a copy or a layer's result has other strides than the tensor it stands for.
_STATE = re.compile(
    "register_hook|retain_grad|register_post_accumulate_grad_hook|(untyped_)?storage|data_ptr|(sym_)?(stride|storage_offset)"
    "|is_contiguous|dim_order|set_|is_set_to|as_strided(_|_copy|_scatter)?|" + "|".join(private_reads)
)
_SETS = Tensor.data.__set__  # type: ignore[attr-defined]
SETS_DATA = {_SETS, getattr(torch.ops.aten, "shallow_copy_data_", _SETS)}  # as torch.compile writes it since torch 2.14
_GRAD = {Tensor.grad.__set__, Tensor.grad.__delete__}  # type: ignore[union-attr]
# These change an object, and not its memory, which other objects may share.
_OF_OBJECT = {Tensor.requires_grad_, Tensor.requires_grad.__set__, *_GRAD}  # type: ignore[attr-defined]


@functools.cache
def is_pure(func: Any) -> bool:
    """Return whether a function of torch has no effects if it is called without keyword arguments.

    Examples:
        >>> is_pure(Tensor.add), is_pure(Tensor.add_), is_pure(Tensor.is_leaf.__get__)
        (True, False, False)
    """
    return not (reads_state(func) or _writes(func) or _write_options(func))


@functools.cache
def reads_state(func: Any) -> bool:
    """Return whether a function of torch differentiates, registers a hook, or reads the autograd graph or memory.

    Examples:
        >>> read = Tensor.is_leaf.__get__, Tensor.stride, torch.ops.aten.as_strided.default, Tensor.shape.__get__
        >>> list(map(reads_state, read))
        [True, True, True, False]
    """
    return func in _AUTOGRAD or _STATE.fullmatch(_name(func).partition(".")[0]) is not None


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


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refuses writes as ``VmapRules`` does, for losses that run without these rules."""

    def call(*args: Any) -> Any:
        with _WriteGuard():
            return function(*args)

    return call


class _WriteGuard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs or not is_pure(func):
            refuse_writes(func, args, kwargs)
        if func in SETS_DATA and args[0] is args[1]:  # of Module.to, where nothing moves
            return None
        return func(*args, **kwargs)


def refuse_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a write into parameters, or into what their modules hold; only clones of buffers may be written into.

    Raises:
        LossError: if the function would write; also when the loss returns, for torch or the loss may catch the error.
    """
    owner = owner_inside()
    for x in written_tensors(func, args, kwargs) if owner is not None else ():
        value = args[1] if len(args) > 1 else kwargs.get("requires_grad", func is Tensor.requires_grad_ or None)
        if func in _OF_OBJECT:
            is_changed = x.grad is not value if func in _GRAD else x.requires_grad != value
            name = owner.names.get(id(x)) if is_changed else None
        else:
            is_same = func in SETS_DATA and value is x
            name = not is_same and (owner.names.get(storage_key(x)) or (func in SETS_DATA and owner.buffer_name(x)))
        if name:
            raise refusal(name)


def refusal(name: str) -> LossError:
    """Return the error of a write, which the loss cannot catch: it is raised again when the loss returns."""
    flags.refusal = LossError(wrote(is_inside(), name))
    return flags.refusal


def wrote(called: str | None, what: str) -> str:
    """Return the message about a loss that writes into what it must leave alone."""
    return (
        f"{called} wrote in place into {what}, which it must leave alone: other samples and later calls see what it "
        "wrote. Compute a new tensor instead (x = 2 * x, not x.mul_(2)), or clone it first."
    )


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
