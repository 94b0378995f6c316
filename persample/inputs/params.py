"""The argument ``params``, checked; and gradients in the ``.grad`` of parameters, where optimizers read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from persample._torch import backward_hooks, buffer_slots, parameter_slots, post_accumulate_grad_hooks
from persample.errors import STOP_STATISTICS, ArgumentError
from persample.inputs.batch import PLAIN, check_kind, check_kinds
from persample.inputs.modules import ParamTree, take_apart, trained_parameters
from persample.utils import trees

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
NORMS = *BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d  # which can have running statistics
_RESTRICTED = (torch.jit.ScriptModule, *NORMS, nn.Embedding, nn.EmbeddingBag)


def check_params(params: object, *, batch_statistics: bool = False, name: str = "params") -> ParamTree:
    """Return the parameters as flat tensors; reject leaves that cannot be differentiated."""
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
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype.itemsize > 1:
            continue
        received = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
        fix = "Convert it (torch.as_tensor(x, dtype=torch.float)), pass what is not learned in batch, or pass a module."
        if callable(leaf):
            fix = "Pass functions first, then the parameters."
        elif isinstance(leaf, torch.optim.Optimizer):
            fix = "Pass the module whose parameters it changes."
        expected = "a floating or complex tensor of 16 bits or more"
        raise ArgumentError.about(path, expected=expected, received=received, fix=fix)
    if not tree.tensors:
        frozen = len(tree.inside.parameters)
        received = f"a module whose {frozen} parameters are all frozen" if frozen else "none"
        fix = "Call .requires_grad_(True) of what is to be differentiated, or pass dict(model.named_parameters())."
        raise ArgumentError.about(name, expected="at least one floating tensor", received=received, fix=fix)
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
    if isinstance(part, NORMS) and part.training and part.track_running_stats and not batch_statistics:
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
    """Return whether any of some tensors has a hook."""
    return any(map(backward_hooks, tensors)) or any(map(post_accumulate_grad_hooks, tensors))


def set_grads(module: nn.Module, grads: Mapping[str, Tensor], accumulate: bool = False) -> None:
    """Put reduced gradients into ``.grad``, so that any ``torch.optim`` optimizer can step on them.

    Args:
        module: the module whose parameters receive the gradients.
        grads: a tensor of the parameter's shape for every parameter with ``requires_grad``, by name: what
            ``per_sample_grads(loss_fn, module, batch, Mean())`` returns. A tensor is converted if its dtype or device
            differs from the parameter's, and otherwise not copied.
        accumulate: add to the gradients that are there, as ``.backward()`` does, instead of replacing them.

    Raises:
        ArgumentError: if ``module`` is no module, a trainable parameter is missing, a name is unknown, or a shape
            differs.

    Examples:
        >>> import torch
        >>> linear = nn.Linear(2, 1, bias=False)
        >>> set_grads(linear, {"weight": torch.ones(1, 2)})
        >>> torch.optim.SGD(linear.parameters(), lr=0.1).step()
    """
    if not isinstance(module, nn.Module):
        fix = "Pass the module that the gradients are of; then call optimizer.step()."
        raise ArgumentError.about("module", expected="an nn.Module", received=type(module).__name__, fix=fix)
    params = trained_parameters(module)
    if not isinstance(grads, Mapping):
        fix = "Pass what per_sample_grads(loss_fn, module, batch, Mean()) returns for this very module."
        raise ArgumentError.about("grads", expected="a dict by name", received=type(grads).__name__, fix=fix)
    missing, unknown = sorted(params.keys() - grads.keys()), sorted(grads.keys() - params.keys())
    if missing or unknown:
        raise ArgumentError.about(
            "grads",
            expected="one gradient per trainable parameter of the module, by name",
            received=f"missing {missing}, unknown or frozen {unknown}",
            fix="Pass what per_sample_grads(loss_fn, module, batch, Mean()) returns for this very module.",
        )
    for name, param in params.items():
        grad = grads[name]
        if not isinstance(grad, Tensor) or grad.shape != param.shape or grad.is_complex() > param.is_complex():
            received = f"shape {list(grad.shape)}, {grad.dtype}" if isinstance(grad, Tensor) else type(grad).__name__
            expected = f"shape {list(param.shape)}, {param.dtype}"
            fix = "Reduce over the samples first, for example with Mean(), and over outputs (.sum(0) of K rows)."
            raise ArgumentError.about(f"grads[{name!r}]", expected=expected, received=received, fix=fix)
    for name, param in params.items():
        grad = grads[name].detach().to(param)
        # Not in place: the gradient that is there may be a result that the caller keeps.
        param.grad = param.grad + grad if accumulate and param.grad is not None else grad


def add_grads(params: ParamTree, grads: object) -> None:
    """Add gradients to ``.grad``, as ``.backward()`` does."""
    for param, grad in zip(params.tensors, trees.flatten(grads)[0], strict=True):
        if param.grad is None:
            param.grad = grad.clone()
        else:
            param.grad.add_(grad)
