"""Parameters and batches that are DTensors, of ``fully_shard`` or of tensor parallelism: processes keep their shards.

The loss runs on DTensors, whose operations torch distributes; ``sharded_gradients.py`` contracts the factors. All
tensors of a call are of one mesh, and plain ones are the same on each of its processes. The hooks of torch's own
wrappers, which gather parameters or change layouts around a module, do not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from persample._torch import forward_hooks
from persample.errors import ArgumentError
from persample.inputs.units import is_count
from persample.reductions import Aux, ClippedMean, ClippedSum, Loss, Mean, Norm, Reduction, Sum, WeightedSum
from persample.utils.numerics import is_sharded
from persample.utils.trees import Leaf

if TYPE_CHECKING:  # importing DTensor takes a second
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from persample.inputs.call import Call

_SUPPORTED = Sum, Mean, ClippedSum, ClippedMean, WeightedSum, Norm, Loss, Aux  # which read norms and sums alone
_NAMES = ", ".join(kind.__name__ for kind in _SUPPORTED)
GATHER = (
    "Pass {name: p.full_tensor().detach() for name, p in model.named_parameters()}, gathered on every process at once, "
    "and call a module without shards by torch.func.functional_call."
)


def replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that is the same on every process as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def mixing(tensors: Iterable[Leaf]) -> AbstractContextManager[None]:
    """Return the context in which operations take plain tensors beside DTensors, if there are DTensors."""
    if not any(map(is_sharded, tensors)):
        return nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def on_one_mesh(
    names: Sequence[str], values: Sequence[Leaf], batched: Sequence[bool], count: int, unit: Leaf, *, allowed: bool
) -> tuple[Leaf, ...]:
    """Return all tensors as DTensors: the first ``count`` values are parameters, the others leaves of the batch.

    Raises:
        ArgumentError: if they are not ``allowed``, or are of several meshes, if a plain leaf differs among the
            processes, or if rows or units are shared out unevenly.
    """
    path, first = next((name, x) for name, x in zip(names, values, strict=True) if is_sharded(x))
    if not allowed:
        expected = "a tensor that this process holds whole (per_sample_grads and accumulate take DTensors)"
        received = f"a {type(first).__name__}, which holds a part"
        raise ArgumentError.about(path, expected=expected, received=received, fix=GATHER)
    if unit is not None and not is_count(unit):
        expected, fix = "None or a number of consecutive samples for DTensors", "Sort the samples by units of one size."
        raise ArgumentError.about("unit", expected=expected, received="ids", fix=fix)
    mesh: DeviceMesh = first.device_mesh
    for name, x, has_rows in zip(names, values, batched, strict=True):
        if not is_sharded(x):
            continue
        if x.device_mesh != mesh or any(place.is_partial() for place in x.placements):
            fix = "Distribute all DTensors of the call over one mesh (distribute_tensor)."
            received = f"one of {x.device_mesh}, {x.placements}"
            raise ArgumentError.about(name, expected=f"shards of {mesh}", received=received, fix=fix)
        parts = prod(mesh.size(axis) for axis, place in enumerate(x.placements) if place.is_shard(0))
        if has_rows and len(x) % (parts * (unit or 1)):
            expected = f"rows (with unit, whole units) that {parts} processes share equally"
            received = f"{len(x)} rows"
            fix = "Leave some samples out, or add samples of weight 0."
            raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
    plain = [(name, x) for name, x in [*zip(names, values, strict=True)][count:] if isinstance(x, Tensor)]
    _check_same([(name, x) for name, x in plain if not is_sharded(x)], mesh)
    return tuple(replicated(x, mesh) if isinstance(x, Tensor) and not is_sharded(x) else x for x in values)


def _check_same(named: Sequence[tuple[str, Tensor]], mesh: DeviceMesh) -> None:
    """Reject tensors whose sums differ among the processes of a mesh."""
    from torch.distributed.tensor import DTensor, Shard

    if not named:
        return
    own = torch.stack([x.double().sum() for _, x in named]).expand(*[1] * mesh.ndim, -1)
    everywhere = DTensor.from_local(own, mesh, list(map(Shard, range(mesh.ndim))), run_check=False).full_tensor()
    differs = ~torch.isclose(everywhere, own, rtol=0, atol=0, equal_nan=True).flatten(0, -2).all(0)
    for place in differs.nonzero()[:1, 0].tolist():
        raise ArgumentError.about(
            named[place][0],
            expected="the same rows on every process, or a DTensor of the rows of all",
            received="a plain tensor with other rows elsewhere",
            fix="Pass DTensor.from_local(x, mesh, [Shard(0)]) of each process's own rows.",
        )


@contextmanager
def on_shards(
    call: Call, wanted: Iterable[Reduction], engine: str, chunk_size: int | None, out: Leaf = None
) -> Iterator[None]:
    """Compute with DTensors; other tensors, such as buffers, count as the same on every process.

    Raises:
        ArgumentError: if a reduction or an option is not supported.
    """
    refused = next((x for x in wanted if type(x) not in _SUPPORTED or getattr(x, "metric", None) is not None), None)
    for name, expected, fits, received in (
        ("engine", "'eager'", engine == "eager", repr(engine)),
        ("randomness", "'error'", call.randomness == "error", repr(call.randomness)),
        ("outputs", "'scalar'", call.loss.outputs == "scalar", repr(call.loss.outputs)),
        ("differentiable", "False", not call.differentiated, "True"),
        ("out", "None", out is None, "a previous result"),
        ("reduce", f"{_NAMES} (without metric)", refused is None, type(refused).__name__),
    ):
        if not fits:
            raise ArgumentError.about(name, expected=f"{expected} for DTensors", received=received, fix=GATHER)
    rows = [x for x, split in zip(call.leaves, call.leaves_batched, strict=True) if split and is_sharded(x)]
    if chunk_size is not None and any(place.is_shard(0) for x in rows for place in x.placements):
        fix = "Pass smaller batches to accumulate."
        expected = "None for a batch whose rows are on several processes"
        raise ArgumentError.about("chunk_size", expected=expected, received=repr(chunk_size), fix=fix)
    hooks = [of_kind for part in call.loss.params.parts.values() for of_kind in forward_hooks(part)]
    before = list(map(dict.copy, hooks))
    try:
        for own in hooks:
            for key in [key for key, hook in own.items() if hook.__module__.startswith("torch.distributed.")]:
                del own[key]
        with mixing(call.params):
            yield
    finally:
        for own, held in zip(hooks, before, strict=True):
            own.clear()  # and in the same order again
            own.update(held)
