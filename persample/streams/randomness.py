"""The random numbers that the losses of a stream draw: not those of the source of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from persample.processes import Processes
from persample.utils import rng


class RandomStream:
    """A stream of its own, seeded from the global one, for the losses; the global one is left to the batches.

    So the batches do not depend on what the losses draw, and a run that is resumed meets the same batches. Under "same"
    all chunks of all batches draw the same numbers.

    Args:
        randomness: "error", "same" or "different", as in ``torch.func.vmap``.
    """

    def __init__(self, randomness: str) -> None:
        self.randomness = randomness
        self.state: list[Tensor] = []

    def seed(self, processes: Processes) -> None:
        """Take the seed from the global stream of the first process; under "different" each process draws its own.

        Args:
            processes: the processes.
        """
        if self.randomness == "error":
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        seed = processes.gather_objects(seed)[0] + (processes.rank if self.randomness == "different" else 0)
        before = rng.snapshot()
        torch.manual_seed(seed)
        self.state = rng.snapshot()
        rng.rewind(before)

    def drawing(self) -> AbstractContextManager[None]:
        """Let the loss of one chunk draw."""
        return nullcontext() if self.randomness == "error" else self._drawing()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        before = rng.snapshot()
        rng.rewind(self.state)
        try:
            yield
            if self.randomness == "different":
                self.state = rng.snapshot()
        finally:
            rng.rewind(before)
