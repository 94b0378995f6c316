"""The encoders of one call, each with its samples; their batch norms, which couple samples, and their buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from persample.errors import ArgumentError, LossError
from persample.inputs.batch import as_dicts
from persample.inputs.call import Call, normalize
from persample.inputs.params import BATCH_NORMS
from persample.merge import merge
from persample.processes import Processes, merged
from persample.utils import trees
from persample.utils.numerics import accumulate_dtype
from persample.utils.trees import Leaf, Tree

RULES = ("refuse", "chunk", "full")
_SIGNATURE = inspect.signature(F.batch_norm)
CHOOSE = (
    "Pass batched=True, reduce=Sum() and batch_norm='chunk' or batch_norm='full' for the sum over the samples. What is "
    "asked of each sample (clipping, norms) has no meaning there, since statistics of the batch make its output depend "
    "on all others: for that call .eval() on the batch norm (running statistics), or replace it by GroupNorm."
)
_CHECKPOINTS = (
    "encode_fn checkpoints activations: their recomputation in the backward pass would not find the statistics and the "
    "buffers of the forward pass. With batch_norm='chunk' and 'full' leave checkpointing off; chunk_size bounds memory."
)


class TrainModeBatchNorm(TorchFunctionMode):
    """Replaces every ``F.batch_norm`` that normalizes with the statistics of its input."""

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: object,
        args: Sequence[Leaf] = (),
        kwargs: Mapping[str, Leaf] | None = None,
    ) -> Tree:
        if func is F.batch_norm:
            bound = _SIGNATURE.bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            if bound.arguments["training"]:
                return self.normalize(**bound.arguments)
        return func(*args, **(kwargs or {}))

    def normalize(self, **arguments: Leaf) -> Tensor:  # noqa: ARG002 (for those of a subclass)
        """Return the result of ``F.batch_norm``, from its arguments by name; here refuse it."""
        raise LossError(
            "encode_fn normalizes with the statistics of a chunk (batch norm in train mode, or without running "
            "statistics): its results depend on chunk_size. Use .eval(), or choose with batch_norm='chunk' or 'full'."
        )


def refuse_batch_statistics(params: object) -> None:
    """Reject modules that normalize with the statistics of their batch."""
    for module in trees.flatten(params)[0]:
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            if isinstance(part, BATCH_NORMS) and (part.training or part.running_mean is None):
                mode = "in train mode" if part.training else "without running statistics"
                raise ArgumentError.about(
                    "params",
                    expected="an encoder that treats every sample alike, whatever the chunk it is in",
                    received=f"{name!r} ({type(part).__name__}) {mode}",
                    fix=CHOOSE,
                )


def guarded(fn: Callable[..., Tree], rule: str) -> Callable[..., Tree]:
    """Wrap an encoder of chunks, so that batch norm that a rule refuses, or checkpoints beside others, are an error."""

    def encode(*args: Leaf) -> Tree:
        if rule == "refuse":
            with TrainModeBatchNorm():
                return fn(*args)
        try:
            with disable_saved_tensors_hooks(_CHECKPOINTS):
                return fn(*args)
        except RuntimeError as error:
            if str(error) != _CHECKPOINTS:
                raise
            raise LossError(_CHECKPOINTS) from error

    return encode


@dataclass(frozen=True)
class BufferUpdate:
    """The value of one buffer after chunks that each started from its value before the call."""

    weight: int  # the number of samples of the chunks
    value: Tensor  # of a floating buffer the mean over these samples, of any other the value after the last chunk

    def merge(self, other: BufferUpdate) -> BufferUpdate:
        """Return the update of the chunks of both."""
        weight = self.weight + other.weight
        if not (self.weight and other.weight and self.value.is_floating_point()):
            return replace(other if other.weight else self, weight=weight)
        mean = self.value + (other.value - self.value) * (other.weight / weight)
        return BufferUpdate(weight, torch.where(self.value == other.value, self.value, mean))  # ∞ − ∞ is NaN


class BufferRecorder:
    """Records the buffers of the modules among the parameters after each chunk of the first pass."""

    def __init__(self) -> None:
        self._updates: list[BufferUpdate] = []

    def recorded(self, chunk: Call) -> Call:
        """Return a chunk whose encoder records the buffers after its forward pass."""
        fn = chunk.loss.fn

        def encode(params: object, *sample: Leaf) -> Tree:
            z = fn(params, *sample)
            modules = [leaf for leaf in trees.flatten(params)[0] if isinstance(leaf, nn.Module)]
            updates = [_update(chunk.size, buffer) for buffer in _buffers(modules)]
            self._updates = merge(self._updates, updates) if self._updates else updates
            return z

        return replace(chunk, loss=replace(chunk.loss, fn=encode))

    def write(self, modules: Sequence[nn.Module], processes: Processes) -> None:
        """Write the updates of all processes into the modules' own buffers."""
        for buffer, update in zip(_buffers(modules), merged(self._updates, processes), strict=True):
            value = update.value.to(buffer.dtype)
            if update.weight and not torch.equal(buffer, value):
                buffer.copy_(value)


