"""Parameters that are DTensors, of ``fully_shard`` or of tensor parallelism: every process keeps its shards.

Engines and reductions run on DTensors, whose operations torch distributes: factors are DTensors, norms are reduced over
the processes as one number per sample, and sums are where the shards of their parameters are. The hooks of torch's own
wrappers, which gather parameters or change layouts around a module, do not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from persample._torch import forward_hooks
from persample.errors import ArgumentError
from persample.reductions import Aux, ClippedMean, ClippedSum, Loss, Mean, Norm, Reduction, Sum, WeightedSum
from persample.utils.trees import Leaf

if TYPE_CHECKING:  # importing DTensor takes a second
    from torch.distributed.tensor import DeviceMesh

    from persample.inputs.call import Call

_SUPPORTED = Sum, Mean, ClippedSum, ClippedMean, WeightedSum, Norm, Loss, Aux  # which read norms and sums alone
_OPTIONS: dict[str, tuple[object, ...]] = {
    "engine": ("eager", "loop", "auto"),
    "randomness": ("error",),
    "out": (None,),
    "differentiable": (False,),
}


def is_sharded(x: object) -> bool:
    """Return whether a value is a DTensor."""
    return hasattr(x, "device_mesh")


def on_one_mesh(names: Sequence[str], values: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Return the tensors among parameters and leaves as DTensors; plain ones are the same on every process.

    Raises:
        ArgumentError: if they are of several meshes, or a DTensor is a term of a sum.
    """
    from torch.distributed.tensor import DTensor, Replicate

    named = [(name, x) for name, x in zip(names, values, strict=True) if is_sharded(x)]
    mesh: DeviceMesh = named[0][1].device_mesh
    for name, x in named:
        if x.device_mesh != mesh or any(place.is_partial() for place in x.placements):
            raise ArgumentError.about(
                name,
                expected=f"a DTensor of {mesh}, of shards or copies",
                received=f"one of {x.device_mesh}, {x.placements}",
                fix="Distribute all parameters over one mesh (x.redistribute, distribute_tensor).",
            )
    whole = [Replicate()] * mesh.ndim
    return tuple(
        DTensor.from_local(x, mesh, whole, run_check=False) if isinstance(x, Tensor) and not is_sharded(x) else x
        for x in values
    )


def check_sharded(wanted: Iterable[Reduction], **options: object) -> None:
    """Reject reductions and options that DTensors do not support."""
    fix = "Gather the parameters ({name: p.full_tensor() for name, p in …}), and call a module without shards."
    for name, received in options.items():
        if received not in _OPTIONS[name]:
            expected = f"{' or '.join(map(repr, _OPTIONS[name]))} for DTensors"
            raise ArgumentError.about(name, expected=expected, received=repr(received), fix=fix)
    for one in wanted:
        if type(one) not in _SUPPORTED or getattr(one, "metric", None) is not None:
            names = ", ".join(kind.__name__ for kind in _SUPPORTED)
            expected = f"one of {names} for DTensors, without a metric"
            raise ArgumentError.about("reduce", expected=expected, received=type(one).__name__, fix=fix)


@contextmanager
def on_shards(call: Call) -> Iterator[None]:
    """Compute with the DTensors of a call: other tensors count as the same on every process."""
    from torch.distributed.tensor.experimental import implicit_replication

    hooks = [of_kind for part in call.loss.params.parts.values() for of_kind in forward_hooks(part)]
    before = list(map(dict.copy, hooks))
    try:
        for own in filter(None, hooks):
            for key in [key for key, hook in own.items() if hook.__module__.startswith("torch.distributed.")]:
                del own[key]
        with implicit_replication():
            yield
    finally:
        for own, held in zip(hooks, before, strict=True):
            own.clear()  # and in the same order again
            own.update(held)
