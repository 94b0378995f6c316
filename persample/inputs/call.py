"""One call in the form that engines take: the loss of one sample, checked each time it is called, and flat tensors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType

from torch import Tensor, nn
from torch.nn.utils import parametrize

from persample._torch import num_parametrize_caches
from persample.errors import ArgumentError, LossError
from persample.factors import cost_model
from persample.gradients import ParamSpec
from persample.inputs.batch import PLAIN, as_tensors, batch_axes_first, dims_of_leaves, sample_structure, split_in_dims
from persample.inputs.modules import ParamTree
from persample.inputs.options import Outputs, check_averages, check_weights
from persample.inputs.params import check_params
from persample.inputs.sharding import on_one_mesh
from persample.inputs.units import Order, UnitReduce, Units, units_of, weights_of_samples
from persample.reductions import Reduction
from persample.utils import trees
from persample.utils.numerics import is_sharded
from persample.utils.tracing import inside, is_recorded
from persample.utils.trees import Leaf, Tree


@dataclass(frozen=True)
class SampleLoss:
    """The loss ℓ in the engines' form: from the tensors of the parameters and the leaves of one sample to (ℓ, aux)."""

    fn: Callable[..., Tree]
    params: ParamTree  # the flattened params, which call the loss with tensors in place of the parameters
    spec: ParamSpec  # the structure, names, shapes and dtypes of results like the parameters
    batch: trees.TreeSpec
    batched: tuple[bool, ...]  # for each leaf of the batch, whether it holds one row per sample
    unpack: bool  # whether the batch is a plain tuple or list, passed as positional arguments
    keep_batch_dim: bool  # whether each sample is passed with a leading axis of 1
    outputs: Outputs = "scalar"  # "scalar", or "rows" if the loss of one sample is a vector ``[K]``
    called: str = "loss_fn"  # the name of the function's argument, for messages
    given: str = "batch"  # the name of the batch's argument, for messages

    def shaped(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Return the leaves of one sample in the shape that the user's loss takes."""
        if not self.keep_batch_dim:
            return list(leaves)
        return [x.unsqueeze(0) if split else x for x, split in zip(leaves, self.batched, strict=True)]

    def arguments(self, shaped: Sequence[Leaf]) -> Sequence[Leaf]:
        """Return the arguments after ``params`` in a call of the user's loss, from leaves that are ``shaped``."""
        sample = trees.unflatten(list(shaped), self.batch)
        return sample if self.unpack else (sample,)

    def returned(self, params: Sequence[Tensor], leaves: Sequence[Leaf]) -> Tree:
        """Call the user's function for one sample, and return its result unchecked."""
        with inside(self.called, self.params):
            return self.params.call(params, self.fn, self.arguments(self.shaped(leaves)))

    def __call__(self, params: Sequence[Tensor], leaves: Sequence[Leaf]) -> tuple[Tensor, Tree]:
        """Return the loss of one sample, and the pair (aux, whether the loss returned aux)."""
        returned = self.returned(params, leaves)
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, ())
        _check_loss(loss, returned, self.outputs)
        if returned is not loss:
            _check_aux(aux)
            if self.keep_batch_dim:  # the axis of 1 is not the user's
                aux = trees.map_tensors(lambda x: x.squeeze(0) if x.ndim else x, aux)
        return loss, (aux, isinstance(returned, tuple))


