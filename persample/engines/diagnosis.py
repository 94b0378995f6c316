"""What is wrong with a loss: torch's errors inside of it, explained by line, cause and fix."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn

from persample._torch import transforms, version
from persample.errors import SAY_RANDOMNESS, STOP_STATISTICS, ArgumentError, LossError, TorchVersionError
from persample.inputs.call import Call, SampleLoss
from persample.inputs.params import NORMS
from persample.utils import rng, trees
from persample.utils.isolation import raise_interrupt
from persample.utils.origin import is_raised, is_users, user_line
from persample.vmap_rules.effects import guarded, wrote

_LOOP = "or pass engine='loop', which takes any loss that autograd takes"
_CHECKPOINTS = (
    "uses checkpointing, full backward hooks of a module, or a custom autograd.Function, which vmap cannot batch"
)
_DIFFERENTIATES = "sets requires_grad, or calls retain_grad() or backward() itself, which does not work in torch.func"
_WRITES = "writes per-sample values in place into a tensor that is the same for all samples"
# (pattern of torch's message, what the loss did, what to do); the first pattern that matches is used.
_VMAP_CAUSES = [
    (
        r"random operation while in randomness error mode",
        "draws random numbers, which randomness='error' refuses",
        SAY_RANDOMNESS,
    ),
    (
        r"running_mean or running_var|num_batches_tracked|BATCH_NORM",
        "updates the running statistics of {module} in train mode",
        STOP_STATISTICS,
    ),
    (
        r"\.item\(\) on a Tensor|data-dependent|access (data|storage)|dynamic shape|tolist|numpy"
        r"|differently shaped",
        "reads values of a sample (.item(), .numpy(), a branch or shape that depends on data), which vmap cannot batch",
        f"Use torch.where or a mask instead, {_LOOP}. To log a value, return (loss, aux).",
    ),
    (
        r"mutate a captured",
        "writes in place into its arguments, or into a tensor it closed over",
        "Compute a new tensor instead (x = 2 * x, not x.mul_(2)), or clone it first.",
    ),
    (
        r"inplace arithmetic|in-place operation|match the broadcast shape|exists a Tensor `other`"
        r"|ZeroTensors are immutable|of the written-to tensor|inplace randomness on an unbatched",
        _WRITES,
        f"Compute a new tensor instead (x = x + y; torch.stack of a list; new_zeros of a batched tensor), {_LOOP}.",
    ),
    (
        r"saved tensor hooks|setup_context staticmethod|vmap support",
        _CHECKPOINTS,
        "Pass chunk_size= to bound memory in place of checkpoints, engine='traced', which takes them, or give the "
        f"function setup_context and a vmap rule, {_LOOP} (checkpoint with use_reentrant=False).",
    ),
    (
        r"requires_grad_\(\)|(retain_grad\(\)|backward\(\) called) inside|does not require grad( and .* grad_fn|$)"
        r"|appears to not have been used in the graph",
        _DIFFERENTIATES,
        f"Use torch.func.grad for a gradient inside the loss, {_LOOP}. (torch.autograd.grad(…, create_graph=True) "
        "works where nothing differentiates the call: without differentiable=True, transforms around it and "
        "composite_grads.)",
    ),
    (
        r"view size is not compatible",
        "views in another shape a tensor that is not contiguous, perhaps because of the batch axis",
        f"Use .reshape() instead of .view(), {_LOOP}.",
    ),
    (
        r"Sparse CS[RC]|'Sparse\w*' backend|for Sparse tensors",
        "uses a sparse tensor, which vmap cannot batch",
        f"Use a dense one, {_LOOP}.",
    ),
    (
        "_assert_async",
        "asserts something about values of a sample, which a program cannot check",
        "Assert it before the call, or pass engine='eager', which takes what holds for all samples.",
    ),
    (
        r"Batching rule not implemented|isn't supported yet|not supported by vmap|do not yet support"
        r"|same randomness with a batched|querying is_contiguous|grad_weight (must|needs to) be contiguous",
        "uses an operation that vmap cannot batch",
        f"Replace the operation, {_LOOP}.",
    ),
]
_CAUSES = [
    (
        r"same dtype|Input type .* and (weight|bias) type|expected scalar type|Found dtype|expected m1 and m2",
        "mixes dtypes in one operation ({dtypes})",
        "Convert the batch or the params so that they agree, for example x.to({dtype}).",
    ),
    (
        r"on the same device|found at least two devices|expected device|device type",
        "mixes devices in one operation ({devices})",
        "Move params and batch to one device, for example x.to('cuda').",
    ),
]
_SHOWN = 4  # leaves in a message
# torch's messages about tensors of too few axes, and about the sizes that follow from them.
_SHAPES = (
    r"shapes cannot be multiplied|must match the size|is invalid for input of size|Dimension out of range"
    r"|[Ee]xpected \d+D|[Ee]xpected (?!.*dtype).*(input|target|channels|batch)|must be a \d+D|at least \d+D"
    r"|Given (groups|normalized_shape|input size)|number of (dimensions|channels)|too many indices"
    r"|inconsistent tensor size|size mismatch"
)
# What a loss may raise, by name: interrupts, and memory that runs out, are none of it.
RAISED = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError),
    *(RuntimeError, TypeError, ValueError, Warning),
)


class DifferentiatesError(LossError):
    """Raised if the loss differentiates by a tensor of its own, which works under plain autograd."""


class CheckpointsError(LossError):
    """The loss checkpoints activations, or does what vmap cannot tell from that."""


class WritesError(LossError):
    """The loss writes what differs between samples into a tensor that all samples share, perhaps one that it made."""


_KINDS = {_DIFFERENTIATES: DifferentiatesError, _CHECKPOINTS: CheckpointsError, _WRITES: WritesError}


@contextmanager
def diagnosed(call: Call, *, batched: bool) -> Iterator[None]:
    """Explain torch's errors inside the loss, where the cause is known: which line, what it did, what to do instead."""
    handled = sys.exc_info()[1]
    try:
        yield
    except LossError:
        raise
    except RuntimeError as error:
        if not is_users(error, handled):
            _explain(call, error, batched=batched)
        raise


