"""Layers followed by tanh in ``nn.Sequential``, computed at once: nobody sees what lies between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn.modules.module import _has_any_global_hook

Layer = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def fused(parts: Iterable[nn.Module], layer: Layer) -> Iterator[None]:
    """Have pairs of a linear layer and tanh computed by one function meanwhile.

    Args:
        parts: modules, among them those with such pairs; nobody else may use them meanwhile.
        layer: from input, weight and bias to the output of tanh.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 1), nn.Tanh())
        >>> with fused([model], lambda x, weight, bias: x.sum()):
        ...     model(torch.ones(2))
        tensor(2.)
    """
    seen = _has_any_global_hook() or _len_torch_function_stack() > 0  # by hooks and modes of the caller's
    sequences = [] if seen else [part for part in parts if type(part) is nn.Sequential and _has_pairs(part)]
    for part in sequences:
        part.__dict__["forward"] = functools.partial(_forward, part, layer)
    try:
        yield
    finally:
        for part in sequences:
            del part.__dict__["forward"]


def _has_pairs(part: nn.Sequential) -> bool:
    children = list(part)
    return "forward" not in part.__dict__ and any(map(_is_pair, children, children[1:]))


def _is_pair(first: nn.Module, second: nn.Module) -> bool:
    return type(first) is nn.Linear and type(second) is nn.Tanh and not any(map(_is_watched, (first, second)))


def _is_watched(part: nn.Module) -> bool:
    return "forward" in part.__dict__ or any(getattr(part, hooks) for hooks in _HOOKS)


def _forward(sequence: nn.Sequential, layer: Layer, input: Tensor) -> Tensor:  # noqa: A002 - as torch's
    children = iter(sequence)
    child = next(children, None)
    while child is not None:
        following = next(children, None)
        if isinstance(child, nn.Linear) and following is not None and _is_pair(child, following):
            input, following = layer(input, child.weight, child.bias), next(children, None)  # noqa: A001
        else:
            input = child(input)  # noqa: A001
        child = following
    return input
