"""The first pass: z of every sample, without a graph; and batch norm with the statistics of all samples.

The statistics s of each batch norm depend on those of the earlier ones: s = S(θ, s), a triangular system. With L batch
norms, L passes solve it, and L more passes solve the adjoint system for dL/ds, with one chunk in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from persample import naive
from persample.composite.encoders import BufferRecorder, Encoder, TrainModeBatchNorm
from persample.engines.diagnosis import diagnosed, hinted, unwritten
from persample.engines.uncompiled import no_rows, of_fake_sample, vmapped
from persample.errors import LossError
from persample.inputs.call import Call, SampleLoss
from persample.merge import Moments, Summed, merge_all
from persample.processes import Processes, merged
from persample.utils import rng, trees
from persample.utils.numerics import accumulate_dtype
from persample.utils.trees import Leaf, Tree
from persample.vmap_rules import VmapRules
from persample.vmap_rules.effects import guarded


class Statistics(NamedTuple):
    """The statistics that one batch norm normalizes with, and the derivatives of L with respect to them."""

    mean: Tensor  # over all samples, ``[C]``
    variance: Tensor  # over all samples, ``[C]``, biased
    n: Tensor  # how many elements per channel were averaged, 0-d
    by_mean: Tensor  # dL/d mean, ``[C]``
    by_variance: Tensor  # dL/d variance, ``[C]``

    @classmethod
    def of(cls, moments: Moments) -> Statistics:
        """Return the statistics of moments, with derivatives of zero."""
        zero = torch.zeros_like(moments.mean)
        return cls(moments.mean, moments.m2 / moments.n.clamp(min=1), moments.n, zero, zero)


class FullBatch(TrainModeBatchNorm):
    """Normalizes with given statistics during one forward pass, and records the moments of each input.

    The statistics are those of the first batch norms, in the order of their calls; later ones use their input's own.
    ``term`` is the contribution of this forward pass to L through the statistics, Σ ⟨moments, dL/d moments⟩.
    """

    def __init__(self, statistics: Sequence[Statistics]) -> None:
        super().__init__()
        self._statistics = statistics
        self.moments: list[Moments] = []
        self.term: Tensor | float = 0.0

    def normalize(self, **arguments: Leaf) -> Tensor:
        """Return the result of ``F.batch_norm`` with the given statistics."""
        x, momentum = arguments["input"], arguments["momentum"]
        values = x.to(accumulate_dtype(x.dtype))
        place = len(self.moments)
        self.moments.append(_moments(values.detach()))
        use = self._statistics[place] if place < len(self._statistics) else Statistics.of(self.moments[place])
        self.term = self.term + _term(values, use)
        _move(arguments["running_mean"], use.mean, momentum)
        _move(arguments["running_var"], use.variance * (use.n / (use.n - 1)), momentum)
        normal = (values - _like(values, use.mean)) * _like(values, (use.variance + arguments["eps"]).rsqrt())
        weight, bias = arguments["weight"], arguments["bias"]
        normal = normal if weight is None else normal * _like(values, weight)
        return (normal if bias is None else normal + _like(values, bias)).to(x.dtype)


def normalized(
    fn: Callable[..., Tree], statistics: Sequence[Statistics] | None
) -> Callable[..., tuple[Tree, Tensor | float]]:
    """Return a function of the encoder's arguments that returns z, normalized with the statistics, and the term."""

    def encode(*args: Leaf) -> tuple[Tree, Tensor | float]:
        if statistics is None:
            return fn(*args), 0.0
        with FullBatch(statistics) as mode:
            z = fn(*args)
        return z, mode.term

    return encode


def _like(values: Tensor, channels: Tensor) -> Tensor:
    return channels.to(values.dtype).view(1, -1, *[1] * (values.ndim - 2))


def _channel_sums(values: Tensor) -> Tensor:
    return values.sum([0, *range(2, values.ndim)])


