"""The second pass: the per-sample gradients of ⟨f(xᵢ), dL/dzᵢ⟩, chunk by chunk, by the pipeline of all gradients.

Encoders that take whole chunks are differentiated by plain autograd, which yields only the sum over a chunk. It is
checked that the second pass encodes the samples as the first pass did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from persample import naive
from persample.composite.encoders import Encoder
from persample.composite.first_pass import FirstPass, Statistics, compact, encode_chunk, normalized, solve_adjoint
from persample.engines.diagnosis import diagnosed, unwritten
from persample.engines.fallback import answered
from persample.engines.uncompiled import ENGINES
from persample.errors import LossError
from persample.gradients import Gradients
from persample.inputs.call import Call, NotConnectedError
from persample.merge import merge_all
from persample.pipeline import Engine, Lift, lift_by
from persample.processes import Processes
from persample.reductions.base import Reductions
from persample.utils import rng, trees
from persample.utils.backward import BackwardGuard
from persample.utils.numerics import accumulate_dtype, as_real, is_autocast
from persample.utils.trees import Tree, tree_map
from persample.vmap_rules.effects import guarded


def chunk_engine(chunk: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (an engine's signature)
    """Compute the gradient of the loss of a whole chunk."""
    with diagnosed(chunk, batched=False):
        loss, tree = chunk.loss, chunk.loss.params
        differentiate = partial(naive.value_and_grad, guarded(loss), chunk.params, chunk.leaves, like=tree.tensors)
        value, (aux, has_aux), grads = tree.unchanged(differentiate)
    return one_row(chunk, grads, value, tree_map(lambda leaf: leaf.unsqueeze(0), aux), has_aux=has_aux)


def one_row(
    chunk: Call, grads: Sequence[Tensor | None], loss: Tensor, aux: Tree = (), *, has_aux: bool = False
) -> Gradients:
    """Return the gradient of a chunk as that of one sample."""
    pairs = zip(chunk.params, grads, strict=True)
    return Gradients.dense(
        [(torch.zeros_like(x) if g is None else g).detach().unsqueeze(0) for x, g in pairs],
        spec=chunk.loss.spec,
        losses=loss.unsqueeze(0),
        connected=any(g is not None for g in grads),
        aux=aux,
        has_aux=has_aux,
    )


BackPropagate = Callable[[Sequence[Tensor | None]], Gradients]


def encode_with_graph(call: Call) -> tuple[Tree, BackPropagate]:
    """Encode a chunk; return z, detached, and the function from dL/dz (one per leaf of z) to the chunk's gradient."""
    with torch.enable_grad(), unwritten(call):
        params = tuple(param.detach().requires_grad_() for param in call.params)
        z = encode_chunk(replace(call, params=params), "batched")
    outputs = trees.flatten(z)[0]

    def back_propagate(cotangents: Sequence[Tensor | None]) -> Gradients:
        pairs = [(x, c) for x, c in zip(outputs, cotangents, strict=True) if c is not None and x.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(params)
        if pairs:
            differentiated, given = zip(*pairs, strict=True)
            guard = BackwardGuard(params)
            grads = call.loss.params.call(params, lambda _: guard.grads(differentiated, given), ())
        return one_row(call, grads, loss=params[0].real.new_zeros(()))

    return trees.tree_map(compact, z), back_propagate


_FIX = (
    "It must draw from the global streams of torch, NumPy or random, which are replayed, and not from a generator of "
    "its own. Its result must not depend on the number of earlier calls, or on whether a graph is recorded."
)


def tolerance(encoder: Encoder, z: object) -> float:
    """Return √eps of the coarsest format: another dropout mask changes z by much more, other kernels by a few eps."""
    leaves = trees.flatten(z)[0]
    dtypes = [*encoder.call.loss.spec.dtypes, *(leaf.dtype for leaf in leaves)]
    dtypes += [torch.get_autocast_dtype(x.device.type) for x in leaves if is_autocast(x.device)]
    return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex) ** 0.5


