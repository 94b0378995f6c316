"""Operations that change the shape of a tensor in place, such as ``y.t_()``.

Dynamo describes a tensor by one example, whose shape is the last one. And torch replays the views that were taken
before, with gradients of another shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from persample.engines.compiled.batchable import memory_of, name_of, nodes_of, writes

_OPERATIONS = {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"}  # all others are refused


def shape_changes(module: GraphModule) -> list[Node]:
    """Return the operations of a graph of Dynamo that change the shape of a tensor in place."""
    return [node for node in nodes_of(module) if name_of(node) in _OPERATIONS]


def refused_views(changes: Sequence[Node]) -> str | None:
    """Return why a graph cannot be differentiated: a view was taken of a tensor whose shape then changes in place.

    Args:
        changes: the operations that change shapes.
    """
    for node in changes:
        users = node.all_input_nodes[0].users
        if any(user < node and not writes(user) and memory_of(user) == memory_of(node) for user in users):
            name = name_of(node)
            return f"{name} changes the shape of a tensor of which it has a view: use {name[:-1]} instead"
    return None
