"""Per-sample gradients of a loss with layers: one vmap, and one backward pass of plain autograd.

``vmap(vjp(loss_fn))`` sends every operation through two transforms, in both directions. Here the loss runs under one
vmap. Linear and recurrent layers, convolutions and embeddings record their inputs and output gradients, which are the
factors of their weights. What the loss computes of parameters alone is a parameter of the rest. Any other function is
given small parameters as one copy per sample; one of large parameters and samples is left to ``vmap(vjp(loss_fn))``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import resolve_name

from persample._torch import (
    add_batch_dim,
    engine_run_backward,
    load_decompositions,
    maybe_get_level,
    multi_head_attention_by,
    temporarily_clear_interpreter_stack,
    transforms,
    vmap_increment_nesting,
)
from persample.engines.layers.interceptor import WITHIN_A_DERIVATIVE, LayerInterceptor
from persample.engines.layers.passes import Again, Contract, Kept, Passes, PassRecorder, Replay, squares
from persample.engines.layers.recorder import LayerRecorder, SavesByHooksError
from persample.engines.layers.shared import LISTS, NotLayersError, SharedParams, Vmap
from persample.errors import LossError, TorchVersionError
from persample.factors import Factor, Op
from persample.gradients import Gradients
from persample.inputs.call import Call, NotConnectedError
from persample.inputs.options import NestedCallError
from persample.utils import rng
from persample.utils.isolation import raise_interrupt
from persample.utils.numerics import full_precision, in_single_precision, is_autocast, memory, precast, storage_key
from persample.utils.origin import is_users
from persample.utils.tracing import is_traced, is_wrapped, unwrapped, wrapped
from persample.utils.trees import Leaf, Tree, tree_map
from persample.vmap_rules import MAKERS, RULED, VmapRules
from persample.vmap_rules.effects import is_pure, is_refusal, reads_state, written_tensors
from persample.vmap_rules.levels import batched
from persample.vmap_rules.nn_functional import REDUCTIONS

R = TypeVar("R", bound=LayerRecorder)
# Under vmap alone torch takes these apart before autocast, which computes them in single precision, has seen them.
_SINGLE_PRECISION = {
    *(F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.l1_loss, F.cosine_embedding_loss),
    *(F.hinge_embedding_loss, F.poisson_nll_loss, F.adaptive_avg_pool3d, torch.trace, Tensor.trace),
}
_LOSSES: set[object] = {F.cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
_OF_LOSSES = {"beta", "delta", "ignore_index"}  # options


def _itself(x: Tensor, _: bool = True) -> Tensor:
    return x


class LayerGuard(VmapRules):
    """Sends uses of shared parameters to the interceptor, and refuses functions with effects that differ here.

    Such functions read autograd's state or memory, register hooks, or write into tensors that the loss did not compute.
    """

    def __init__(self, interceptor: LayerInterceptor, leaves: Sequence[object]) -> None:
        super().__init__(differentiated_by="autograd")
        self._interceptor, self._leaves = interceptor, leaves
        self._made: dict[int, Tensor] = {}  # by address, kept alive: tensors of the loss's own that all samples share

    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: Tree = (), kwargs: Tree = None
    ) -> Tree:
        kwargs = kwargs or {}
        try:
            if self._rows or not is_pure(func) or kwargs:
                self._check_effects(func, args, kwargs)
            params = self._interceptor.params
            values = (*args, *kwargs.values()) if kwargs else args
            is_used = not params.shared.keys().isdisjoint(map(id, values))
            if not is_used and not LISTS.isdisjoint(map(type, values)):
                is_used = params.are_among(values)
            # Without grad mode, results are constants, whatever a parameter is used for.
            is_used = is_used and torch.is_grad_enabled()
            if func is Tensor.requires_grad_ and not params.are_among(args) and all(args[1:]) and not kwargs:
                func = _itself  # hooks of transformers mark activations; who differentiates by one makes no layers
            if is_used and func is F.multi_head_attention_forward:  # of layers, which torch calls without any mode
                return self._call(multi_head_attention_by(F.scaled_dot_product_attention), *args, **kwargs)
            if is_used or func in WITHIN_A_DERIVATIVE:
                return self._interceptor.call(func, args, kwargs)
            if func in _LOSSES:
                result = _loss_of_rows(self._interceptor.vmap, func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if func in _SINGLE_PRECISION and is_autocast(params.plain[0].device):
                return precast(in_single_precision, params.plain[0].device, self.replaced, func, args, kwargs)
            if func is F.linear:  # perhaps with a copy of a vector as its bias
                return self._interceptor.linear(*args, **kwargs)
            result = self.replaced(func, args, kwargs) if kwargs or func in RULED else func(*args)
        except Exception as error:
            if isinstance(error, NotLayersError | SavesByHooksError) or is_refusal(error, func, args, kwargs):
                self._refusal = self._refusal or error
            raise
        if type(result) is Tensor and not is_wrapped(result) and getattr(func, "__name__", "") in MAKERS:
            self._made[storage_key(result)] = result
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        refusal = self._refusal
        try:
            super().__exit__(kind, error, at)
        except LossError as swallowed:
            raise NotLayersError(str(swallowed)) from error
        if isinstance(refusal, NotLayersError) and isinstance(error, Exception) and error is not refusal:
            raise NotLayersError("the loss caught a refusal") from error

    def _check_effects(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._rows:
            self.check_rows(func, args, kwargs)
        params, written = self._interceptor.params, written_tensors(func, args, kwargs)
        # nn.GRU on a GPU asks for the places of its weights.
        reads = reads_state(func) and (func is not Tensor.data_ptr or params.place_of(args[0]) is None)
        if reads or (written and not (self._interceptor.is_laid_out and all(map(self._is_computed, written)))):
            name = resolve_name(func) or func
            raise NotLayersError(f"the loss calls {name}, which reads a tensor's state or writes into a given tensor")

    def _is_computed(self, x: Tensor) -> bool:
        """Return whether the loss computed a tensor itself, and not the caller or autograd."""
        if self._interceptor.vmap.level not in map(maybe_get_level, wrapped(x)):
            return storage_key(x) in self._made
        given = [y for y in (*self._leaves, *self._interceptor.params.plain) if isinstance(y, Tensor)]
        # Traced tensors have no addresses, so that captured losses that write are left to vmap(vjp): layers lay out
        # their results otherwise than one sample does, and whether a write reaches another tensor depends on that.
        return memory(unwrapped(x)) not in {memory(unwrapped(y)) for y in given}


def _loss_of_rows(
    vmap: Vmap,
    function: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    target: Tensor,
    *args: object,
    **options: Leaf,
) -> Tree:
    """Call one of ``_LOSSES`` once for all samples; return ``NotImplemented`` for arguments that this does not know."""
    given = {name: option for name, option in options.items() if option is not None}
    reduction, smoothing = given.pop("reduction", "mean"), given.pop("label_smoothing", 0)
    if args or smoothing or not given.keys() <= _OF_LOSSES or reduction not in REDUCTIONS:
        return NotImplemented
    one, other = vmap.rows(input), vmap.rows(target)
    if one is None or other is None or one[1] != other[1] or not input.numel():
        return NotImplemented
    has_classes = function is F.cross_entropy
    if has_classes:
        fits = target.dtype == torch.long and input.ndim in {1, 2} and input.shape[:-1] == target.shape
    else:
        fits = input.shape == target.shape and input.is_floating_point() and target.is_floating_point()
    if not fits:
        return NotImplemented
    (rows, levels), (targets, _) = one, other
    with temporarily_clear_interpreter_stack():
        flat = (rows.flatten(0, -2), targets.flatten()) if has_classes else (rows, targets)
        losses = function(*flat, reduction="none", **given).view(targets.shape)
        own = tuple(range(len(levels), losses.ndim))
        if reduction == "mean" and has_classes:
            kept = targets != given.get("ignore_index", -100)
            losses = losses.sum(own) / kept.sum(own) if own else losses / kept  # 0 / 0 where none is kept
        elif own:
            losses = REDUCTIONS[reduction](losses, own)
    return batched(losses, levels)


def unsuited(call: Call) -> str:
    """Return why a call goes to ``vmap(vjp(loss))`` at once; "" if its loss is tried here first."""
    if call.differentiated or transforms():
        return "the caller differentiates or batches the call"
    if any(call.params_batched):
        return "each sample has parameters of its own"
    if not all(map(Tensor.is_floating_point, call.params)):
        return "a parameter is complex"
    # A captured loss does so by operations: a refusal would leave it between them.
    graph = getattr(getattr(call.loss.fn, "capture", None), "graph", None) if is_traced(call.params[0]) else None
    if graph is not None and any("nesting" in str(node.target) for node in graph.graph.nodes):
        return "the loss enters transforms of torch.func"
    return ""


def gradients(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients of all samples at once.

    Raises:
        NotLayersError: if the loss does what is not known here, or if torch raises a ``RuntimeError`` or a warning: its
            types for what autograd or vmap cannot do, which may differ under ``vmap(vjp)``.
        LossError: if the loss depends on no parameter, or returns no scalar.
        Exception: what the loss itself raises, and any other error of torch's (an index out of range).
    """
    handled = sys.exc_info()[1]
    try:
        return _gradients(call, required_ops)
    except (LossError, TorchVersionError):
        raise
    except NestedCallError as error:  # under vmap(vjp) the call inside of the loss can be differentiated
        raise NotLayersError(str(error)) from error
    except (RuntimeError, ValueError, Warning) as error:
        raise_interrupt(error, handled)
        # A captured graph raises no errors of the user's, and those of torch's about views are ValueErrors in a trace.
        if not is_traced(call.params[0]) and (isinstance(error, ValueError) or is_users(error, handled)):
            raise
        raise NotLayersError(str(error)) from error


