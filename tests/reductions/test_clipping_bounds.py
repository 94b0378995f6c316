"""Bounds by name: parameters of one module are clipped together, the longest name decides."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.nn import functional as F

from persample import ClippedMean, ClippedSum, Norm, Sum, accumulate, per_sample_grads

F64 = torch.float64
GROUPS = {"": ["scale"], "body": ["body.0.weight", "body.2.weight", "body.2.bias"], "body.0.bias": ["body.0.bias"]}
BOUNDS = {"": 0.7, "body": 0.4, "body.0.bias": 0.05}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.body(x)


def loss(net, x, y):
    return F.cross_entropy(net(x), y)


@pytest.fixture(scope="module")
def case():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net().double()
        return net, (3 * torch.randn(7, 3, dtype=F64), torch.randint(2, (7,)))


def by_hand(net, batch, bounds=BOUNDS):
    rows, total = per_sample_grads(loss, net, batch, engine="loop"), {}
    for group, names in GROUPS.items():
        norms = torch.cat([rows[name].reshape(7, -1) for name in names], 1).norm(dim=1)
        assert (norms > bounds[group]).any()
        for name in names:
            scale = (bounds[group] / norms).clamp(max=1)
            total[name] = torch.einsum("b,b...->...", scale, rows[name])
    return {name: total[name] for name in rows}


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"engine": "loop"}], ids=["eager", "chunks", "loop"])
def test_modules_are_clipped_together(case, options):
    net, batch = case
    expected = by_hand(net, batch)
    assert_trees_close(per_sample_grads(loss, net, batch, ClippedSum(BOUNDS), **options), expected, 1e-9)
    other = {name: torch.tensor(bound / 2, dtype=F64) for name, bound in BOUNDS.items()}
    mean = per_sample_grads(loss, net, batch, ClippedMean(other), **options)
    assert_trees_close(mean, {name: g / 7 for name, g in by_hand(net, batch, other).items()}, 1e-9)


def test_bounds_of_a_compiled_program_may_change(case):
    """And are those of the call."""
    net, batch = case
    for scale in (1.0, 0.5, 0.25):
        bounds = {name: scale * bound for name, bound in BOUNDS.items()}
        actual = per_sample_grads(loss, net, batch, ClippedSum(bounds), engine="compiled")
        assert_trees_close(actual, by_hand(net, batch, bounds), 1e-9)


def test_one_name_for_all_is_one_bound_and_infinity_is_none(case):
    net, batch = case
    result = per_sample_grads(
        loss,
        net,
        batch,
        {"all": ClippedSum({"": 0.3}), "one": ClippedSum(0.3), "none": ClippedSum({"": torch.inf}), "sum": Sum()},
    )
    assert_trees_close(result["all"], result["one"], 1e-12)
    assert_trees_close(result["none"], result["sum"], 1e-12)


def test_each_parameter_by_itself_with_the_bound_of_its_module(case):
    net, batch = case
    actual = per_sample_grads(loss, net, batch, ClippedSum({"": 0.7, "body": 0.1}, per_param=True))
    each = {name: 0.7 if name == "scale" else 0.1 for name in actual}
    assert_trees_close(actual, per_sample_grads(loss, net, batch, ClippedSum(each)), 1e-12)


def test_a_sample_contributes_at_most_the_root_of_the_sum_of_squares(case):
    net, batch = case
    whole, without = (accumulate(loss, net, [tuple(x[i:] for x in batch)], ClippedSum(BOUNDS)) for i in (0, 1))
    change = torch.cat([(whole[name] - without[name]).flatten() for name in whole]).norm()
    assert 0 < change <= torch.tensor(list(BOUNDS.values()), dtype=F64).norm() * (1 + 1e-12)


def test_trees_are_named_by_their_keys():
    params = {"layers": [{"w": torch.zeros(2)}, {"w": torch.zeros(2)}], "b": torch.zeros(())}
    loss = lambda p, x: (p["layers"][0]["w"] + 2 * p["layers"][1]["w"]) @ x + 3 * p["b"]
    bounds = {"layers": torch.inf, "layers.1": 1.0, "b": 2.0}
    result, norms = per_sample_grads(
        loss, params, torch.tensor([[3.0, 4.0]]), (ClippedSum(bounds), Norm(per_param=True))
    )
    assert norms["layers"][1]["w"] == 10
    assert [leaf.tolist() for leaf in torch.utils._pytree.tree_leaves(result)] == [
        pytest.approx([3.0, 4.0]), pytest.approx([0.6, 0.8]), 2.0
    ]  # fmt: skip


def test_a_key_with_an_apostrophe_is_a_name():
    params, x = {"q'": torch.ones(2), 'the "other"': torch.ones(2)}, torch.ones(3, 2)
    bounds = {"q'": 0.0, 'the "other"': torch.inf}
    found = per_sample_grads(lambda p, x: sum(x @ w for w in p.values()), params, x, ClippedSum(bounds))
    assert found["q'"].tolist() == [0, 0]
    assert found['the "other"'].tolist() == [3, 3]


def test_nan_with_a_parameter_of_no_axes():
    params = {"w": torch.ones(2), "scale": torch.tensor(0.5)}
    x = torch.tensor([[1.0, 2.0], [torch.nan, 1.0]])
    found = per_sample_grads(lambda p, x: p["w"] @ x * p["scale"].exp(), params, x, ClippedSum(1.0))
    assert found["w"].isnan().all()
    assert found["scale"].isnan()
