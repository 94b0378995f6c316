"""Functions of torch with effects beyond their result, and access to tensors past autograd.

They read or change a tensor's state, write into tensors, or read memory, whose strides, formats and storage differ from
those of one sample. A loss that catches an error that torch raises because of vmap goes on with other numbers.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from traceback import extract_tb
from types import FunctionType
from typing import TypeVar

import torch
from torch import Tensor, nn, stack
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from persample._torch import (
    OpOverload,
    make_dual,
    maybe_get_bdim,
    private_reads,
    schema,
    temporarily_clear_interpreter_stack,
    transforms,
)
from persample.errors import LossError
from persample.utils.numerics import storage_key
from persample.utils.origin import frames, is_ours, raised_since, user_line
from persample.utils.tracing import flags, is_batched, is_inside, is_traced, unwrapped
from persample.utils.trees import Leaf, Tree, flatten
from persample.vmap_rules.levels import Args, Function, Options, Rules

T = TypeVar("T")

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING = {"__set__", "__delete__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


def getters(*names: str) -> list[Function]:
    """Return attributes of tensors as modes see them."""
    return [getattr(Tensor, name).__get__ for name in names]


_ATTRIBUTES = ("requires_grad", "grad_fn", "is_leaf", "grad", "output_nr", "retains_grad", *private_reads[:3])
_AUTOGRAD = {torch.autograd.grad, Tensor.backward, *getters(*_ATTRIBUTES)}
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
def is_pure(func: Function) -> bool:
    """Return whether a function of torch has no effects if it is called without keyword arguments.

    Examples:
        >>> is_pure(Tensor.add), is_pure(Tensor.add_), is_pure(Tensor.is_leaf.__get__)
        (True, False, False)
    """
    return not (reads_state(func) or _writes(func) or _write_options(func))


@functools.cache
def reads_state(func: Function) -> bool:
    """Return whether a function of torch differentiates, registers a hook, or reads the autograd graph or memory.

    Examples:
        >>> read = Tensor.is_leaf.__get__, Tensor.stride, torch.ops.aten.as_strided.default, Tensor.shape.__get__
        >>> list(map(reads_state, read))
        [True, True, True, False]
    """
    return func in _AUTOGRAD or _STATE.fullmatch(_name(func).partition(".")[0]) is not None


def written_tensors(func: Function, args: Args, kwargs: Options) -> list[Tensor]:
    """Return the arguments that a call of a function of torch writes into.

    Examples:
        >>> x, relu = torch.zeros(2), torch.nn.functional.relu
        >>> calls = [(Tensor.add_, (x, 1), {}), (torch.add, (x, 1), {}), (relu, (x, True), {}), (relu, (x,), {})]
        >>> [len(written_tensors(*call)) for call in calls]
        [1, 0, 1, 0]
    """
    given = {**dict(zip(_write_options(func), args, strict=False)), **kwargs}
    written = [given.get("out")]
    if _writes(func):
        written.append(args[0] if args else next(iter(kwargs.values())))
    if given.get("inplace"):
        written.append(given["input"])
    if given.get("max_norm") is not None:
        written.append(given["weight"])
    if len(written) == 1 and written[0] is None:  # the usual case
        return []
    flat = [y for x in written for y in (x if isinstance(x, list | tuple) else [x])]
    return [x for x in flat if isinstance(x, Tensor)]


def of_each(x: Tensor, *others: object) -> Tensor:
    """Return a copy of a tensor for each sample, to write into, if any of the others differs between samples."""
    sample = None if is_batched(x) else next(filter(is_batched, others), None)
    if not isinstance(sample, Tensor):
        return x
    each = sample.new_zeros((), dtype=torch.bool)  # under vmap, new_zeros has the batch axis of its tensor
    return torch.where(each, x, x)


def guarded(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function that refuses writes as ``VmapRules`` does, for losses that run without these rules."""

    def call(*args: object) -> T:
        with _WriteGuard():
            return function(*args)

    return call


