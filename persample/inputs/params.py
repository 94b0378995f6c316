"""The argument ``params``, and what its tensors must not have: hooks of the caller's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persample._torch import NormBase, backward_hooks, buffer_slots, parameter_slots, post_accumulate_grad_hooks
from persample.errors import STOP_STATISTICS, ArgumentError
from persample.inputs.batch import PLAIN, check_kind, check_kinds
from persample.inputs.modules import ParamTree, take_apart

_RESTRICTED = (torch.jit.ScriptModule, NormBase, nn.Embedding, nn.EmbeddingBag)


def check_params(params: Any, *, batch_statistics: bool = False, name: str = "params") -> ParamTree:
    """Return the parameters as flat tensors; reject leaves that cannot be differentiated.

    Args:
        params: the argument.
        batch_statistics: whether modules may normalize with the statistics of a batch.
        name: the name of the argument, for messages.

    Raises:
        ArgumentError: if there are no leaves, if a leaf is not a floating tensor or has a hook, or if a module cannot
            be used sample by sample.
    """
    if isinstance(params, Iterator):
        fix = "Pass the module itself, or dict(model.named_parameters())."
        raise ArgumentError.about(name, expected="a module, or a tree of tensors", received="an iterator", fix=fix)
    tree = take_apart(params, name)
    for path, part in tree.parts.items():
        if isinstance(part, _RESTRICTED):
            _check_part(name, path.partition(".")[2], part, batch_statistics=batch_statistics)
        for own, held in (*parameter_slots(part).items(), *buffer_slots(part).items()):
            if held is not None and (type(held) not in PLAIN or held.is_nested):
                check_kind(f"{name}['{path}.{own}']".replace("['0.", "['"), held)
    check_kinds(tree.paths, tree.tensors)
    for path, leaf in zip(tree.paths, tree.tensors, strict=True):
        if hasattr(leaf, "full_tensor"):  # importing DTensor takes a second
            raise ArgumentError.about(
                path,
                expected="a tensor that this process holds whole, as a sample's gradient is that of whole tensors",
                received=f"a {type(leaf).__name__} of fully_shard or of tensor parallelism, which holds a part",
                fix="Pass {name: p.full_tensor().detach() for name, p in model.named_parameters()}, gathered on every "
                "process at once, and call a module without shards by torch.func.functional_call.",
            )
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype.itemsize > 1:
            continue
        received = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
        fix = "Convert it (torch.as_tensor(x, dtype=torch.float32)), or pass what is not learned in batch."
        if callable(leaf):
            fix = "Pass functions first, then the parameters."
        elif isinstance(leaf, torch.optim.Optimizer):
            fix = "Pass the module whose parameters it changes."
        expected = "a floating or complex tensor of 16 bits or more"
        raise ArgumentError.about(path, expected=expected, received=received, fix=fix)
    if not tree.tensors:
        fix = "Pass dict(model.named_parameters()), or a module with at least one parameter that requires_grad."
        raise ArgumentError.about(name, expected="at least one floating tensor", received="none", fix=fix)
    if are_hooked(tree.tensors):
        raise ArgumentError.about(
            next(path for path, leaf in zip(tree.paths, tree.tensors, strict=True) if are_hooked([leaf])),
            expected="a tensor without hooks: there is no gradient of the batch to call them with, on any engine",
            received="one with a hook (register_hook or register_post_accumulate_grad_hook)",
            fix="Remove the hook (handle.remove()), and apply what it does to the result.",
        )
    return tree


def _check_script(argument: str, name: str, part: torch.jit.ScriptModule) -> None:
    """Reject TorchScript modules with parameters or buffers, which cannot be replaced by other tensors."""
    if any(p.requires_grad for p in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False)):
        raise ArgumentError.about(
            argument,
            expected="modules whose parameters and buffers can be replaced",
            received=f"{_labelled(name, part.original_name)}, a TorchScript module",
            fix="Pass the nn.Module that it was made from; loss_fn may close over a scripted one that is not learned.",
        )


def _check_part(argument: str, name: str, part: nn.Module, *, batch_statistics: bool) -> None:
    if isinstance(part, torch.jit.ScriptModule):
        _check_script(argument, name, part)
    if isinstance(part, NormBase) and part.training and part.track_running_stats and not batch_statistics:
        expected = "a module that does not update running statistics while it is differentiated"
        received = f"{_labelled(name, type(part).__name__)} in train mode"
        raise ArgumentError.about(argument, expected=expected, received=received, fix=STOP_STATISTICS)
    if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
        return
    label = _labelled(name, type(part).__name__)
    if part.max_norm is not None:
        expected, received = "tables, also frozen ones, that no lookup changes", f"{label}, max_norm={part.max_norm}"
        fix = "Build it without max_norm, and bound its rows after each step (torch.renorm under torch.no_grad)."
        raise ArgumentError.about(argument, expected=expected, received=received, fix=fix)
    if part.sparse:
        expected, received, fix = "dense gradients", f"{label}, sparse=True", "Build it with sparse=False."
        raise ArgumentError.about(argument, expected=expected, received=received, fix=fix)


def _labelled(name: str, kind: str) -> str:
    return f"{name!r} ({kind})" if name else kind


def are_hooked(tensors: Sequence[Tensor]) -> bool:
    """Return whether any of some tensors has a hook.

    Args:
        tensors: the parameters.

    Examples:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> hook = x.register_hook(torch.neg)
        >>> are_hooked([x]), hook.remove(), are_hooked([x])
        (True, None, False)
    """
    return any(map(backward_hooks, tensors)) or any(map(post_accumulate_grad_hooks, tensors))
