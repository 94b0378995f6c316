"""Batch norm in train mode: refused, or with the statistics of all samples while one chunk is in memory.

z depends on the moments s of all batch norms, and those of a later one on the earlier ones: s = S(θ, s), a triangular
system. Its solution takes as many passes as there are batch norms, and so does that for the adjoint dL/ds.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from persample.errors import LossError
from persample.merge import Moments
from persample.utils.dtypes import accumulate_dtype

RULES = ("refuse", "chunk", "full")
RECOMPUTED = (
    "encode_fn checkpoints activations: what is recomputed in the backward pass would not find the statistics and the "
    "buffers of the forward pass. With batch_norm='chunk' and 'full' leave checkpointing off; chunk_size bounds memory."
)
_SIGNATURE = inspect.signature(F.batch_norm)


class _InTrainMode(TorchFunctionMode):
    """Sees every batch norm that normalizes with the statistics of what it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            bound = _SIGNATURE.bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            if bound.arguments["training"]:
                return self.normalize(**bound.arguments)
        return func(*args, **(kwargs or {}))

    def begin(self) -> None:
        """Begin a forward pass."""

    def normalize(self, **arguments: Any) -> Tensor:
        """Return what stands in the place of ``F.batch_norm``."""
        raise NotImplementedError


class Refused(_InTrainMode):
    """Batch norm in train mode is an error, also where no module among the parameters shows it at the door."""

    def normalize(self, **_: Any) -> Tensor:
        """Refuse.

        Raises:
            LossError: always.
        """
        raise LossError(
            "encode_fn normalizes with the statistics of a chunk (batch norm in train mode, or without running "
            "statistics): its results depend on chunk_size. Use .eval(), or choose with batch_norm='chunk' or 'full'."
        )


@dataclass(frozen=True)
class Statistics:
    """What one batch norm normalizes with, and how strongly L depends on it.

    Args:
        mean: over all samples, ``[C]``.
        variance: over all samples, ``[C]``, biased.
        count: how many numbers per channel they were taken of, 0-d.
        by_mean: dL/d mean, ``[C]``.
        by_variance: dL/d variance, ``[C]``.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    by_mean: Tensor
    by_variance: Tensor

    @classmethod
    def of(cls, moments: Moments) -> Statistics:
        """Return the statistics that belong to moments, L not depending on them yet."""
        zero = torch.zeros_like(moments.mean)
        return cls(moments.mean, moments.m2 / moments.n.clamp(min=1), moments.n, zero, zero)


class FullBatch(_InTrainMode):
    """Batch norms use known statistics, in the order in which they are called; where there are none, the chunk's.

    ``known`` holds those of the first batch norms, ``seen`` the moments that the last forward pass came by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Statistics] = []
        self.seen: list[Moments] = []
        self._terms: list[Tensor] = []

    def begin(self) -> None:
        """Forget the forward pass before."""
        self.seen, self._terms = [], []

    @property
    def terms(self) -> Tensor | float:
        """What the last forward pass contributed to L through the statistics."""
        return sum(self._terms, start=0.0)

    def normalize(self, **arguments: Any) -> Tensor:
        """Return batch norm with the statistics of all samples, and note the moments of these."""
        x = arguments["input"]
        values = x.to(accumulate_dtype(x.dtype))
        moments = _moments(values.detach())
        place = len(self.seen)
        self.seen.append(moments)
        use = self.known[place] if place < len(self.known) else Statistics.of(moments)
        self._terms.append(_term(values, use))
        _move(arguments["running_mean"], use.mean, arguments["momentum"])
        _move(arguments["running_var"], use.variance * (use.count / (use.count - 1)), arguments["momentum"])
        normal = (values - _like(values, use.mean)) * _like(values, (use.variance + arguments["eps"]).rsqrt())
        weight, bias = arguments["weight"], arguments["bias"]
        normal = normal if weight is None else normal * _like(values, weight)
        return (normal if bias is None else normal + _like(values, bias)).to(x.dtype)


def _like(values: Tensor, channels: Tensor) -> Tensor:
    return channels.to(values.dtype).view(1, -1, *[1] * (values.ndim - 2))


def _over_channel(values: Tensor) -> Tensor:
    return values.sum([0, *range(2, values.ndim)])


def _moments(values: Tensor) -> Moments:
    count = values.new_full((), values.numel() // values.shape[1], dtype=torch.float64)
    mean = _over_channel(values) / count.clamp(min=1).to(values.dtype)
    return Moments(count, mean, _over_channel((values - _like(values, mean)).square()))


def _term(values: Tensor, use: Statistics) -> Tensor:
    """Return ⟨moments of the chunk, dL/d moments⟩; that of the variance does not move with the mean it is about."""
    deviations = (values - _like(values, use.mean.detach())).square()
    by_sum = (_over_channel(values) * use.by_mean).sum() + (_over_channel(deviations) * use.by_variance).sum()
    return by_sum / use.count.to(values.dtype)


def _move(running: Tensor | None, towards: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(towards.detach().to(running.dtype), momentum)
