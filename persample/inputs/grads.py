"""Gradients in ``.grad``, where optimizers read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.inputs.modules import ParamTree, trained_parameters
from persample.utils import trees


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
            fix = "Reduce over the samples first, for example with Mean()."
            raise ArgumentError.about(f"grads[{name!r}]", expected=expected, received=received, fix=fix)
    for name, param in params.items():
        grad = grads[name].detach().to(param)
        # Not in place: the gradient that is there may be a result that the caller keeps.
        param.grad = param.grad + grad if accumulate and param.grad is not None else grad


def add_grads(params: ParamTree, grads: Any) -> None:
    """Add gradients to ``.grad``, as ``.backward()`` does.

    Args:
        params: the parameters, leaf tensors that require gradients.
        grads: a tree of gradients like the parameters.
    """
    for param, grad in zip(params.tensors, trees.flatten(grads)[0], strict=True):
        if param.grad is None:
            param.grad = grad.clone()
        else:
            param.grad.add_(grad)