class _WriteGuard(TorchFunctionMode):
    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Options | None = None) -> Tree:
        kwargs = kwargs or {}
        if kwargs or not is_pure(func):
            refuse_writes(func, args, kwargs)
        if func in SETS_DATA and args[0] is args[1]:  # of Module.to, where nothing moves
            return None
        return func(*args, **kwargs)


def refuse_writes(func: Function, args: Args, kwargs: Options) -> None:
    """Refuse a write into parameters, or into what their modules hold; only clones of buffers may be written into.

    The ``LossError`` is raised again when the loss returns, for torch or the loss may catch it.
    """
    owner = flags.owner
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


def lost_write() -> LossError:
    """Return the error of a write into a row at an index of the sample's, which would be lost."""
    return LossError(
        f"{is_inside()} wrote in place into x[i], where i differs between samples, or is a tensor that a program does "
        "not read: that is a copy, and x did not change. Write x[i] = value, or pass engine='loop'."
    )


def wrote(called: str | None, what: str) -> str:
    """Return the message about a loss that writes into what it must leave alone."""
    return (
        f"{called} wrote in place into {what}, which it must leave alone: other samples and later calls see what it "
        "wrote. Compute a new tensor instead (x = 2 * x, not x.mul_(2)), or clone it first."
    )


def _name(func: Function) -> str:
    return str(getattr(func, "__name__", ""))


@functools.cache
def _writes(func: Function) -> bool:
    """Return whether a function always writes, into its first argument or ``out``."""
    if isinstance(func, OpOverload):
        return schema(func).is_mutable
    name = _name(func)
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def _write_options(func: Function) -> tuple[str, ...]:
    """Return the names of a function's arguments, in order, if one of these makes it write; else nothing."""
    if not isinstance(func, FunctionType):
        return ()
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    return names if {"inplace", "max_norm"}.intersection(names) else ()


_OF_VMAP = re.compile(
    "vmap|functorch|torch.func|[Bb]atching rule|Batched|doesn't have storage|detach views in-place|got a batched tensor"
)


def is_refusal(error: Exception, func: Function, args: Args, kwargs: Options) -> bool:
    """Return whether a function of torch might not have raised an error if it were called for one sample."""
    said = str(error)
    if isinstance(error, LossError) or (isinstance(error, RuntimeError) and _OF_VMAP.search(said)):
        return True
    operands = flatten((args[func is Tensor.__getitem__ :], kwargs))[0]
    batched = list(filter(is_batched, operands))
    if isinstance(error, IndexError):  # the index of one sample
        return "Dimension" not in said and any(not x.is_floating_point() for x in batched)
    # The matrix of one sample; no kernel for batches; torch's loop over samples, whose results differ in size.
    by_sample = isinstance(error, NotImplementedError) or re.search(r"\(Batch element|stack expects each tensor", said)
    return bool(by_sample and batched) and func is not stack


def swallowed(refusal: Exception, error: BaseException | None) -> LossError | None:
    """Return what is wrong if a loss caught a refusal and went on; ``error`` is what it raised in the end, or None."""
    is_interrupt = error is not None and not isinstance(error, Exception)
    if is_interrupt or refusal in raised_since(None, error):
        return None
    line = user_line(extract_tb(refusal.__traceback__))
    return LossError(
        f"An error was caught that one sample alone might not raise{line}: the loss would "
        "go on with other numbers. Use torch.where or a mask, without an error to catch, or pass engine='loop', which "
        f"takes any loss that autograd takes. The error was: {refusal}"
    )


def _of_memory(function: Function, *args: Leaf, **kwargs: Leaf) -> Tree:
    """Call a function that reads memory by strides or sizes, or reject it where a sample's differ under vmap."""
    x, *others = *args, *kwargs.values()
    if function in _OF_PLAIN:
        is_wrong = any(map(is_batched, (x, *others)))
    else:
        has_offset = function in _AS_STRIDED and len(others) > 2 and None not in others
        is_wrong = is_batched(x) and (has_offset or not x.is_contiguous())
    if is_wrong:
        raise LossError(
            f"loss_fn: {function.__name__} reads memory by strides or sizes, but under vmap a sample has no memory of "
            "its own: that of the batch holds all samples. Use an index, unfold, narrow or reshape (as_strided on a "
            "contiguous tensor, without storage_offset, is accepted), or pass engine='loop'."
        )
    return function(*args, **kwargs)


