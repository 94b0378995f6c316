"""The encoders of one call, each with its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from persample.composite.batch_norm import guarded, refuse_batch_statistics
from persample.errors import ArgumentError
from persample.inputs.call import Call, normalize
from persample.utils import trees


@dataclass(frozen=True)
class Encoder:
    """One encoder f and its samples.

    Args:
        call: f (``call.loss.returned`` returns z), its parameters, and the samples x₁ … xₙ.
        chunk_size: how many samples are encoded at a time, or None for all.
        mode: "eager" (vmap), "loop" (one sample at a time), or "batched" (f takes chunks).
        batch_norm: "refuse", "chunk" or "full".
    """

    call: Call
    chunk_size: int | None
    mode: str
    batch_norm: str

    @property
    def is_one_plain_chunk(self) -> bool:
        """Whether f takes all samples in one call, so that plain autograd computes the gradients."""
        whole = self.chunk_size is None or self.call.size <= self.chunk_size
        return self.mode == "batched" and self.batch_norm == "refuse" and whole and self.call.size > 0

    def chunks(self) -> Iterator[Call]:
        """Return the samples in chunks."""
        return self.call.chunks(self.chunk_size)

    def calling(self, fn: Callable[..., Any]) -> Encoder:
        """Return the encoder with another function in place of f."""
        return replace(self, call=replace(self.call, loss=replace(self.call.loss, fn=fn)))


def build_encoders(
    encode_fn: Any,
    params: Any,
    inputs: Any,
    *,
    in_dims: Any,
    keep_batch_dim: bool,
    chunk_size: int | None,
    mode: str,
    batch_norm: str,
) -> tuple[list[Encoder], trees.TreeSpec]:
    """Return the encoders of a call of ``composite_grads`` and the structure of their container.

    Raises:
        ArgumentError: if an argument is of the wrong form.
    """
    functions, container = trees.flatten(encode_fn)
    batches = trees.leaves_like(inputs, container)
    if batches is None or not functions:
        expected = f"the inputs of every encoder in the structure of encode_fn, {container}"
        fix = "Pass one batch of inputs for each encoder, under the same key or at the same place."
        raise ArgumentError.about("inputs", expected=expected, received=f"{trees.structure(inputs)}", fix=fix)
    if batch_norm == "refuse":
        refuse_batch_statistics(params)
    shared: dict[str, Any] = {
        "weights": None,
        "in_dims": in_dims,
        "keep_batch_dim": keep_batch_dim,
        "randomness": "different",
        "batch_statistics": batch_norm != "refuse",
    }
    names = zip(trees.paths(encode_fn, "encode_fn"), trees.paths(encode_fn, "inputs"), strict=True)
    encoders = []
    for fn, batch, (called, given) in zip(functions, batches, names, strict=True):
        call = normalize(fn, params, batch, (), called=called, given=given, **shared)
        encoder = Encoder(call, chunk_size, mode, batch_norm)
        if mode == "batched":
            _refuse_params_of_samples(call, in_dims)
            encoder = encoder.calling(guarded(fn, batch_norm))
        encoders.append(encoder)
    return encoders, container


def _refuse_params_of_samples(call: Call, in_dims: Any) -> None:
    if any(call.params_batched):
        fix = "With batched=True all samples of a chunk share the parameters; leave batched=False."
        raise ArgumentError.about("in_dims[0]", expected="None", received=repr(in_dims[0]), fix=fix)
