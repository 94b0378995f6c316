"""The global random streams: what they are now, and going back to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def snapshot() -> list[Tensor]:
    """Return the state of the CPU's generator and of every CUDA device's in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def rewind(states: list[Tensor]) -> None:
    """Go back to a snapshot.

    Args:
        states: what ``snapshot`` returned.
    """
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, device)


def moved_since(states: list[Tensor]) -> bool:
    """Return whether random numbers were drawn since a snapshot.

    Args:
        states: what ``snapshot`` returned.
    """
    now = snapshot()
    return len(now) == len(states) and any(not torch.equal(a, b) for a, b in zip(now, states, strict=True))


def replayed(items: Iterable[T], randomness: str) -> Iterator[T]:
    """Go through items, under "same" each from where the streams stand now: what is drawn for one is drawn for all.

    Args:
        items: chunks, or samples.
        randomness: "error", "same" or "different".

    Yields:
        The items.
    """
    if randomness != "same":  # reading the streams waits for every CUDA device
        yield from items
        return
    start = snapshot()
    for item in items:
        rewind(start)
        yield item
