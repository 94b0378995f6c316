"""Per-sample gradients of a loss with layers: one vmap, and one backward pass of plain autograd.

``vmap(vjp(loss_fn))`` sends every operation through two transforms, in both directions. Here the loss runs under one
vmap. Linear and recurrent layers, convolutions and embeddings record their inputs and output gradients, which are the
factors of their weights. What the loss computes of parameters alone is a parameter of the rest. Any other function is
given small parameters as one copy per sample; one of large parameters and samples is left to ``vmap(vjp(loss_fn))``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from persample._torch import (
    add_batch_dim,
    lazy_load_decompositions,
    remove_batch_dim,
    transforms,
    vmap_increment_nesting,
)
from persample.engines.layers.computed import pull_back
from persample.engines.layers.guard import LayerGuard
from persample.engines.layers.interceptor import LayerInterceptor
from persample.engines.layers.recorder import LayerRecorder
from persample.engines.layers.shared import NotLayersError, SharedParams, Vmap
from persample.errors import LossError, TorchVersionError
from persample.factors.cost_model import Plan
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError
from persample.inputs.options import NestedCallError
from persample.utils.dtypes import full_precision
from persample.utils.interrupts import raise_interrupt
from persample.utils.origin import is_users
from persample.utils.tracing import is_traced
from persample.utils.trees import tree_map


def unsuited(call: Call) -> str:
    """Return why a loss is not tried as made of layers, as far as the call tells; "" for one that is tried.

    Args:
        call: the chunk, not empty.
    """
    if call.differentiated or transforms():
        return "the caller differentiates or batches the call"
    if any(call.params_batched):
        return "each sample has parameters of its own"
    if not all(map(Tensor.is_floating_point, call.params)):
        return "a parameter is complex"
    if is_traced(call.params[0]) and _enters_transforms(call.loss.fn):
        return "the loss enters transforms of torch.func"
    return ""


def _enters_transforms(captured: Any) -> bool:
    """Return whether a captured loss enters transforms, by operations: a refusal would leave it between them."""
    graph = getattr(getattr(captured, "capture", None), "graph", None)
    return graph is not None and any("nesting" in str(node.target) for node in graph.graph.nodes)


def gradients(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients of all samples at once.

    Args:
        call: the chunk, not empty.
        required_ops: the operations of ``Factor`` that the reductions call.

    Returns:
        The gradients.

    Raises:
        NotLayersError: if the loss does what is not known here, or if torch raises a ``RuntimeError`` or a warning: its
            types for what autograd or vmap cannot do, which may differ under ``vmap(vjp)``.
        LossError: if the loss depends on no parameter, or returns no scalar.
        Exception: what the loss itself raises, and any other error of torch's (an index out of range).
    """
    handled = sys.exc_info()[1]
    in_trace = is_traced(call.params[0])
    try:
        return _gradients(call, required_ops)
    except (LossError, TorchVersionError):
        raise
    except NestedCallError as error:  # under vmap(vjp) the call inside of the loss can be differentiated
        raise NotLayersError(str(error)) from error
    except (RuntimeError, ValueError, Warning) as error:
        raise_interrupt(error, handled)
        # A captured graph raises no errors of the user's, and those of torch's about views are ValueErrors in a trace.
        if not in_trace and (isinstance(error, ValueError) or is_users(error, handled)):
            raise
        raise NotLayersError(str(error)) from error


def _gradients(call: Call, required_ops: frozenset[str]) -> Gradients:
    params, recorder, losses, aux, has_aux = _forward(call, call.plan(required_ops))
    if not losses.requires_grad:
        raise NotConnectedError
    layers, copies = len(recorder.outputs), len(params.expanded)
    grads = _differentiated(losses, [*recorder.outputs, *params.expanded.values(), *params.plain])
    of_layers, of_copies, of_plain = grads[:layers], grads[layers : layers + copies], grads[layers + copies :]
    # Layers pass no gradient to their parameters, so a gradient here comes from a use that the guard did not see.
    if [grad for grad in of_plain if grad is not None]:
        raise NotLayersError("a parameter of a layer has another use")
    with full_precision(losses.device):
        recorder.add(of_layers, losses.shape)
        for place, grad in zip(params.expanded, of_copies, strict=True):
            if grad is not None:
                recorder.add_written_out(place, grad if losses.ndim == 1 else grad.transpose(0, 1))
        if not recorder:
            raise NotLayersError("no parameter has a gradient")
        if params.computed:
            pull_back(params, recorder)
        factors = [recorder.factor(place) for place in range(len(call.params))]
    return Gradients(tuple(factors), call.loss.spec, losses.detach(), aux, has_aux, call.weights)


def _differentiated(losses: Tensor, inputs: list[Any]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the losses ``[B]``; those of ``[B, K]`` with a first axis of K, by one backward pass."""
    if losses.ndim == 1:
        return torch.autograd.grad([losses], inputs, [torch.ones_like(losses)], allow_unused=True)
    size, count = losses.shape
    units = torch.eye(count, dtype=losses.dtype, device=losses.device).unsqueeze(1).expand(count, size, count)
    return torch.autograd.grad([losses], inputs, [units], is_grads_batched=True, allow_unused=True)


def _forward(call: Call, plan: Plan) -> tuple[SharedParams, LayerRecorder, Tensor, Any, bool]:
    """Return the parameters, the recorder, the losses with their graph, aux, and whether the loss returned any."""
    lazy_load_decompositions()  # of operations for vmap, once
    with torch.enable_grad(), vmap_increment_nesting(call.size, call.randomness) as level:
        pairs = zip(call.leaves, call.leaves_batched, strict=True)
        leaves = [add_batch_dim(x, 0, level) if split else x for x, split in pairs]
        vmap = Vmap(level, call.size)
        params = SharedParams(call.params, vmap)
        recorder = LayerRecorder(params.plain, call.size, plan)
        with LayerGuard(LayerInterceptor(params, vmap, recorder), leaves):
            value, (aux, has_aux) = call.loss(params.given, leaves)
        penalty = params.get(value)  # a loss of parameters alone
        value = value if penalty is None else params.copy(penalty)
        losses = remove_batch_dim(value, level, call.size, 0)
        if has_aux:  # perhaps the user's own tensors, so copied
            aux = tree_map(lambda x: remove_batch_dim(x, level, call.size, 0).detach().clone(), aux)
    return params, recorder, losses, aux, has_aux
