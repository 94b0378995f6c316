"""Replay of the random streams: every chunk of a later pass draws the numbers that it drew in the first pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from persample.utils import rng

T = TypeVar("T")


class Replay:
    """The random streams of one pass over the chunks; each forward pass continues where the previous one ended.

    Random numbers drawn by backward passes do not advance the replayed streams. Only one position is stored, not one
    per chunk.

    Args:
        start: the states of the random streams at the start of the first pass.
    """

    def __init__(self, start: rng.Streams) -> None:
        self._position = start

    def over(self, chunks: Iterable[T]) -> Iterator[T]:
        """Iterate over chunks; the streams are set to their states at the same chunk of the first pass.

        Args:
            chunks: the chunks.

        Yields:
            The chunks.
        """
        for chunk in chunks:
            self._position.go_back()
            yield chunk
            torch.clear_autocast_cache()  # which holds casts of every chunk's copies of the parameters

    def forward_done(self) -> None:
        """Record the states of the streams after a forward pass."""
        self._position = rng.Streams.now()
