"""What a run computes, in words and checksums, by which a folder of another run is told."""

from __future__ import annotations

from typing import Any

from persample.inputs import check_params
from persample.reductions.described import in_words
from persample.streams.lift import BatchLift
from persample.utils.digest import digest, name_of


def description(lift: BatchLift, names: list[str]) -> dict[str, Any]:
    """Return what determines the results of a run, beside its batches.

    Args:
        lift: what is computed for each batch.
        names: the names of the results.
    """
    tree = check_params(lift.params)
    state = [module.state_dict() for module in tree.modules]
    reduce = {name: in_words(one) for name, one in zip(names, lift.wanted, strict=True)}
    options = {name: repr(value) for name, value in lift.options.items()}
    return {
        "loss_fn": name_of(lift.loss_fn),
        "params": digest([dict(zip(tree.paths, tree.tensors, strict=True)), state]),
        "reduce": reduce,
        "options": {**options, "chunk_size": lift.chunk_size, "engine": lift.engine},
    }
