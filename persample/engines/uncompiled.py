"""The engines that compile nothing: vmap over vjp or layers, plain autograd sample after sample, and B = 0."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils.checkpoint import checkpoint

from persample import naive
from persample._torch import FakeTensorMode, import_dynamo, transforms
from persample.engines import inner_derivatives, layers
from persample.engines.diagnosis import CheckpointsError, DifferentiatesError, WritesError, diagnosed, hinted
from persample.errors import SAY_RANDOMNESS, FallbackWarning, LossError, TorchVersionError
from persample.factors import Op, concatenate
from persample.gradients import Gradients
from persample.inputs.call import Call, NotConnectedError
from persample.inputs.sharding import GATHER
from persample.merge import joined
from persample.pipeline import Engine
from persample.utils import rng, trees
from persample.utils.isolation import after_imports, undone
from persample.utils.origin import is_users, users_depth
from persample.utils.tracing import is_batched
from persample.utils.trees import Leaf, Tree, tree_map
from persample.vmap_rules import OwnTensors, SecondDerivativeError, VmapRules
from persample.vmap_rules.effects import guarded

T = TypeVar("T")
# The attributes by which modules of transformers switch checkpoints on, and call ``torch.utils.checkpoint``.
_CHECKPOINTS, _BY = "gradient_checkpointing", "_gradient_checkpointing_func"


def eager(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients of all samples at once, by ``engines/layers`` where the loss is made of layers."""
    return factored(call, required_ops)[0]


def factored(call: Call, required_ops: frozenset[str]) -> tuple[Gradients, str]:
    """Return what ``eager`` returns, and why its gradients are not those of layers; "" if they are."""
    reason, places = layers.unsuited(call), tuple[int, ...]()
    go_back = rng.rewinding(call.randomness)
    if not reason:
        try:
            return layers.gradients(call, required_ops), ""
        except layers.NotLayersError as error:
            reason, places = str(error), error.places
        go_back()
    if Op.term_norms in required_ops:
        raise _no_terms(call, reason, places)
    if call.is_sharded:  # gradients written out would be larger than what the processes share out
        raise LossError(
            f"{call.loss.called}: expected a loss whose layers are recorded, for DTensors, received another: {reason}. "
            f"Change that, or gather the parameters. {GATHER}"
        )
    return unfactored(call, required_ops), reason  # outside of the block above: the error of a wrong loss is its own


def _no_terms(call: Call, reason: str, places: Sequence[int]) -> LossError:
    """Return the error of gradients without terms, which names the parameters at some places."""
    named = [path for place, path in enumerate(call.loss.spec.paths) if place in places]
    if not named:
        return LossError(
            f"TermNorm(): expected a loss whose layers are recorded, received another: {reason}. Change that, or "
            "leave TermNorm() out."
        )
    return LossError(
        "TermNorm(): expected parameters that layers alone use, at one or more positions, received other uses of "
        f"{', '.join(named)}: {reason}. Freeze these (requires_grad_(False)), or leave them out of params."
    )


def without_checkpoints(call: Call, function: Callable[[], T]) -> T:
    """Call a function; if it fails because modules of the loss checkpoint activations, again with fewer checkpoints.

    Blocks that autograd enters anew in the backward pass become blocks that run again in it, with the same gradients.
    Where these fail, too, no activations are checkpointed, with a warning.
    """
    go_back = rng.rewinding(call.randomness)
    try:
        return function()
    except (CheckpointsError, DifferentiatesError):  # the latter of hooks that come with checkpoints
        parts = call.loss.params.parts.values()
        checkpointed = [part for part in parts if vars(part).get(_CHECKPOINTS) and part.training]
        if not checkpointed:
            raise

    def switched(name: str, value: Leaf) -> T:
        before = [getattr(part, name, None) for part in checkpointed]

        def switch(values: Iterable[Leaf]) -> None:
            for part, own in zip(checkpointed, values, strict=True):
                setattr(part, name, own)

        def body() -> T:
            go_back()
            switch([value] * len(before))
            return function()

        return undone(body, partial(switch, before))

    try:
        return switched(_BY, partial(checkpoint, use_reentrant=False))
    except (CheckpointsError, DifferentiatesError):
        pass
    warnings.warn(
        f"{call.loss.called} checkpoints activations, which vmap cannot batch: gradient_checkpointing is off in the "
        "call. Pass chunk_size= to bound memory, and call model.gradient_checkpointing_disable(); or engine='traced'.",
        FallbackWarning,
        stacklevel=users_depth(),
    )
    return switched(_CHECKPOINTS, value=False)


