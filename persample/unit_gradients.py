"""The gradients of units, from those of their samples: terms of factors are put side by side, nothing is written out.

The gradient of a unit (a user, a prompt, an image with its augmentations) is Σ wᵢ gᵢ over its samples. Of factors it
is a sum of more terms: U units of k samples with T terms each have k·T terms. Where units differ in size, those of
similar sizes are padded with terms that are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from persample.factors import Dense, Factor, Op, contractions, sum_factors
from persample.factors.cost_model import Plan
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.units import Order, Units
from persample.merge import Stacked, joined
from persample.reductions.base import Reductions
from persample.utils import rng, trees
from persample.utils.numerics import accumulate_dtype
from persample.utils.trees import Tree

_FACTORS = frozenset[str]({Op.weighted_sum})  # operations for which engines keep factors of any size
_OF_SAMPLES = frozenset[str]({Op.term_norms, Op.kronecker})  # those that engines must know of


def of_units(
    chunk: Call, engine: Callable[[Call, frozenset[str]], Gradients], ops: frozenset[str]
) -> Iterator[Gradients]:
    """Yield the gradients of the units of a chunk of whole units, of units of similar sizes at a time.

    ``engine`` computes the gradients of samples; ``ops`` are the operations that reductions call.
    """
    units, plan, of_samples = chunk.units or Units(1), chunk.plan(ops), _FACTORS | (ops & _OF_SAMPLES)
    samples = replace(chunk, units=None)
    if chunk.size > (units.most or chunk.size):  # one unit, a part at a time
        chunks = samples.chunks(units.most)
        chunks = rng.replayed(chunks) if chunk.randomness == "same" else chunks
        parts = [_summed(engine(part, of_samples), units.scale, part.size) for part in chunks]
        yield _stored(_added(parts, units.ids), plan)
        return
    gradients = engine(samples, of_samples)
    sizes = units.of_each(chunk.size)
    bounds = list(accumulate(sizes, initial=0))
    each = sum(factor.stored for factor in gradients.factors) // max(1, chunk.size)
    for group in units.groups(chunk.size, each):
        rows = slice(bounds[group.start], bounds[group.stop])
        some = gradients if rows == slice(0, chunk.size) else _rows(gradients, rows)
        ids = None if units.ids is None else units.ids[group]
        yield _stored(replace(_padded(some, sizes[group], units.scale), unit_ids=ids), plan)


def _padded(gradients: Gradients, sizes: Sequence[int], scale: float) -> Gradients:
    """Return the gradients of units of consecutive samples, which are padded to the largest size."""
    largest = max(sizes, default=1)
    if min(sizes, default=1) == largest:
        return _summed(gradients, scale, largest)
    numbers = [unit * largest + place for unit, size in enumerate(sizes) for place in range(size)]
    places, rows = torch.tensor(numbers, device=gradients.losses.device), len(sizes) * largest
    weights = gradients.weights
    padded = replace(
        gradients,
        factors=tuple(factor.spread(places, rows) for factor in gradients.factors),
        losses=contractions.spread(gradients.losses, places, rows),
        weights=None if weights is None else contractions.spread(weights, places, rows),
    )
    filled = gradients.losses.new_tensor(sizes, dtype=torch.float64) / largest
    return replace(_summed(padded, scale, largest), filled=filled)


def _summed(gradients: Gradients, scale: float, count: int) -> Gradients:
    """Return the gradients of units of ``count`` consecutive samples each."""
    losses, weights, factors = gradients.losses, gradients.weights, gradients.factors
    if weights is not None:
        factors = tuple(factor.scale_rows(weights) for factor in gradients.weighted_factors)
        each = contractions.per_row(weights, losses)
        losses = torch.where(each == 0, 0, losses) * each
        weights = contractions.split_rows((weights != 0).double(), count).amax(1)
    # Half precision is added up in float32, also by those who add the parts of one unit.
    factors = tuple(x.joined_rows(count) if count > 1 or x.dtype.itemsize < 4 else x for x in factors)
    losses = contractions.split_rows(losses, count).sum(1, dtype=accumulate_dtype(losses.dtype))
    if scale != 1:
        losses = losses * scale
        factors = tuple(factor.times(scale) for factor in factors)
    losses = losses.to(gradients.losses.dtype)
    return replace(gradients, factors=factors, losses=losses, weights=weights, are_of_units=True)


def _added(parts: Sequence[Gradients], ids: Tensor | None) -> Gradients:
    """Return the gradient of one unit from those of its parts."""
    factors = tuple(sum_factors(factors) for factors in zip(*(part.factors for part in parts), strict=True))
    weights = [part.weights for part in parts if part.weights is not None]
    return replace(
        parts[0],
        factors=factors,
        losses=torch.stack([part.losses for part in parts]).sum(0),
        aux=trees.tree_map(lambda *rows: torch.cat(rows), *(part.aux for part in parts)) if parts[0].has_aux else None,
        term_norms=joined(part.term_norms or () for part in parts) or None,
        weights=torch.stack(weights).amax(0) if weights else None,
        connected=any(part.connected for part in parts),
        unit_ids=ids,
    )


def _stored(gradients: Gradients, plan: Plan) -> Gradients:
    """Write out the gradients of units that are better not stored as factors."""

    def stored(factor: Factor) -> Factor:
        written = isinstance(factor, Dense) or not factor.reason_to_write_out(plan)
        return factor if written else Dense(factor.materialize(), outputs=factor.outputs)

    return replace(gradients, factors=tuple(map(stored, gradients.factors)))


def _rows(gradients: Gradients, index: slice | Tensor) -> Gradients:
    """Return the gradients of some samples."""
    return replace(
        gradients,
        factors=tuple(factor.rows(index) for factor in gradients.factors),
        losses=gradients.losses[index],
        aux=trees.map_tensors(lambda x: x[index], gradients.aux),
        term_norms=trees.map_tensors(lambda x: x[index], gradients.term_norms),
        weights=None if gradients.weights is None else gradients.weights[index],
    )


def in_first_order(order: Order, merged: Tree, reductions: Reductions) -> Tree:
    """Return merged leaves in the order of the batch: rows of samples, and rows of units by their first samples."""
    leaves, connected = merged

    def sorted_rows(places: Tensor, tree: Tree) -> Tree:
        return trees.tree_map(lambda x: x.at(places) if isinstance(x, Stacked) else x, tree)

    pairs = zip(reductions.reductions, leaves, strict=True)
    return [sorted_rows(order.places if one.rows_of_samples else order.units, tree) for one, tree in pairs], connected