def _update(size: int, buffer: Tensor) -> BufferUpdate:
    value = buffer.detach().clone()
    return BufferUpdate(size, value.to(accumulate_dtype(value.dtype)) if value.is_floating_point() else value)


def _buffers(modules: Sequence[nn.Module]) -> list[Tensor]:
    return list(nn.ModuleList(modules).buffers())


@dataclass(frozen=True)
class Encoder:
    """One encoder f and its samples."""

    call: Call  # f (``call.loss.returned`` returns z), its parameters, and the samples x₁ … xₙ
    chunk_size: int | None  # how many samples are encoded at a time, or None for all
    mode: str  # "eager" (vmap), "loop" (one sample at a time), or "batched" (f takes chunks)
    batch_norm: str  # "refuse", "chunk" or "full"

    @property
    def is_one_plain_chunk(self) -> bool:
        """Whether f takes all samples in one call, so that plain autograd computes the gradients."""
        whole = self.chunk_size is None or self.call.size <= self.chunk_size
        return self.mode == "batched" and self.batch_norm == "refuse" and whole and self.call.size > 0

    def chunks(self) -> Iterator[Call]:
        """Return the samples in chunks."""
        return self.call.chunks(self.chunk_size)

    def calling(self, fn: Callable[..., Tree]) -> Encoder:
        """Return the encoder with another function in place of f."""
        return replace(self, call=replace(self.call, loss=replace(self.call.loss, fn=fn)))


def build_encoders(
    encode_fn: object,
    params: object,
    inputs: object,
    *,
    in_dims: tuple[Tree, Tree],
    keep_batch_dim: bool,
    chunk_size: int | None,
    mode: str,
    batch_norm: str,
) -> tuple[list[Encoder], trees.TreeSpec]:
    """Return the encoders of a call of ``composite_grads`` and the structure of their container."""
    functions, container = trees.flatten(encode_fn)
    batches = trees.leaves_like(inputs, container)
    if batches is None or not functions:
        expected = f"the inputs of every encoder in the structure of encode_fn, {container}"
        fix = "Pass one batch of inputs for each encoder, under the same key or at the same place."
        raise ArgumentError.about("inputs", expected=expected, received=f"{trees.structure(inputs)}", fix=fix)
    if batch_norm == "refuse":
        refuse_batch_statistics(params)
    names = zip(trees.paths(encode_fn, "encode_fn"), trees.paths(encode_fn, "inputs"), strict=True)
    encoders = []
    for fn, batch, (called, given) in zip(functions, batches, names, strict=True):
        call = normalize(
            fn,
            params,
            as_dicts(batch),
            (),
            weights=None,
            in_dims=in_dims,
            keep_batch_dim=keep_batch_dim,
            randomness="different",
            batch_statistics=batch_norm != "refuse",
            called=called,
            given=given,
        )
        encoder = Encoder(call, chunk_size, mode, batch_norm)
        if mode == "batched":
            if any(call.params_batched):
                fix = "With batched=True all samples of a chunk share the parameters; leave batched=False."
                raise ArgumentError.about("in_dims[0]", expected="None", received=repr(in_dims[0]), fix=fix)
            encoder = encoder.calling(guarded(fn, batch_norm))
        encoders.append(encoder)
    return encoders, container
