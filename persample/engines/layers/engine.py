"""Per-sample gradients of a loss made of layers: one vmap, and one backward pass of plain autograd.

``vmap(vjp(loss_fn))`` sends every operation through two transforms, in both directions. Here the loss runs under one
vmap. Linear layers and embeddings record their inputs and output gradients, which are the factors of their weights. All
other parameters are expanded to one copy per sample. A loss that uses a matrix in any other way is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim, _remove_batch_dim
from torch._functorch.predispatch import lazy_load_decompositions
from torch._functorch.vmap import vmap_increment_nesting

from persample.engines.layers.guard import LayerGuard
from persample.engines.layers.interceptor import LayerInterceptor
from persample.engines.layers.recorder import LayerRecorder
from persample.engines.layers.shared import NotLayersError, SharedParams
from persample.errors import LossError
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError, SampleLoss
from persample.utils.fallback import explained
from persample.utils.interrupts import interrupts_first
from persample.utils.numeric import is_autocast, is_traced
from persample.utils.origin import is_users
from persample.utils.trees import tree_map
from persample.vmap_rules import plain_autograd

# Modules of torch whose matrices are multiplied inside of one function, and not by ``F.linear``.
_NOT_LAYERS = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.EmbeddingBag)


def suits(loss: SampleLoss, samples: Call) -> bool:
    """Return whether a loss may be made of layers, as far as its parameters and modules tell.

    A wrong guess costs time, never correctness: ``gradients`` refuses the loss at the first other use of a matrix.

    Args:
        loss: the loss of one sample.
        samples: the chunk, not empty.
    """
    first = samples.params[0]
    if any(samples.params_batched) or is_traced(first) or is_autocast(first.device) or not first.is_floating_point():
        return False
    alike = all(x.dtype == first.dtype and x.device == first.device for x in samples.params)
    kernels = any(x.ndim > 2 and x.shape[0] > 1 for x in samples.params)  # of convolutions; [1, T, d] may be positions
    if not alike or kernels or not any(x.ndim == 2 for x in samples.params):
        return False
    return not any(isinstance(part, _NOT_LAYERS) for part in loss.params.parts.values())


def gradients(loss: SampleLoss, samples: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients of all samples at once.

    Args:
        loss: the loss of one sample.
        samples: the chunk, not empty.
        required_ops: the operations of ``Factor`` that the reductions call.

    Returns:
        The gradients.

    Raises:
        NotLayersError: if the loss is not made of layers alone, or if torch raises a ``RuntimeError`` or a warning: its
            types for what autograd or vmap cannot do, which may differ under ``vmap(vjp)``.
        LossError: if the loss depends on no parameter, or returns no scalar.
        Exception: what the loss itself raises, and any other error of torch's (an index out of range).
    """
    try:
        with interrupts_first(), explained(), plain_autograd():
            return _gradients(loss, samples, required_ops)
    except LossError:
        raise
    except (RuntimeError, Warning) as error:
        if is_users(error):
            raise
        raise NotLayersError(str(error)) from error


def _gradients(loss: SampleLoss, samples: Call, required_ops: frozenset[str]) -> Gradients:
    recorder = LayerRecorder(samples.params, samples.size, required_ops)
    params, losses, aux, has_aux = _forward(loss, samples, recorder)
    if not losses.requires_grad:
        raise NotConnectedError
    inputs = [*params.plain, *params.copies.values()]
    grads = torch.autograd.grad([losses], inputs, [torch.ones_like(losses)], allow_unused=True)
    of_plain, of_copies = grads[: len(params.plain)], grads[len(params.plain) :]
    # A layer leaves no gradient at its parameters: only a use that the guard did not see does.
    if any(grad is not None for grad in of_plain):
        raise NotLayersError("a parameter of a layer has another use")
    if not recorder and all(grad is None for grad in of_copies):
        raise NotLayersError("no parameter has a gradient")
    rest = dict(zip(params.copies, of_copies, strict=True))
    factors = tuple(recorder.factor(place, rest.get(place)) for place in range(len(samples.params)))
    return Gradients(factors, loss.spec, losses.detach(), aux, has_aux, samples.weights)


def _forward(loss: SampleLoss, samples: Call, recorder: LayerRecorder) -> tuple[SharedParams, Tensor, Any, bool]:
    """Return the parameters, the losses with their graph, aux, and whether the loss returned any."""
    lazy_load_decompositions()  # of operations for vmap, once
    with torch.enable_grad(), vmap_increment_nesting(samples.size, "error") as level:
        pairs = zip(samples.leaves, samples.leaves_batched, strict=True)
        leaves = [_add_batch_dim(x, 0, level) if split else x for x, split in pairs]
        params = SharedParams(samples.params, samples.size, level)
        with LayerGuard(LayerInterceptor(params, level, samples.size, recorder), leaves):
            value, (aux, has_aux) = loss(params.given, leaves)
        losses = _remove_batch_dim(value, level, samples.size, 0)
        if has_aux:  # perhaps the user's own tensors, so copied
            aux = tree_map(lambda x: _remove_batch_dim(x, level, samples.size, 0).detach().clone(), aux)
    return params, losses, aux, has_aux
