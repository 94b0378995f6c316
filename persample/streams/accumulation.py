"""``accumulate``: the reductions of ``per_sample_grads`` over any number of batches and processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from persample import inputs
from persample._torch import transforms, uncaptured
from persample.engines.compiled import PROGRAMS, FlatParams
from persample.errors import ArgumentError, WrapperWarning
from persample.inputs import Engine, Outputs, Randomness, check_outside
from persample.inputs.sharding import mixing
from persample.inputs.units import UnitReduce, has_ids
from persample.pipeline import owned
from persample.processes import Processes, check_group
from persample.reductions import Reduce
from persample.reductions.base import Reductions, described
from persample.streams.accumulator import ORDERS, Finished, Order
from persample.streams.batches import numbered, shown
from persample.streams.lift import BatchLift, RandomStream
from persample.streams.sink import SinkRun
from persample.streams.stream import Stream
from persample.streams.unit_stream import UnitStream
from persample.utils import trees
from persample.utils.isolation import isolated
from persample.utils.numerics import is_sharded
from persample.utils.trees import Leaf, Tree

Loss: TypeAlias = Callable[..., Tensor | tuple[Tensor, Tree]]


@uncaptured
def accumulate(
    loss_fn: Loss | Mapping[Any, Loss],
    params: Tree,
    batches: Iterable[Leaf],
    reduce: Reduce = None,
    *_apart: NoReturn,
    weights: Tree = None,
    in_dims: tuple[Tree, Tree] = (None, 0),
    keep_batch_dim: bool = False,
    randomness: Randomness = "error",
    outputs: Outputs = "scalar",
    unit: int | Callable[[Leaf], Leaf] | Iterable[Leaf] | None = None,
    unit_reduce: UnitReduce = "sum",
    chunk_size: int | None = None,
    memory: int | Literal["low"] | None = None,
    engine: Engine = "eager",
    group: object = None,
    order: Order = "interleaved",
    progress: bool = False,
    sink: str | Path | None = None,
    resume: bool | None = None,
    differentiable: bool = False,
) -> Tree:
    """Compute the results of ``per_sample_grads`` for the samples of many batches, on one or more processes.

    The results are those of one big batch. Memory does not grow with the number of batches, except for results with a
    row for each sample (``Stack``, ``Norm``, ``Gram``, …). Sums of batches are added up in float64, moments are merged
    by Chan's formula.

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).

    Args:
        loss_fn: as in ``per_sample_grads``: the loss of one sample. Or a dict of several losses by name, whose samples
            become rows of one result: each entry of ``batches`` is then a dict of batches with the same names, of any
            sizes, and so are the weights. By default a sample weighs 1/n, for the n in its batch, so that a mean is one
            over losses. Rows are in the order of the losses, entry by entry. ``unit`` is not supported.
        params: as in ``per_sample_grads``; the same for all batches. For a ``DistributedDataParallel`` module the
            module inside is used, with a warning. DTensors need no ``group``: batches are those of all processes.
        batches: an iterable of batches: a ``DataLoader``, a generator, a list. Each is a ``batch`` of
            ``per_sample_grads``, of any size, even 0. Each process of a group passes its own.
        reduce: as in ``per_sample_grads``.
        weights: None; a function from a batch to its weights, ``[B]`` or None; or an iterable with an entry for each
            batch. See ``per_sample_grads``.
        in_dims: as in ``per_sample_grads``, the same for all batches.
        keep_batch_dim: as in ``per_sample_grads``.
        randomness: as in ``per_sample_grads``; "same" means the same numbers for the samples of all batches. The losses
            draw from a stream of their own, which torch's global generator seeds once.
        outputs: as in ``per_sample_grads``.
        unit: as in ``per_sample_grads``: a number; or a function from a batch to the ids of its samples' units, or an
            iterable with ids for each batch. The last unit of a batch may continue in the next one (with ``sink``, none
            may). An id that comes again later is an error: sort the samples by their units. Each unit has all its
            samples on one process, and ``order`` is that of units.
        unit_reduce: as in ``per_sample_grads``.
        chunk_size: the number of samples processed at a time; None for a whole batch.
        memory: as in ``per_sample_grads``, for the samples of one chunk.
        engine: as in ``per_sample_grads``.
        group: a process group such as ``torch.distributed.group.WORLD``: each process goes through its own batches,
            and all return the result for the samples of all. The reductions, their options, and names, shapes and
            dtypes of the parameters must be the same on all; functions are compared by name. None for this process
            alone.
        order: how the samples of a dataset are distributed over the processes of a group, which gives the order of
            rows: "interleaved" if process r has samples r, r + world, …, as ``DistributedSampler`` gives them without
            shuffling; "contiguous" if each has one piece, in the order of the ranks.
        progress: show a bar on stderr, on the first process, in terminals and notebooks (needs ``rich``).
        sink: a folder for results with rows of samples, instead of memory: new, or with the results of this run. Each
            tensor is an ``.npy`` file there, and ``read_sink`` reads them back; returned tensors are memory-mapped.
            ``Gram`` and others that need all gradients at once cannot go there.
        resume: continue an interrupted run in ``sink`` after its last complete batch.
            The files are the same as without the interruption, to the last bit. The batches must come as before.
        differentiable: not supported for many batches; ``per_sample_grads`` gives the results of one a graph.

    Returns:
        As ``per_sample_grads``, for the samples of all batches: a result like ``reduce``.

    Raises:
        ArgumentError: if an argument is invalid. Errors in a batch name it.
        SinkError: if the folder cannot be written to, or a file in it is not what was written.
        LossError: if the loss fails in a way that is explained; if results of batches do not fit together; if another
            process failed or ended. An error raised by the loss's own code keeps its type; a note names the batch.

    Examples:
        >>> import torch
        >>> from persample import Mean, Norm, accumulate
        >>> batches = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])]
        >>> accumulate(lambda w, x: w @ x, torch.zeros(2), batches, {"mean": Mean(), "norms": Norm()})
        {'mean': tensor([1., 2.]), 'norms': tensor([5., 1., 1.])}

        Samples that count differently, by a column of the batch:

        >>> def loss(w, sample):
        ...     return w @ sample["x"]
        >>> batches = [{"x": torch.eye(2), "weight": torch.tensor([1.0, 3.0])}]
        >>> accumulate(loss, torch.zeros(2), batches, Mean(), weights=lambda batch: batch["weight"])
        tensor([0.2500, 0.7500])

        Two losses with batches of two sizes:

        >>> losses = {"inside": lambda w, x: w @ x, "at the boundary": lambda w, x: 2 * w @ x}
        >>> batches = [{"inside": torch.eye(2), "at the boundary": torch.ones(1, 2)}]
        >>> accumulate(losses, torch.zeros(2), batches, Mean())
        tensor([1.2500, 1.2500])
    """
    losses: Mapping[Any, Loss] = loss_fn if isinstance(loss_fn, Mapping) else {None: loss_fn}
    check_group(group)
    params = unwrapped(params)

    def prepare() -> tuple[BatchLift, trees.TreeSpec, Processes, SinkRun | None]:
        check_constant(differentiable=differentiable)
        inputs.check_options(
            engine=engine,
            randomness=randomness,
            chunk_size=chunk_size,
            memory=memory,
            outputs=outputs,
            unit_reduce=unit_reduce,
        )
        inputs.check_choices(order=(order, ORDERS))
        check_losses(losses, unit, group, order)
        wanted, container = inputs.reductions(reduce, *_apart)
        options = {
            "in_dims": in_dims,
            "keep_batch_dim": keep_batch_dim,
            "randomness": randomness,
            "outputs": outputs,
            "memory": memory,
        }
        if isinstance(unit, int) and (isinstance(unit, bool) or unit < 1):
            fix = "Pass how many consecutive samples are a unit, or ids."
            raise ArgumentError.about("unit", expected="a positive int", received=repr(unit), fix=fix)
        # A folder takes rows, and the numbers of its sums, by batch; rows of units by ids are sorted by batch.
        repeats = engine in PROGRAMS and sink is None and not has_ids(unit)
        if (group is not None or sink is not None) and any(map(is_sharded, FlatParams.of(params).tensors)):
            expected, received = "None for DTensors, whose batches are those of all processes", "group or sink"
            fix = "Leave both out: pass batches of DTensors, on every process of their mesh."
            raise ArgumentError.about("group", expected=expected, received=received, fix=fix)
        units = UnitStream(unit_reduce, wanted, waits=sink is None)
        lift = BatchLift(losses, params, wanted, options, chunk_size, engine, RandomStream(randomness), repeats, units)
        processes = Processes(group, lift.device, "accumulate")
        if unit is not None and group is not None and order == "interleaved" and any(r.rows_of_samples for r in wanted):
            expected = "'contiguous' for rows of samples (Aux) beside units"
            fix = "Give each process one piece of the data set."
            raise ArgumentError.about("order", expected=expected, received="'interleaved'", fix=fix)
        if sink is None:
            return lift, container, processes, None
        run = SinkRun(sink, lift, container, order, processes, resume=bool(resume))
        return lift, container, processes, run

    def alike(prepared: tuple[BatchLift, trees.TreeSpec, Processes, SinkRun | None]) -> dict[str, str]:
        lift, container, *_ = prepared
        options = {"order": order, "randomness": randomness, "sink": repr(sink), "unit_reduce": unit_reduce}
        options |= {"unit": "ids" if has_ids(unit) else repr(unit), "loss_fn": repr(list(losses))}
        return {"reduce": described(lift.wanted, container), **options, **inputs.check_params(params).formats}

    lift, container, processes, run = Processes(group, called="accumulate").together(prepare, alike)
    if run is not None and run.is_finished:
        return run.of_finished(numbered(batches, weights, unit, losses))
    stream = Stream(lift, order, processes, run)
    with shown(batches, len(losses), wanted=progress and processes.rank == 0) as advance:
        stream.through(numbered(batches, weights, unit, losses), advance)

    def finish() -> Tree:
        total = stream.merged()
        if run is not None:
            return run.finish(total)
        pairs = zip(lift.wanted, total.leaves[0], strict=True)
        with mixing(FlatParams.of(params).tensors):
            results = [
                leaves.value
                if isinstance(leaves, Finished)
                else Reductions([one]).finish([leaves], processes.device)[0]
                for one, leaves in pairs
            ]
        return owned(trees.unflatten(results, container), ())

    return isolated((), finish)  # without the modules: nothing of them is used any more


def check_losses(losses: Mapping[Any, Loss], unit: object, group: object, order: Order) -> None:
    """Reject what several losses do not support."""
    if not losses or (None in losses and len(losses) > 1):
        received = f"the names {list(losses)}"
        raise ArgumentError.about("loss_fn", expected="losses by name", received=received, fix="Name every loss.")
    if None not in losses and unit is not None:
        fix = "Sum over the samples of a unit in the loss."
        raise ArgumentError.about("unit", expected="None for several losses", received=repr(unit), fix=fix)
    if None not in losses and group is not None and order == "interleaved":
        fix = "Give each process one piece of each data set."
        raise ArgumentError.about("order", expected="'contiguous' for several losses", received=repr(order), fix=fix)


def unwrapped(params: Tree) -> Tree:
    """Return the parameters with the module inside of each ``DistributedDataParallel``."""
    leaves, structure = trees.flatten(params)
    if not any(isinstance(leaf, DistributedDataParallel) for leaf in leaves):
        return params
    warnings.warn(
        "params: of a DistributedDataParallel module, accumulate uses the module inside, and names results by its "
        "parameters. Its own reduction of gradients does not run: pass group= for results of all processes.",
        WrapperWarning,
        stacklevel=3,
    )
    inner = [leaf.module if isinstance(leaf, DistributedDataParallel) else leaf for leaf in leaves]
    return trees.unflatten(inner, structure)


def check_constant(*, differentiable: bool) -> None:
    """Reject derivatives of the results, and transforms of the caller's, whose tensors do not outlive a batch."""
    fix = "Call per_sample_grads(…, differentiable=True) there, on one batch."
    check_outside("accumulate", fix)
    if around := transforms():
        expected = "to be called outside of torch.func's transforms"
        received = f"a call inside torch.func.{around[0]}"
        raise ArgumentError.about("accumulate", expected=expected, received=received, fix=fix)
    if differentiable:
        expected = "False for a stream, which keeps none of its batches for a graph"
        fix = "Call per_sample_grads(…, differentiable=True) for each batch."
        raise ArgumentError.about("differentiable", expected=expected, received="True", fix=fix)
