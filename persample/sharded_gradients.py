"""The gradients of parameters that are DTensors: each process contracts its own part of the factors.

The loss runs on DTensors, so that the tensors of factors are DTensors: their rows are shared out among the processes,
where the samples are, or their features, where a layer's are. Here every process takes its part of each factor. The
squared norms of parts are added up over the processes, one number per sample. Sums are of the part of the parameter
that the process has; sums of its part of the rows are added up over the processes, and shared out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from persample.factors import Dense, Factor, Outer
from persample.gradients import Gradients, weighted_sums
from persample.inputs.sharding import replicated
from persample.utils import trees
from persample.utils.trees import Leaf

_Layout = tuple[Placement, ...]  # of gradients written out, ``[B, *shape]``


@dataclass(frozen=True)
class ShardedGradients(Gradients):
    """Gradients of which ``factors`` are this process's parts; losses and aux are whole.

    Args:
        layouts: how the gradients of each parameter are shared out, one placement per axis of the mesh.
        params: the parameters as they were given, plain ones among them.
        mesh: the mesh.
    """

    layouts: tuple[_Layout, ...] = ()
    params: tuple[Tensor, ...] = ()
    mesh: Any = None

    @classmethod
    def of(cls, gradients: Gradients, params: Sequence[Tensor]) -> ShardedGradients:
        """Return this process's part of gradients whose factors have DTensors."""
        named: dict[str, Any] = {one.name: getattr(gradients, one.name) for one in fields(Gradients)}
        mesh = gradients.losses.device_mesh  # type: ignore[attr-defined]
        named["losses"], named["aux"] = _whole(gradients.losses), trees.tree_map(_whole, gradients.aux)
        named["factors"], layouts = zip(*(_part(factor, mesh) for factor in gradients.factors), strict=True)
        return cls(**named, layouts=layouts, params=tuple(params), mesh=mesh)

    @cached_property
    def squared_norms_per_param(self) -> list[Tensor]:
        """‖gᵢ‖² of each single parameter, ``[B]`` float64 each, by one collective for each kind of layout."""
        found = [factor.squared_norms() for factor in self.factors]
        kinds = [tuple(map(_of_norms, layout)) for layout in self.layouts]
        for kind in dict.fromkeys(kinds):
            places = [place for place, other in enumerate(kinds) if other == kind]
            own = torch.stack([found[place] for place in places])
            whole = self._distributed(own, kind, (len(places), len(self.losses))).full_tensor()
            for place, norms in zip(places, whole, strict=True):
                found[place] = norms
        return found

    @cached_property
    def weighted_factors(self) -> tuple[Factor, ...]:
        """The factors for sums over samples: rows of weight 0 are set to zero."""
        if self.weights is None:
            return self.factors
        pairs = zip(self.factors, self.layouts, strict=True)
        return tuple(factor.zero_rows(self._own_rows(self.weights, layout) == 0) for factor, layout in pairs)

    def sums(self, scales: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return Σ wᵢ sᵢ gᵢ of each parameter, in its placements."""
        found = []
        parts = zip(self.weighted_factors, self.layouts, self.params, scales, dtypes, strict=True)
        for factor, layout, param, scale, dtype in parts:
            whole = self._weighted(scale)
            own = None if whole is None else self._own_rows(whole, layout)
            total = weighted_sums([factor], [own], [dtype], are_weights=scale is None)[0]
            summed = self._distributed(total, tuple(map(_of_sums, layout)), param.shape)
            places = param.placements if isinstance(param, DTensor) else None
            found.append(summed.redistribute(placements=places) if places else summed.full_tensor())
        return found

    def _own_rows(self, rows: Tensor, layout: _Layout) -> Tensor:
        """Return the rows of this process, of a tensor that is the same on all."""
        places = [place if place == Shard(0) else Replicate() for place in layout]
        return replicated(rows, self.mesh).redistribute(placements=places).to_local()

    def _distributed(self, own: Tensor, places: _Layout, shape: Sequence[int]) -> DTensor:
        size = torch.Size(shape)  # parts of unequal sizes do not tell it
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(own.contiguous(), self.mesh, places, run_check=False, shape=size, stride=stride)


def _whole(x: Leaf) -> Leaf:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _of_norms(place: Placement) -> Placement:
    """Return the placement of squared norms ``[n, B]`` of n parameters, of that of their gradients."""
    return Shard(1) if place == Shard(0) else Partial() if place.is_shard() else place


def _of_sums(place: Placement) -> Placement:
    """Return the placement of sums over samples, of that of gradients."""
    return Partial() if place == Shard(0) else Shard(place.dim - 1) if isinstance(place, Shard) else place


def _part(factor: Factor, mesh: Any) -> tuple[Factor, _Layout]:
    """Return this process's part of a factor, and how the gradients are shared out."""
    tensors = [x if isinstance(x, DTensor) else replicated(x, mesh) for x in factor.tensors]
    # Which axis of each tensor is which of the gradients ``[B, *shape]``, of those that may be shared out.
    axes: list[dict[Placement, int]] = [{Shard(0): 0} for _ in tensors]
    is_matrix = isinstance(factor, Outer) and len(factor.param_shape) == 2 and factor.has_rows
    if isinstance(factor, Dense):
        axes = [{Shard(axis): axis for axis in range(tensors[0].ndim)}]
    elif is_matrix:
        axes = [{Shard(0): 0, Shard(1 + place): x.ndim - 1} for place, x in enumerate(tensors)]
    known = [(x, place, axis) for x, own in zip(tensors, axes, strict=True) for place, axis in own.items()]
    layout = tuple(
        next((place for x, place, axis in known if x.placements[along] == Shard(axis)), Replicate())
        for along in range(mesh.ndim)
    )
    parts = [
        x.redistribute(placements=[Shard(own[place]) if place in own else Replicate() for place in layout]).to_local()
        for x, own in zip(tensors, axes, strict=True)
    ]
    part = factor.with_tensors(parts)
    if isinstance(part, Outer) and is_matrix:
        part = replace(part, param_shape=(parts[0].shape[-1], parts[1].shape[-1]))
    return part, layout
