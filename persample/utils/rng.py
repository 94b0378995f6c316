"""The global random streams: snapshots of their states, and rewinding to these."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from persample.utils.trees import Tree

T = TypeVar("T")


def snapshot() -> list[Tensor]:
    """Return the states of the CPU's generator and of the generators of all devices in use."""
    module = _accelerator()
    if module is None:
        return [torch.get_rng_state()]
    devices = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
    return [torch.get_rng_state(), *devices]


def rewind(states: list[Tensor]) -> None:
    """Set the generators to the states of a snapshot."""
    torch.set_rng_state(states[0])
    module = _accelerator()
    for device, state in enumerate(states[1:]):
        module.set_rng_state(state, *([device] if hasattr(module, "get_rng_state_all") else []))


@contextmanager
def kept() -> Iterator[None]:
    """Set the generators back to their states at the beginning."""
    states = snapshot()
    try:
        yield
    finally:
        rewind(states)


def _accelerator() -> Tree:
    """Return torch's module of the accelerator (``torch.cuda``), or None if there is none or none was used yet."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    started = getattr(module, "is_initialized", lambda: True)  # torch.mps needs no initialization
    return module if started() else None


def moved_since(states: list[Tensor]) -> bool:
    """Return whether random numbers were drawn since a snapshot."""
    now = snapshot()
    return len(now) == len(states) and any(not torch.equal(a, b) for a, b in zip(now, states, strict=True))


def rewinding(randomness: str) -> Callable[[], None]:
    """Return a function that puts torch's streams back as they are now; under "error", where nothing may draw, none."""
    if randomness == "error":  # a snapshot would wait for every CUDA device
        return lambda: None
    return partial(rewind, snapshot())


def replayed(items: Iterable[T]) -> Iterator[T]:
    """Iterate over items, and rewind the streams before each, so that every item draws the same numbers."""
    start = snapshot()
    for item in items:
        rewind(start)
        yield item


@dataclass(frozen=True)
class Streams:
    """The states of all global random streams: torch's on all devices, Python's and NumPy's."""

    torch: list[Tensor]
    python: tuple[object, ...]
    numpy: dict[str, object]

    @classmethod
    def now(cls) -> Streams:
        """Return the present states."""
        return cls(snapshot(), random.getstate(), np.random.get_state(legacy=False))  # noqa: NPY002 (the global stream is meant)

    def go_back(self) -> None:
        """Set all streams to these states."""
        rewind(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