def _gradients(call: Call, required_ops: frozenset[str]) -> Gradients:
    plan, go_back = call.plan(required_ops), None if call.randomness == "error" else rng.rewinding(call.randomness)
    grads: Sequence[Tensor | None] | None = None
    try:
        recorder, losses, aux, has_aux = _forward(call, partial(LayerRecorder, plan=plan))
        grads = _differentiated(losses, recorder)
    except SavesByHooksError:
        if go_back is not None:
            go_back()
        if _are_contracted(call, required_ops):
            return _in_passes(call, required_ops)
        recorder, losses, aux, has_aux = _forward(call, partial(PassRecorder, plan=plan), _backward)
    with full_precision(losses.device):
        if grads is not None:
            recorder.add(grads, losses.shape)
        factors = [recorder.factor(place) for place in range(len(call.params))]
        norms = recorder.term_norms() if Op.term_norms in required_ops else None
    return Gradients(tuple(factors), call.loss.spec, losses.detach(), aux, has_aux, call.weights, term_norms=norms)


def _are_contracted(call: Call, required_ops: frozenset[str]) -> bool:
    """Return whether reductions read the gradients of a call by norms, and by sums that these scale, alone."""
    ops = Op.squared_norms in required_ops <= {Op.squared_norms, Op.weighted_sum}
    return ops and call.loss.outputs == "scalar" and not is_traced(call.params[0])


