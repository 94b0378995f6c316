"""Which module computed something else when it was called again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from persample._torch import get_unwrapped
from persample.composite.encoder import Tower
from persample.composite.replay import NotReplayedError
from persample.errors import LossError
from persample.utils import rng, trees
from persample.utils.tracing import is_wrapped

_FIX = (
    "Let it draw from the global streams of torch, NumPy or random, which are replayed, and not from a generator of "
    "its own; and let it not depend on how often it was called, nor on whether a graph is recorded."
)


def not_replayed(
    error: NotReplayedError, path: str, tower: Tower, encode: Callable[[], object], start: rng.Streams
) -> LossError:
    """Return the error that names the module.

    Args:
        error: what was seen.
        path: the leaf of z that differs.
        tower: the encoder.
        encode: encodes the chunk.
        start: where to set the random streams before each call.
    """
    runs = []
    for recording in (torch.no_grad(), torch.enable_grad()):
        start.go_back()
        with recording:
            runs.append(_outputs(tower, encode))
    name = next((name for (name, a), (_, b) in zip(*runs, strict=False) if not _equal(a, b)), None)
    where = f"module {name}" if name else f"{tower.encoder.called} itself, outside of any module,"
    return LossError(
        f"{tower.encoder.called}: expected the second pass to encode the samples as the first did, received another "
        f"{path}, off by {error.difference:g} beside numbers up to {error.size:g}: {where} computes something else "
        f"when it is called again. {_FIX}"
    )


def _outputs(tower: Tower, encode: Callable[[], object]) -> list[tuple[str, list[Tensor]]]:
    """Return what every module returned, in the order in which they finished: inner ones first."""
    modules = tower.encoder.params.modules
    names = {part: name for module in modules for name, part in module.named_modules() if name}
    found: list[tuple[str, list[Tensor]]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        name = f"{names[module]!r} ({type(module).__name__})" if module in names else type(module).__name__
        tensors = [x for x in trees.flatten(output)[0] if isinstance(x, Tensor)]
        found.append((name, [_physical(x).detach().clone() for x in tensors]))

    handle = register_module_forward_hook(note)
    try:
        encode()
    finally:
        handle.remove()
    return found


def _physical(x: Tensor) -> Tensor:
    while is_wrapped(x):
        x = get_unwrapped(x)
    return x


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))
