"""The one function that does the work: check, compute chunk by chunk, merge, finish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from persample import check, engines, rng, trees
from persample.errors import ArgumentError, LossError
from persample.gradients import Gradients
from persample.loss import NOT_CONNECTED, SampleLoss, fake_call
from persample.merge import AnyOf, merge
from persample.modules import locked
from persample.samples import Samples

_ENGINES = {"eager": engines.eager, "loop": engines.loop}


def per_sample_grads(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    reduce: Any = None,
    *,
    weights: Any = None,
    in_dims: Any = (None, 0),
    keep_batch_dim: bool = False,
    randomness: str = "error",
    chunk_size: int | None = None,
    engine: str = "eager",
    out: Any = None,
) -> Any:
    """Compute per-sample gradients gᵢ = ∇ℓᵢ(params) of a loss written for one sample, reduced as asked.

    Row i belongs to sample i's own loss ℓᵢ and is never divided by B. Results never require grad.

    Args:
        loss_fn: ``loss_fn(params, *sample)`` for one sample, without the batch axis. Returns a real 0-d loss, or
            exactly ``(loss, aux)`` with aux any pytree of tensors.
        params: a pytree of floating or complex tensors, or an ``nn.Module`` (also modules inside the pytree):
            then ``loss_fn`` receives the module itself, and results are keyed by parameter name. Of a module only
            parameters with ``requires_grad`` are differentiated, tied ones once; writes to its buffers are discarded.
        batch: a pytree of tensors or NumPy arrays with a leading batch axis of common size B. A plain tuple or list
            becomes positional arguments, anything else (dict, NamedTuple, dataclass, TensorDict) is one argument.
            Floating arrays take the dtype and device of the first parameter; None, strings and numbers pass through.
        reduce: a reduction such as ``Mean()``, or a dict, tuple or list of them, all answered from one pass. None
            stands for ``Stack()``, the gradients themselves.
        weights: ``[B]``, real: weight k means that the sample counted k times. Applied after clipping, to reductions
            over samples only; weight 0 removes a sample entirely, even if its gradient is NaN.
        in_dims: ``(params_dims, batch_dims)``: an int, None (the same for all samples) or a tree prefix for each.
        keep_batch_dim: each sample arrives with a leading axis of 1.
        randomness: "error", "same" or "different", as in ``torch.func.vmap``.
        chunk_size: how many samples are processed at a time; memory follows it. None for all.
        engine: "eager" (vmap), "compiled", or "loop" (plain autograd, for losses that vmap cannot take).
        out: a previous result of the same call, whose storage is written again and which is returned.

    Returns:
        What ``reduce`` says: a tree like ``params`` with leaves ``[B, *shape]`` for None, the reduction's result, or
        the container of their results. Gradients have the dtype of their parameter.

    Raises:
        ArgumentError: if an argument is of the wrong form; it names the argument and the fix.
        LossError: if the loss does not return a real scalar, depends on no parameter, or cannot be batched.
        NotImplementedError: for ``engine="compiled"``, which is not built yet.

    Example:
        The semi-gradient of TD(0), one row per transition:

        >>> from persample import per_sample_grads, stop_gradient
        >>> def td_loss(theta, s_tm1, r_t, s_t):
        ...     target = r_t + stop_gradient(s_t @ theta)
        ...     return (target - s_tm1 @ theta) ** 2
        >>> theta = torch.tensor([0.2, -0.2, 0.1])
        >>> s_tm1, r_t, s_t = torch.tensor([[2.0, 1.0, -2.0]]), torch.tensor([2.0]), torch.tensor([[1.0, 2.0, 0.0]])
        >>> per_sample_grads(td_loss, theta, (s_tm1, r_t, s_t))
        tensor([[-7.2000, -3.6000,  7.2000]])
    """
    if engine == "compiled":
        raise NotImplementedError("engine='compiled' is not built yet; use engine='eager' or engine='loop'.")
    check.choice("engine", engine, ("eager", "compiled", "loop"))
    check.options(chunk_size, randomness)
    wanted, container = check.reductions(reduce)
    # Both states are left as they are outside; inference mode would forbid differentiating what it creates.
    with torch.inference_mode(False), torch.no_grad():
        loss, samples = check.call(
            loss_fn,
            params,
            batch,
            in_dims=in_dims,
            keep_batch_dim=keep_batch_dim,
            wanted=wanted,
            weights=weights,
        )

        def lift(gradients: Gradients) -> Any:
            return [reduction.lift(gradients) for reduction in wanted], AnyOf(gradients.connected)

        with locked(loss.params.modules):
            partials, connected = _partial(lift, loss, samples, randomness, chunk_size, engine)
        if not connected.value:
            raise LossError(NOT_CONNECTED)
        finished = [reduction.finish(partial) for reduction, partial in zip(wanted, partials, strict=True)]
        result = trees.unflatten(finished, container)
        return result if out is None else _written(result, out)


def _partial(
    lift: Callable[[Gradients], Any],
    loss: SampleLoss,
    samples: Samples,
    randomness: str,
    chunk_size: int | None,
    engine: str,
) -> Any:
    if samples.size == 0:
        return lift(_empty(loss, samples))
    start = rng.snapshot() if randomness == "same" else None
    partial = None
    for chunk in samples.chunks(chunk_size):
        if start is not None:
            rng.rewind(start)
        piece = _ENGINES[engine](lift, loss, chunk, randomness)
        partial = piece if partial is None else merge(partial, piece)
    return partial


def _empty(loss: SampleLoss, samples: Samples) -> Gradients:
    """Return the gradients of no samples, their shapes taken from one fake sample (vmap refuses an empty batch)."""

    def one(values: tuple[Any, ...], batched: tuple[bool, ...]) -> list[Any]:
        return [x.new_zeros(x.shape[1:]) if split else x for x, split in zip(values, batched, strict=True)]

    params = one(samples.params, samples.params_batched)
    value, (aux, has_aux) = fake_call(loss, params, one(samples.leaves, samples.leaves_batched))

    def no_rows(x: Tensor) -> Tensor:
        return torch.zeros((0, *x.shape), dtype=x.dtype, device=x.device)

    return Gradients.dense(
        [no_rows(param) for param in params],
        spec=loss.spec,
        losses=no_rows(value),
        aux=trees.tree_map(no_rows, aux),
        has_aux=has_aux,
        weights=samples.weights,
    )


def _written(result: Any, out: Any) -> Any:
    """Copy a result into the storage of a previous one and return that."""
    leaves, spec = trees.flatten(result)
    targets, out_spec = trees.flatten(out)
    if spec != out_spec:
        fix = "Pass what the same call returned before."
        raise ArgumentError.about("out", expected=f"the structure {spec}", received=f"{out_spec}", fix=fix)
    for path, leaf, target in zip(trees.paths(out, "out"), leaves, targets, strict=True):
        if not isinstance(leaf, Tensor):
            fix = "Leave out=None for Factored()."
            raise ArgumentError.about(path, expected="a tensor result", received=type(leaf).__name__, fix=fix)
        wanted = (leaf.shape, leaf.dtype, leaf.device)
        found = (target.shape, target.dtype, target.device) if isinstance(target, Tensor) else None
        if wanted != found:
            received = f"{list(found[0])}, {found[1]}, {found[2]}" if found else type(target).__name__
            expected = f"a tensor of {list(leaf.shape)}, {leaf.dtype}, {leaf.device}"
            raise ArgumentError.about(path, expected=expected, received=received, fix="Pass a previous result.")
    for leaf, target in zip(leaves, targets, strict=True):
        target.copy_(leaf)
    return out