def _check_loss(loss: object, returned: object, outputs: Outputs) -> None:
    expected = "one real scalar tensor" if outputs == "scalar" else "one real vector [K] (outputs='rows')"
    if not isinstance(loss, Tensor):
        received = type(loss).__name__ if loss is returned else f"a 2-tuple that starts with {type(loss).__name__}"
        if isinstance(returned, tuple | list):
            received = f"a {type(returned).__name__} of {len(returned)}"
        fix = "Return the tensor itself (no .item(), no float()), and with more to return exactly (loss, aux)."
    elif not loss.is_floating_point():
        received, fix = f"dtype {loss.dtype}", "Compute a real floating loss (.float(), or .abs() of a complex one)."
        if loss.is_complex():
            fix += " For the gradients of both parts return torch.view_as_real(loss), with outputs='rows'."
    elif outputs == "rows" and (loss.ndim != 1 or not len(loss)):
        received = f"shape {list(loss.shape)}"
        fix = "Return the K outputs of one sample, for example by .flatten(); for one output leave outputs='scalar'."
    elif outputs == "scalar" and loss.ndim:
        received = f"shape {list(loss.shape)}"
        fix = "loss_fn sees one sample: reduce what is left, for example with .sum(), .mean() or .squeeze()."
        if loss.ndim == 1:
            fix += " Or pass outputs='rows': then each element has a gradient of its own."
    else:
        return
    raise LossError(f"loss_fn: expected to return {expected}, received {received}. {fix}")


def _check_aux(aux: object) -> None:
    for path, leaf in zip(trees.paths(aux, "aux"), trees.flatten(aux)[0], strict=True):
        if not isinstance(leaf, Tensor):
            raise LossError(
                f"loss_fn returned (loss, aux): expected {path} to be a tensor, received {type(leaf).__name__}. "
                "Return tensors only, torch.as_tensor(x) for a number."
            )


NOT_CONNECTED = (
    "loss_fn: expected a loss that depends on params, received one that depends on none of them. Likely causes: it "
    "uses a module or tensors it closed over instead of the params it is given, every path is detached "
    "(stop_gradient, no_grad, .item()), or the parameters sit in a module hidden in a plain Python list (use "
    "nn.ModuleList). Compute the loss from the first argument."
)


class NotConnectedError(LossError):
    """Raised if the loss depends on no parameter."""

    def __init__(self, message: str = NOT_CONNECTED) -> None:
        super().__init__(message)