def unfactored(call: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (gradients are dense anyway)
    """Compute the gradients of all samples at once, written out, of any loss that vmap can batch."""
    if "torch._dynamo" not in sys.modules:  # torch.func.vjp imports it
        after_imports(import_dynamo)
    go_back, own = rng.rewinding(call.randomness), OwnTensors()
    rules = VmapRules()
    while True:
        before = len(own.written)
        try:
            grads, losses, aux, has_aux = batched_gradients(call, rules)
            break
        except SecondDerivativeError:
            rules = VmapRules(differentiated_by="any")
        except WritesError:
            if rules is own and len(own.written) == before:  # into what the loss did not make
                raise
            rules = own
        except DifferentiatesError as error:
            if call.differentiated or transforms():
                raise
            go_back()
            try:
                return inner_derivatives.gradients(call)
            except RuntimeError:  # which says less
                raise error from error.__cause__
        go_back()
    facts = {"spec": call.loss.spec, "losses": losses, "aux": aux, "has_aux": has_aux, "weights": call.weights}
    return Gradients.dense(grads, **facts)


def batched_gradients(call: Call, rules: AbstractContextManager[object]) -> tuple[list[Tensor], Tensor, Tree, bool]:
    """Differentiate the loss of all samples at once.

    Returns the gradients of each parameter, ``[B, *shape]`` (``[B, K, *shape]`` of K outputs), the losses, aux, and
    whether the loss returned aux. ``rules`` is the context that the loss runs in.
    """
    has_aux = one_by_one = False

    def value_of(params: list[Tensor], leaves: list[Leaf]) -> tuple[Tensor, Tree]:
        nonlocal has_aux, one_by_one
        if isinstance(rules, OwnTensors):
            rules.begin(next(filter(is_batched, (*leaves, *params)), None))
        with rules:
            value, (aux, has_aux) = call.loss(params, leaves)
        if not value.requires_grad:  # under vjp: no path from params to the loss
            raise NotConnectedError
        one_by_one = value.ndim > 0 and _uses_factorizations(value)
        return value, aux

    def one(params: list[Tensor], leaves: list[object]) -> tuple[list[Tensor], Tensor, object]:
        value, backward, *aux = vjp(lambda params: value_of(params, leaves), params, has_aux=True)
        with nullcontext() if call.differentiated else torch.no_grad():
            grads = _pulled_back(backward, value, one_by_one=one_by_one)
        return grads, value, aux[0]

    with diagnosed(call, batched=True):
        grads, losses, aux = vmapped(one, call)
    return grads, losses, tree_map(torch.clone, aux), has_aux  # aux may be the user's own tensors


def _pulled_back(backward: Callable[..., tuple[list[Tensor]]], value: Tensor, *, one_by_one: bool) -> list[Tensor]:
    """Return the gradients of a loss; of a vector one per element, in one backward pass unless ``one_by_one``."""
    if value.ndim == 0:
        return backward(torch.ones_like(value), retain_graph=False)[0]
    units = torch.eye(len(value), dtype=value.dtype, device=value.device)
    if one_by_one:
        rows = [backward(unit, retain_graph=True)[0] for unit in units]
        return [torch.stack(column) for column in zip(*rows, strict=True)]
    return vmap(lambda unit: backward(unit, retain_graph=False)[0])(units)


def _uses_factorizations(value: Tensor) -> bool:
    """Return whether a value depends on a solution or determinant, whose backward pass torch batches wrongly twice.

    Under two levels of vmap without grad mode, torch 2.13 gives arbitrary numbers.
    """
    seen, stack = set[object](), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith(("Linalg", "LuSolve", "TriangularSolve")):
            return True
        seen.add(node)
        stack.extend(parent for parent, _ in node.next_functions)
    return False


def vmapped(one: Callable[[list[Tensor], list[object]], T], call: Call) -> T:
    """Call a function of parameters and leaves for all samples at once; all tensors of the result get a batch axis."""
    given = [*call.params, *call.leaves]
    split = [*call.params_batched, *call.leaves_batched]

    def of_row(*rows: Tensor) -> T:
        row = iter(rows)  # values that all samples share are not passed through vmap
        values = [next(row) if batched else x for x, batched in zip(given, split, strict=True)]
        return one(values[: len(call.params)], values[len(call.params) :])

    return vmap(of_row, randomness=call.randomness)(*[x for x, batched in zip(given, split, strict=True) if batched])


def loop(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients one sample at a time; norms and moments of terms by recording the layers of each.

    Random operations are rejected under "error", replayed for every sample under "same", left alone under "different".
    """
    has_terms = not {Op.term_norms, Op.kronecker}.isdisjoint(required_ops)
    go_back = rng.rewinding(call.randomness) if has_terms else None
    losses, returned, grads = zip(*_rows(call), strict=True)
    stacked = _stacked_losses(losses)
    columns = zip(call.params, call.loss.spec.shapes, zip(*grads, strict=True), strict=True)
    lead = stacked.shape[1:]  # [K] of K outputs
    norms = recorded = None
    if go_back:
        go_back()
        chunks = rng.replayed(call.chunks(1)) if call.randomness == "same" else call.chunks(1)
        parts = [factored(one, required_ops)[0] for one in chunks]
        norms = joined(part.term_norms or () for part in parts)
        if Op.kronecker in required_ops:
            _check_uses(parts)
            recorded = tuple(map(concatenate, zip(*(part.factors for part in parts), strict=True)))
    gradients = Gradients.dense(
        [
            torch.stack([x.new_zeros((*lead, *shape)) if g is None else g for g in column])
            for x, shape, column in columns
        ],
        term_norms=norms,
        spec=call.loss.spec,
        losses=stacked,
        aux=_stacked([aux for aux, _ in returned]),
        has_aux=returned[0][1],
        weights=call.weights,
        # No generator, where Python closes one early: an interrupt that comes then is lost.
        connected={g is None for row in grads for g in row} != {True},
    )
    return replace(gradients, factors=recorded) if recorded else gradients


def _check_uses(parts: Sequence[Gradients]) -> None:
    """Reject samples that use a parameter in unlike ways, whose terms have no common number."""
    for path, factors in zip(parts[0].spec.paths, zip(*(part.factors for part in parts), strict=True), strict=True):
        uses = {(type(factor).__name__, factor.num_terms) for factor in factors}
        if len(uses) > 1:
            received = " and ".join(f"{count} of {kind}" for kind, count in sorted(uses))
            raise LossError(
                f"loss_fn: expected every sample to use {path} in one way, and as often (KroneckerFactors()), received "
                f"terms: {received}. Use all parameters in every sample, times 0 where they do not count."
            )


def _rows(call: Call) -> Iterator[tuple[Tensor, tuple[object, bool], Sequence[Tensor | None]]]:
    loss, start, rows = call.loss, rng.snapshot(), range(call.size)
    for i in rng.replayed(rows) if call.randomness == "same" else rows:
        with diagnosed(call, batched=False), hinted(call, i):
            params, leaves = call.at(i)
            one = partial(naive.value_and_grad, guarded(loss), params, leaves)
            row = loss.params.unchanged(partial(one, like=loss.params.tensors, create_graph=call.differentiated))
        if call.randomness == "error" and rng.moved_since(start):
            raise LossError(f"{loss.called} drew random numbers, received randomness='error'. {SAY_RANDOMNESS}")
        yield row


def _stacked_losses(losses: Sequence[Tensor]) -> Tensor:
    sizes = sorted({len(loss) for loss in losses if loss.ndim})
    if len(sizes) > 1:
        raise LossError(
            f"loss_fn: expected the same number of outputs for every sample (outputs='rows'), received {sizes}. Return "
            "vectors of one length, padded with zeros."
        )
    return torch.stack(list(losses))


def _stacked(aux: list[object]) -> object:
    try:
        return tree_map(lambda *leaves: torch.stack(leaves), *aux)
    except (RuntimeError, ValueError) as error:
        raise LossError(
            "loss_fn: expected aux of the same structure and shapes from every sample, received aux that differ. "
            f"Return the same from each, padded where it is shorter. torch said: {error}"
        ) from error


def empty(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Return gradients with no rows; a fake sample shows the shapes, and one of zeros which gradients are products."""
    value, (aux, has_aux) = of_fake_sample(call.loss, call)
    gradients = Gradients.dense(
        [no_rows(x.expand((*value.shape, *x.shape))) for x in _one(call.params, call.params_batched)],
        spec=call.loss.spec,
        losses=no_rows(value),
        term_norms=tuple(x.new_zeros(0, *value.shape, 0) for x in call.params),
        aux=trees.tree_map(no_rows, aux),
        has_aux=has_aux,
        weights=call.weights,
    )
    if Op.kronecker not in required_ops:
        return gradients
    pairs = [(call.params, call.params_batched), (call.leaves, call.leaves_batched)]
    params, leaves = (
        tuple(x.new_zeros(1, *x.shape[1:]) if split else x for x, split in zip(*pair, strict=True)) for pair in pairs
    )
    go_back = rng.rewinding(call.randomness)
    one = factored(replace(call, size=1, params=params, leaves=leaves, weights=None, units=None), required_ops)[0]
    go_back()
    return replace(gradients, factors=tuple(factor.rows(slice(0)) for factor in one.factors))


def of_fake_sample(function: Callable[[Sequence[Tensor], Sequence[object]], T], call: Call) -> T:
    """Call a function with a made-up sample; of tensors of the result, only shape, dtype and device are meaningful."""
    params = _one(call.params, call.params_batched)
    if not transforms():  # under which torch refuses to make leaves
        params = [param.requires_grad_() for param in params]
    with torch.enable_grad():  # for losses that differentiate something themselves
        return _fake_call(function, params, _one(call.leaves, call.leaves_batched))


def _one(values: Sequence[Leaf], batched: Sequence[bool]) -> list[Leaf]:
    rows = [x.new_zeros(x.shape[1:]) if split else x for x, split in zip(values, batched, strict=True)]
    return trees.map_tensors(torch.Tensor.detach, rows)  # new tensor objects, so that requires_grad_ spares the user's


def no_rows(x: Tensor) -> Tensor:
    """Return a tensor of zero rows of the shape of ``x``."""
    return torch.zeros((0, *x.shape), dtype=x.dtype, device=x.device)


def _fake_call(function: Callable[..., T], params: Sequence[Tensor], leaves: Sequence[Leaf]) -> T:
    handled = sys.exc_info()[1]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = trees.map_tensors(mode.from_tensor, (list(params), list(leaves)))
            return guarded(function)(*fakes)
    except (LossError, TorchVersionError):
        raise
    except Exception as error:
        if is_users(error, handled):
            raise
        return function(params, leaves)  # fake tensors have no values to read: the loss runs on zeros instead


# "auto" begins as "eager"; ``fallback.py`` goes on.
ENGINES: dict[str, Engine] = {"eager": eager, "auto": eager, "loop": loop}