def _moments(values: Tensor) -> Moments:
    count = values.new_full((), values.numel() // values.shape[1], dtype=torch.float64)
    mean = _channel_sums(values) / count.clamp(min=1).to(values.dtype)
    return Moments(count, mean, _channel_sums((values - _like(values, mean)).square()))


def _term(values: Tensor, use: Statistics) -> Tensor:
    """Return ⟨moments of the chunk, dL/d moments⟩; the variance is taken about a constant mean."""
    deviations = (values - _like(values, use.mean.detach())).square()
    sums = (_channel_sums(values) * use.by_mean).sum() + (_channel_sums(deviations) * use.by_variance).sum()
    return sums / use.n.to(values.dtype)


def _move(running: Tensor | None, towards: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(towards.detach().to(running.dtype), momentum)


def solve_statistics(encoder: Encoder, start: rng.Streams, processes: Processes) -> list[Statistics]:
    """Return the statistics of all batch norms; each pass over the samples determines one more."""
    statistics: list[Statistics] = []
    while True:
        moments = merged(processes.together(partial(_moments_of_all, encoder, statistics)), processes)
        start.go_back()
        statistics = [Statistics.of(one) for one in moments[: len(statistics) + 1]]
        if any(one.n == 1 for one in statistics):
            raise LossError(
                "batch_norm='full': expected more than one number per channel, received one (a batch of 1 sample). "
                "Encode more samples, or use .eval()."
            )
        if len(statistics) == len(moments):
            return statistics


def _moments_of_all(encoder: Encoder, statistics: Sequence[Statistics]) -> list[Moments]:
    def moments(chunk: Call) -> list[Moments]:
        with FullBatch(statistics) as mode, diagnosed(chunk, batched=False):
            guarded(chunk.loss.returned)(chunk.params, chunk.leaves)
        return mode.moments

    return merge_all(map(moments, encoder.chunks()))


def solve_adjoint(
    contributions: Callable[[Sequence[Statistics]], Iterable[Call]],
    statistics: Sequence[Statistics],
    processes: Processes,
) -> Sequence[Statistics]:
    """Return the statistics with dL/d statistics; each pass determines one more, from the last to the first."""
    for _ in range(len(statistics)):
        by = merged(processes.together(partial(_derivatives, contributions, statistics)), processes)
        pairs = zip(by[::2], by[1::2], strict=True)
        statistics = [
            Statistics(one.mean, one.variance, one.n, by_mean.value, by_variance.value)
            for one, (by_mean, by_variance) in zip(statistics, pairs, strict=True)
        ]
    return statistics


def _derivatives(
    contributions: Callable[[Sequence[Statistics]], Iterable[Call]], statistics: Sequence[Statistics]
) -> list[Summed]:
    """Return the sums over all chunks of dL/d mean and dL/d variance of each batch norm, by turns."""
    tensors = [x for one in statistics for x in (one.mean, one.variance)]
    count = len(trees.flatten(list(statistics))[0])

    def derivatives(chunk: Call) -> list[Summed]:
        def loss(values: Sequence[Tensor]) -> tuple[Tensor, object]:
            triples = zip(statistics, values[::2], values[1::2], strict=True)
            moved = [Statistics(mean, variance, *one[2:]) for one, mean, variance in triples]
            return chunk.loss(chunk.params, [*chunk.leaves[:-count], *trees.flatten(moved)[0]])

        _, _, grads = chunk.loss.params.unchanged(lambda: naive.value_and_grad(loss, tensors))
        return [Summed(torch.zeros_like(x) if g is None else g) for x, g in zip(tensors, grads, strict=True)]

    return merge_all(map(derivatives, contributions(statistics)))


def encode_chunk(chunk: Call, mode: str) -> Tree:
    """Encode the samples of a chunk."""
    if mode == "batched":
        return _at_once(chunk)
    if not chunk.size:
        z = trees.tree_map(no_rows, of_fake_sample(partial(_returned, chunk.loss), chunk))
    else:
        z = _under_vmap(chunk) if mode == "eager" else _one_by_one(chunk)
    return trees.tree_map(lambda x: x.squeeze(1), z) if chunk.loss.keep_batch_dim else z


def _under_vmap(chunk: Call) -> Tree:
    def one(params: Sequence[Tensor], leaves: Sequence[Leaf]) -> Tree:
        with VmapRules():
            return _returned(chunk.loss, params, leaves)

    with diagnosed(chunk, batched=True), hinted(chunk):
        return vmapped(one, chunk)


def _one_by_one(chunk: Call) -> Tree:
    rows = []
    for i in range(chunk.size):
        with diagnosed(chunk, batched=False), hinted(chunk, i):
            rows.append(guarded(_returned)(chunk.loss, *chunk.at(i)))
    return trees.tree_map(lambda *z: torch.stack(z), *rows)


def _at_once(chunk: Call) -> Tree:
    with diagnosed(chunk, batched=False):
        z = guarded(_returned)(chunk.loss, chunk.params, chunk.leaves)
    for path, leaf in _named(z):
        if leaf.shape[:1] != (chunk.size,):
            raise LossError(
                f"{chunk.loss.called}: with batched=True expected {path} to hold one row for each of the {chunk.size} "
                f"samples of a chunk, received shape {list(leaf.shape)}. Return [chunk, ...], or write encode_fn for "
                "one sample and leave batched=False."
            )
    return z


def _returned(encoder: SampleLoss, params: Sequence[Tensor], leaves: Sequence[Leaf]) -> Tree:
    """Call the encoder and return z; reject any result but a tree of tensors."""
    z = encoder.returned(params, leaves)
    named = _named(z)
    for path, leaf in named:
        if not isinstance(leaf, Tensor):
            raise LossError(
                f"{encoder.called}: expected {path} to be a tensor, received {type(leaf).__name__}. Return a tensor, "
                "or a dict, tuple or list of tensors."
            )
        if encoder.keep_batch_dim and leaf.shape[:1] != (1,):
            raise LossError(
                f"{encoder.called}: with keep_batch_dim=True expected {path} to keep the leading axis of 1, received "
                f"shape {list(leaf.shape)}. Return [1, ...]."
            )
    if not named:
        raise LossError(f"{encoder.called}: expected tensors, received an empty {type(z).__name__}. Return z.")
    return z


def _named(z: object) -> list[tuple[str, Leaf]]:
    return list(zip(trees.paths(z, "z"), trees.flatten(z)[0], strict=True))


@dataclass(frozen=True)
class FirstPass:
    """z of all samples, with the random state and the statistics that the second pass needs to compute the same z."""

    z: Tree  # a tree of detached tensors ``[n, ...]`` in memory of their own
    start: rng.Streams  # the states of the random streams before the pass
    statistics: Sequence[Statistics] | None  # the statistics that batch norms are given; None for those of each chunk


def encode(encoder: Encoder, recorder: BufferRecorder | None, processes: Processes) -> FirstPass:
    """Encode all samples, chunk by chunk."""
    start = rng.Streams.now()
    statistics = _statistics(encoder, start, processes)
    forward = normalized(encoder.call.loss.fn, statistics)
    replaced = encoder.calling(lambda *args: forward(*args)[0])

    def chunk_by_chunk() -> Tree:
        with unwritten(encoder.call):
            chunks = replaced.chunks() if recorder is None else map(recorder.recorded, replaced.chunks())
            pieces = [trees.tree_map(compact, encode_chunk(chunk, encoder.mode)) for chunk in chunks]
        return trees.tree_map(lambda *rows: torch.cat(rows), *pieces)

    return FirstPass(processes.together(chunk_by_chunk), start, statistics)


def compact(z: Tensor) -> Tensor:
    """Return z detached, without the larger tensor that it may be a view of (one token of a sequence, say)."""
    alone = z.untyped_storage().nbytes() == z.numel() * z.element_size()
    return z.detach() if alone else z.detach().clone(memory_format=torch.contiguous_format)


def _statistics(encoder: Encoder, start: rng.Streams, processes: Processes) -> Sequence[Statistics] | None:
    if encoder.batch_norm == "full":
        return solve_statistics(encoder, start, processes)
    # torch's batch norm rejects an empty chunk; ours normalizes it with the chunk's own statistics.
    return [] if encoder.batch_norm == "chunk" and not encoder.call.size else None
