"""Losses whose graphs torch.func cannot batch as Dynamo records them, and what such graphs are called with."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from counting import AT_ONCE, functions_entered
from oracle import assert_trees_close
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample import per_sample_grads
from persample.engines.compiled import clear_cache

F64 = torch.float64


@pytest.fixture(autouse=True)
def _fresh():
    clear_cache()


def doubles(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


W, X, CLOSED = doubles(3, seed=1), doubles(4, 3, seed=2), doubles(3, seed=3)
M = doubles(3, 3, seed=4)


def same(loss, params=W, batch=X, reduce=None, tolerance=1e-9, **options):
    """Compute by the traced engine twice, the second time as an earlier call, and compare with the loop."""
    wanted = (ps.Stack(), ps.Loss()) if reduce is None else reduce
    expected = per_sample_grads(loss, params, batch, wanted, engine="loop", **options)
    for _ in range(2):
        actual = per_sample_grads(loss, params, batch, wanted, engine="traced", **options)
        assert_trees_close(actual, expected, tolerance)
    return actual


# ---------------------------------------------------------------- graphs that are rewritten


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 5 * x**2 * g  # not the true one, so that nothing else computes it


class Exp(torch.autograd.Function):
    """Saves what it computed."""

    @staticmethod
    def forward(ctx, x, scale):
        y = torch.exp(x)
        ctx.save_for_backward(y, x.cos())
        ctx.scale = scale
        return scale * y

    @staticmethod
    def backward(ctx, g):
        y, cosine = ctx.saved_tensors
        return ctx.scale * y * g + cosine, None


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y + 2 * h, g * x + 3 * h


class Largest(torch.autograd.Function):
    """Its second output has no gradient."""

    @staticmethod
    def forward(ctx, x):
        value, place = x.max(0)
        ctx.mark_non_differentiable(place)
        ctx.save_for_backward(place)
        ctx.size = len(x)
        return value, place

    @staticmethod
    def backward(ctx, g, _):
        (place,) = ctx.saved_tensors
        return 2 * g * F.one_hot(place, ctx.size)


def two_outputs(w, x):
    product, total = Two.apply(w, x)
    return product.sin().sum() + (total**2).sum()


def a_part_without_gradient(w, x):
    value, place = Largest.apply(w * x)
    return value**2 + 0.1 * place * w[0]


def checkpointed_module_call(w, x):
    block = functools.partial(checkpoint, use_reentrant=False)
    return block(lambda v: block(lambda u: (u * x).sin(), v).cos(), w).sum()


REWRITTEN = {
    "checkpoint": lambda w, x: checkpoint(lambda v: (v * x).sin().sum(), w, use_reentrant=False),
    "checkpoint in a checkpoint": checkpointed_module_call,
    "autograd.Function": lambda w, x: Cube.apply(w * x).sum(),
    "autograd.Function twice": lambda w, x: Cube.apply(Cube.apply(w * x).sin()).sum(),
    "autograd.Function, saved intermediates": lambda w, x: (Exp.apply(w * x, 2.0) * CLOSED).sum(),
    "autograd.Function, two outputs": two_outputs,
    "autograd.Function, no gradient": a_part_without_gradient,
    "autograd.Function in a checkpoint": lambda w, x: checkpoint(Cube.apply, w * x, use_reentrant=False).sum(),
    "grad": lambda w, x: grad(lambda v: (v * x).sin().sum())(w) @ w,
    "grad of grad": lambda w, x: grad(grad(lambda t: (t * w @ x).sin()))(x[0]),
    "vmap": lambda w, x: vmap(lambda row: (row @ w).sin())(x[:, None] * CLOSED).sum(),
    "vmap of grad": lambda w, x: vmap(grad(lambda v, y: (v * y).sin().sum()), (None, 0))(
        w, torch.outer(x, CLOSED)
    ).sum(),
    "vmap of vmap": lambda w, x: vmap(vmap(torch.mul, (None, 0)), (0, None))(w, x).sin().sum(),
    "jvp": lambda w, x: jvp(lambda v: (v * x).sin(), (w,), (x,))[1] @ w,
    "jacrev": lambda w, x: jacrev(lambda v: (v * x).sin())(w).sum(),
    "jvp of grad": lambda w, x: jvp(grad(lambda v: (v * x).sin().sum()), (w,), (CLOSED,))[1] @ x,
    "item": lambda w, x: x[0].item() * (w @ x) + CLOSED.max().item() * w[0] ** 2,
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_graphs_that_are_rewritten(name):
    same(REWRITTEN[name])


# ---------------------------------------------------------------- writes


def written(make):
    def loss(w, x):
        out = make(w, x)
        for t in range(3):
            out[t] = (w * x).sum() * x[t]
        return (out * w).sin().sum()

    return loss


def write_into_clone_of_parameter(w, x):
    v = w.clone()
    v[1] *= x[0]
    v.mul_(x)
    return v.sin().sum()


def write_into_views(w, x):
    table = torch.zeros(3, 3, dtype=F64)
    table[1:][0, :2] = (w * x)[:2]
    table.T[2].add_(w)
    table.view(9)[3:6] += x * w
    table.diagonal().mul_(CLOSED)
    return (table @ w).sum()


def write_in_a_loop(w, x):
    total, state = torch.zeros((), dtype=F64), torch.zeros(3, dtype=F64)
    for t in range(3):
        state = state.clone()
        state[t] = (w[t] * x[t]).sin() + state.sum()
        total += state.sum() * w[t]
    return total


def filled_without_a_write_of_the_sample(w, x):
    mask = torch.zeros(3, dtype=F64)
    mask[1] = 1.0
    return (w * x) @ mask


WRITES = {
    "zeros": written(lambda w, x: torch.zeros(3, dtype=F64)),
    "empty": written(lambda w, x: torch.empty(3, dtype=F64)),
    "full": written(lambda w, x: torch.full((3,), 2.0, dtype=F64)),
    "new_zeros of what is closed over": written(lambda w, x: CLOSED.new_zeros(3)),
    "clone of what is closed over": written(lambda w, x: CLOSED.clone()),
    "clone of a parameter": write_into_clone_of_parameter,
    "views": write_into_views,
    "a loop": write_in_a_loop,
    "a mask": filled_without_a_write_of_the_sample,
    "index_put_": lambda w, x: torch.zeros(3, dtype=F64).index_put_((torch.tensor([0, 2]),), (w * x)[:2]).sin() @ w,
    "scatter_": lambda w, x: torch.zeros(3, dtype=F64).scatter_(0, torch.tensor([2, 0, 1]), w * x).sin() @ w,
    "scatter_add_": lambda w, x: torch.zeros(3, dtype=F64).scatter_add_(0, x.argsort(), w * x).sin() @ w,
    "index_add_": lambda w, x: torch.ones(3, dtype=F64).index_add_(0, torch.tensor([0, 0, 2]), w * x).sin().sum(),
    "copy_": lambda w, x: torch.empty(3, dtype=F64).copy_(w * x).sin().sum(),
    "out=": lambda w, x: torch.add(w, x, alpha=2).mul_(w).sin_().sum(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    same(WRITES[name])
    same(WRITES[name], batch=X[:1])


# ---------------------------------------------------------------- indices


def episode(w, x, action):
    log_probs = (torch.outer(x, w)).log_softmax(-1)
    total = torch.zeros((), dtype=F64)
    for t in range(3):
        total = total + log_probs[t, action[t]] * x[t]
    return total


def computed_index(w, x, action):
    return (w * x)[action.max()] + (w * x)[(x * w).argmax()] ** 2


@pytest.mark.parametrize("loss", [episode, computed_index])
def test_indices_of_no_dimension(loss):
    action = torch.tensor([[0, 1, 2], [2, 2, 0], [1, 0, 1], [0, 0, 0]])
    same(loss, batch=(X, action))
    same(loss, batch=(X, action.flip(0)))


# ---------------------------------------------------------------- modules and distributions


@pytest.mark.parametrize(
    "var",
    [lambda w, x: x**2 + 0.1, lambda w, x: w.exp(), lambda w, x: torch.linspace(0, 1, 3, dtype=F64), lambda w, x: 0.5],
    ids=["of the sample", "of parameters", "constant", "number"],
)
def test_losses_whose_arguments_torch_checks(var):
    loss = lambda w, x: nn.functional.gaussian_nll_loss(w * x, x, var(w, x), full=True, reduction="sum")
    agree_exactly(loss, torch.randn(3, dtype=F64), torch.randn(5, 3, dtype=F64), None)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers(kind):
    net = nn.ModuleDict({"cell": kind(3, 4, batch_first=True), "head": nn.Linear(4, 1)}).double()
    same(lambda net, x: net["head"](net["cell"](x)[0]).sin().sum(), net, doubles(3, 5, 3, seed=5))


def normal(w, x):
    return -torch.distributions.Normal(w @ x, F.softplus(w[0])).log_prob(x).sum()


def categorical(w, x):
    policy = torch.distributions.Categorical(logits=w * x)
    return policy.log_prob(torch.tensor(1)) + policy.entropy()


@pytest.mark.parametrize("loss", [normal, categorical])
def test_distributions(loss):
    same(loss)


def test_distributions_that_are_told_to_validate_are_refused():
    def loss(w, x):
        return torch.distributions.Normal(w @ x, 1.0, validate_args=True).log_prob(x).sum()

    with pytest.raises(ps.LossError, match=rf"is_dependent.* In loss \({__file__}:"):
        per_sample_grads(loss, W, X, engine="traced")


class Storing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(3, 1, dtype=F64), None

    def forward(self, x):
        self.kept = self.linear(x)
        return self.kept.sin() + self.linear.weight.sum()


def test_a_module_that_keeps_activations():
    net = Storing()
    same(lambda net, x: net(x).sum() + net.kept.sum(), net)
    assert net.kept is None or isinstance(net.kept, torch.Tensor)


def test_a_list_outside_that_keeps_activations():
    kept = []

    def loss(w, x):
        kept.append(w * x)
        return kept[-1].sum()

    with pytest.raises(ps.LossError, match="keeps a tensor in an object outside: return the tensor in aux instead"):
        per_sample_grads(loss, W, X, engine="traced")


@pytest.mark.parametrize("of_a_sample", [True, False], ids=["of a sample", "of params"])
def test_a_list_outside_that_keeps_numbers(of_a_sample):
    kept = []

    def loss(w, x):
        kept.append((w * x if of_a_sample else w * 2).sum().item())
        return (w * x).sum()

    said = "reads values of a sample" if of_a_sample else "keeps a number that it reads: return the tensor in aux"
    for _ in range(2):  # captured; found again
        with pytest.raises(ps.LossError, match=said):
            per_sample_grads(loss, W, X, engine="traced")


def tanh(w, x):
    return (w @ x).tanh()


COUNT = 0
RECORD = {"calls": 0}


class Steps:
    calls = 0


class Counter(nn.Module):
    """Changes something of its own, or around it, at every call."""

    total = 0

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=F64)
        self.calls, self.seconds, self.name, self.log, self.record, self.change = 0, 0.5, "", [], {"calls": 0}, change
        self.kept = Steps()

    def forward(self, x):
        self.change(self)
        return self.linear(x).tanh()


def add_to_a_global(_):
    global COUNT  # noqa: PLW0603 - as people do
    COUNT += 1


COUNTS = {  # what a call changes, and how often that was done
    "attribute": (lambda net: setattr(net, "calls", net.calls + 1), lambda net: net.calls),
    "float": (lambda net: setattr(net, "seconds", net.seconds + 1), lambda net: int(net.seconds)),
    "entry": (lambda net: net.record.update(calls=net.record["calls"] + 1), lambda net: net.record["calls"]),
    "new entry": (lambda net: net.record.update({len(net.record): 0}), lambda net: len(net.record) - 1),
    "list": (lambda net: net.log.append(0), lambda net: len(net.log)),
    "text": (lambda net: setattr(net, "name", net.name + "."), lambda net: len(net.name)),
    "object": (lambda net: setattr(net.kept, "calls", net.kept.calls + 1), lambda net: net.kept.calls),
    "class": (lambda _: setattr(Counter, "total", Counter.total + 1), lambda _: Counter.total),
    "global": (add_to_a_global, lambda _: COUNT),
    "entry of a global": (lambda _: RECORD.update(calls=RECORD["calls"] + 1), lambda _: RECORD["calls"]),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_what_counts_calls_costs_two_programs_at_most(kind):
    change, count = COUNTS[kind]
    net, before = Counter(change), count(None) if "global" in kind or kind == "class" else 0
    expected = per_sample_grads(lambda net, x: net.linear(x).tanh().sum(), net, X, ps.Norm())

    def loss(net, x):
        return net(x).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for calls in range(1, 71):
            assert_trees_close(per_sample_grads(loss, net, X, ps.Norm(), engine="traced"), expected, 1e-9)
            assert count(net) - before == calls
    assert {warning.category for warning in caught} <= {ps.CompileLimitWarning}
    assert len(caught) <= 1  # a list can only be told by its length, so that each length is another loss
    assert len(ps.explain(loss, net, X, ps.Norm(), engine="traced").compilations) <= 2


def test_a_count_that_the_result_depends_on_ends_on_the_eager_engine():
    count = [0]

    def loss(w, x):
        count[0] += 1
        return count[0] * tanh(w, x)

    def train():
        for calls in range(1, 31):
            rows = per_sample_grads(loss, W, X, engine="traced")
            assert count == [calls]
            assert_trees_close(rows, calls * per_sample_grads(tanh, W, X), 1e-9)

    with pytest.warns(ps.CompileLimitWarning, match=r"eagerly: it was captured 7 times, .*cell_contents") as caught:
        train()
    assert len(caught) == 1


def test_equal_graphs_under_other_defaults_have_programs_of_their_own():
    log = []

    def loss(w, x):
        log.append(0)
        return tanh(w, x) * torch.ones(()), torch.ones(()) / 3

    for dtype in (torch.float32, F64, torch.float32, F64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            aux = per_sample_grads(loss, W, X, ps.Aux(), engine="traced")
        finally:
            torch.set_default_dtype(before)
        assert aux.dtype == dtype
        assert aux[0] == torch.ones((), dtype=dtype) / 3


def counted(step):
    """Return a loss that counts its calls in the list beside it."""
    count = [step - step]

    def loss(w, x):
        count[0] += step
        return tanh(w, x)

    return loss, count


@pytest.mark.parametrize("step", [1, 0.5])
def test_a_count_of_calls_in_a_closure_compiles_nothing(step):
    loss, count = counted(step)
    for calls in range(1, 7):
        rows = per_sample_grads(loss, W, X, engine="traced")
        assert count == [calls * step]
        assert_trees_close(rows, per_sample_grads(tanh, W, X), 1e-9)
    assert len(ps.explain(loss, W, X, ps.Stack(), engine="traced").compilations) == 2


@pytest.mark.parametrize("start", [torch.tensor(2), torch.tensor(0.5), np.int64(2), np.float64(0.5)])
def test_a_count_in_a_tensor_or_a_number_of_numpy(start):
    count = [start]

    def loss(w, x):
        count[0] = count[0] * 2 + np.int64(1)
        return tanh(w, x)

    expected = start
    for _ in range(5):
        rows = per_sample_grads(loss, W, X, engine="traced")
        expected = expected * 2 + 1
        assert type(count[0]) is (torch.Tensor if isinstance(start, torch.Tensor) else np.ndarray)  # as torch.compile
        assert count[0] == expected
        assert_trees_close(rows, per_sample_grads(tanh, W, X), 1e-9)
    assert len(ps.explain(loss, W, X, ps.Stack(), engine="traced").compilations) == 1


def test_a_tensor_that_is_kept_and_returned():
    scale = [torch.tensor(1.0, dtype=torch.float64)]

    def loss(w, x):
        scale[0] = 0.5 * scale[0]
        return tanh(w, x), {"scale": scale[0], "noise": scale[0] + torch.rand(2), "tanh": tanh(w, x)}

    for calls in range(1, 5):
        _, aux = per_sample_grads(loss, W, X, (ps.Stack(), ps.Aux()), engine="traced", randomness="different")
        assert scale[0].item() == 0.5**calls
        assert aux["scale"].tolist() == [0.5**calls] * 4
        assert len(aux["noise"].unique()) == 8
        assert_trees_close(aux["tanh"], (X @ W).tanh(), 1e-9)


@pytest.mark.parametrize("keeps", [False, True])
def test_tensors_outside_of_several_sizes(keeps):
    scales, seen = [torch.ones(1)], {"size": 0}

    def loss(w, x):
        if keeps:
            seen["size"] = len(scales[0])
        return torch.stack([scales[0], scales[0]]).flatten().sum() * tanh(w, x)

    for size in (1, 2, 3, 4, 2):
        scales[0] = torch.full((size,), 0.5)
        rows = per_sample_grads(loss, W, X, engine="traced")
        assert_trees_close(rows, size * per_sample_grads(tanh, W, X), 1e-9)
        assert seen == {"size": size * keeps}


@pytest.mark.parametrize(
    ("mode", "dtype", "has_graph"),
    [
        (torch.no_grad, torch.float32, False),
        (torch.enable_grad, torch.float32, True),
        (lambda: torch.autocast("cpu", torch.bfloat16), torch.bfloat16, True),
    ],
    ids=["no_grad", "enable_grad", "autocast"],
)
def test_a_tensor_that_is_kept_is_computed_in_the_mode_of_its_line(mode, dtype, has_graph):
    target, kept = torch.eye(2, requires_grad=True), [torch.zeros(2, 2)]

    def loss(w, x):
        with mode():
            kept[0] = target @ target
        return tanh(w, x)

    per_sample_grads(loss, W, X, engine="traced")
    assert kept[0].dtype == dtype
    assert kept[0].requires_grad == has_graph
    assert kept[0].tolist() == torch.eye(2).tolist()


def test_numbers_made_by_functions_that_dynamo_takes_for_constants():
    kept = {"rate": 1.0}

    def loss(w, x):
        kept["rate"] = math.exp(-kept["rate"])
        return tanh(w, x)

    expected = 1.0
    for _ in range(4):
        per_sample_grads(loss, W, X, engine="traced")
        expected = math.exp(-expected)
        assert kept == {"rate": expected}


def test_several_numbers_in_a_closure():
    seen = {"calls": 0, "rate": 1.0, "parity": 0}

    def loss(w, x):
        seen["calls"] += 1
        seen["rate"] *= 0.5
        seen["parity"] = seen["calls"] % 2
        return tanh(w, x)

    for calls in range(1, 6):
        per_sample_grads(loss, W, X, engine="traced")
        assert seen == {"calls": calls, "rate": 0.5**calls, "parity": calls % 2}


def test_a_changing_number_that_the_result_depends_on():
    counts = [0], [0]

    def made(count):
        def loss(w, x):
            count[0] += 1
            return count[0] * tanh(w, x)

        return loss

    for _ in range(5):
        actual = per_sample_grads(made(counts[0]), W, X, engine="traced")
        assert_trees_close(actual, per_sample_grads(made(counts[1]), W, X, ps.Stack()), 1e-9)
    assert counts[0] == [5]


@dataclass(frozen=True)
class Scaled(ps.Mean):
    """A mean whose code changes its number, which is harmless for a float."""

    scale: float = 0.7
    live: ClassVar[tuple[str, ...]] = ("scale",)

    def finish(self, merged):
        scale = self.scale
        scale *= 2
        return scale * super().finish(merged)


def test_numbers_of_reductions_are_made_anew():
    for _ in range(4):
        actual = per_sample_grads(tanh, W, X, Scaled(), engine="traced")
        assert_trees_close(actual, 1.4 * per_sample_grads(tanh, W, X, ps.Mean()), 1e-9)


def test_attributes_that_a_loss_gives_its_sample_end_with_the_call():
    def loss(w, x):
        factor = 2.0 if hasattr(x, "seen") else 1.0
        x.seen = True
        return factor * tanh(w, x)

    for _ in range(4):
        assert_trees_close(per_sample_grads(loss, W, X, engine="traced"), per_sample_grads(tanh, W, X), 1e-9)


def test_a_changing_number_that_is_returned():
    count = [0]

    def loss(w, x):
        count[0] += 1
        return tanh(w, x), {"tensor": torch.tensor(count[0]), "scalar": torch.scalar_tensor(count[0])}

    for calls in range(1, 5):
        _, aux = per_sample_grads(loss, W, X, (ps.Stack(), ps.Aux()), engine="traced")
        assert count == [calls]
        assert {name: x.tolist() for name, x in aux.items()} == dict.fromkeys(["tensor", "scalar"], [calls] * 4)


def test_tied_frozen_and_unused_parameters():
    net = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3), "unused": nn.Linear(2, 2)}).double()
    net["two"].weight = net["one"].weight
    net["two"].bias.requires_grad_(False)
    found = same(lambda net, x: net["two"](net["one"](x).sin()).sin().sum(), net, reduce=ps.Stack())
    assert found.keys() == {"one.weight", "one.bias", "unused.weight", "unused.bias"}


def test_modules_in_params_and_in_the_closure():
    net, target = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    holder = [target]

    def both(net_, x):
        return net_(x).sum() * net(x).sum().detach() + net.bias.detach().sum()

    def with_target(net, x):
        return ((net(x) - holder[0](x).detach()) ** 2).sum()

    same(both, net)
    same(with_target, net)
    for other in (net, target, net, nn.Linear(3, 1).double()):  # net: the same module as the parameters
        holder[0] = other
        same(with_target, net)


def test_a_part_of_the_parameters_that_is_closed_over_for_a_while():
    net, other = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double(), nn.Linear(3, 3).double()
    box = [other]
    loss = lambda net, x: (net[0](x) * box[0](x).detach()).sin().sum()
    for part in (other, net[1], other, net[1], nn.Linear(3, 3).double(), net[0]):
        box[0] = part
        same(loss, net)


def test_a_parameter_that_is_also_closed_over():
    w = nn.Parameter(W.clone())
    same(lambda v, x: (v * w.detach()) @ x, w)
    same(lambda v, x: (v * w) @ x, {"w": w}["w"])


def test_aliases_of_what_is_closed_over():
    box = [CLOSED, CLOSED]
    loss = lambda w, x: (w * box[0]) @ (x + box[1])
    for second in (CLOSED.clone(), CLOSED, CLOSED.clone() + 1, CLOSED[:], 2 * CLOSED, CLOSED, CLOSED + 3):
        box[1] = second
        same(loss)
    pair = doubles(2, 3)
    box[:] = pair[0], pair[1]
    same(loss)
    pair.mul_(2)
    same(loss)


def test_aliases_of_modules_that_are_closed_over():
    one, other = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    box = [one, other]
    loss = lambda w, x: box[0](w * x).sin() @ box[1](x)
    for size in (4, 3, 2):  # the first call of each size is another one
        for second in (other, one, other, one, nn.Linear(3, 3).double())[4 - size :]:
            box[1] = second
            same(loss, batch=X[:size])


# ---------------------------------------------------------------- callables


class Method:
    scale = 2.0

    def loss(self, w, x):
        return self.scale * (w @ x).sin()

    def __call__(self, w, x):
        return self.loss(w, x) ** 2

    @classmethod
    def of_class(cls, w, x):
        return cls.scale * (w @ x)

    @staticmethod
    def static(w, x):
        return (w @ x).cos()


class ModuleLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(doubles(3))

    def forward(self, w, x):
        return (w * self.scale) @ x


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        print("called")
        return 2 * function(*args, **kwargs)

    return wrapper


@decorated
def decorated_loss(w, x):
    return (w @ x).sin()


def power(w, x, n=2, *, scale=1.0):
    return scale * (w @ x) ** n


CALLABLES = {
    "bound method": Method().loss,
    "callable object": Method(),
    "class method": Method.of_class,
    "static method": Method.static,
    "module": ModuleLoss(),
    "builtin": torch.dot,
    "decorated": decorated_loss,
    "partial": functools.partial(power, scale=3.0),
    "partial of a partial": functools.partial(functools.partial(power, n=3), scale=3.0),
    "partial of a method": functools.partial(Method().loss),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_callables(name):
    same(CALLABLES[name])


def test_lambdas_made_anew_and_partials_are_repeated():
    def call(scale):
        first = per_sample_grads(lambda w, x: scale * (w @ x) ** 2, W, X, ps.Sum(), engine="traced")
        return first, per_sample_grads(functools.partial(power, n=3), W, X, ps.Sum(), engine="traced")

    expected = call(doubles(())), call(doubles((), seed=1))
    for scale, wanted in zip((doubles(()), doubles((), seed=1)), expected, strict=True):
        found, entered = functions_entered(call, scale)
        assert entered.total() < 2 * AT_ONCE
        assert_trees_close(found, wanted, 1e-12)


# ---------------------------------------------------------------- batches and options


class Step(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def of_dict(w, batch):
    return (w @ batch["x"] - batch["y"].sum()) ** 2


def of_step(w, step):
    return (w @ step.x - step.y.sum()) ** 2


def of_numbers(w, x, nothing, name, count, rate):
    assert nothing is None
    return (w @ x) ** count * rate + len(name) * w[0]


BATCHES = {
    "dict": (of_dict, {"x": X, "y": 2 * X}),
    "NamedTuple": (of_step, Step(X, 2 * X)),
    "None, str, int, float": (of_numbers, (X, None, "abc", 2, 0.5)),
    "NumPy": (lambda w, x: (w @ x) ** 2, (X.numpy(),)),
    "NumPy, float32": (lambda w, x: (w @ x) ** 2, (X.numpy().astype(np.float32),)),
    "list": (lambda w, x, y: (w @ x) * (w @ y), [X, 2 * X]),
    "strided": (lambda w, x: (w @ x) ** 2, doubles(4, 6)[:, ::2]),
    "transposed": (lambda w, x: (w @ x) ** 2, doubles(3, 4).T),
    "expanded": (lambda w, x: (w @ x) ** 2, doubles(1, 3).expand(4, 3)),
    "B = 1": (lambda w, x: (w @ x) ** 2, X[:1]),
    "integers": (lambda w, i: (w[i] ** 2).sum(), torch.tensor([[0, 1], [2, 2]])),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    loss, batch = BATCHES[name]
    same(loss, batch=batch)


def squared(w, x):
    return (w @ x) ** 2


OPTIONS = {
    "shared leaf": (
        lambda w, s, x: s * (w @ x) ** 2,
        W,
        (torch.tensor(2.0, dtype=F64), X),
        {"in_dims": (None, (None, 0))},
    ),
    "params per sample": (squared, doubles(4, 3), (X,), {"in_dims": (0, 0)}),
    "params per sample, shared batch": (squared, doubles(4, 3), (X[0],), {"in_dims": (0, None)}),
    "another axis": (squared, W, (X.T.contiguous(),), {"in_dims": (None, 1)}),
    "keep_batch_dim": (lambda w, x: (x @ w).square().sum(), W, (X,), {"keep_batch_dim": True}),
    "chunk_size": (squared, W, (doubles(5, 3),), {"chunk_size": 2}),
    "weights": (squared, W, (X,), {"weights": torch.tensor([1.0, 0.0, 2.0, 0.5]), "reduce": (ps.Mean(), ps.Sum())}),
    "clipped": (squared, W, (X,), {"reduce": {"mean": ps.ClippedMean(0.5), "norm": ps.Norm()}}),
    "strided params": (squared, doubles(3, 2)[:, 0], (X,), {}),
    "complex": (lambda w, x: (w @ x.to(w.dtype)).abs() ** 2, torch.complex(W, CLOSED), (X,), {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    loss, params, batch, options = OPTIONS[name]
    same(loss, params, batch, **options)


def test_bfloat16():
    same(squared, W.bfloat16(), X.bfloat16(), reduce=ps.Sum(), tolerance=0.05)


@pytest.mark.parametrize("name", ["checkpoint", "autograd.Function", "grad"])
def test_out(name):
    loss = REWRITTEN[name]
    out = per_sample_grads(loss, W, X, engine="traced")
    for batch in (2 * X, X - 1, X):
        expected = per_sample_grads(loss, W, batch, engine="loop")
        assert per_sample_grads(loss, W, batch, engine="traced", out=out) is out
        assert_trees_close(out, expected, 1e-9)


# ---------------------------------------------------------------- what surrounds the call, and what it leaves behind


def test_autocast_does_not_reach_the_reductions():
    w, x = torch.randn(64), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            agree_exactly(lambda w, x: (w * x).pow(3).sum(), w, x, (ps.Gram(), ps.Dot(w)), "compiled")


def agree_exactly(loss, params, batch, reduce, engine="traced"):
    expected, found = (per_sample_grads(loss, params, batch, reduce, engine=one) for one in ("eager", engine))
    for one, other in zip(
        torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found), strict=True
    ):
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_negative_views():
    w, x = torch.randn(3, dtype=F64), torch.randn(5, 3, dtype=F64)
    closed = torch._neg_view(w)
    for batch in (x, torch._neg_view(x), x):
        agree_exactly(lambda w, x: (w @ x) ** 2 + closed @ x * (w @ w), w, batch, ps.Sum(), "compiled")
    agree_exactly(lambda w, x: (w @ x) ** 2, torch._neg_view(w), x, ps.Sum(), "compiled")


def test_weights_that_are_constants():
    w, x = torch.randn(3, dtype=F64), torch.randn(5, 3, dtype=F64)
    for factor in (1.0, 2.0):
        agree_exactly(lambda w, x: (w @ x) ** 2, w, x, ps.WeightedSum(lambda _, factor=factor: factor))


def test_values_have_the_range_of_pythons_numbers():
    w = torch.randn(3, dtype=F64)
    for dtype, number in ((torch.uint8, 200), (torch.int8, 100), (torch.int16, 30000), (torch.int32, 2**30)):
        n = torch.tensor([number, number - 1, 3, 0], dtype=dtype)
        found = per_sample_grads(lambda w, n: w.sum() * (1 - 2 * n.item()), w, n, engine="traced")
        expected = per_sample_grads(lambda w, n: w.sum() * (1 - 2 * n.item()), w, n, engine="loop")
        assert torch.equal(found, expected)


def test_values_of_bools_are_refused():
    with pytest.raises(ps.LossError, match=r"reads values of a sample|\.item\(\) of a bool"):
        per_sample_grads(lambda w, x: (x > 0).any().item() * w.sum(), torch.ones(3), torch.ones(4, 3), engine="traced")


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("n", torch.zeros(()))
        self.kept = None

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            self.n, self.kept = self.n + 1, y
        return y.sum()


def test_a_module_that_stores_in_train_mode_alone():
    module, x = Counting(), torch.randn(4, 3)
    buffer = module.n
    for train in (True, False, False, True, True):
        module.train(train)
        agree_exactly(lambda module, x: module(x), module, x, ps.Norm())
        assert module.n is buffer
        assert module.kept is None


class Listed(ps.reductions.Reduction):
    uses = ps.Norm.uses

    def __init__(self, field):
        self.field = field

    def lift(self, gradients):
        return ps.Norm().lift(gradients)

    def finish(self, merged):
        return ps.Norm().finish(merged)


@pytest.mark.parametrize("field", [[1.0], {"a": 1}, torch.ones(2)])
def test_fields_of_reductions_that_cannot_be_part_of_a_key(field):
    with pytest.raises(ps.ArgumentError, match=r"Listed\.field: expected a value that can be hashed.*`live`"):
        per_sample_grads(lambda w, x: w @ x, torch.ones(3), torch.ones(4, 3), Listed(field), engine="traced")


class Capped(ps.Mean):
    """A mean whose last step reads values, so that it is no part of a program."""

    def finish(self, merged):
        mean = super().finish(merged)
        return mean / max(1.0, float(mean.norm()))


def test_an_out_where_the_last_step_is_not_compiled():
    out = per_sample_grads(tanh, W, X, Capped(), engine="traced")
    again = per_sample_grads(tanh, W, 2 * X, Capped(), engine="traced", out=out)
    assert again is out
    assert_trees_close(again, per_sample_grads(tanh, W, 2 * X, Capped()), 1e-9)


def test_an_out_of_another_size_is_refused_with_its_own_size():
    w, x = torch.ones(3), torch.ones(5, 3)
    loss = lambda w, x: w @ x
    for size in (5, 4):
        per_sample_grads(loss, w, x[:size], engine="traced")
    with pytest.raises(ps.ArgumentError, match=r"expected shape \[4, 3\]"):
        per_sample_grads(loss, w, x[:4], engine="traced", out=torch.zeros(5, 3))


def test_where_torch_compile_does_not_run():
    w, x = torch.ones(3), torch.ones(5, 3)
    loss = lambda w, x: w @ x
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ps.LossError, match=r"torch\.compile does not run here"),
    ):
        per_sample_grads(loss, w, x, engine="traced")
    assert torch.equal(per_sample_grads(loss, w, x, engine="traced"), x)


def test_threads_wait_for_a_compilation():
    warm, w, x = (lambda w, x: (w @ x) ** 2), torch.randn(3, dtype=F64), torch.randn(5, 3, dtype=F64)
    expected = per_sample_grads(warm, w, x, ps.Norm())
    per_sample_grads(warm, w, x, ps.Norm(), engine="traced")
    errors, done = [], threading.Event()

    def run(number):
        try:
            while not done.is_set():
                assert torch.allclose(per_sample_grads(warm, w, x, ps.Norm(), engine="traced"), expected)
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            errors.append((number, error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for number in range(5):
        space = {}
        exec(f"def loss(w, x): return (w @ x) ** {number + 2}", space)
        agree_exactly(space["loss"], w, x, ps.Norm())
    clear_cache()
    agree_exactly(warm, w, x, ps.Norm())
    done.set()
    for thread in threads:
        thread.join()
    assert not errors


# ---------------------------------------------------------------- what each call compares


def test_functional_call_compares_the_module():
    """A hook, another value of a module, and a parametrization are seen."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.5), nn.Linear(3, 1)).double()
    params = {name: x.detach() for name, x in model.named_parameters()}

    def loss(params, x):
        return functional_call(model, params, (x,)).square().sum()

    same(loss, params)
    model[1].negative_slope = 0.25
    same(loss, params)
    handle = model[0].register_forward_hook(lambda module, args, output: 2 * output)
    same(loss, params)
    handle.remove()
    same(loss, params)
    nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Tanh())
    params = {name: x.detach() for name, x in model.named_parameters()}
    same(loss, params)