@dataclass(frozen=True)
class Call:
    """The normalized arguments of a call, or of one chunk of it."""

    loss: SampleLoss
    size: int  # B
    params: tuple[Tensor, ...]  # one tensor per differentiated parameter
    params_batched: tuple[bool, ...]  # for each of ``params``, whether it holds one parameter per sample, on axis 0
    leaves: tuple[Leaf, ...]  # the leaves of the batch, tensors or constants
    leaves_batched: tuple[bool, ...]  # for each of ``leaves``, whether it holds one row per sample, on axis 0
    weights: Tensor | None = None  # ``[B]`` float64, or None for ones
    randomness: str = "error"  # "error", "same" or "different", as in ``torch.func.vmap``
    differentiated: bool = False  # whether the caller differentiates the results
    memory: cost_model.Memory = None  # the bytes that written-out gradients may take, "low" or None
    planned: cost_model.Budget | None = None  # the budget that a program was made with, in place of ``memory``, or None
    units: Units | None = None  # which consecutive samples are a unit; None if each sample is one
    order: Order | None = None  # how the samples were sorted, so that those of units are consecutive, or None
    unit_weights: Tensor | None = None  # ``[U]``, 0 for units that are left out, else 1; None for ones
    is_sharded: bool = False  # whether parameters and tensors of the batch are DTensors

    @property
    def count(self) -> int:
        """B, or U of units: the number of gradients that reductions see."""
        return self.size if self.units is None else self.units.count(self.size)

    @property
    def counted(self) -> tuple[int, Tensor | None]:
        """The number of gradients that reductions see, and their weights."""
        return (self.size, self.weights) if self.units is None else (self.count, self.unit_weights)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that the loss is called with."""
        return [x for x in (*self.params, *self.leaves) if isinstance(x, Tensor)]

    @property
    def budget(self) -> cost_model.Budget:
        """The memory for written-out gradients."""
        if self.planned is not None:
            return self.planned
        if self.loss.outputs == "rows":  # K is not known yet
            return cost_model.budget(self.memory, math.inf)
        written_out, count = 0, self.count
        for x, split in zip(self.params, self.params_batched, strict=True):
            written_out += x.nbytes * (1 if split else count)
        return cost_model.budget(self.memory, written_out)

    def plan(self, required_ops: frozenset[str]) -> cost_model.Plan:
        """Return how gradients are stored."""
        return cost_model.Plan(required_ops, *self.budget)

    def chunks(self, chunk_size: int | None) -> Iterator[Call]:
        """Split the call into chunks of at most ``chunk_size`` samples, in order; not if weights are differentiated."""
        step = chunk_size or self.size
        # A chunk whose weights are all 0 has no mean that could be merged with derivatives by its weights.
        has_recorded_weights = self.weights is not None and is_recorded(self.weights)
        if step >= self.size or has_recorded_weights:
            yield self
        elif self.units is not None:
            for rows, units in self.units.split(self.size, step):
                yield replace(self._chunk(rows), units=units)
        else:
            for start in range(0, self.size, step):
                yield self._chunk(slice(start, min(start + step, self.size)))

    def none(self) -> Call:
        """Return the chunk without samples."""
        units = self.units and replace(self.units, sizes=1, ids=None if self.units.ids is None else self.units.ids[:0])
        return replace(self._chunk(slice(0, 0)), units=units, unit_weights=None)

    def _chunk(self, rows: slice) -> Call:
        params, leaves = self.at(rows)
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, size=rows.stop - rows.start, params=params, leaves=leaves, weights=weights)

    def at(self, index: int | slice | Tensor) -> tuple[tuple[Tensor, ...], tuple[Leaf, ...]]:
        """Return the parameters and the leaves of one sample, or of a range of samples."""

        def pick(values: tuple[Leaf, ...], batched: tuple[bool, ...]) -> tuple[Leaf, ...]:
            return tuple(x[index] if split else x for x, split in zip(values, batched, strict=True))

        return pick(self.params, self.params_batched), pick(self.leaves, self.leaves_batched)


def normalize(
    loss_fn: Callable[..., Tree],
    params: Tree,
    batch: Tree,
    wanted: Sequence[Reduction],
    *,
    weights: Tree,
    in_dims: Tree,
    keep_batch_dim: bool,
    randomness: str = "error",
    outputs: Outputs = "scalar",
    memory: cost_model.Memory = None,
    called: str = "loss_fn",
    given: str = "batch",
    batch_statistics: bool = False,
    is_part: bool = False,
    takes_shards: bool = False,
    differentiated: bool = False,
    unit: Tree = None,
    unit_reduce: UnitReduce = "sum",
) -> Call:
    """Return the call in the form that engines take; reject invalid arguments.

    ``called`` and ``given`` name the function and the batch in messages. ``is_part`` says that other samples follow, so
    that averages cannot be checked yet, ``takes_shards`` that parameters and leaves may be DTensors.
    """
    _check_parametrizations(called)
    tree = check_params(params, batch_statistics=batch_statistics)
    params_dims, batch_dims = split_in_dims(in_dims)
    leaves, structure = trees.flatten(batch)
    batch_names = trees.paths(batch, given)
    given_leaves = [*tree.tensors, *as_tensors(batch_names, leaves, tree.tensors[0])]
    leaf_dims = dims_of_leaves("in_dims[1]", batch_dims, structure)
    dims = dims_of_leaves("in_dims[0]", params_dims, tree.result)
    pairs = zip(dims, tree.slots, strict=True)
    if params_dims is not None and any(dim is not None and isinstance(slot, str) for dim, slot in pairs):
        fix = "Stack the parameters with torch.func.stack_module_state and pass the dict."
        raise ArgumentError.about("in_dims[0]", expected="None for modules", received=repr(params_dims), fix=fix)
    dims += leaf_dims
    values, batched, size = batch_axes_first(
        [*tree.paths, *batch_names], given_leaves, dims, given, keep_graph=differentiated
    )

    count = len(tree.tensors)
    sharded = not PLAIN.issuperset(map(type, values)) and any(map(is_sharded, values))
    if sharded:
        values = on_one_mesh([*tree.paths, *batch_names], values, batched, count, unit, allowed=takes_shards)
    shapes, dtypes = [], []
    for x, split in zip(values[:count], batched[:count], strict=True):
        shapes.append(x.shape[1:] if split else x.shape)
        dtypes.append(x.dtype)
    spec = ParamSpec(tree.result, tree.paths, tuple(shapes), tuple(dtypes))
    unpack = type(batch) in (tuple, list)
    sample = sample_structure(batch, structure, leaf_dims, slice(0, 1) if keep_batch_dim else 0)
    loss = SampleLoss(loss_fn, tree, spec, sample, batched[count:], unpack, keep_batch_dim, outputs, called, given)
    _check_signature(called, loss_fn, params, batch if unpack else (batch,), unpacked=unpack)
    for reduction in wanted:
        reduction.check(spec)
    weights = check_weights(weights, size, keep_graph=differentiated)
    call = Call(
        loss,
        size,
        values[:count],
        batched[:count],
        values[count:],
        batched[count:],
        weights,
        randomness,
        differentiated,
        memory,
        is_sharded=sharded,
    )
    if unit is not None:
        call = with_units(call, unit, unit_reduce, wanted)
    if not is_part:
        count, of_gradients = call.counted
        check_averages(wanted, of_gradients, count)
    return call if call.weights is None else replace(call, weights=call.weights.to(values[0].device))


def with_units(call: Call, unit: Leaf, reduce: UnitReduce, wanted: Sequence[Reduction]) -> Call:
    """Return the call whose samples are sorted by their units."""
    units, order = units_of(unit, call.size, keep_ids=any(one.returns_ids for one in wanted))
    params, leaves, weights = call.params, call.leaves, None if call.weights is None else call.weights.cpu()
    device = params[0].device
    if order is not None:
        params, leaves = call.at(order.samples.to(device))
        weights = None if weights is None else weights[order.samples]
    weights, units, of_units = weights_of_samples(weights, units, call.size, reduce)
    return replace(
        call,
        params=params,
        leaves=leaves,
        weights=None if weights is None else weights.to(device),
        units=units,
        order=order,
        unit_weights=of_units,
    )


def _check_parametrizations(called: str) -> None:
    if num_parametrize_caches(parametrize):
        expected = "parametrized tensors to be computed from the parameters of each sample"
        received = "a call inside torch.nn.utils.parametrize.cached(), which keeps those of the first sample"
        fix = "Make the call outside of this context, and enter it inside of the loss (on 'eager' or 'loop')."
        raise ArgumentError.about(called, expected=expected, received=received, fix=fix)


def _check_signature(called: str, loss_fn: Tree, params: Tree, sample: Sequence[Leaf], *, unpacked: bool) -> None:
    if not callable(loss_fn):
        fix = "Pass a function of (params, *sample)."
        raise ArgumentError.about(called, expected="a function", received=type(loss_fn).__name__, fix=fix)
    if isinstance(loss_fn, FunctionType):  # the usual case; inspect.signature is slow
        code = loss_fn.__code__
        if code.co_argcount == 1 + len(sample) and not code.co_kwonlyargcount:
            return
    is_module = isinstance(loss_fn, nn.Module)
    try:
        signature = inspect.signature(loss_fn.forward if is_module else loss_fn, follow_wrapped=False)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(params, *sample)
    except TypeError as error:
        fix = "A NamedTuple or dict is one argument: pass tuple(batch) or tuple(batch.values()) for several."
        if isinstance(sample[0], Tensor):
            fix = "A tensor is one argument, a plain tuple several. `accumulate` takes batches: pass [batch] for one."
        if unpacked:
            fix = (
                f"A plain {type(sample).__name__} is unpacked into positional arguments: let the loss take them; to "
                f"pass {len(sample)} samples, stack them into one tensor with a batch axis."
            )
        if is_module:
            fix = "Pass a function that calls the model too, such as lambda model, x, y: criterion(model(x), y)."
        expected = f"to take params and {len(sample)} argument(s) of a sample"
        received = f"{signature} ({error})"
        raise ArgumentError.about(called, expected=expected, received=received, fix=fix) from error
