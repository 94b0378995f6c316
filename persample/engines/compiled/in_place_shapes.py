"""Operations that change the shape of a tensor in place, such as ``y.t_()``.

Dynamo describes a tensor by one example, whose shape is the last one. And torch replays the views that were taken
before, with gradients of another shape.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from persample.engines.compiled.batchable import memory_of, name_of, writes

_OPERATIONS = {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"}  # all others are refused


def changes_shapes(module: GraphModule) -> list[Node]:
    """Return the operations of a graph of Dynamo that change the shape of a tensor in place."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    return [node for graph in graphs for node in graph.nodes if name_of(node) in _OPERATIONS]


def refused_views(module: GraphModule) -> str | None:
    """Return why a graph cannot be differentiated: a view was taken of a tensor whose shape then changes in place."""
    for node in changes_shapes(module):
        users = node.all_input_nodes[0].users
        if any(user < node and not writes(user) and memory_of(user) == memory_of(node) for user in users):
            name = name_of(node)
            return f"{name} changes the shape of a tensor of which it has a view: use {name[:-1]} instead"
    return None
