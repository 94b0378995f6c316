"""The argument ``params``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from persample._torch import NormBase
from persample.errors import STOP_STATISTICS, ArgumentError
from persample.inputs.hooks import is_hooked
from persample.inputs.modules import ParamTree, take_apart


def check_params(params: Any, *, batch_statistics: bool = False, name: str = "params") -> ParamTree:
    """Return the parameters taken apart; refuse what cannot be differentiated.

    Args:
        params: what the user passed.
        batch_statistics: modules may normalize with the statistics of a batch.
        name: what the caller calls them, for messages.

    Raises:
        ArgumentError: if a leaf is no floating tensor or has a hook, if none is there, or if a module cannot be used
            sample by sample.
    """
    tree = take_apart(params, name)
    for path, part in tree.parts.items():
        _check_script(name, path.partition(".")[2], part)
        _check_part(name, path.partition(".")[2], part, batch_statistics=batch_statistics)
    for path, leaf in zip(tree.paths, tree.tensors, strict=True):
        if is_lazy(leaf):
            fix = "Run one forward pass first, so that lazy modules learn their shapes."
            raise ArgumentError.about(path, expected="a tensor", received="an uninitialized one", fix=fix)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype.itemsize > 1:
            _check_hooks(path, leaf)
            continue
        received = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
        fix = "Convert it (torch.as_tensor(x, dtype=torch.float32)), or pass what is not learned in batch."
        expected = "a floating or complex tensor of 16 bits or more"
        raise ArgumentError.about(path, expected=expected, received=received, fix=fix)
    if not tree.tensors:
        fix = "Pass dict(model.named_parameters()), or a module with at least one parameter that requires_grad."
        raise ArgumentError.about(name, expected="at least one floating tensor", received="none", fix=fix)
    return tree


def _check_hooks(path: str, leaf: Tensor) -> None:
    if is_hooked(leaf):
        raise ArgumentError.about(
            path,
            expected="a tensor without hooks: there is no gradient of the batch to call them with, on any engine",
            received="one with a hook (register_hook or register_post_accumulate_grad_hook)",
            fix="Remove the hook (handle.remove()), and apply what it does to the result.",
        )


def _check_script(argument: str, name: str, part: nn.Module) -> None:
    """Refuse TorchScript modules that hold what would have to be swapped: they take no other tensors."""
    if not isinstance(part, torch.jit.ScriptModule):
        return
    if any(p.requires_grad for p in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False)):
        label = f"{name!r} ({part.original_name})" if name else part.original_name
        raise ArgumentError.about(
            argument,
            expected="modules whose parameters and buffers can be replaced",
            received=f"{label}, a TorchScript module",
            fix="Pass the nn.Module that it was made from; loss_fn may close over a scripted one that is not learned.",
        )


def _check_part(argument: str, name: str, part: nn.Module, *, batch_statistics: bool) -> None:
    updates = isinstance(part, NormBase) and part.training and part.track_running_stats and not batch_statistics
    sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    if not updates and not sparse:
        return
    label = f"{name!r} ({type(part).__name__})" if name else type(part).__name__
    if updates:
        expected = "a module that does not update running statistics while it is differentiated"
        received = f"{label} in train mode"
        raise ArgumentError.about(argument, expected=expected, received=received, fix=STOP_STATISTICS)
    fix = "Build it with sparse=False."
    raise ArgumentError.about(argument, expected="dense gradients", received=f"{label}, sparse=True", fix=fix)