def _view_as_complex(input: Tensor) -> Tensor:
    # The batch axis may lie between the two numbers of a pair.
    return torch.view_as_complex(input if input.stride()[-1:] == (1,) or not is_batched(input) else input.contiguous())


_AS_STRIDED: set[Function] = {torch.as_strided, Tensor.as_strided, torch.as_strided_copy}
_OF_PLAIN: set[Function] = {
    *(torch.as_strided_scatter, Tensor.as_strided_scatter, torch.as_strided_, Tensor.as_strided_),
    Tensor.storage_offset,
}
_OF_CONTIGUOUS: set[Function] = {Tensor.resize_, Tensor.resize_as_, Tensor.stride, Tensor.dim_order}


_data = Tensor.data.__get__  # type: ignore[attr-defined]


def _dual(tensor: Tensor, tangent: Tensor, *, level: int) -> Tensor:
    # linearize traces the function to a graph in which parameters are constants: their gradients would be zeros.
    if get_proxy_mode() is not None and transforms()[-1:] != ["jvp"]:
        raise LossError(
            "loss_fn calls torch.func.linearize (or traces a forward derivative), which treats the parameters as "
            "constants. Use torch.func.jvp, or pass engine='loop'."
        )
    return make_dual(tensor, tangent, level=level)


# Modules whose branches on masks skip work where nothing is masked: False is right for every sample.
_SHORTCUTS = {"transformers.masking_utils"}


def _truth(x: Tensor) -> bool:
    """Return the truth value that a tensor has in all samples: each would take the same branch if it were alone."""
    if is_batched(x) and x.numel() == 1 and not is_traced(plain := unwrapped(x)):
        is_true = (plain != 0).flatten()
        if is_true.numel() and (is_true == is_true[0]).all():
            return bool(is_true[0])
        users = itertools.dropwhile(is_ours, frames())
        if (frame := next(users, None)) is not None and frame.f_globals.get("__name__") in _SHORTCUTS:
            return False
    return Tensor.__bool__(x)  # where samples differ, torch raises its error


def _set_data(*_: object) -> None:
    # torch would put a wrapper into the object, which outlives the wrapper's level and crashes when it is read.
    raise refusal("a tensor (x.data = y)")


def _deepcopy(x: Tensor, memo: dict[int, Tensor]) -> Tensor:
    if not _is_shared_leaf(x):
        return Tensor.__deepcopy__(x, memo)  # type: ignore[no-untyped-call]
    if id(x) not in memo:
        with temporarily_clear_interpreter_stack():
            values = unwrapped(x).detach().clone()
            memo[id(x)] = nn.Parameter(values) if x.requires_grad else values
    return memo[id(x)]


def _is_shared_leaf(x: Tensor) -> bool:
    """Return whether all samples share a tensor that no operation made, as parameters and buffers."""
    return x.is_leaf and not is_batched(x) and not is_traced(unwrapped(x))


RULES: Rules = {
    **{function: functools.partial(_of_memory, function) for function in _AS_STRIDED | _OF_PLAIN | _OF_CONTIGUOUS},
    torch.view_as_complex: _view_as_complex,
    # A sample has no memory of its own: that of the batch. nn.GRU on a GPU asks whether its weights share memory.
    Tensor.data_ptr: lambda x: unwrapped(x).data_ptr(),
    # torch.func rejects .data of what vmap wraps last.
    _data: lambda x, *rest: x.detach() if maybe_get_bdim(x) >= 0 else _data(x, *rest),
    **dict.fromkeys(SETS_DATA, _set_data),
    make_dual: _dual,
    Tensor.__bool__: _truth,
    Tensor.__deepcopy__: _deepcopy,
    # Pickle reads it.
    Tensor.untyped_storage: lambda x: Tensor.untyped_storage(unwrapped(x) if _is_shared_leaf(x) else x),
}