def _in_passes(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Return gradients whose factors are contracted layer by layer, in one pass for each quantity."""
    go_back, call = rng.rewinding(call.randomness), replace(call, memory="low")

    def passed(ops: Iterable[str], contract: Contract | None) -> tuple[PassRecorder, Tensor, Tree, bool]:
        go_back()
        return _forward(call, partial(PassRecorder, plan=call.plan(frozenset(ops)), contract=contract), _backward)

    def factors() -> list[Factor]:
        recorder = passed(required_ops, None)[0]
        return [recorder.factor(place) for place in range(len(call.params))]

    recorder, losses, aux, has_aux = passed({Op.squared_norms}, squares)
    kept: Leaf = Kept(len(call.params), factors)
    return Passes(
        kept,
        call.loss.spec,
        losses.detach(),
        aux,
        has_aux,
        call.weights,
        squares=recorder.results(),
        contracted=lambda contract: passed({Op.weighted_sum}, contract)[0].results(),
    )


def _differentiated(losses: Tensor, recorder: LayerRecorder) -> tuple[Tensor | None, ...]:
    """Return the gradients of the losses ``[B]``; those of ``[B, K]`` with a first axis of K, by one backward pass."""
    params = recorder.params
    inputs: Leaf = [*recorder.outputs, *params.expanded.values(), *params.plain]
    if losses.ndim == 1:
        return torch.autograd.grad([losses], inputs, [torch.ones_like(losses)], allow_unused=True)
    size, count = losses.shape
    units = torch.eye(count, dtype=losses.dtype, device=losses.device).unsqueeze(1).expand(count, size, count)
    return torch.autograd.grad([losses], inputs, [units], is_grads_batched=True, allow_unused=True)


def _backward(call: Call, recorder: PassRecorder, losses: Tensor, again: LayerGuard) -> None:
    """Differentiate losses inside of their vmap, where blocks of the loss may run again, with the same parameters."""
    if losses.ndim > 1:
        raise NotLayersError("blocks run again for several outputs")
    recorder.sizes, params = tuple(losses.shape), recorder.params
    flags = False, False, (*recorder.outputs, *params.expanded.values(), *params.plain), True

    def differentiated(*_: Leaf) -> tuple[Tensor | None, ...]:
        with Replay(again):  # which torch.autograd.grad would leave
            return engine_run_backward((losses,), (torch.ones_like(losses),), *flags, accumulate_grad=False)

    try:
        grads = call.loss.params.call(params.given, differentiated, ())
        with temporarily_clear_interpreter_stack(), full_precision(losses.device):
            recorder.add(grads, losses.shape)
    finally:
        recorder.outputs.clear()  # whose graph refers to the recorder


def _forward(
    call: Call,
    recorder_of: Callable[[SharedParams], R],
    in_the_vmap: Callable[[Call, Leaf, Tensor, LayerGuard], None] | None = None,
) -> tuple[R, Tensor, Tree, bool]:
    """Return the recorder, the losses with their graph, aux, and whether the loss returned any."""
    load_decompositions()
    with torch.enable_grad(), vmap_increment_nesting(call.size, call.randomness) as level:
        pairs = zip(call.leaves, call.leaves_batched, strict=True)
        leaves = [add_batch_dim(x, 0, level) if split else x for x, split in pairs]
        vmap = Vmap(level, call.size)
        params = SharedParams(call.params, vmap)
        recorder = recorder_of(params)
        with LayerGuard(LayerInterceptor(params, vmap, recorder), leaves):
            value, (aux, has_aux) = call.loss(params.given, leaves)
        penalty = params.get(value)  # a loss of parameters alone
        value = value if penalty is None else params.copy(penalty)
        losses = vmap.all_rows(value)
        if not losses.requires_grad:
            raise NotConnectedError
        if has_aux:  # perhaps the user's own tensors, so copied
            aux = tree_map(lambda x: vmap.all_rows(x).detach().clone(), aux)
        if in_the_vmap is not None:
            again: Leaf = Again()
            in_the_vmap(call, recorder, losses, LayerGuard(LayerInterceptor(params, vmap, again), leaves))
    return recorder, losses, aux, has_aux


__all__ = ["NotLayersError", "gradients", "unsuited"]
