"""``composite_grads``: the gradient of a loss that couples samples, by gradient caching.

It encodes without a graph, differentiates the loss L = g(z), and back-propagates dL/dz by chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from persample import inputs, naive
from persample._torch import uncaptured
from persample.composite import first_pass, second_pass
from persample.composite.encoders import CHOOSE, RULES, BufferRecorder, Encoder, build_encoders
from persample.composite.second_pass import encode_with_graph
from persample.errors import ArgumentError, LossError
from persample.inputs import check_outside
from persample.inputs.call import SampleLoss
from persample.inputs.modules import ParamTree
from persample.inputs.params import add_grads
from persample.merge import merge_all
from persample.pipeline import owned
from persample.processes import Processes, check_group, merged, own_rows
from persample.reductions import Aux, Loss, Reduce, Reduction, Sum
from persample.reductions.base import Reductions, SumOverSamples, described
from persample.utils import rng, trees
from persample.utils.isolation import isolated
from persample.utils.tracing import inside
from persample.utils.trees import Leaf, Tree
from persample.vmap_rules.effects import guarded


@dataclass(frozen=True)
class LossHead:
    """g with its own parameters."""

    loss_fn: Callable[..., Tree]  # from (loss_params, z), or from z alone, to L
    params: ParamTree | None  # the flattened parameters of g; None if it has none
    container: trees.TreeSpec  # the structure of the encoders' container, which is that of their z, too

    def differentiate(self, z: Sequence[Leaf]) -> tuple[Tensor, Tree, list[list[Tensor | None]]]:
        """Compute L and its derivatives from z of all samples, one tree per encoder.

        Returns the detached loss, the gradients of the loss parameters (a tree like them; None without), and for each
        encoder dL/dz, one per leaf of z, None where L does not depend on it.
        """
        leaves, structure = trees.flatten(trees.unflatten(list(z), self.container))
        own = list(self.params.tensors) if self.params else []
        places = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point() or leaf.is_complex()]

        def value(tensors: Sequence[Tensor]) -> tuple[Tensor, Tree]:
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

    def _call(self, own: Sequence[Tensor], z: object) -> Tree:
        with inside("loss_fn", self.params):
            loss_fn = guarded(self.loss_fn)
            return loss_fn(z) if self.params is None else self.params.call(own, loss_fn, (z,))


def build_loss_head(loss_fn: object, loss_params: object, container: trees.TreeSpec) -> LossHead:
    """Return the loss and its parameters; reject anything but a function and floating parameters."""
    if not callable(loss_fn):
        fix = "Pass a function of z, or of (loss_params, z)."
        raise ArgumentError.about("loss_fn", expected="a function", received=type(loss_fn).__name__, fix=fix)
    params = None if loss_params is None else inputs.check_params(loss_params, name="loss_params")
    return LossHead(loss_fn, params, container)


def _checked(loss: object) -> Tensor:
    if isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point():
        return loss
    received = f"shape {list(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"loss_fn: expected to return one real scalar tensor for all samples, received {received}. Reduce it, for "
        "example with .mean(), and return nothing beside it."
    )


# From dL/dz, one per leaf of z, to the leaves of every reduction and whether z depends on any parameter.
Pullback: TypeAlias = Callable[[Sequence[Tensor | None]], Tree]
_NOT_CONNECTED = (
    "encode_fn: expected z that depends on params, received z that depends on none of them. Likely causes: it uses a "
    "module or tensors it closed over instead of the params it is given, every path is detached, or the parameters "
    "sit in a module hidden in a plain Python list (use nn.ModuleList). Compute z from the first argument."
)


def loss_and_gradients(
    encoders: Sequence[Encoder],
    head: LossHead,
    reductions: Reductions,
    recorder: BufferRecorder | None,
    processes: Processes,
) -> tuple[Tensor, Tree, list[Leaf]]:
    """Compute L = g(z), the gradients of g's own parameters, and the reductions of the samples' contributions."""
    sizes = [*zip(*processes.gather_objects([encoder.call.size for encoder in encoders]), strict=True)]  # by rank
    inputs.check_averages(reductions.reductions, None, sum(map(sum, sizes)))
    encoded, pullbacks = zip(*(vjp(encoder, reductions, recorder, processes) for encoder in encoders), strict=True)
    z = [processes.gather_rows(*pair) for pair in zip(encoded, sizes, strict=True)]
    loss, loss_grads, cotangents = processes.together(lambda: _differentiated(head, z, processes))
    after = rng.Streams.now()
    try:
        own = (own_rows(*pair, processes.rank) for pair in zip(cotangents, sizes, strict=True))
        lifted = merge_all(pullback(rows) for pullback, rows in zip(pullbacks, own, strict=True))
        leaves, connected = merged(lifted, processes)
    finally:
        after.go_back()
    if not connected.value and any(map(sum, sizes)):
        raise LossError(_NOT_CONNECTED)
    return loss, loss_grads, leaves


def vjp(
    encoder: Encoder, reductions: Reductions, recorder: BufferRecorder | None, processes: Processes
) -> tuple[Tree, Pullback]:
    """Encode all samples; return z and the function that back-propagates dL/dz (vector-Jacobian products)."""
    if encoder.is_one_plain_chunk:
        z, back_propagate = processes.together(lambda: encode_with_graph(encoder.call))
        return z, lambda cotangents: processes.together(lambda: reductions.lift(back_propagate(cotangents)))
    first = first_pass.encode(encoder, recorder, processes)
    return first.z, lambda cotangents: second_pass.back_propagate(encoder, first, cotangents, reductions, processes)


def _differentiated(
    head: LossHead, z: Sequence[Leaf], processes: Processes
) -> tuple[Tensor, Tree, list[list[Tensor | None]]]:
    before = None if processes.group is None else rng.snapshot()
    result = head.differentiate(z)
    if before is not None and rng.moved_since(before):
        raise LossError(
            "loss_fn drew random numbers: every process of the group would compute another loss. Draw them before, "
            "alike on every process, and let loss_fn close over them."
        )
    return result


@uncaptured
def composite_grads(
    encode_fn: Tree,
    loss_fn: Callable[..., Tensor],
    params: Tree,
    inputs: Tree,
    *,
    loss_params: Tree = None,
    reduce: Reduce = Sum(),
    in_dims: tuple[Tree, Tree] = (None, 0),
    batched: bool = False,
    keep_batch_dim: bool = False,
    batch_norm: Literal["refuse", "chunk", "full"] = "refuse",
    chunk_size: int | None = 32,
    engine: Literal["eager", "loop"] = "eager",
    accumulate: bool = False,
    group: object = None,
) -> tuple[Tensor, Tree]:
    """Compute L = g(f(x₁), …, f(xₙ)) and its gradient with the graph of one chunk alive at a time.

    For losses that couple samples: contrastive learning, list-wise ranking, functions of statistics of a batch. The
    first pass encodes all samples without a graph, zᵢ = f(xᵢ). Then L = g(z) is differentiated with respect to z. The
    second pass encodes again, a chunk at a time, and back-propagates ⟨zᵢ, dL/dzᵢ⟩, whose gradient is the contribution
    of sample i to dL/dθ (gradient caching).

    The result is exact: the second pass replays the random numbers of the first (dropout), and z of both passes is
    compared. Memory beyond z, dL/dz and the graph of g follows ``chunk_size``. The price is one more forward pass
    (none for a single chunk with ``batched=True``).

    Source: Gao, Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021).

    Args:
        encode_fn: f, ``encode_fn(params, *sample)`` for one sample, without the batch axis; returns zᵢ, a pytree of
            tensors. For several encoders, each with its own samples: a dict, tuple or list of functions; all
            receive ``params``.
        loss_fn: g, ``loss_fn(z)`` or ``loss_fn(loss_params, z)``, returns a real 0-d loss; z has the structure that
            ``encode_fn`` returns, with leaves ``[n, ...]``. With several encoders, z is a container of their z.
        params: as in ``per_sample_grads``: a pytree of tensors, an ``nn.Module``, modules in a pytree.
        inputs: as ``batch`` in ``per_sample_grads``, n samples. With several encoders: the same container of batches,
            each with its own n.
        loss_params: parameters of the loss (a temperature), a pytree or a module; they get gradients, too.
        reduce: the reduction of the samples' contributions (dL/dzᵢ)(dzᵢ/dθ): ``Sum()``, which is dL/dθ, any other
            reduction, or a container of them; None means ``Stack()``. Rows of several encoders are concatenated.
        in_dims: as in ``per_sample_grads``.
        batched: ``encode_fn(params, *chunk)`` receives chunks ``[k, ...]`` and returns z ``[k, ...]``; plain autograd,
            no vmap. The only reduction is ``Sum()`` then.
        keep_batch_dim: pass each sample with a leading axis of 1; zᵢ must have one, too.
        batch_norm: batch norm in train mode, with ``batched=True``: "refuse" it, or normalize with the statistics of
            each "chunk", or with those of the "full" batch (exact, at 2L more passes for L batch norms). With "chunk"
            and "full" the modules' buffers are updated once: each chunk starts from their values before the call, and
            they become the mean of the values after the chunks (integers: the value after the last chunk). With
            "refuse" they are not changed.
        chunk_size: the number of samples encoded at a time, which bounds memory; None for all.
        engine: "eager" (vmap) or "loop" (one sample at a time, for encoders that vmap cannot batch).
        accumulate: also add the gradients to ``.grad`` of ``params`` and ``loss_params``, as ``.backward()`` does.
        group: a process group such as ``torch.distributed.group.WORLD``: z of all ranks is gathered, in rank order,
            and every rank returns the result for the samples of all ranks. None for this process alone.

    Returns:
        ``(loss, grads)``, with ``loss_params`` ``(loss, (grads, loss_grads))``: the detached loss; the result of
        ``reduce``, by default a tree like ``params`` in their dtypes; a tree like ``loss_params``.

    Raises:
        ArgumentError: if an argument is invalid; the message names the argument and the fix.
        LossError: if z or the loss is not of the right form, if z does not depend on ``params`` or the loss on z, or
            if z differs between the passes; then the message names the module.

    Examples:
        A contrastive loss with a temperature of its own, every sample beside all others:

        >>> import torch
        >>> from persample import composite_grads
        >>> def encode(weight, x):
        ...     return torch.tanh(weight @ x)
        >>> def info_nce(log_scale, z):
        ...     return torch.nn.functional.cross_entropy(z @ z.T * log_scale.exp(), torch.arange(len(z)))
        >>> weight, x = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
        >>> loss, (grads, loss_grads) = composite_grads(encode, info_nce, weight, x, loss_params=torch.tensor(0.0))
        >>> loss
        tensor(0.6125)
        >>> grads.shape, loss_grads.shape
        (torch.Size([2, 2]), torch.Size([]))
    """
    instead = "There, differentiate loss_fn of what torch.vmap(encode_fn, in_dims=(None, 0)) returns: it composes."
    check_outside("composite_grads", instead)
    check_group(group)

    def normalized() -> tuple[list[Reduction], trees.TreeSpec, list[Encoder], LossHead]:
        check_options(
            engine=engine, chunk_size=chunk_size, batch_norm=batch_norm, batched=batched, keep_batch_dim=keep_batch_dim
        )
        requested, structure = check_reductions(reduce, batched=batched, batch_norm=batch_norm, accumulate=accumulate)
        encoders, container = build_encoders(
            encode_fn,
            params,
            inputs,
            in_dims=in_dims,
            keep_batch_dim=keep_batch_dim,
            chunk_size=chunk_size,
            mode="batched" if batched else engine,
            batch_norm=batch_norm,
        )
        head = build_loss_head(loss_fn, loss_params, container)
        check_parameters(encoders[0].call.loss, head.params, requested, accumulate=accumulate)
        return requested, structure, encoders, head

    def alike(found: tuple[list[Reduction], trees.TreeSpec, list[Encoder], LossHead]) -> dict[str, str]:
        requested, structure, encoders, head = found
        of_loss = {} if head.params is None else head.params.formats
        return {"reduce": described(requested, structure), **encoders[0].call.loss.params.formats, **of_loss}

    def compute() -> tuple[Tensor, Tree]:
        requested, structure, encoders, head = Processes(group).together(normalized, alike)
        own, tree, reductions = encoders[0].call.params, encoders[0].call.loss.params, Reductions(requested)
        processes = Processes(group, own[0].device)
        recorder = None if batch_norm == "refuse" else BufferRecorder()
        loss, loss_grads, leaves = loss_and_gradients(encoders, head, reductions, recorder, processes)
        if recorder is not None:
            recorder.write(tree.modules, processes)
        finished = trees.unflatten(reductions.finish(leaves, own[0].device), structure)
        given = [x for encoder in encoders for x in encoder.call.tensors]
        grads, loss_grads = owned((finished, loss_grads), given)
        if accumulate:
            add_grads(tree, grads)
            if head.params is not None:
                add_grads(head.params, loss_grads)
        return loss, grads if head.params is None else (grads, loss_grads)

    return isolated((params, loss_params), compute)


def check_options(*, engine: str, chunk_size: int | None, batch_norm: str, batched: bool, keep_batch_dim: bool) -> None:
    """Reject unknown options and combinations that exclude each other."""
    inputs.check_choices(engine=(engine, ("eager", "loop")), batch_norm=(batch_norm, RULES))
    inputs.check_loop(engine)
    inputs.check_chunk_size(chunk_size)
    if batched and keep_batch_dim:
        fix = "With batched=True encode_fn receives chunks of chunk_size samples; leave keep_batch_dim=False."
        raise ArgumentError.about("keep_batch_dim", expected="one of the two", received="batched=True, too", fix=fix)
    if batch_norm != "refuse" and not batched:
        raise ArgumentError.about("batch_norm", expected="'refuse' for single samples", received=batch_norm, fix=CHOOSE)


def check_reductions(
    reduce: object, *, batched: bool, batch_norm: str, accumulate: bool
) -> tuple[list[Reduction], trees.TreeSpec]:
    """Return the reductions as a list, and the structure of their container."""
    requested, container = inputs.reductions(reduce)
    for one in requested:
        if isinstance(one, Loss | Aux):
            fix = "Leave it out: the loss is returned beside the gradients."
            expected = "reductions of gradients (the samples have no losses of their own)"
            raise ArgumentError.about("reduce", expected=expected, received=f"{type(one).__name__}()", fix=fix)
        if batched and type(one) is not Sum:
            fix = "Write encode_fn for one sample, or with keep_batch_dim=True for a batch of one."
            fix = fix if batch_norm == "refuse" else CHOOSE
            expected = "Sum() with batched=True, which does not tell samples apart"
            raise ArgumentError.about("reduce", expected=expected, received=f"{type(one).__name__}()", fix=fix)
    if accumulate and not isinstance(reduce, SumOverSamples):
        fix = "Ask for Sum() (the default) or ClippedSum(C), or pass one of the results to set_grads yourself."
        expected = "a single sum over the samples with accumulate=True"
        raise ArgumentError.about("reduce", expected=expected, received=repr(reduce), fix=fix)
    return requested, container


def check_parameters(
    encoder: SampleLoss, loss_params: ParamTree | None, requested: Sequence[Reduction], *, accumulate: bool
) -> None:
    """Reject parameters that a reduction does not fit, or that have no ``.grad`` to accumulate into."""
    for reduction in requested:
        reduction.check(encoder.spec)
    for tree in (encoder.params, loss_params) if accumulate else ():
        for name, tensor in zip(tree.paths, tree.tensors, strict=True) if tree is not None else ():
            if not (tensor.requires_grad and tensor.is_leaf):
                received = "one that was computed" if tensor.requires_grad else "one without requires_grad"
                fix = "Pass the module, or leave accumulate=False and use the returned gradients."
                expected = "a leaf tensor that requires a gradient, for accumulate=True"
                raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
