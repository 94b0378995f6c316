"""Backward passes that run code of the user's: blocks that run again in their own backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from persample._torch import engine_run_backward, run_by
from persample.errors import LossError
from persample.utils import trees
from persample.utils.numerics import storage_key
from persample.utils.tracing import untraced
from persample.utils.trees import Leaf, Tree

_OUTSIDE = (
    "loss_fn: code that runs in the backward pass differentiates a parameter itself, not the tensor that stands for it "
    "in the loss; the gradient would be lost. Pass the module as params (functional_call puts the parameters back "
    "before the backward pass), or give the block the parameters that loss_fn received."
)
_TWICE = (
    "loss_fn: a block that runs again in its own backward pass cannot be differentiated twice, because it would read "
    "other parameters in the second pass. Leave differentiable=False, or write the block without an autograd.Function."
)


class BackwardGuard(TorchFunctionMode):
    """Computes gradients of stand-ins; refuses code in the backward pass that differentiates what they stand for."""

    def __init__(self, stand_ins: Sequence[Tensor]) -> None:
        super().__init__()
        self._stand_ins, self._has_differentiated = stand_ins, False
        self._foreign: set[torch.Size] = set()  # shapes of other parameters that are differentiated

    def __torch_function__(
        self, func: Leaf, types: object, args: Sequence[Leaf] = (), kwargs: Mapping[str, Leaf] | None = None
    ) -> Tree:
        kwargs = dict(kwargs or {})
        if func is Tensor.backward:
            func, kwargs["grad_tensors"] = torch.autograd.backward, kwargs.pop("gradient")
        if func in (torch.autograd.grad, torch.autograd.backward):
            self._has_differentiated = True
            self._check(*args[:2] if func is torch.autograd.grad else (args[0], self._stand_ins))
            func = run_by(self._run, func)  # blocks may run again inside of this one
        return func(*args, **kwargs)

    def _run(self, *args: Leaf, **kwargs: Leaf) -> Tree:
        with self:  # torch's own functions leave the mode before the backward pass
            return engine_run_backward(*args, **kwargs)

    def grads(
        self, outputs: Sequence[Tensor], units: Sequence[Tensor], *, retain: bool = False, create_graph: bool = False
    ) -> list[Leaf]:
        """Return the gradients of the stand-ins, or None; what code accumulates during the pass is added."""
        for x in self._stand_ins:
            if x.is_leaf:
                x.grad = None
        flags = retain, create_graph, tuple(self._stand_ins), True
        found = self._run(tuple(outputs), tuple(units), *flags, accumulate_grad=False)
        pairs = [(g, x.grad if x.is_leaf else None) for x, g in zip(self._stand_ins, found, strict=True)]
        found = [g if own is None else own if g is None else g + own for g, own in pairs]
        if any(g is None and x.shape in self._foreign for x, g in zip(self._stand_ins, found, strict=True)):
            raise LossError(_OUTSIDE)
        return found

    def refuse_derivatives(self, results: object) -> None:
        """Make backward passes through results raise an error if they would run a block again without stand-ins."""
        for x in trees.flatten(results)[0] if self._has_differentiated else ():
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(_refuse_twice)

    def _check(self, outputs: object, inputs: object) -> None:
        given = [x for x in trees.flatten(inputs)[0] if isinstance(x, Tensor)]
        ours = {_key(x): x for x in self._stand_ins}
        reached = _reached(outputs, () if inputs is self._stand_ins else ours)
        memory = {storage_key(x) for x in self._stand_ins}
        # What functional_call has put back has the shape of a stand-in that takes no part.
        lost = [x.shape for x in given if (key := _key(x)) in ours and key not in reached]
        self._foreign |= {x.shape for x in given if isinstance(x, nn.Parameter) and id(x) not in ours}
        for x in (*given, *reached.values()):
            if isinstance(x, nn.Parameter) and id(x) not in ours and (storage_key(x) in memory or x.shape in lost):
                raise LossError(_OUTSIDE)


def _key(x: Tensor) -> object:
    """Return a key that identifies a tensor with a graph; a leaf saved by a checkpoint is another object."""
    if x.grad_fn is not None:
        return x.grad_fn
    with untraced():  # torch makes a view of the leaf: torch.cond differentiates its branches in a trace
        return id(get_gradient_edge(x).node.variable)  # type: ignore[attr-defined]


def _reached(outputs: Tree, ends: Tree) -> dict[object, Tree]:
    """Return the nodes of a graph up to some ends, and the leaves by their ids; the values of leaves are tensors."""
    reached: dict[object, Tree] = {}
    stack = [x.grad_fn for x in trees.flatten(outputs)[0] if isinstance(x, Tensor)]
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        key = node if leaf is None else id(leaf)
        if node is not None and key not in reached:
            reached[key] = leaf
            stack += [] if key in ends else [parent for parent, _ in node.next_functions]
    return reached


def _refuse_twice(_: Tensor) -> None:
    raise LossError(_TWICE)
