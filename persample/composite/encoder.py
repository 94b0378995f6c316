"""The encoders of one call, each with its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from persample._torch import BatchNormBase
from persample.errors import ArgumentError
from persample.inputs import normalize
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.utils import trees

_CHOOSE = (
    "Call .eval() on it, replace it by GroupNorm, or pass batched=True and choose the statistics it normalizes with: "
    "batch_norm='chunk' or batch_norm='full'."
)


@dataclass(frozen=True)
class Tower:
    """One encoder and what it encodes.

    Args:
        samples: x₁ … xₙ, and f as their loss: its ``returned`` is z.
        chunk_size: how many of them are encoded at a time.
    """

    samples: Call
    chunk_size: int | None

    @property
    def encoder(self) -> SampleLoss:
        """The function f of flat tensors."""
        return self.samples.loss

    def chunks(self) -> Iterator[Call]:
        """Return the samples in pieces."""
        return self.samples.chunks(self.chunk_size)

    def calling(self, fn: Callable[..., Any]) -> Tower:
        """Return this tower with another function in the place of the user's."""
        return replace(self, samples=replace(self.samples, loss=replace(self.encoder, fn=fn)))


def build_towers(
    encode_fn: Any,
    params: Any,
    inputs: Any,
    *,
    in_dims: Any,
    keep_batch_dim: bool,
    chunk_size: int | None,
    batched: bool,
    batch_statistics: bool,
) -> tuple[list[Tower], trees.TreeSpec]:
    """Return the towers, and the container that their encoders came in.

    Args:
        encode_fn: the user's encoder, or a dict, tuple or list of encoders.
        params: the user's parameters, which every encoder receives.
        inputs: the samples, or the same container with the samples of each encoder.
        in_dims: the batch axes of ``params`` and of the inputs.
        keep_batch_dim: each sample keeps an axis of 1.
        chunk_size: how many samples are encoded at a time.
        batched: the encoders take chunks.
        batch_statistics: batch norm may be in train mode.

    Raises:
        ArgumentError: if any of them is of the wrong form.
    """
    encoders, container = trees.flatten(encode_fn)
    batches = trees.leaves_like(inputs, container)
    if batches is None or not encoders:
        expected = f"the inputs of every encoder in the structure of encode_fn, {container}"
        fix = "Pass one batch of inputs for each encoder, under the same key or at the same place."
        raise ArgumentError.about("inputs", expected=expected, received=f"{trees.structure(inputs)}", fix=fix)
    if not batch_statistics:
        refuse_batch_statistics(params)
    names = zip(trees.paths(encode_fn, "encode_fn"), trees.paths(encode_fn, "inputs"), strict=True)
    towers = []
    for encoder, batch, (called, given) in zip(encoders, batches, names, strict=True):
        call = normalize(
            encoder,
            params,
            batch,
            (),
            weights=None,
            in_dims=in_dims,
            keep_batch_dim=keep_batch_dim,
            called=called,
            given=given,
            batch_statistics=batch_statistics,
            randomness="different",
        )
        towers.append(Tower(call, chunk_size))
        if batched and any(towers[-1].samples.params_batched):
            fix = "With batched=True all samples of a chunk share the parameters; leave batched=False."
            raise ArgumentError.about("in_dims[0]", expected="None", received=repr(in_dims[0]), fix=fix)
    return towers, container


def refuse_batch_statistics(params: Any) -> None:
    """Refuse modules that normalize with the statistics of whatever batch they are given.

    Args:
        params: the user's parameters.

    Raises:
        ArgumentError: if there is one; it says what can be chosen.
    """
    for module in trees.flatten(params)[0]:
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            if isinstance(part, BatchNormBase) and (part.training or part.running_mean is None):
                mode = "in train mode" if part.training else "without running statistics"
                raise ArgumentError.about(
                    "params",
                    expected="an encoder that treats every sample alike, whatever the chunk it is in",
                    received=f"{name!r} ({type(part).__name__}) {mode}",
                    fix=_CHOOSE,
                )
