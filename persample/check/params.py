"""The argument ``params``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from persample.errors import ArgumentError
from persample.modules import ParamTree, take_apart


def check_params(params: Any) -> ParamTree:
    """Return the parameters taken apart; refuse what cannot be differentiated.

    Args:
        params: what the user passed.

    Raises:
        ArgumentError: if a leaf is no floating tensor, none is there, or a module cannot be used sample by sample.
    """
    tree = take_apart(params)
    for module in tree.modules:
        _check_module(module)
    for path, leaf in zip(tree.paths, tree.tensors, strict=True):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            continue
        received = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
        fix = "Convert it (torch.as_tensor(x, dtype=torch.float32)), or pass what is not learned in batch."
        raise ArgumentError.about(path, expected="a floating or complex tensor", received=received, fix=fix)
    if not tree.tensors:
        fix = "Pass dict(model.named_parameters()), or a module with at least one parameter that requires_grad."
        raise ArgumentError.about("params", expected="at least one floating tensor", received="none", fix=fix)
    return tree


def _check_module(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if is_lazy(param):
            fix = "Run one forward pass first, so that lazy modules learn their shapes."
            raise ArgumentError.about(f"params[{name!r}]", expected="a tensor", received="uninitialized", fix=fix)
    for name, part in module.named_modules():
        if isinstance(part, _NormBase) and part.training and part.track_running_stats:
            label = f"{name!r} ({type(part).__name__})" if name else type(part).__name__
            raise ArgumentError.about(
                "params",
                expected="a module whose samples do not influence each other",
                received=f"{label} in train mode, which updates running statistics from the whole batch",
                fix="Call .eval() on it, replace it by GroupNorm, or build it with track_running_stats=False.",
            )