def deviation(z: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest |z − z₁| and the largest finite |z₁|, 0-d float64 each; NaN and ∞ equal themselves."""
    dtype = accumulate_dtype(z.dtype) if z.is_floating_point() or z.is_complex() else torch.float64
    now, then = (as_real(x.detach()).to(dtype).flatten() for x in (z, before))
    same = (now == then) | (now.isnan() & then.isnan())
    largest = [torch.where(same, 0, (now - then).abs()), torch.where(then.isfinite(), then, 0).abs()]
    difference, size = (torch.cat([x, x.new_zeros(1)]).max().double() for x in largest)  # 0 for an empty tensor
    return difference, size


def checked(engine: Engine, encoder: Encoder, z: object) -> Engine:
    """Return an engine that also compares z of each chunk with z of the first pass."""
    paths, bound, batched = trees.paths(z, "z"), tolerance(encoder, z), encoder.mode == "batched"

    def checked_engine(chunk: Call, required_ops: frozenset[str]) -> Gradients:
        gradients = engine(chunk, required_ops)
        _, _, before, _ = trees.unflatten(list(chunk.leaves), chunk.loss.batch)
        numbers = [x for pair in zip(gradients.aux, before, strict=True) for x in deviation(*pair)]
        found = torch.stack(numbers).tolist()  # one transfer for both, because each one waits for the device
        for path, difference, size in zip(paths, found[::2], found[1::2], strict=True):
            if not difference <= bound * size:
                off = f"{path}, off by {difference:g} beside numbers up to {size:g}"
                raise LossError(_message(chunk.loss.called, off, _first_difference(chunk, batched=batched)))
        return gradients

    return checked_engine


def _message(called: str, off: str, module: str | None) -> str:
    where = f"module {module}" if module else f"{called} itself, outside of any module,"
    return (
        f"{called}: expected the second pass to encode the samples as the first did, received another {off}: {where} "
        f"returns a different result when it is called again. {_FIX}"
    )


def _first_difference(chunk: Call, *, batched: bool) -> str | None:
    """Return the name of the first module whose outputs differ with and without a graph, or None if there is none."""
    start = rng.Streams.now()
    for arguments in [(chunk.params, chunk.leaves)] if batched else map(chunk.at, range(chunk.size)):
        runs = []
        for recording in (torch.no_grad(), torch.enable_grad()):
            start.go_back()
            with recording:
                runs.append(_module_outputs(lambda: chunk.loss.returned(*arguments)))  # noqa: B023 (called at once)
        for (module, first), (_, second) in zip(*runs, strict=False):
            if not all(torch.allclose(x, y, equal_nan=True) for x, y in zip(first, second, strict=True)):
                return _name(module, chunk.loss.params.modules)
    return None


def _module_outputs(call: Callable[[], object]) -> list[tuple[nn.Module, list[Tensor]]]:
    """Return every module called and the tensors that it returned, in the order in which the modules finished."""
    outputs: list[tuple[nn.Module, list[Tensor]]] = []

    def record(module: nn.Module, _: object, output: object) -> None:
        outputs.append((module, [x.detach().clone() for x in trees.flatten(output)[0] if isinstance(x, Tensor)]))

    handle = register_module_forward_hook(record)
    try:
        call()
    finally:
        handle.remove()
    return outputs


def _name(module: nn.Module, roots: Sequence[nn.Module]) -> str:
    names = {part: name for root in roots for name, part in root.named_modules() if name}
    return f"{names[module]!r} ({type(module).__name__})" if module in names else type(module).__name__


def back_propagate(
    encoder: Encoder,
    first: FirstPass,
    cotangents: Sequence[Tensor | None],
    reductions: Reductions,
    processes: Processes,
) -> Tree:
    """Lift the gradients of all samples' contributions."""

    def chunks(statistics: Sequence[Statistics] | None) -> Iterator[Call]:
        replay = Replay(first.start)
        call = contributions(encoder.call, replace(first, statistics=statistics), cotangents, replay)
        return replay.over(call.chunks(encoder.chunk_size))

    used = any(cotangent is not None for cotangent in cotangents)
    lift_chunk = _lift(encoder, first.z, reductions) if used else lift_by(_zeros, reductions)
    statistics = first.statistics
    if statistics and used:
        statistics = solve_adjoint(chunks, statistics, processes)

    def lift() -> Tree:
        with unwritten(encoder.call):
            return merge_all(map(lift_chunk, chunks(statistics)))

    return processes.together(lift)


def contributions(call: Call, first: FirstPass, cotangents: Sequence[Tensor | None], replay: Replay) -> Call:
    """Return the call whose sample i has the loss ⟨f(xᵢ), dL/dzᵢ⟩, and the leaves of f(xᵢ) as aux.

    The leaves of its batch are those of the samples, dL/dz (None where L does not depend on it), z of the first pass,
    and the statistics, whose contributions to L are added. ``replay`` records where each forward pass ends.
    """
    f, z = call.loss, trees.flatten(first.z)[0]
    used = [cotangent is not None for cotangent in cotangents]
    given = [cotangent for cotangent in cotangents if cotangent is not None]

    def loss(params: Tree, leaves: Tree, given: Tree, _: Tree, statistics: Tree) -> tuple[Tree, Tree]:
        sample = trees.unflatten(list(leaves), f.batch)
        z, term = normalized(f.fn, statistics)(params, *(sample if f.unpack else (sample,)))
        replay.forward_done()
        found = trees.flatten(z)[0]
        moving = [leaf for leaf, counts in zip(found, used, strict=True) if counts]
        return sum(map(inner_product, moving, given), start=term), found

    leaves, batch = trees.flatten((call.leaves, given, z, first.statistics))
    rows = (*call.leaves_batched, *(True for _ in (*given, *z)))
    batched = (*rows, *(False for _ in leaves[len(rows) :]))
    contribution = replace(f, fn=loss, batch=batch, batched=batched, unpack=True)
    return replace(call, loss=contribution, leaves=tuple(leaves), leaves_batched=batched)


def inner_product(z: Tensor, cotangent: Tensor) -> Tensor:
    """Return ⟨z, c⟩, whose gradient is c: complex numbers as pairs of reals, summed in float32 at least."""
    dtype = accumulate_dtype(z.dtype)
    return (as_real(z).to(dtype) * as_real(cotangent).to(dtype)).sum()


def _lift(encoder: Encoder, z: object, reductions: Reductions) -> Lift:
    """Return the function that lifts a chunk by the engine of the encoder's mode; a chunk may contribute nothing."""
    own, zeros = chunk_engine if encoder.mode == "batched" else ENGINES[encoder.mode], lift_by(_zeros, reductions)

    def lift(chunk: Call) -> Tree:
        def by(engine: Engine) -> Tree:
            return lift_by(checked(engine, encoder, z), reductions)(chunk)

        try:
            if encoder.mode == "eager" and chunk.size:
                return answered(chunk, encoder.mode, lambda: by(own), by)
            return by(own) if chunk.size else zeros(chunk)
        except NotConnectedError:  # this encoder is frozen, others need not be
            return zeros(chunk)

    return lift


def _zeros(chunk: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (an engine's signature)
    """Return gradients of zero, those of contributions that depend on no parameter."""
    pairs = zip(chunk.params, chunk.loss.spec.shapes, strict=True)
    values = [x.new_zeros(()).expand(chunk.size, *shape) for x, shape in pairs]
    losses = chunk.params[0].real.new_zeros(chunk.size)
    return Gradients.dense(values, spec=chunk.loss.spec, losses=losses, connected=False)


class Replay:
    """The random streams of one pass over the chunks; each forward pass continues where the previous one ended.

    Random numbers drawn by backward passes do not advance the replayed streams. Only one position is stored, not one
    per chunk.
    """

    def __init__(self, start: rng.Streams) -> None:
        self._position = start

    def over(self, chunks: Iterable[Call]) -> Iterator[Call]:
        """Iterate over chunks; the streams are set to their states at the same chunk of the first pass."""
        for chunk in chunks:
            self._position.go_back()
            yield chunk
            torch.clear_autocast_cache()  # which holds casts of every chunk's copies of the parameters

    def forward_done(self) -> None:
        """Record the states of the streams after a forward pass."""
        self._position = rng.Streams.now()
