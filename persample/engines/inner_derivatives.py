"""Losses that differentiate with respect to tensors of their own, by ``torch.autograd.grad(…, create_graph=True)``.

Plain autograd differentiates them under one vmap: every sample has copies of the parameters, no sample depends on
another, and so the gradient of a sum over samples holds those of each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from persample._torch import (
    add_batch_dim,
    load_decompositions,
    maybe_get_bdim,
    maybe_get_level,
    temporarily_clear_interpreter_stack,
    vmap_increment_nesting,
)
from persample.engines.layers.shared import Vmap
from persample.gradients import Gradients
from persample.inputs.call import Call, NotConnectedError
from persample.utils.tracing import unwrapped_once
from persample.utils.trees import Leaf, Tree, tree_map
from persample.vmap_rules import VmapRules
from persample.vmap_rules.levels import Args, Function, Options


def gradients(call: Call) -> Gradients:
    """Compute the gradients of all samples of a chunk, not empty, at once, outside of all transforms, written out.

    A ``RuntimeError`` if the loss differentiates what samples share, or by what is no output of autograd.
    """
    load_decompositions()
    pairs = zip(call.params, call.params_batched, strict=True)
    copies = [(x if split else x.expand(call.size, *x.shape)).detach().requires_grad_() for x, split in pairs]
    with torch.enable_grad(), vmap_increment_nesting(call.size, call.randomness) as level:
        batched = zip(call.leaves, call.leaves_batched, strict=True)
        leaves = [add_batch_dim(x.detach(), 0, level) if split else x for x, split in batched]
        vmap = Vmap(level, call.size)
        with _Derivatives(vmap):
            value, (aux, has_aux) = call.loss([add_batch_dim(x, 0, level) for x in copies], leaves)
        losses = vmap.all_rows(value)
        aux = tree_map(lambda x: vmap.all_rows(x).detach().clone(), aux)
    if not losses.requires_grad:
        raise NotConnectedError
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": losses.ndim > 1}
    with torch.enable_grad():
        each = [losses] if losses.ndim == 1 else losses.unbind(1)
    rows = [torch.autograd.grad([x], copies, [torch.ones_like(x)], **options) for x in each]
    dense = list(rows[0]) if losses.ndim == 1 else [torch.stack(column, 1) for column in zip(*rows, strict=True)]
    facts = {"spec": call.loss.spec, "losses": losses.detach(), "aux": aux, "has_aux": has_aux, "weights": call.weights}
    return Gradients.dense(dense, **facts)


class _Derivatives(VmapRules):
    """Rules for functions of autograd, on the tensors of all samples."""

    def __init__(self, vmap: Vmap) -> None:
        super().__init__(differentiated_by="any")
        self._vmap = vmap
        self._own: dict[object, Callable[..., object]] = {
            torch.autograd.grad: self._grad,
            Tensor.requires_grad_: self._mark,
            Tensor.requires_grad.__set__: self._mark,  # type: ignore[attr-defined]
            Tensor.requires_grad.__get__: lambda x: self._plain(x).requires_grad,  # type: ignore[attr-defined]
            Tensor.is_leaf.__get__: lambda x: self._plain(x).is_leaf,  # type: ignore[attr-defined]
        }

    def replaced(self, func: Function, args: Args, kwargs: Options) -> Tree:
        if func in self._own:
            return self._own[func](*args, **kwargs)
        return super().replaced(func, args, kwargs)

    def _plain(self, x: Tensor) -> Tensor:
        return unwrapped_once(x) if maybe_get_level(x) == self._vmap.level else x

    def _mark(self, x: Tensor, requires_grad: bool = True) -> Tensor:
        plain = self._plain(x)
        with temporarily_clear_interpreter_stack():
            plain.requires_grad_(requires_grad)
        return x

    def _grad(
        self, outputs: Tree, inputs: Tree, grad_outputs: Tree = None, *args: Leaf, **kwargs: Leaf
    ) -> tuple[Tensor | None, ...]:
        """Compute ``torch.autograd.grad`` of all samples at once."""
        outputs, inputs = ([x] if isinstance(x, Tensor) else list(x) for x in (outputs, inputs))
        given = [None] * len(outputs) if grad_outputs is None else grad_outputs
        given = [given] if isinstance(given, Tensor) else list(given)
        levels = {*map(maybe_get_level, (*outputs, *inputs))}
        if args[3:] or kwargs.get("is_grads_batched") or levels != {self._vmap.level}:
            raise RuntimeError("a derivative of what all samples share")
        units = list(map(self._unit, outputs, given))
        with temporarily_clear_interpreter_stack():
            plain = list(map(unwrapped_once, inputs))
            found = torch.autograd.grad(list(map(self._vmap.all_rows, outputs)), plain, units, *args, **kwargs)
        pairs = zip(found, inputs, strict=True)
        return tuple(None if g is None else add_batch_dim(g, maybe_get_bdim(x), self._vmap.level) for g, x in pairs)

    def _unit(self, output: Tensor, given: Tensor | None) -> Tensor:
        if given is None and output.ndim:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return self._vmap.all_rows(torch.ones_like(output) if given is None else given)
