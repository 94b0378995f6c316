"""The second pass: ⟨zᵢ, dL/dzᵢ⟩ as the loss of sample i, on the random numbers of the first pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from persample.composite.encoder import Tower
from persample.gradients import Gradients
from persample.inputs.loss import SampleLoss
from persample.merge import AnyOf
from persample.reductions import Reduction
from persample.utils import rng, trees
from persample.utils.dtypes import accumulate_dtype, as_real, is_autocast

T = TypeVar("T")


class Replay:
    """The random streams of passes over the chunks: each chunk goes on where the forward pass before it stopped.

    What backward passes draw in between is not heard. Only one place in the streams is kept, not one per chunk.

    Args:
        start: where the first pass started.
    """

    def __init__(self, start: rng.Streams) -> None:
        self._start = self._next = start

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Go through chunks, the streams where they stood at each in the first pass.

        Args:
            items: the chunks.

        Yields:
            The chunks.
        """
        self._next = self._start
        for item in items:
            self._next.go_back()
            yield item
            torch.clear_autocast_cache()  # which holds casts of every chunk's handles of the parameters

    def forward_done(self) -> None:
        """Note where the streams stand after a forward pass."""
        self._next = rng.Streams.now()


def contributions(
    tower: Tower,
    z: Any,
    cotangents: Sequence[Tensor | None],
    replay: Replay,
    further: Callable[[], Tensor | float],
) -> Tower:
    """Return ⟨zᵢ, dL/dzᵢ⟩ as the loss of sample i of a tower.

    Args:
        tower: the encoder and its samples.
        z: what the first pass found.
        cotangents: dL/dz, one per leaf of z; None where L does not depend on it.
        replay: is told where each forward pass ends.
        further: what else a forward pass contributes to L, beside z.

    Returns:
        A tower of losses; beside each is how far z is from that of the first pass (``deviation``).
    """
    before = trees.flatten(z)[0]
    given = [cotangent for cotangent in cotangents if cotangent is not None]
    unpack = tower.encoder.unpack

    def loss(params: Any, sample: Any, given: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Tensor, Any]:
        leaves, _ = trees.flatten(tower.encoder.fn(params, *sample) if unpack else tower.encoder.fn(params, sample))
        replay.forward_done()
        moving = [leaf for leaf, cotangent in zip(leaves, cotangents, strict=True) if cotangent is not None]
        products = [inner_product(leaf, cotangent) for leaf, cotangent in zip(moving, given, strict=True)]
        return sum(products[1:], start=products[0]) + further(), [
            deviation(*pair) for pair in zip(leaves, before, strict=True)
        ]

    extra = (*given, *before)
    structures = [trees.structure(given), trees.structure(before)]
    encoder = replace(
        tower.encoder,
        fn=loss,
        batch=trees.treespec_tuple([tower.encoder.batch, *structures]),
        batched=(*tower.encoder.batched, *(True for _ in extra)),
        unpack=True,
    )
    samples = tower.samples
    batched = (*samples.leaves_batched, *(True for _ in extra))
    leaves = (*samples.leaves, *extra)
    return replace(tower, samples=replace(samples, loss=encoder, leaves=leaves, leaves_batched=batched))


def inner_product(z: Tensor, cotangent: Tensor) -> Tensor:
    """Return ⟨z, c⟩, of which the gradient is c: complex numbers as pairs of reals, summed in float32 at least.

    Examples:
        >>> inner_product(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor(11.)
    """
    dtype = accumulate_dtype(z.dtype)
    return (as_real(z).to(dtype) * as_real(cotangent).to(dtype)).sum()


def deviation(z: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest |z − z₁|, and the largest finite |z₁|, 0-d each; NaN and ∞ equal themselves.

    Examples:
        >>> deviation(torch.tensor([1.0, torch.inf]), torch.tensor([4.0, torch.inf]))
        (tensor(3.), tensor(4.))
    """
    dtype = accumulate_dtype(z.dtype) if z.is_floating_point() or z.is_complex() else torch.float64
    now, then = (as_real(x.detach()).to(dtype) for x in (z, before))
    same = (now == then) | (now.isnan() & then.isnan())
    largest = [torch.where(same, 0, (now - then).abs()), torch.where(then.isfinite(), then, 0).abs()]
    zero = now.new_zeros(1)  # so that there is a largest even of nothing
    difference, size = (torch.cat([x.flatten(), zero]).max() for x in largest)
    return difference, size


class NotReplayedError(Exception):
    """The second pass encoded a sample to another z.

    Args:
        leaf: the place of the leaf of z.
        difference: the largest |z − z₁|.
        size: the largest |z₁|.
    """

    def __init__(self, leaf: int, difference: float, size: float) -> None:
        super().__init__(leaf, difference, size)
        self.leaf, self.difference, self.size = leaf, difference, size


@dataclass(frozen=True)
class Replayed(Reduction):
    """Nothing but the check that the second pass encodes as the first did.

    Args:
        tolerance: what |z − z₁| may be, relative to the largest |z₁| of a chunk.
    """

    tolerance: float
    uses: ClassVar[frozenset[str]] = frozenset()

    def lift(self, gradients: Gradients) -> Any:
        """Check the deviations of one chunk."""
        largest = [rows.max().double() for leaf in gradients.aux or () for rows in leaf]
        found = torch.stack(largest).tolist() if largest else []  # read together: a device waits once
        for place, (difference, size) in enumerate(zip(found[::2], found[1::2], strict=True)):
            if not difference <= self.tolerance * size:
                raise NotReplayedError(place, difference, size)
        return AnyOf(value=True)

    def finish(self, merged: Any) -> Any:
        """Return nothing."""


def tolerance(encoder: SampleLoss, z: Any) -> float:
    """Return √eps of the coarsest format that z is computed in.

    Another dropout mask moves z by a share of its size; kernels that differ with and without a graph by a few eps.

    Args:
        encoder: f, whose parameters are looked at.
        z: what the first pass found.
    """
    dtypes = [*encoder.spec.dtypes, *(leaf.dtype for leaf in trees.flatten(z)[0])]
    devices = {leaf.device for leaf in trees.flatten(z)[0]}
    dtypes += [torch.get_autocast_dtype(device.type) for device in devices if is_autocast(device)]
    return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex) ** 0.5
