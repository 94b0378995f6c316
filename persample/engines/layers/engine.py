"""Per-sample gradients of a loss made of layers: one vmap, and one backward pass of plain autograd.

``vmap(vjp(loss_fn))`` sends every operation through two transforms, in both directions. Here the loss runs under one
vmap. Linear layers and embeddings record their inputs and output gradients, which are the factors of their weights. All
other parameters are expanded to one copy per sample. A loss that uses a weight in any other way is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_get_level
from torch.func import vmap

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
    plain = [x.detach().requires_grad_() for x in samples.params]
    copies = [x.detach().expand(samples.size, *x.shape).requires_grad_() for x in samples.params]
    recorder = LayerRecorder(samples.params, samples.size, required_ops)
    losses, aux, has_aux = _forward(loss, samples, plain, copies, recorder)
    if not losses.requires_grad:
        raise NotConnectedError
    grads = torch.autograd.grad([losses], [*plain, *copies], [torch.ones_like(losses)], allow_unused=True)
    of_plain, of_copies = grads[: len(plain)], grads[len(plain) :]
    # A layer leaves no gradient at its shared parameters: only a use that the guard did not see does.
    if any(grad is not None for grad in of_plain):
        raise NotLayersError("a parameter of a layer has another use")
    if not recorder and all(grad is None for grad in of_copies):
        raise NotLayersError("no parameter has a gradient")
    factors = tuple(recorder.factor(place, grad) for place, grad in enumerate(of_copies))
    return Gradients(factors, loss.spec, losses.detach(), aux, has_aux, samples.weights)


def _forward(
    loss: SampleLoss, samples: Call, plain: Sequence[Tensor], copies: Sequence[Tensor], recorder: LayerRecorder
) -> tuple[Tensor, Any, bool]:
    """Return the losses with their graph, aux, and whether the loss returned any."""
    has_aux = False

    def one(copies: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Any]:
        nonlocal has_aux
        row = iter(rows)
        leaves = [next(row) if split else x for x, split in zip(samples.leaves, samples.leaves_batched, strict=True)]
        params = SharedParams(plain, copies)
        interceptor = LayerInterceptor(params, maybe_get_level(copies[0]), samples.size, recorder)
        with LayerGuard(interceptor, leaves):
            value, (aux, has_aux) = loss(params.given, leaves)
        return value, aux

    rows = [x for x, split in zip(samples.leaves, samples.leaves_batched, strict=True) if split]
    with torch.enable_grad():
        losses, aux = vmap(one)(copies, rows)
    return losses, tree_map(lambda x: x.detach().clone(), aux), has_aux  # aux may be the user's own tensors
