"""``per_sample_grads``: check the arguments, compute chunk by chunk, merge, finish."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal, NoReturn

from torch import Tensor

from persample import inputs, pipeline
from persample._torch import transforms, uncaptured
from persample.engines.compiled import PROGRAMS, Asked, compiled, repeated
from persample.engines.diagnosis import unwritten
from persample.engines.fallback import answered
from persample.engines.readings import vanish, warn_of_statistics
from persample.engines.uncompiled import ENGINES, empty
from persample.inputs import Engine, Outputs, Randomness
from persample.inputs.batch import PLAIN
from persample.inputs.sharding import on_shards
from persample.inputs.units import UnitReduce, consecutive, has_ids, reads_ids
from persample.pipeline import is_apart, owned, write_into
from persample.reductions import Reduce
from persample.reductions.base import Reductions
from persample.utils import trees
from persample.utils.isolation import isolated
from persample.utils.origin import fold
from persample.utils.trees import Leaf, Tree


@uncaptured
def per_sample_grads(
    loss_fn: Callable[..., Tensor | tuple[Tensor, Tree]],
    params: Tree,
    batch: Tree,
    reduce: Reduce = None,
    *_apart: NoReturn,
    weights: Tree = None,
    in_dims: tuple[Tree, Tree] = (None, 0),
    keep_batch_dim: bool = False,
    randomness: Randomness = "error",
    outputs: Outputs = "scalar",
    unit: int | Tensor | Sequence[int] | None = None,
    unit_reduce: UnitReduce = "sum",
    chunk_size: int | None = None,
    memory: int | Literal["low"] | None = None,
    engine: Engine = "eager",
    out: Tree = None,
    differentiable: bool = False,
) -> Tree:
    """Compute per-sample gradients gᵢ = ∇ℓᵢ(params) of a loss written for one sample, and reduce them.

    Row i is the gradient of sample i's own loss ℓᵢ, never divided by B. Results never require grad, unless
    ``differentiable``. Inside ``torch.func.grad``, ``vjp``, ``jvp``, ``jacrev``, ``jacfwd``, ``hessian`` and
    ``vmap`` a call gives the same result as ``vmap(grad(loss_fn))`` with the same arithmetic.

    Args:
        loss_fn: ``loss_fn(params, *sample)`` for one sample, without the batch axis. Returns a real 0-d loss (a
            vector with ``outputs="rows"``), or exactly ``(loss, aux)`` with aux any pytree of tensors.
        params: a pytree of floating or complex tensors, or an ``nn.Module`` (also modules inside the pytree):
            then ``loss_fn`` receives the module itself, and results are keyed by parameter name. Only a module's
            parameters with ``requires_grad`` are differentiated; a tied parameter counts once. Writes to the module's
            buffers are discarded. Or DTensors, of ``fully_shard`` or of tensor parallelism, which keep their shards:
            sums are DTensors in the placements of their parameters, ``Norm``, ``Loss`` and ``Aux`` are whole.
        batch: a pytree of tensors or NumPy arrays with a leading batch axis of common size B. A plain tuple or list
            becomes positional arguments, anything else (dict, NamedTuple, dataclass, TensorDict) is one argument. Any
            other mapping (``BatchEncoding``) is passed as a dict.
            Floating arrays take the dtype and device of the first parameter; None, strings and numbers pass through.
            A DTensor holds the samples of all processes of its mesh.
            A list of B samples of different lengths is not a batch: pad them, stack them, and pass a mask.
        reduce: a reduction, or a dict, tuple or list of reductions, all computed in one pass. None means ``Stack()``,
            the gradients themselves. Others are ``Sum``, ``Mean``, ``ClippedSum``, ``ClippedMean``, ``WeightedSum``;
            ``Norm``, ``Gram``, ``CosineSimilarity``, ``Dot``, ``Project``; ``SecondMoment``, ``Variance``,
            ``NoiseScale``; ``NaturalGradient``, ``Leverage``; ``Loss``, ``Aux``, ``Factored``; and your own
            (``persample.reductions.Reduction``).
        weights: ``[B]``, real or bool: a sample of weight k counts k times. Weights apply after clipping, and to
            reductions over samples only. Weight 0 removes a sample entirely, even if its gradient is NaN.
        in_dims: ``(params_dims, batch_dims)``: an int, None (shared by all samples) or a tree prefix for each;
            ``(None, (None, 0, 0))`` for a batch whose first argument all samples share, ``(0, 0)`` if every sample
            has its own parameters.
        keep_batch_dim: pass each sample with a leading axis of 1, for models that require a batch axis.
        randomness: as in ``torch.func.vmap``: random operations in the loss raise an error ("error"), or draw the
            "same" or "different" numbers for the samples.
        outputs: "scalar" if the loss of one sample is a number; "rows" if it is a vector ``[K]``. Then a sample has K
            gradients: ``Stack`` gives ``[B, K, *shape]``, ``Norm`` ``[B, K]``, ``Gram`` ``[B, K, B, K]``, sums
            ``[K, *shape]``. The loss runs once for all K.
        unit: samples that count as one: a number k, for units of k consecutive samples; or the id of each sample's
            unit (user, prompt, image), integers ``[B]``. The gradient of a unit is the weighted sum of those of its
            samples. All reductions except ``Aux`` then work on units, in the order of their first samples: ``Norm``
            gives ``[U]``, ``ClippedMean`` clips the gradient of each unit and divides by the number of units. Each unit
            counts once, and one whose weights are all 0 is removed.
        unit_reduce: "sum", or "mean" for the (weighted) mean of a unit's samples.
        chunk_size: the number of samples processed at a time, which bounds memory; None for all.
        memory: the bytes that gradients written out for speed may take together; ``"low"`` for no more than their
            factors; None for 256 MiB, beyond which each may take twice its factors. Does not change results.
        engine: "eager" (``vmap``); "traced" (the same operations as a program without autograd and vmap, captured at
            the first call, and again when the loss or the sizes change); "compiled" (that program, compiled: the
            fastest, after seconds of compilation); "loop" (plain autograd, one sample at a time; takes ``.item()``,
            branches on values, and checkpoints, too); "auto" ("eager", or "loop" for a loss that vmap cannot batch,
            with a ``FallbackWarning`` that says why). All engines give the same results.
        out: a previous result of the same call, to be overwritten and returned. Reuse it in loops: fresh memory can
            cost more than the gradients themselves.
        differentiable: give the results a graph for plain autograd, back to those parameters, batch, weights, fields of
            reductions and closed-over tensors that require grad: for meta-gradients and gradient penalties. Gradients
            are then written out, ``[B, *shape]``, operation by operation (with every engine except "loop").

    Returns:
        A tree like ``params`` with leaves ``[B, *shape]`` if ``reduce`` is None; the result of the reduction; or a
        container of results like ``reduce``. Gradients have the dtype of their parameter.

    Raises:
        ArgumentError: if an argument is invalid; the message names the argument and the fix. Also if the call stands
            inside a loss that plain autograd differentiates, and is not ``differentiable``.
        LossError: if the loss does not return a real scalar, depends on no parameter, or cannot be batched.

    Examples:
        The semi-gradient of TD(0), one row per transition:

        >>> import torch
        >>> from persample import per_sample_grads, stop_gradient
        >>> def td_loss(theta, s_tm1, r_t, s_t):
        ...     target = r_t + stop_gradient(s_t @ theta)
        ...     return (target - s_tm1 @ theta) ** 2
        >>> theta = torch.tensor([0.2, -0.2, 0.1])
        >>> batch = torch.tensor([[2.0, 1.0, -2.0]]), torch.tensor([2.0]), torch.tensor([[1.0, 2.0, 0.0]])
        >>> per_sample_grads(td_loss, theta, batch)
        tensor([[-7.2000, -3.6000,  7.2000]])

        Several reductions from one pass:

        >>> from persample import ClippedMean, Gram, Mean, Norm
        >>> per_sample_grads(td_loss, theta, batch, {"update": ClippedMean(1.0), "norms": Norm()})
        {'update': tensor([-0.6667, -0.3333,  0.6667]), 'norms': tensor([10.8000])}

        A module, whose reduced gradients any optimizer takes (``set_grads``):

        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.ones(5, 3), torch.zeros(5)
        >>> update = per_sample_grads(lambda model, x, y: (model(x)[0] - y) ** 2, model, (x, y), Mean())
        >>> {name: list(grad.shape) for name, grad in update.items()}
        {'weight': [1, 3], 'bias': [1]}

        An argument that all samples share, and samples that count differently:

        >>> def loss(w, scale, x):
        ...     return scale * w @ x
        >>> options = {"in_dims": (None, (None, 0)), "weights": [1.0, 3.0]}
        >>> per_sample_grads(loss, torch.zeros(2), (torch.tensor(2.0), torch.eye(2)), Mean(), **options)
        tensor([0.5000, 1.5000])

        The derivative of the largest norm, by plain autograd:

        >>> w = torch.ones(2, requires_grad=True)
        >>> norms = per_sample_grads(lambda w, x: (w @ x) ** 2, w, torch.eye(2), Norm(), differentiable=True)
        >>> torch.autograd.grad(norms.max(), w)
        (tensor([1., 1.]),)

        The gradients of two outputs of each sample, and all their inner products (the empirical neural tangent kernel):

        >>> def predictions(w, x):
        ...     return w @ x  # [2]
        >>> w, x = torch.zeros(2, 3), torch.eye(3)[:2]
        >>> wanted = {"jacobians": None, "ntk": Gram()}
        >>> found = per_sample_grads(predictions, w, x, wanted, outputs="rows")
        >>> {name: list(result.shape) for name, result in found.items()}
        {'jacobians': [2, 2, 2, 3], 'ntk': [2, 2, 2, 2]}
    """
    differentiated = inputs.is_differentiated("per_sample_grads", requested=differentiable)
    inputs.check_options(
        engine=engine,
        randomness=randomness,
        chunk_size=chunk_size,
        memory=memory,
        outputs=outputs,
        unit_reduce=unit_reduce,
    )
    wanted, container = inputs.reductions(reduce, *_apart)
    if type(batch) is not tuple or not PLAIN.issuperset(map(type, batch)):
        batch = inputs.as_dicts(batch)
    if engine in PROGRAMS and (differentiated or transforms()):
        engine = "eager"  # programs take no tensors of the caller's transforms, and record no graph
    by_ids = engine in PROGRAMS and has_ids(unit)
    if by_ids and weights is None and in_dims == (None, 0) and not any(map(reads_ids, wanted)):
        # As units of k samples, for which programs are remembered.
        batch, unit = consecutive(batch, unit) or (batch, unit)
        by_ids = has_ids(unit)
    options = engine, in_dims, keep_batch_dim, randomness, outputs, chunk_size, memory, unit, unit_reduce
    asked = Asked(loss_fn, params, batch, wanted, container, out, options, weights)
    if engine in PROGRAMS and not by_ids and (found := repeated(asked)) is not None:
        return found[0]

    def compute() -> Tree:
        if out is not None:
            inputs.check_out(out, differentiated=differentiated)
        call = inputs.normalize(
            loss_fn,
            params,
            batch,
            wanted,
            weights=weights,
            in_dims=in_dims,
            keep_batch_dim=keep_batch_dim,
            randomness=randomness,
            differentiated=differentiated,
            outputs=outputs,
            memory=memory,
            unit=unit,
            unit_reduce=unit_reduce,
            takes_shards=True,
        )
        into = out if out is not None and is_apart(out, call.tensors) else None
        reductions = Reductions(wanted, keep_factored=into is not None, keep_stacked=into is not None)

        def by(way: pipeline.Engine) -> list[Leaf]:
            return pipeline.run(call, pipeline.lift_by(way, reductions), reductions, chunk_size)

        def first() -> list[Leaf]:
            if engine in PROGRAMS:
                return compiled(call, reductions, chunk_size, None if by_ids else asked, into, engine=engine)
            return by(ENGINES[engine])

        shards = on_shards(call, wanted, engine, chunk_size, out) if call.is_sharded else nullcontext()
        with unwritten(call), shards:
            results = answered(call, engine, first, by) if call.size else by(empty)
        result = owned(trees.unflatten(results, container), call.tensors)
        result = result if out is None else write_into(out, result)
        if keep_batch_dim and call.size > 1 and vanish(trees.leaves_like(result, container), wanted):
            warn_of_statistics(call, chunk_size or call.size)
        return result

    handled = sys.exc_info()[1]
    try:
        return isolated(params, compute, keep_graph=differentiated)
    except Exception as error:
        fold(error, handled)
        raise
