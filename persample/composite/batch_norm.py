"""Batch norm in train mode couples the samples of a chunk: where it is rejected, and how it is intercepted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from persample._torch import BatchNormBase
from persample.errors import ArgumentError, LossError
from persample.utils import trees

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            bound = _SIGNATURE.bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            if bound.arguments["training"]:
                return self.normalize(**bound.arguments)
        return func(*args, **(kwargs or {}))

    def normalize(self, **arguments: Any) -> Tensor:
        """Return the result of ``F.batch_norm``, from its arguments by name."""
        raise NotImplementedError


class _Rejecting(TrainModeBatchNorm):
    def normalize(self, **_: Any) -> Tensor:
        raise LossError(
            "encode_fn normalizes with the statistics of a chunk (batch norm in train mode, or without running "
            "statistics): its results depend on chunk_size. Use .eval(), or choose with batch_norm='chunk' or 'full'."
        )


def refuse_batch_statistics(params: Any) -> None:
    """Reject modules that normalize with the statistics of their batch.

    Args:
        params: the user's parameters.

    Raises:
        ArgumentError: if there is such a module; the message lists the choices.
    """
    for module in trees.flatten(params)[0]:
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            if isinstance(part, BatchNormBase) and (part.training or part.running_mean is None):
                mode = "in train mode" if part.training else "without running statistics"
                raise ArgumentError.about(
                    "params",
                    expected="an encoder that treats every sample alike, whatever the chunk it is in",
                    received=f"{name!r} ({type(part).__name__}) {mode}",
                    fix=CHOOSE,
                )


def guarded(fn: Callable[..., Any], rule: str) -> Callable[..., Any]:
    """Return an encoder of chunks that raises an error where it breaks the rule.

    Args:
        fn: the user's encoder.
        rule: "refuse" rejects batch norm in train mode outside of the modules in ``params``; "chunk" and "full" reject
            checkpoints, which would recompute activations from other statistics and buffers.
    """
    return _without_batch_statistics(fn) if rule == "refuse" else _without_checkpoints(fn)


def _without_batch_statistics(fn: Callable[..., Any]) -> Callable[..., Any]:
    def encode(*args: Any) -> Any:
        with _Rejecting():
            return fn(*args)

    return encode


def _without_checkpoints(fn: Callable[..., Any]) -> Callable[..., Any]:
    def encode(*args: Any) -> Any:
        try:
            with disable_saved_tensors_hooks(_CHECKPOINTS):
                return fn(*args)
        except RuntimeError as error:
            if str(error) != _CHECKPOINTS:
                raise
            raise LossError(_CHECKPOINTS) from error

    return encode
