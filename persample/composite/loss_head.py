"""The loss of all samples, L = g(z), and its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from persample import inputs, naive
from persample.errors import ArgumentError, LossError
from persample.inputs.modules import ParamTree
from persample.utils import trees
from persample.utils.tracing import inside
from persample.vmap_rules.effects import guarded


@dataclass(frozen=True)
class LossHead:
    """g with its own parameters.

    Args:
        loss_fn: from (loss_params, z), or from z alone, to L.
        params: the flattened parameters of g; None if it has none.
        container: the structure of the encoders' container, which is that of their z, too.
    """

    loss_fn: Callable[..., Any]
    params: ParamTree | None
    container: trees.TreeSpec

    def differentiate(self, z: Sequence[Any]) -> tuple[Tensor, Any, list[list[Tensor | None]]]:
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

        def value(tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
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

    def _call(self, own: Sequence[Tensor], z: Any) -> Any:
        with inside("loss_fn", self.params):
            loss_fn = guarded(self.loss_fn)
            return loss_fn(z) if self.params is None else self.params.call(own, loss_fn, (z,))


def build_loss_head(loss_fn: Any, loss_params: Any, container: trees.TreeSpec) -> LossHead:
    """Return the loss and its parameters; reject anything but a function and floating parameters."""
    if not callable(loss_fn):
        fix = "Pass a function of z, or of (loss_params, z)."
        raise ArgumentError.about("loss_fn", expected="a function", received=type(loss_fn).__name__, fix=fix)
    params = None if loss_params is None else inputs.check_params(loss_params, name="loss_params")
    return LossHead(loss_fn, params, container)


def _checked(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point():
        return loss
    received = f"shape {list(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"loss_fn: expected to return one real scalar tensor for all samples, received {received}. Reduce it, for "
        "example with .mean(), and return nothing beside it."
    )