@contextmanager
def hinted(call: Call, index: int = 0) -> Iterator[None]:
    """Add to an error of the loss, which failed at the sample ``index``, what ``add_hint`` knows."""
    try:
        yield
    except RAISED as error:
        if not isinstance(error, ArgumentError | LossError | TorchVersionError | Warning):
            add_hint(call, error, index)
        raise


def add_hint(call: Call, error: Exception, index: int = 0) -> None:
    """Add to an error of the loss what it sees, and whether a sample passes with a batch axis, which is tried once."""
    if not any(frame.f_code is SampleLoss.returned.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
        return  # of a reduction, say
    said = str(error)
    # What the user's code raises on purpose needs no words about shapes.
    is_of_shapes = not is_raised(error) and re.search(_SHAPES, said) and call.loss.called == "loss_fn"
    hint = _one_sample(call, index, of_shapes=bool(is_of_shapes))
    hint = hint or (_tree(call, said) if isinstance(error, TypeError | AttributeError) else "")
    if hint and error.args == (said,):  # an error of the user's may keep something else there
        error.args = (f"{said}{hint}",)


def _explain(call: Call, error: RuntimeError, *, batched: bool) -> None:
    """Raise a ``LossError`` that explains an error of torch's, if its cause is known."""
    text = str(error)
    module = _norm_module(error.__traceback__)
    if module and "in-place" in text:
        text = "num_batches_tracked"
    for pattern, happened, fix in (_VMAP_CAUSES if batched else []) + _CAUSES:
        if re.search(pattern, text):
            facts = {
                "module": module,
                "dtypes": _formats(call, "dtype"),
                "devices": _formats(call, "device"),
                "dtype": call.params[0].dtype,
            }
            where = user_line(traceback.extract_tb(error.__traceback__))
            raise _KINDS.get(happened, LossError)(
                f"{call.loss.called} {happened.format(**facts)}{where}. {fix.format(**facts)} torch said: {error}"
            ) from error


def _one_sample(call: Call, index: int, *, of_shapes: bool) -> str:
    """Return what the loss sees, and how to give it a batch axis, if that helps or torch speaks of shapes."""
    rows = zip(_names(call), call.leaves, call.leaves_batched, strict=True)
    shapes = {name: [*x.shape[1:]] for name, x, split in rows if split}
    runs = bool(shapes) and _runs_with_axis(call, index)
    if not shapes or not (runs or of_shapes):
        return ""
    lead = [1] if call.loss.keep_batch_dim else []
    seen = ", ".join(f"{name} of shape {lead + shape}" for name, shape in [*shapes.items()][:_SHOWN])
    if call.loss.keep_batch_dim:
        return f"\nloss_fn sees one sample, with a batch axis of 1: {seen}."
    name, shape = next(iter(shapes.items()))
    return (
        f"\n{call.loss.called} sees one sample, without the batch axis: {seen}. If the model needs that axis, pass "
        f"keep_batch_dim=True: then {name} has the shape {[1, *shape]}{', and the loss runs' if runs else ''}."
    )


def _runs_with_axis(call: Call, index: int) -> bool:
    """Return whether a sample, at which the loss fails, passes with a batch axis of 1."""
    loss, start, handled = replace(call.loss, keep_batch_dim=True), rng.Streams.now(), sys.exc_info()[1]
    if call.loss.keep_batch_dim or transforms():  # transforms of the caller's take no other values
        return False
    params, leaves = call.at(index)
    function = guarded(loss if loss.called == "loss_fn" else loss.returned)
    try:
        with torch.enable_grad():
            loss.params.unchanged(partial(function, [x.detach().requires_grad_() for x in params], leaves))
    except RAISED as error:
        raise_interrupt(error, handled)
        return False
    finally:
        start.go_back()
    return True


def _tree(call: Call, said: str) -> str:
    """Return that params or batch is a tree, where a loss took it for a module or for one tensor."""
    if re.fullmatch(r"'(Tensor|list|tuple|dict|collections\.OrderedDict)' object is not callable", said):
        if call.loss.params.parts:
            return "\nparams come first in the call of a loss, as in loss_fn(model, x, y)."
        fix = "Pass the module itself, or dict(model.named_parameters()) with torch.func.functional_call."
        return f"\nparams is a tree of tensors, not a module. {fix}"
    found = re.fullmatch(r"'dict' object has no attribute '(\w+)'", said)
    if found and any(name.endswith(f"['{found[1]}']") for name in _names(call)):
        return (
            f"\nA mapping in the batch (BatchEncoding, UserDict) comes as a dict: write ['{found[1]}'] for .{found[1]}."
        )
    if sum(type(x) in {int, float} for x in call.leaves) > 1:
        return "\nA list of numbers in the batch is not one tensor: every sample gets all of it. Pass torch.tensor(…)."
    nested = call.loss.batch.num_nodes > call.loss.batch.num_leaves + 1
    pattern = r"\b(list|tuple|dict)\b|only integer tensors" if nested else r"must be Tensor, not (list|tuple|dict)"
    found = re.search(pattern, said)
    if found is None:
        return ""
    return (
        f"\nA {found[1] or 'list'} in params or batch is a tree: loss_fn gets its tensors apart. "
        "To pass them as one tensor, stack them first (torch.stack)."
    )


@contextmanager
def unwritten(call: Call) -> Iterator[None]:
    """Check that the loss does not write into the user's parameters and batch.

    The write is not undone; other memory of a frozen parameter is, which it gets by ``set_``, that no mode sees.
    """
    tensors = call.tensors
    versions = list(map(version, tensors))
    frozen = [(x, x.data) for x in call.loss.params.frozen]
    try:
        yield
    finally:
        replaced = [x.set_(memory) for x, memory in frozen if x.data_ptr() != memory.data_ptr()]  # type: ignore[call-overload]
        if replaced:
            raise LossError(wrote(call.loss.called, "a frozen parameter (set_)"))
    if versions != list(map(version, tensors)):  # names are looked up only here, because every call is checked
        names = [name for name, _ in _named(call)]
        written = [name for name, x, before in zip(names, tensors, versions, strict=True) if version(x) != before]
        raise LossError(wrote(call.loss.called, ", ".join(written)))


def _named(call: Call) -> list[tuple[str, Tensor]]:
    """Return the names and the tensors of the arguments of a loss."""
    named = [*zip(call.loss.spec.paths, call.params, strict=True), *zip(_names(call), call.leaves, strict=True)]
    return [(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]


def _names(call: Call) -> list[str]:
    """Return the names of the leaves of the batch."""
    return trees.paths(trees.unflatten(list(call.leaves), call.loss.batch), call.loss.given)


def _norm_module(tb: TracebackType | None) -> str:
    """Return the name of the normalization layer whose forward raised, as its outermost module calls it."""
    # Only frames of methods are asked: reading f_locals keeps the locals alive, and ours include the error itself.
    methods = [frame for frame, _ in traceback.walk_tb(tb) if "self" in frame.f_code.co_varnames]
    selves = [frame.f_locals.get("self") for frame in methods]
    modules = [module for module in selves if isinstance(module, nn.Module)]
    norms = [module for module in modules if isinstance(module, NORMS)]
    if not norms:
        return ""
    for outer in modules:
        for name, part in outer.named_modules():
            if part is norms[-1] and name:
                return f"{name!r} ({type(part).__name__})"
    return type(norms[-1]).__name__


def _formats(call: Call, attribute: str) -> str:
    """Return the dtypes, or devices, of the parameters and leaves, for a message."""
    groups: dict[str, list[str]] = {}
    for name, leaf in _named(call):
        groups.setdefault(str(getattr(leaf, attribute)), []).append(name)
    return "; ".join(f"{value}: {', '.join(names)}" for value, names in groups.items())
