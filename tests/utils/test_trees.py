"""``trees.flatten`` has a way of its own for built-in containers, which agrees with torch's."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

from persample._torch import tree_flatten
from persample.utils import trees

X, Y, Z = torch.zeros(3, 1).unbind()
Pair = namedtuple("Pair", "a b")
TREES = {
    "tensor": X,
    "none": None,
    "number": 3.0,
    "nested": ([{"w": X, "b": Y}, (Z,)], None),
    "order of names": {"b": X, "a": [Y]},
    "numbers inside": {"a": [X, 2], "b": Y},
    "other containers inside": {"a": Pair(X, [Y]), "b": [OrderedDict(z=Z)]},
    "names that are numbers": [{1: X, 0: Y}],
    "empty": [(), {}, [], X],
    "nothing": {},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_flatten_agrees_with_torch(tree):
    (leaves, spec), (expected, expected_spec) = trees.flatten(tree), tree_flatten(tree, None)
    assert len(leaves) == len(expected)
    assert all(x is y for x, y in zip(leaves, expected, strict=True))
    assert spec == expected_spec


def test_structures_differ_by_container_and_names():
    distinct = [{"a": X, "b": Y}, {"a": X, "c": Y}, [X, Y], (X, Y), [[X], Y], [X, [Y]], [X, Y, ()]]
    specs = [trees.flatten(tree)[1] for tree in distinct]
    assert all((one == other) == (one is other) for one in specs for other in specs)
