"""Gradient caching: encode without a graph, differentiate the loss L = g(z), and back-propagate dL/dz by chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from persample import inputs, naive
from persample.composite import first_pass, second_pass
from persample.composite.encoders import BufferRecorder, Encoder
from persample.composite.second_pass import encode_with_graph
from persample.errors import ArgumentError, LossError
from persample.inputs.modules import ParamTree
from persample.merge import merge_all
from persample.processes import Processes, merged, own_rows
from persample.reductions.base import Reductions
from persample.utils import rng, trees
from persample.utils.tracing import inside
from persample.utils.trees import Leaf, Tree
from persample.vmap_rules.effects import guarded


@dataclass(frozen=True)
class LossHead:
    """g with its own parameters."""

    loss_fn: Callable[..., Tree]  # from (loss_params, z), or from z alone, to L
    params: ParamTree | None  # the flattened parameters of g; None if it has none
    container: trees.TreeSpec  # the structure of the encoders' container, which is that of their z, too

    def differentiate(self, z: Sequence[Leaf]) -> tuple[Tensor, Tree, list[list[Tensor | None]]]:
        """Compute L and its derivatives.

        Args:
            z: z of all samples, one tree per encoder.

        Returns:
            The detached loss, the gradients of the loss parameters (a tree like them; None without), and for each
            encoder dL/dz, one per leaf of z, None where L does not depend on it.

        Raises:
            LossError: if g does not return a real scalar, or does not depend on z.
        """
        leaves, structure = trees.flatten(trees.unflatten(list(z), self.container))
        own = list(self.params.tensors) if self.params else []
        places = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point() or leaf.is_complex()]

        def value(tensors: Sequence[Tensor]) -> tuple[Tensor, Tree]:
            placed = dict(zip(places, tensors[len(own) :], strict=True))
            filled = trees.unflatten([placed.get(i, leaf) for i, leaf in enumerate(leaves)], structure)
            return _checked(self._call(tensors[: len(own)], filled)), ()

        inputs = [*own, *(leaves[i] for i in places)]
        differentiate = partial(naive.value_and_grad, value, inputs)
        loss, _, grads = self.params.unchanged(differentiate) if self.params else differentiate()
        by_place = dict(zip(places, grads[len(own) :], strict=True))
        if all(grad is None for grad in by_place.values()):
            raise LossError(
                "loss_fn: expected a loss that depends on z, received one that depends on none of it (it is detached, "
                "not used, or holds no floating tensor). Compute the loss from the z it is given."
            )
        filled = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(own, grads, strict=False)]
        tree = trees.unflatten(filled, self.params.result) if self.params else None
        cotangents = (by_place.get(i) for i in range(len(leaves)))
        return loss, tree, [list(islice(cotangents, len(trees.flatten(of_one)[0]))) for of_one in z]

    def _call(self, own: Sequence[Tensor], z: object) -> Tree:
        with inside("loss_fn", self.params):
            loss_fn = guarded(self.loss_fn)
            return loss_fn(z) if self.params is None else self.params.call(own, loss_fn, (z,))


def build_loss_head(loss_fn: object, loss_params: object, container: trees.TreeSpec) -> LossHead:
    """Return the loss and its parameters; reject anything but a function and floating parameters."""
    if not callable(loss_fn):
        fix = "Pass a function of z, or of (loss_params, z)."
        raise ArgumentError.about("loss_fn", expected="a function", received=type(loss_fn).__name__, fix=fix)
    params = None if loss_params is None else inputs.check_params(loss_params, name="loss_params")
    return LossHead(loss_fn, params, container)


def _checked(loss: object) -> Tensor:
    if isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point():
        return loss
    received = f"shape {list(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"loss_fn: expected to return one real scalar tensor for all samples, received {received}. Reduce it, for "
        "example with .mean(), and return nothing beside it."
    )


# From dL/dz, one per leaf of z, to the leaves of every reduction and whether z depends on any parameter.
Pullback: TypeAlias = Callable[[Sequence[Tensor | None]], Tree]
_NOT_CONNECTED = (
    "encode_fn: expected z that depends on params, received z that depends on none of them. Likely causes: it uses a "
    "module or tensors it closed over instead of the params it is given, every path is detached, or the parameters "
    "sit in a module hidden in a plain Python list (use nn.ModuleList). Compute z from the first argument."
)


def loss_and_gradients(
    encoders: Sequence[Encoder],
    head: LossHead,
    reductions: Reductions,
    recorder: BufferRecorder | None,
    processes: Processes,
) -> tuple[Tensor, Tree, list[Leaf]]:
    """Compute L = g(z), the gradients of g's own parameters, and the reductions of the samples' contributions."""
    sizes = [*zip(*processes.gather_objects([encoder.call.size for encoder in encoders]), strict=True)]  # by rank
    inputs.check_averages(reductions.reductions, None, sum(map(sum, sizes)))
    encoded, pullbacks = zip(*(vjp(encoder, reductions, recorder, processes) for encoder in encoders), strict=True)
    z = [processes.gather_rows(*pair) for pair in zip(encoded, sizes, strict=True)]
    loss, loss_grads, cotangents = processes.together(lambda: _differentiated(head, z, processes))
    after = rng.Streams.now()
    try:
        own = (own_rows(*pair, processes.rank) for pair in zip(cotangents, sizes, strict=True))
        lifted = merge_all(pullback(rows) for pullback, rows in zip(pullbacks, own, strict=True))
        leaves, connected = merged(lifted, processes)
    finally:
        after.go_back()
    if not connected.value and any(map(sum, sizes)):
        raise LossError(_NOT_CONNECTED)
    return loss, loss_grads, leaves


def vjp(
    encoder: Encoder, reductions: Reductions, recorder: BufferRecorder | None, processes: Processes
) -> tuple[Tree, Pullback]:
    """Encode all samples; return z and the function that back-propagates dL/dz (vector-Jacobian products)."""
    if encoder.is_one_plain_chunk:
        z, back_propagate = processes.together(lambda: encode_with_graph(encoder.call))
        return z, lambda cotangents: processes.together(lambda: reductions.lift(back_propagate(cotangents)))
    first = first_pass.encode(encoder, recorder, processes)
    return first.z, lambda cotangents: second_pass.back_propagate(encoder, first, cotangents, reductions, processes)


def _differentiated(
    head: LossHead, z: Sequence[Leaf], processes: Processes
) -> tuple[Tensor, Tree, list[list[Tensor | None]]]:
    before = None if processes.group is None else rng.snapshot()
    result = head.differentiate(z)
    if before is not None and rng.moved_since(before):
        raise LossError(
            "loss_fn drew random numbers: every process of the group would compute another loss. Draw them before, "
            "alike on every process, and let loss_fn close over them."
        )
    return result
