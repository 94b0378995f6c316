"""In-place writes of traced graphs: programs have none, but those of results into inputs."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from oracle import assert_trees_close
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import persample as ps
from persample._torch import FakeTensorMode
from persample.engines.compiled.lower import decomposed, functional
from persample.engines.compiled.straight import writes


def chain(x):
    y = (2 * x).view(-1)
    y.add_(1).mul_(y)
    return y.view(x.shape) + x


def view_of_a_product(x):
    y = (x @ x).view(-1)
    y.div_(torch.full((), 3.0, dtype=torch.float64))
    return y


def wider(x):
    y = 2 * x
    y.add_(torch.ones_like(x, dtype=torch.float64))
    return y


def squeezed(x):
    y = (2 * x).unsqueeze(0)
    y.squeeze_(0)
    return y.T


def last_use(x):
    y = 2 * x
    z = y.exp()
    y.mul_(3)
    return z


def scattered(x):
    index = torch.tensor([[0, 1, 0]] * 3)
    return (2 * x).scatter_add_(1, index, x).index_add_(0, index[0], x)


def base_is_read(x):
    y = 2 * x
    y.view(-1).add_(1)
    return y


def view_is_read(x):
    y = 2 * x
    z = y[0]
    y.add_(1)
    return z


def unsafe_view_is_read(x):
    y = x @ x
    z = torch.ops.aten._unsafe_view(y, [9])
    y.add_(1)
    return z


def part_is_read(x):
    y = 2 * x
    first, second, _ = y.unbind()
    second.add_(1)
    return first, y


def out_of_a_product(x):
    y = torch.empty(3, 3)
    return torch.mm(x, x, out=y).add_(1), y


def other_operation_of_the_name(x):
    return (2 * x).pow_(2)


def by_strides(x):
    y = 2 * x
    y.add_(1)
    return torch.as_strided(y, (2,), (3,))


WRITES = [
    *(chain, view_of_a_product, wider, squeezed, last_use, scattered, base_is_read, view_is_read, unsafe_view_is_read),
    *(part_is_read, out_of_a_product, other_operation_of_the_name, by_strides),
]


def traced(function, *inputs):
    """The trace of a function, and the graph that Inductor would compile."""
    graph, mode = make_fx(function)(*(x.clone() for x in inputs)), FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(x) for x in inputs]
    return graph, decomposed(functional(graph, mode, fakes), mode, fakes)


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_writes_are_ordinary_operations(function):
    x = torch.randn(3, 3)
    graph, flat = traced(function, x)
    assert any(map(writes, graph.graph.nodes))
    assert not any(map(writes, flat.graph.nodes))
    torch.testing.assert_close(flat(x), function(x))


def added(x, y):
    x.add_(y)


def copied(x, y):
    x.copy_(x + y)


def read_again(x, y):
    x.copy_(x + y)
    return 2 * x


def view_is_read_again(x, y):
    row = x[0]
    x.copy_(x + y)
    return row + 1


def result_is_read(x, y):
    return x.copy_(x + y).sum()


def copied_into_a_view(x, y):
    x[0].copy_(y[0])


def copied_twice(x, y):
    x.copy_(x + y)
    x.copy_(x * y)


@pytest.mark.parametrize(
    "function", [added, copied, read_again, view_is_read_again, result_is_read, copied_into_a_view, copied_twice]
)
def test_writes_into_inputs_stay(function):
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    _, flat = traced(function, x, y)
    assert [node.target for node in flat.graph.nodes if writes(node)] == [torch.ops.aten.copy_.default]
    expected, found = x.clone(), x.clone()
    torch.testing.assert_close(flat(found, y), function(expected, y), rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


STEPS = [
    lambda x, _: 2 * x,
    lambda x, _: x.exp(),
    lambda x, _: x.view(-1),
    lambda x, _: x[0],
    lambda x, _: x.unsqueeze(0),
    lambda x, _: x.unbind()[-1],
    lambda x, _: x.detach(),
    lambda x, _: torch.ops.aten._unsafe_view(x, [x.numel()]),
    lambda x, _: x.add_(1),
    lambda x, _: x.squeeze_(0),
    lambda x, _: x.masked_fill_(x > 0, 0.5),
    lambda x, _: x.index_add_(0, torch.tensor([0]), 3 * x[:1]),
    lambda x, y: x.mul_(y),
    lambda x, y: x.copy_(y),
]


def drawn(seed):
    """A function of random operations on results, views and written tensors, three of which it returns."""

    def function(x):
        draw = random.Random(seed)
        tensors = [1.5 * x, x @ x, torch.zeros(3, 3)]
        for _ in range(draw.randint(3, 12)):
            with contextlib.suppress(RuntimeError, IndexError):  # the shapes do not fit
                tensors.append(draw.choice(STEPS)(draw.choice(tensors), draw.choice(tensors)))
        return [y.clone() for y in draw.sample(tensors, 3)]

    return function


def test_random_programs():
    count = 0
    for seed in range(30):
        x = torch.randn(3, 3)
        try:
            expected = make_fx(drawn(seed))(x)(x)
        except RuntimeError:  # an operation that failed is in the graph
            continue
        graph, flat = traced(drawn(seed), x)
        count += any(map(writes, graph.graph.nodes))
        torch.testing.assert_close(flat(x), expected, equal_nan=True)
    assert count > 8


def test_a_write_through_a_view_is_never_lost():
    """Functionalization gives the result of the write before it other strides, and then refuses the view."""

    def loss(w, x):
        y = (w * x).t().clone()
        y.masked_fill_((x > 0).t(), 0.5)
        y.t().view(-1).exp_()
        return y.square().sum()

    w, x = torch.randn(3, 4).double(), torch.randn(5, 3, 4).double()
    with pytest.warns(ps.FallbackWarning, match="Cannot view a tensor"):
        found = ps.per_sample_grads(loss, w, x, ps.Stack(), engine="compiled")
    assert_trees_close(found, ps.per_sample_grads(loss, w, x, ps.Stack(), engine="loop"), 1e-9)


# What indices that are the same for all samples write into is one copy for all, until the write.
INDEX = torch.tensor([2, 0, 2])
SHARED = torch.arange(12.0, dtype=torch.float64).view(3, 4)
SCATTERS = {
    "index_select": lambda x: x.index_select(0, INDEX),
    "index_select of columns": lambda x: x.index_select(1, torch.tensor([3, 3, 0])),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), 0, output_size=3),
    "index": lambda x: x[INDEX, torch.tensor([1, 1, 0])],
    "take": lambda x: x.take(torch.tensor([5, 1, 5])),
    "gather": lambda x: x.gather(1, INDEX[:, None]),
    "index_add": lambda x: SHARED.index_add(0, INDEX, x),
    "index_copy": lambda x: SHARED.index_copy(1, torch.tensor([2, 0, 1, 3]), x),
    "index_put": lambda x: SHARED.index_put((INDEX,), x, accumulate=True),
    "put": lambda x: SHARED.put(torch.tensor([1, 2, 1]), x[:, 0], accumulate=True),
    "scatter": lambda x: SHARED.scatter(1, torch.tensor([[0, 3, 1, 2]] * 3), x),
    "scatter_add": lambda x: SHARED.scatter_add(0, INDEX.expand(4, 3).t(), x),
    "scatter_reduce": lambda x: SHARED.scatter_reduce(0, INDEX.expand(4, 3).t(), x, "mean"),
    "masked_scatter": lambda x: SHARED.masked_scatter(SHARED > 5, x),
    "slice_scatter": lambda x: SHARED.slice_scatter(x[:, :2], 1, 0, 4, 2),
    "select_scatter": lambda x: SHARED.select_scatter(x[0], 0, 1),
    "diagonal_scatter": lambda x: SHARED.diagonal_scatter(x[0, :3]),
    "unfold": lambda x: x.unfold(1, 3, 1),
}


def test_nothing_is_written_into_what_samples_share():
    """One program for all: compiling takes seconds."""
    params = {key: torch.randn(3, 4, dtype=torch.float64) for key in SCATTERS}
    batch = {key: torch.randn(2, 3, 4, dtype=torch.float64) for key in SCATTERS}

    def loss(params, batch):
        losses = {key: function(params[key] * batch[key]).square().sum() for key, function in SCATTERS.items()}
        return sum(losses.values()), losses

    wanted = {"grads": ps.Stack(), "losses": ps.Aux()}
    actual, expected = (
        ps.per_sample_grads(loss, params, (batch,), wanted, engine=engine) for engine in ("compiled", "loop")
    )
    for key in SCATTERS:
        assert_trees_close(*({of: each[of][key] for of in wanted} for each in (actual, expected)), 1e-12)
