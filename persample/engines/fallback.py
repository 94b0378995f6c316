"""Calls that an optimization fails are answered without it; with ``engine="auto"``, those that vmap cannot take, too.

So are calls for which the installed torch lacks a private name. A name of a torch newer than the tested ones may exist
and do something else: once in a process the names of levels of vmap are tried, and an engine computes small programs
that the loop computes, too. ``tests/public/test_torch.py`` says in full what each private name must do.

An answer comes from vmap under the rules of ``vmap_rules``, with gradients written out, or else from plain
autograd, sample after sample. It never comes from vmap without those rules, which batches some operations wrongly. But
where that takes a loss, the loss can be batched, and the error came from a rule.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import resolve_name

from persample import _torch
from persample.engines.compiled import PROGRAMS, lift_compiled
from persample.engines.diagnosis import add_hint
from persample.engines.uncompiled import batched_gradients, eager, loop, unfactored, without_checkpoints
from persample.errors import (
    KNOWN_TORCH_VERSIONS,
    ArgumentError,
    FallbackWarning,
    LossError,
    PersampleWarning,
    TorchVersionError,
    TorchVersionWarning,
)
from persample.factors import Factor
from persample.inputs.call import Call, normalize
from persample.pipeline import Engine, lift_by, run
from persample.reductions import Norm
from persample.reductions.base import Reductions
from persample.utils import rng, trees
from persample.utils.isolation import raise_interrupt
from persample.utils.origin import LIBRARY, is_users, users_depth
from persample.utils.tracing import is_wrapped, unwrapped_once
from persample.utils.trees import Tree
from persample.vmap_rules import MISSING

T = TypeVar("T")
_FIRST_UNKNOWN = tuple(map(int, KNOWN_TORCH_VERSIONS.rpartition("<")[2].split(".")))
_MOST = 5  # names of parameters in a message


@functools.cache
def changed(way: Engine | None) -> str:
    """Return a private name that a newer torch changed, or "" if the engine (None: the traced one) works."""
    if way is loop or tuple(map(int, torch.__version__.split(".")[:2])) < _FIRST_UNKNOWN:
        return ""
    found: list[str] = []
    # A thread of its own has no modes and no transforms, whatever the caller's has.
    thread = threading.Thread(target=lambda: found.append(_name() or ("" if _is_loop(way) else "a private name")))
    thread.start()
    thread.join()
    return found[0]


def _layers(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (F.linear(x, params["w"], params["b"]).tanh() @ params["v"]).square().sum()


def _attention(params: dict[str, Tensor], x: Tensor) -> Tensor:
    q = F.linear(x, params["w"]).unsqueeze(0)
    return F.scaled_dot_product_attention(q, q * params["v"], q + params["b"]).square().sum()


def _distances(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.cdist(x @ params["w"].T, params["v"].expand(2, 5) * x.sum() + params["b"]).sum()


def _is_loop(way: Engine | None) -> bool:
    def numbers(*shape: int, first: float) -> Tensor:
        return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float64).sin().view(shape)

    params = {"w": numbers(5, 4, first=0), "b": numbers(5, first=30), "v": numbers(5, first=60)}
    reductions = Reductions([Norm()])
    traced = functools.partial(lift_compiled, reductions=reductions, engine="traced")
    for loss in (_layers, _attention, _distances):
        call = normalize(
            loss, params, numbers(6, 3, 4, first=90), [Norm()], weights=None, in_dims=(None, 0), keep_batch_dim=False
        )
        try:
            lifts = (traced if way is None else lift_by(way, reductions), lift_by(loop, reductions))
            found, expected = (run(call, lift, reductions, None)[0] for lift in lifts)
            if not torch.allclose(found, expected):
                return False
        except TorchVersionError:  # of a name that is missing, which is noticed where it is needed
            continue
        except Exception:  # noqa: BLE001 - whatever a changed name leads to, the engine does not work
            return False
    return True


def _name() -> str:
    """Return the first private name of levels of vmap that does something else than is known, or ""."""
    rows = torch.arange(6.0).view(2, 3)
    facts: dict[str, bool] = {}

    def check(x: Tensor) -> Tensor:
        facts["torch._C._functorch.maybe_get_level"] = _torch.maybe_get_level(x) == 1 and not is_wrapped(rows)
        facts["torch.func.debug_unwrap"] = (inside := unwrapped_once(x)).equal(rows) and not is_wrapped(inside)
        facts["torch._C._functorch.maybe_get_bdim"] = _torch.maybe_get_bdim(x) == 0
        facts["torch._C._functorch._add_batch_dim"] = unwrapped_once(_torch.add_batch_dim(rows, 0, 1)).equal(rows)
        facts["torch._C._functorch.get_dynamic_layer_stack_depth"] = _torch.get_dynamic_layer_stack_depth() == 1
        return x

    with suppress(Exception):  # of a name that is missing, or whose arguments have changed
        vmap(check)(rows)
    return next((name for name, is_as_known in facts.items() if not is_as_known), "")


def answered(call: Call, engine: str, first: Callable[[], T], by: Callable[[Engine], T]) -> T:
    """Answer a call of one sample or more by ``first``; where an optimization fails, without it, and with a warning.

    ``engine`` is the name that the user asked for; ``by`` computes the answer by another engine.
    """
    handled = sys.exc_info()[1]
    start = None if call.randomness == "error" else rng.Streams.now()
    try:
        if engine != "loop" and (name := changed(eager) or (changed(None) if engine in PROGRAMS else "")):
            raise TorchVersionError(f"{name} as known")  # noqa: TRY301 - answered below as a missing name
        return without_checkpoints(call, first)
    except Exception as error:
        raise_interrupt(error, handled)
        if call.is_sharded:  # no other way takes DTensors
            raise
        lacking = _lacking(error, handled)
        if MISSING and isinstance(error, LossError) and not _is_refusal(error):  # perhaps a rule's
            lacking = lacking or TorchVersionError(", ".join(MISSING))
        if engine != "loop" and _is_final(error, handled) and not isinstance(error, ArgumentError | LossError):
            add_hint(call, error)  # the loop has done so
        if engine == "loop" or _is_final(error, handled) or (_is_refusal(error) and engine != "auto" and not lacking):
            raise
        start = rng.Streams.now() if start is None else start
        try:
            found = _otherwise(call, engine, lacking or error, by, start)
        except Exception as users:
            raise users from users.__cause__  # without the error before it, which says less
        if found is None:
            raise
        result, warning = found
    if lacking is None or lacking.name not in _torch.replaced:  # then ``isolated`` has warned
        warnings.warn(warning, stacklevel=users_depth())
    return result


def _lacking(error: BaseException | None, handled: BaseException | None) -> TorchVersionError | None:
    """Return the error of a missing name that led to another one, if one did."""
    while error is not None and error is not handled and not isinstance(error, TorchVersionError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, TorchVersionError) and error is not handled else None


def _is_final(error: Exception, handled: BaseException | None) -> bool:
    """Return whether every engine would raise an error."""
    on_purpose = (ArgumentError, MemoryError, torch.OutOfMemoryError)
    return isinstance(error, on_purpose) or (not isinstance(error, LossError) and is_users(error, handled))


def _is_refusal(error: Exception) -> bool:
    """Return whether an error says on purpose what is wrong with the loss.

    Errors of torch's that ``diagnosis.py`` explained do not: they may come from a rule.
    """
    return isinstance(error, LossError) and not isinstance(error.__cause__, RuntimeError)


def _otherwise(
    call: Call, engine: str, error: Exception, by: Callable[[Engine], T], start: rng.Streams
) -> tuple[T, PersampleWarning] | None:
    """Return the answer and why it is not the engine's; or None if no optimization is at fault.

    ``error`` is what the engine raised, ``start`` the state of the random streams before the call.
    """

    def tried(way: Callable[[], object]) -> Tree:
        start.go_back()
        handled = sys.exc_info()[1]
        try:
            return way()
        except Exception as failed:  # noqa: BLE001 - another way is tried
            raise_interrupt(failed, handled)
            return None

    is_plain = not _torch.transforms()  # plain autograd cannot handle the caller's transforms
    is_batchable = False
    if not _is_refusal(error):
        if is_plain and not isinstance(error, LossError):
            start.go_back()
            loop(next(call.chunks(1)), frozenset())  # raises the error if any way would
        for way in (eager, unfactored) if engine in PROGRAMS else (unfactored,):
            if not changed(way) and (result := tried(functools.partial(by, way))) is not None:
                return result, _fault(error, call)
        is_batchable = isinstance(error, TorchVersionError) or (
            tried(lambda: batched_gradients(call, nullcontext())) is not None
        )
    start.go_back()
    if not is_plain or not (is_batchable or engine == "auto"):
        return None
    return by(loop), _fault(error, call) if is_batchable else _not_batchable(error, call)


def _fault(error: Exception, call: Call) -> PersampleWarning:
    if isinstance(error, TorchVersionError):
        return TorchVersionWarning(error.name)
    operation, names, line = _place(error if error.__cause__ is None else error.__cause__, call)
    return FallbackWarning(
        f"An optimization of persample failed at {operation} of {names} ({line}): "
        f"{type(error).__name__}: {_first_line(error)}. The call was answered without it: the same results, slower, "
        "each time. This is a bug of persample: please report this message, loss_fn and the shapes of its arguments."
    )


def _not_batchable(error: Exception, call: Call) -> PersampleWarning:
    return FallbackWarning(
        f"engine='auto' computed {call.size} samples one after another, because vmap cannot batch the loss. This costs "
        f"about as much as {call.size} calls with one sample, and a failed attempt before. Pass engine='loop' to save "
        f"the attempt, or change the loss: {_first_line(error)}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or "?").splitlines()[0]


def _place(error: BaseException, call: Call) -> tuple[str, str, str]:
    """Return the operation at which an error was raised, the parameters of its shapes, and our line."""
    operation, shapes, line = "a call", set[tuple[int, ...]](), ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file, values = frame.f_code.co_filename, frame.f_locals
        if not file.startswith(LIBRARY):
            continue
        line = f"persample{os.sep}{file.removeprefix(LIBRARY)}:{number}"
        factor = values.get("self")
        if isinstance(factor, Factor):
            operation, shapes = f"{type(factor).__name__}.{frame.f_code.co_name}", {tuple(factor.shape)}
        elif "func" in values:
            operation, shapes = resolve_name(values["func"]) or str(values["func"]), set(_shapes(values.get("args")))
    paths = call.loss.spec.paths
    pairs = zip(paths, call.loss.spec.shapes, strict=True)
    found = [path for path, shape in pairs if {tuple(shape), (call.size, *shape)} & shapes]
    return operation, ", ".join(found[:_MOST]) or f"one of {', '.join(paths[:_MOST])}", line


def _shapes(args: object) -> Iterator[tuple[int, ...]]:
    return (tuple(x.shape) for x in trees.flatten(args)[0] if isinstance(x, Tensor))
