"""The table of ``docs/constructs.md``: which engine takes which construct of Python and torch. Every cell runs.

``PYTHONPATH=tests python tests/public/test_constructs.py`` writes the table into the page.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import assert_trees_close, oracle
from pages import Part
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from persample import ArgumentError, Aux, FallbackWarning, LossError, Stack, per_sample_grads, stop_gradient

# peft asks for what transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
PART = Part("constructs.md", "table", "public/test_constructs.py")
F64 = torch.float64
B = 4
ENGINES = ("eager", "traced", "compiled", "loop")


class Refusal(NamedTuple):
    """A kind of refusal: what the table says, and what the error says."""

    name: str
    message: str
    error: type[Exception] = LossError
    until: str = "9"  # the version of torch from which the loss is taken

    @property
    def is_expected(self):
        return torch.__version__ < self.until


def until(version, refusal):
    """Return a refusal of torch versions before the one that is named."""
    return refusal._replace(until=version)


VALUES = Refusal("values", r"reads values of a sample")
CAPTURE = Refusal("capture", r"cannot be (traced|compiled)")
WRITES = Refusal("writes", r"writes in place into its arguments, or into a tensor it closed over")
WROTE = Refusal("writes", r"wrote in place into")
NO_RULE = Refusal("no rule", r"uses .*vmap cannot batch")
DERIVATIVES = Refusal("derivatives", r"sets requires_grad, or calls retain_grad\(\) or backward\(\) itself")
STATISTICS = Refusal("statistics", r"does not update running statistics", ArgumentError)
SPARSE_GRADIENTS = Refusal("sparse", r"expected dense gradients", ArgumentError)
BOUNDED_ROWS = Refusal("rescaled", r"tables, also frozen ones, that no lookup changes", ArgumentError)
REENTRANT = Refusal("reentrant", r"use_reentrant=True, torch.utils.checkpoint is incompatible", RuntimeError)
RAGGED = Refusal("lengths", r"expected leaves of one common batch size.*Pad episodes", ArgumentError)
TORCH = Refusal("no rule", r"False != True", AssertionError)  # torch.cond's own


class Construct(NamedTuple):
    """A row of the table.

    Attributes:
        group: its heading.
        name: what stands in the first column.
        loss: the loss of one sample.
        refusals: for each engine that refuses the loss, how.
        params: makes the parameters.
        batch: makes the batch.
        replay: for a random loss, the same loss from (params, sample, the aux of that sample).
        options: other arguments of the call.
    """

    group: str
    name: str
    loss: Callable[..., Any]
    refusals: dict[str, Refusal]
    params: Callable[[], Any]
    batch: Callable[[], Any]
    replay: Callable[..., Any] | None
    options: dict[str, Any]


CONSTRUCTS: list[Construct] = []


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def vector():
    return draw(3, seed=1)


def rows():
    return draw(B, 3, seed=2)


def construct(group, name, *, params=vector, batch=rows, replay=None, eager=None, captured=None, loop=None, **options):
    """Put the decorated loss into the table; an engine that is not named takes it. Two engines capture a loss."""
    refusals = dict(zip(ENGINES, (eager, captured, captured, loop), strict=True))
    refusals = {engine: refusal for engine, refusal in refusals.items() if refusal}
    if replay:
        options["randomness"] = "different"

    def add(loss):
        CONSTRUCTS.append(Construct(group, name, loss, refusals, params, batch, replay, options))
        return loss

    return add


# ---------------------------------------------------------------- control flow

flow = functools.partial(construct, "Control flow")
FLAG = {"squared": True}


@flow("`if x.sum() > 0:` (a value of the sample)", eager=VALUES, captured=VALUES)
def _(w, x):
    return w @ x if x.sum() > 0 else (w @ x) ** 2


@flow("`if w.norm() > 1:` (a value of a parameter)", captured=CAPTURE)
def _(w, x):
    return w @ x if w.norm() > 1 else (w @ x) ** 2


@flow("`if total > 0:`, computed from a closed-over tensor", captured=CAPTURE)
def _(w, x):
    return (w * CLOSED) @ x if CLOSED.sum() > 0 else w @ x


@flow("`if x.shape[0] > 2:`, `if x.dtype == …:`")
def _(w, x):
    return (w @ x) ** 2 if x.shape[0] > 2 and x.dtype == F64 else w @ x


@flow('`if config["flag"]:`')
def _(w, x):
    return (w @ x) ** 2 if FLAG["squared"] else w @ x


@flow("`for t in range(len(x)):`")
def _(w, x):
    total = torch.zeros((), dtype=F64)
    for t in range(len(x)):
        total = torch.tanh(total + w[t] * x[t])
    return total


@flow("`while` on a value", eager=VALUES, captured=VALUES)
def _(w, x):
    y = w @ x
    while y.abs() < 10:
        y = 2 * y
    return y


@flow("`if x.isnan().any():`, false for all samples", captured=CAPTURE)
def _(w, x):
    return w.sum() if x.isnan().any() else (w @ x) ** 2


@flow("`assert (x < 100).all()`, true of all samples", captured=CAPTURE)
def _(w, x):
    assert (x < 100).all()
    return (w @ x) ** 2


@flow("`torch.where`")
def _(w, x):
    return torch.where(x > 0, w * x, (w * x) ** 2).sum()


@flow("`torch.cond`", eager=TORCH)
def _(w, x):
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (w * x,)).sum()


# ---------------------------------------------------------------- reading values

values = functools.partial(construct, "Reading values")
CLOSED = draw(3, seed=3)
STEPS = torch.tensor(2)
NUMBER = torch.tensor(0.5, dtype=F64)
ARRAY = np.array([1.0, -2.0, 3.0])


@values("`x[0].item()` of the sample, used as a factor", eager=VALUES)
def _(w, x):
    return x[0].item() * (w @ x)


@values("`(w @ x).item()`, used as a factor", eager=VALUES)
def _(w, x):
    return (w @ x).item() * (w @ x)


@values("`number.item()` of a closed-over tensor")
def _(w, x):
    return NUMBER.item() * (w @ x)


@values("`float(number)` of a closed-over tensor")
def _(w, x):
    return float(NUMBER) * (w @ x)


@values("`range(n.item())`, an integer of a closed-over tensor")
def _(w, x):
    y = w @ x
    for _ in range(STEPS.item()):
        y = torch.sin(y)
    return y


@values("`bool(number)` of a closed-over tensor")
def _(w, x):
    return (w @ x) ** 2 if bool(NUMBER) else w @ x


@values("`vector.tolist()` of a closed-over tensor", captured=CAPTURE)
def _(w, x):
    return sum(a * b * c for a, b, c in zip(CLOSED.tolist(), w, x, strict=True))


@values(
    "`if a.item() > 1:`, a number of the sample",
    eager=VALUES,
    captured=VALUES,
    batch=lambda: (rows(), torch.tensor([1, 2, 1, 2])),
)
def _(w, x, a):
    return w @ x if a.item() > 1 else 2 * (w @ x)


@values(
    "`range(int(a))`, a number of the sample",
    eager=VALUES,
    captured=VALUES,
    batch=lambda: (rows(), torch.tensor([1, 2, 1, 2])),
)
def _(w, x, a):
    y = w @ x
    for _ in range(int(a)):
        y = 2 * y
    return y


@values("`x.tolist()` of the sample", eager=VALUES, captured=VALUES)
def _(w, x):
    return sum(a * b for a, b in zip(x.tolist(), w, strict=True))


@values("`x.numpy()` of the sample", eager=VALUES)
def _(w, x):
    return (w * torch.from_numpy(np.tanh(x.numpy()))).sum()


@values("a closed-over NumPy array")
def _(w, x):
    return (w * torch.from_numpy(ARRAY)) @ x


@values("`x.unique()`, `x.nonzero()`", eager=VALUES, captured=VALUES)
def _(w, x):
    return w @ x * x.unique().sum() * x.nonzero().sum()


# ---------------------------------------------------------------- indexing

indexing = functools.partial(construct, "Indexing")
indexed = functools.partial(indexing, batch=lambda: (rows(), torch.tensor([0, 2, 1, 2])))


@indexing("`torch.tensor([x[0], x[1]])`, a tensor built from entries", eager=VALUES)
def _(w, x):
    return torch.tensor([x[0], x[1], x[2]], dtype=x.dtype) @ w


@indexing("`torch.stack([x[0], w[1]])`")
def _(w, x):
    return torch.stack([x[0] * w[0], w[1], x[2]]).square().sum()


@indexed("`q[a]`, with `a` in the batch")
def _(w, x, a):
    return (w * x)[a] ** 2


@indexing("`q[q.argmax()]`, an index that the loss computes")
def _(w, x):
    q = w * x
    return q[q.argmax()] ** 2


@indexing(
    "`q[t, a[t]]` in a loop", batch=lambda: (draw(B, 2, 3, seed=2), torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1]]))
)
def _(w, x, a):
    q = w * x
    return sum(q[t, a[t]] ** 2 for t in range(2))


@indexed("`gather`, `index_select`, `take_along_dim`")
def _(w, x, a):
    q = w * x
    return q.gather(0, a[None]).sum() + q.index_select(0, a[None]).sum() ** 2 + q.take_along_dim(a[None]).sum()


@indexing("`q[x > 0]` (a boolean mask)", eager=VALUES, captured=VALUES)
def _(w, x):
    return (w * x)[x > 0].sum()


@indexed("`x[:a]` (a slice of a length in the batch)", eager=VALUES, captured=VALUES)
def _(w, x, a):
    return (w * x)[:a].sum() + w @ x


# ---------------------------------------------------------------- writes in place

writing = functools.partial(construct, "Writes in place")


@writing("into `torch.zeros(…)`")
def _(w, x):
    out = torch.zeros(3, dtype=F64)
    for t in range(3):
        out[t] = w[t] * x[t] ** 2
    return out.square().sum()


@writing("slices, into `x.new_zeros(…)`")
def _(w, x):
    out = x.new_zeros(3)
    out[1:] = (w * x)[:2]
    return out.square().sum()


@writing("masks, `out[x > 0] = 1`")
def _(w, x):
    out = x.new_zeros(3)
    out[x > 0] = 1.0
    return (out * w).sum() ** 2


@writing("the same by `torch.where(x > 0, 1, out)`, `out.masked_fill(x > 0, 1)`")
def _(w, x):
    return (torch.where(x > 0, 1, x.new_zeros(3)) * w).sum() ** 2 + (w * x).masked_fill(x > 0, 1.0).sum()


@writing("into `x.new_zeros(…)`")
def _(w, x):
    out = x.new_zeros(3)
    for t in range(3):
        out[t] = w[t] * x[t]
    return out.square().sum()


@writing("at an index in the batch, `out[a] = 1`", batch=lambda: (rows(), torch.tensor([0, 2, 1, 2])))
def _(w, x, a):
    out = torch.zeros(2, 3, dtype=F64)
    out[0, a] = w @ x
    out[..., a] = out[:, a] + x[:2] * w[1]
    out[a - 2, a] = w[2]
    return out.square().sum()


@writing("into an intermediate result (`y.mul_(2)`, `y += x`)")
def _(w, x):
    y = w * x
    y.mul_(2)
    y += x
    return y.square().sum()


@writing("into a parameter", eager=WROTE, captured=WROTE, loop=WROTE)
def _(w, x):
    with torch.no_grad():
        w.mul_(2)
    return w @ x


@writing("into a leaf of the batch", eager=WRITES, captured=WRITES, loop=WROTE)
def _(w, x):
    return w @ x.mul_(2)


@writing("into a closed-over tensor", eager=WRITES, captured=WRITES)
def _(w, x):
    SCRATCH.copy_(x)
    return (w * SCRATCH) @ x


SCRATCH = torch.zeros(3, dtype=F64)


class Counting(nn.Module):
    """Counts its calls in a buffer, and keeps its last output."""

    def __init__(self, count=False, keep=False, mean=False):
        super().__init__()
        self.weight = nn.Parameter(vector())
        self.register_buffer("calls", torch.zeros((), dtype=F64))
        self.register_buffer("mean", torch.ones(3, dtype=F64))
        self.count, self.keep, self.average, self.kept = count, keep, mean, None

    def forward(self, x):
        y = self.weight * x
        if self.count:
            self.calls += 1
        if self.average:
            self.mean.copy_(x)
        if self.keep:
            self.kept = y
        return y * self.mean


def squared_output(model, x):
    return model(x).square().sum()


writing("into a buffer, the same for all samples (`calls += 1`)", params=lambda: Counting(count=True))(squared_output)
writing("into a buffer, of the sample (`mean.copy_(x)`)", params=lambda: Counting(mean=True))(squared_output)


# ---------------------------------------------------------------- random numbers

random = functools.partial(construct, 'Random numbers (`randomness="different"`)')


@random("`F.dropout`", replay=lambda w, x, kept: (kept * w * x).square().sum())
def _(w, x):
    y = F.dropout(w * x, 0.5)
    return y.square().sum(), (y / (w * x)).detach()


@random("`torch.rand_like`, `torch.randn`", replay=lambda w, x, noise: ((w + noise) * x).square().sum())
def _(w, x):
    noise = torch.rand_like(x) + torch.randn(3, dtype=F64)
    return ((w + noise) * x).square().sum(), noise


@random("`Normal(…).rsample()`", replay=lambda w, x, noise: (w * x + noise * w.exp()).square().sum())
def _(w, x):
    drawn = torch.distributions.Normal(w * x, w.exp()).rsample()
    return drawn.square().sum(), ((drawn - w * x) / w.exp()).detach()


@random(
    "`Categorical(…).sample()`, `log_prob`",
    replay=lambda w, x, a: -(w * x).log_softmax(0)[int(a)],
)
def _(w, x):
    policy = torch.distributions.Categorical(logits=w * x)
    a = policy.sample()
    return -policy.log_prob(a), a


@random("`torch.multinomial`, `torch.bernoulli`", replay=lambda w, x, drawn: (drawn * w * x).square().sum())
def _(w, x):
    drawn = torch.multinomial(x.softmax(0), 3, replacement=True) + torch.bernoulli(x.sigmoid())
    return (drawn * w * x).square().sum(), drawn


@random(
    "a `torch.Generator` of your own", captured=CAPTURE, replay=lambda w, x, noise: ((w + noise) * x).square().sum()
)
def _(w, x):
    noise = torch.rand(3, generator=GENERATOR, dtype=F64)
    return ((w + noise) * x).square().sum(), noise


GENERATOR = torch.Generator()


# ---------------------------------------------------------------- autograd

autograd = functools.partial(construct, "Autograd")


@autograd("`.detach()`, `stop_gradient`")
def _(w, x):
    return (w @ x - stop_gradient(w.sum() * x.sum()) - (w @ x).detach()) ** 2 + w[0] * (w * x).detach().sum()


@autograd("`with torch.no_grad():`")
def _(w, x):
    with torch.no_grad():
        target = (w @ x).sin()
    return (w @ x - target) ** 2 + target * w[0]


@autograd("`torch.func.grad`")
def _(w, x):
    slope = torch.func.grad(lambda x: torch.tanh(w * x).sum())(x)
    return (slope * w).square().sum()


@autograd("`torch.func.vmap`")
def _(w, x):
    return torch.func.vmap(lambda a: torch.tanh(w * a).sum())(x).square().sum()


@autograd("`torch.func.jvp`")
def _(w, x):
    return torch.func.jvp(lambda x: torch.tanh(w * x), (x,), (w,))[1].square().sum()


@autograd("`torch.func.jacrev`, `jacfwd`, `hessian`")
def _(w, x):
    f = lambda x: torch.tanh(w * x).sum() ** 2
    return torch.func.jacrev(f)(x).square().sum() + torch.func.jacfwd(f)(x).sum() + torch.func.hessian(f)(x).sum()


@autograd("`torch.autograd.grad(…, create_graph=True)` with respect to a parameter")
def _(w, x):
    (slope,) = torch.autograd.grad(torch.tanh(w * x).sum(), w, create_graph=True)
    return (slope * x).square().sum()


@autograd("the same with respect to a tensor that requires a gradient inside (WGAN-GP, PINNs)", captured=CAPTURE)
def _(w, x):
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(w * x).sum(), x, create_graph=True)
    return (slope * w).square().sum()


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.tanh(w * x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x, w = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            return torch.autograd.grad(torch.tanh(w * x), (x, w), grad)


@autograd(
    "a solver of fixed steps that checks its times, and writes into `torch.empty(…)` (`odeint`)", captured=CAPTURE
)
def _(w, x):
    assert (TIMES[1:] > TIMES[:-1]).all()
    found = torch.empty(len(TIMES), *x.shape, dtype=x.dtype)
    found[0] = y = x
    for i, step in enumerate(TIMES[1:] - TIMES[:-1]):
        found[i + 1] = y = y + step * torch.tanh(w * y)
    return found.square().sum()


TIMES = torch.tensor([0.0, 0.5, 2.0])


@autograd("a solver with an adjoint, whose backward pass calls `torch.autograd.grad`", eager=NO_RULE, captured=CAPTURE)
def _(w, x):
    return Again.apply(x, w).square().sum()


def surrogate(ctx, grad):
    (u,) = ctx.saved_tensors
    return grad * torch.sigmoid(u) * (1 - torch.sigmoid(u))


class Spike(torch.autograd.Function):
    backward = staticmethod(surrogate)

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)


class SpikeOfVmap(torch.autograd.Function):
    generate_vmap_rule = True
    backward = staticmethod(surrogate)

    @staticmethod
    def forward(u):
        return (u > 0).to(u.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


@autograd(
    "a surrogate gradient (spikes): a step forward, a sigmoid backward, in a `forward` that takes `ctx`", eager=NO_RULE
)
def _(w, x):
    return (Spike.apply(w * x) * x).sum()


@autograd("the same with `setup_context` and `generate_vmap_rule = True`")
def _(w, x):
    return (SpikeOfVmap.apply(w * x) * x).sum()


@autograd("an implicit layer (DEQ): a fixed point without grad, and a hook that solves for its gradient")
def _(w, x):
    def step(z):
        return torch.tanh(w * z + x)

    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(60):
            z = step(z)
    z = step(z)
    slope = (w * (1 - z**2)).detach()
    z.register_hook(lambda grad: grad / (1 - slope))
    return z.square().sum()


@autograd("`.backward()` inside", eager=DERIVATIVES, captured=DERIVATIVES)
def _(w, x):
    leaf = x.detach().clone().requires_grad_()
    leaf.square().sum().backward()
    return (w * leaf.grad).square().sum()


@autograd(
    "`checkpoint(…, use_reentrant=True)`",
    eager=NO_RULE,
    loop=REENTRANT,
    replay=lambda w, x, _: torch.tanh(w * x).square().sum(),  # torch's own has no torch.autograd.grad
)
def _(w, x):
    return checkpoint(lambda w, x: torch.tanh(w * x).square().sum(), w, x, use_reentrant=True), x.sum()


@autograd("`checkpoint(…, use_reentrant=False)`", eager=NO_RULE)
def _(w, x):
    return checkpoint(lambda y: torch.tanh(w * y).square().sum(), x, use_reentrant=False)


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0].cos()


class NewStyle(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0].cos()


@autograd("`autograd.Function` whose `forward` takes `ctx`", eager=NO_RULE)
def _(w, x):
    return OldStyle.apply(w * x).square().sum()


@autograd("`autograd.Function` with `setup_context`")
def _(w, x):
    return NewStyle.apply(w * x).square().sum()


@autograd("`y.requires_grad_()` of an activation, as `model.enable_input_require_grads()` has it", captured=CAPTURE)
def _(w, x):
    return (w * (2 * x).requires_grad_()).square().sum()


@autograd("`y.register_hook(…)`")
def _(w, x):
    y = w * x
    y.register_hook(lambda grad: 2 * grad)
    return y.square().sum()


def hooked(register):
    def make():
        net = linear()
        getattr(net, register)(lambda module, *_: None)
        return net

    return make


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=F64)


autograd("forward hooks of modules", params=hooked("register_forward_hook"))(squared_output)
autograd(
    "full backward hooks of modules", eager=NO_RULE, captured=NO_RULE, params=hooked("register_full_backward_hook")
)(squared_output)


# ---------------------------------------------------------------- modules

modules = functools.partial(construct, "Modules")


def made(make, *args, train=False, **options):
    """Return a function that makes a module of float64."""

    def module():
        torch.manual_seed(0)
        return make(*args, **options).double().train(train)

    return module


def sequences():
    return draw(B, 5, 4, seed=2)


def images():
    return draw(B, 2, 4, 4, seed=2)


class Lstm(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(4, 3, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Tabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x):
        return self.table(torch.arange(3)) * x


class Closed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), norm

    def forward(self, x):
        return self.norm(self.linear(x))


def parametrized():
    net = nn.Linear(3, 2)
    nn.utils.parametrize.register_parametrization(net, "weight", Halved())
    return net


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


SCRIPTED = torch.jit.script(nn.Linear(3, 3, dtype=F64))

modules("`nn.Linear`, `nn.Sequential`", params=linear)(squared_output)
modules("`nn.Conv2d`, pooling", params=made(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2))), batch=images)(
    squared_output
)
modules("`nn.Embedding`", params=made(Tabled))(squared_output)
modules("`nn.GRU`, `nn.RNN`", params=made(Lstm, nn.GRU), batch=sequences)(squared_output)
modules("`nn.LSTM`", params=made(Lstm), batch=sequences)(squared_output)
modules("`nn.MultiheadAttention`", params=made(Attention), batch=sequences, keep_batch_dim=True)(squared_output)
transformer = functools.partial(nn.TransformerEncoderLayer, 4, 2, 8, batch_first=True)
modules(
    "`nn.TransformerEncoderLayer`, in train and in eval mode",
    params=lambda: nn.Sequential(made(transformer, dropout=0.0, train=True)(), made(transformer)()),
    batch=sequences,
)(squared_output)
modules("batch norm in eval mode", params=made(nn.BatchNorm2d, 2), batch=images, keep_batch_dim=True)(squared_output)
modules(
    "batch norm in train mode",
    eager=STATISTICS,
    captured=STATISTICS,
    loop=STATISTICS,
    params=made(nn.BatchNorm2d, 2, train=True),
    batch=images,
    keep_batch_dim=True,
)(squared_output)
modules(
    "group norm, layer norm",
    params=made(lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(1, 2))),
    batch=images,
    keep_batch_dim=True,
)(lambda model, x: model(x).sin().sum())
modules("weight norm", params=made(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))))(squared_output)
modules("spectral norm in eval mode", params=made(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))))(
    squared_output
)
modules(
    "spectral norm in train mode (its buffers are put back)",
    params=made(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), train=True),
)(squared_output)
modules("parametrizations of your own", params=made(parametrized))(squared_output)


def materialized():
    torch.manual_seed(0)
    net = nn.Sequential(nn.LazyLinear(2), nn.Tanh())
    net(torch.zeros(3))
    return net.double()


modules("lazy modules, called once before", params=materialized)(squared_output)
modules("modules that read buffers", params=Counting)(squared_output)
modules("modules that keep an activation (`self.kept = y`)", params=lambda: Counting(keep=True))(squared_output)


@modules("a scripted module that the loss closes over", captured=CAPTURE)
def _(w, x):
    return SCRIPTED(w * x).square().sum()


@modules("`torch.func.functional_call`", params=lambda: dict(linear().named_parameters()))
def _(params, x):
    return torch.func.functional_call(NET, params, (x,)).square().sum()


NET = linear()


@modules("a network that the loss closes over (a target network)")
def _(w, x):
    return (w @ x - NET(x).sum()) ** 2


@modules("`copy.deepcopy(model)` inside", captured=CAPTURE, params=linear)
def _(model, x):
    return model(x).square().sum() + copy.deepcopy(model)(x).sum()


# ---------------------------------------------------------------- numerical methods

numerical = functools.partial(construct, "Numerical methods")
square = functools.partial(numerical, params=lambda: draw(3, 3, seed=1))


def positive(w, x):
    """A symmetric positive matrix of parameters and a sample."""
    y = w * x
    return y @ y.T + 2 * torch.eye(3, dtype=F64)


@square("`torch.linalg.slogdet`, `solve`, `inv`, `cholesky`")
def _(w, x):
    a = positive(w, x)
    halves = torch.linalg.cholesky(a)
    return a.slogdet().logabsdet + torch.linalg.solve(a, x) @ x + torch.linalg.inv(a).trace() + halves.sum()


@square("`torch.linalg.eigh`, `svdvals`, `matrix_exp`, `pinv`")
def _(w, x):
    a = positive(w, x)
    values, vectors = torch.linalg.eigh(a)
    spectrum = values.log().sum() + (vectors[:, -1] @ x) ** 2 + torch.linalg.svdvals(w * x).sum()
    return spectrum + torch.linalg.matrix_exp(a / 10).sum() + torch.linalg.pinv(a).sum()


@square("a Sinkhorn loop")
def _(w, x):
    k = (-((w - x) ** 2)).exp()
    u = torch.ones(3, dtype=F64)
    for _ in range(5):
        v = 1 / (k.T @ u)
        u = 1 / (k @ v)
    return (u[:, None] * k * v * w).sum()


@numerical("a Newton loop of a fixed length")
def _(w, x):
    z = (x * 0).sum() + 1.0
    for _ in range(4):
        z = z - (z**3 + z - (w @ x).tanh()) / (3 * z**2 + 1)
    return z


@numerical("a Newton loop until `residual < eps`", eager=VALUES, captured=VALUES)
def _(w, x):
    z = (x * 0).sum() + 1.0
    while (z**3 + z - (w @ x).tanh()).abs() > 1e-12:
        z = z - (z**3 + z - (w @ x).tanh()) / (3 * z**2 + 1)
    return z


@numerical("a product with a Hessian, `jvp` of `grad`")
def _(w, x):
    return torch.func.jvp(torch.func.grad(lambda w: torch.tanh(w * x).sum()), (w,), (x,))[1].square().sum()


def field(w, t, x):
    return torch.tanh(w[0] * t + w[1] * x) * w[2]


@numerical("the residual of a differential equation (PINN)", batch=lambda: draw(B, 2, seed=2))
def _(w, point):
    t, x = point
    u_t = torch.func.grad(field, 1)(w, t, x)
    u_xx = torch.func.grad(torch.func.grad(field, 2), 2)(w, t, x)
    return (u_t - 0.1 * u_xx) ** 2


@numerical("steps of gradient descent inside (MAML)", batch=lambda: draw(B, 2, 3, seed=2))
def _(w, x):
    support, query = x
    for _ in range(3):
        w = w - 0.1 * torch.func.grad(lambda w: torch.tanh(w @ support) ** 2)(w)
    return torch.tanh(w @ query) ** 2


@numerical("`log_prob`, `entropy`, `kl_divergence` of distributions, with validation", captured=CAPTURE)
def _(w, x):
    normal = torch.distributions.Normal(w, x.exp(), validate_args=True)
    choice = torch.distributions.Categorical(logits=w * x, validate_args=True)
    other = torch.distributions.Normal(x, 1.0)
    return normal.log_prob(x).sum() + choice.entropy() + torch.distributions.kl_divergence(normal, other).sum()


@numerical("the same with `validate_args=False`")
def _(w, x):
    normal = torch.distributions.Normal(w, x.exp(), validate_args=False)
    choice = torch.distributions.Categorical(logits=w * x, validate_args=False)
    other = torch.distributions.Normal(x, torch.ones(3, dtype=F64), validate_args=False)
    return normal.log_prob(x).sum() + choice.entropy() + torch.distributions.kl_divergence(normal, other).sum()


# ---------------------------------------------------------------- models

models = functools.partial(construct, "Models")


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding="same", bias=False), nn.BatchNorm2d(2)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


models("a ResNet block, batch norm in eval mode", params=made(Residual), batch=images, keep_batch_dim=True)(
    squared_output
)
models(
    "a ResNet block, batch norm in train mode",
    eager=STATISTICS,
    captured=STATISTICS,
    loop=STATISTICS,
    params=made(Residual, train=True),
    batch=images,
    keep_batch_dim=True,
)(squared_output)
models(
    '`nn.Conv2d(padding="valid")`, `"same"`',
    params=made(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding="valid"), nn.Conv2d(3, 2, 2, padding="same", dilation=2))
    ),
    batch=images,
)(squared_output)
models("layers that are called twice, shared layers", params=linear)(
    lambda model, x: model(x[:3] * model(x).sum()).square().sum()
)
models("orthogonal parametrization", params=made(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))))(
    squared_output
)
models("a module that was wrapped by `torch.compile`", params=lambda: torch.compile(linear(), backend="eager"))(
    squared_output
)
models("`nn.DataParallel`", params=lambda: nn.DataParallel(linear()))(squared_output)


class Graph(nn.Module):
    """One step of message passing over the edges of a sample."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(3, 3)

    def forward(self, nodes, edges):
        sent = self.message(nodes[edges[0]]).tanh()
        return nodes + torch.zeros_like(nodes).index_add(0, edges[1], sent)


def edges():
    return torch.randint(0, 5, (B, 2, 7), generator=torch.Generator().manual_seed(3))


models("a graph network (`index_add` over edges)", params=made(Graph), batch=lambda: (draw(B, 5, 3, seed=2), edges()))(
    lambda model, nodes, edges: model(nodes, edges).square().sum()
)


def degree(ends, w):
    return w.new_zeros(3).scatter_add_(0, ends, w.new_ones(4))


models(
    "messages added up by `new_zeros(n).scatter_add_(…)`, of edges without weights (`GCNConv`)",
    batch=lambda: (rows(), torch.tensor([[[0, 1, 2, 0], [1, 2, 0, 2]]]).expand(B, 2, 4)),
)(lambda w, x, edges: (degree(edges[1], w) * w * x).square().sum())
models(
    "loops of nodes removed by a mask, `edges[:, mask]` (`GCNConv`, `GATConv`)",
    eager=VALUES,
    captured=VALUES,
    batch=lambda: (rows(), torch.tensor([[[0, 1, 1, 0], [1, 2, 1, 2]]]).expand(B, 2, 4)),
)(lambda w, x, edges: (w * x)[edges[:, edges[0] != edges[1]][0]].square().sum())


def bags():
    return torch.randint(0, 5, (B, 2, 4), generator=torch.Generator().manual_seed(3))


models("`nn.EmbeddingBag`", params=made(nn.EmbeddingBag, 5, 3, mode="sum"), batch=bags)(squared_output)
models(
    "`nn.Embedding(sparse=True)`",
    eager=SPARSE_GRADIENTS,
    captured=SPARSE_GRADIENTS,
    loop=SPARSE_GRADIENTS,
    params=made(nn.Embedding, 5, 3, sparse=True),
    batch=bags,
)(squared_output)
models(
    "`nn.Embedding(max_norm=…)`",
    eager=BOUNDED_ROWS,
    captured=BOUNDED_ROWS,
    loop=BOUNDED_ROWS,
    params=made(nn.Embedding, 5, 3, max_norm=1.0),
    batch=bags,
)(squared_output)


@torch.library.custom_op("persample_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, grad: 3 * grad * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@models("an operator of your own (`torch.library.custom_op`, `register_autograd`)")
def _(w, x):
    return cube(w * x).sum()


def distributed():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(made(nn.Linear, 3, 2)())


models("`DistributedDataParallel`", params=distributed, captured=CAPTURE)(squared_output)
models("the module inside, `model.module`", params=lambda: distributed().module)(squared_output)


def gpt2():
    import transformers  # takes seconds

    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).double().eval()


def adapted():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(), config)


def next_token(model, tokens):
    return F.cross_entropy(model(input_ids=tokens[None]).logits[0, :-1], tokens[1:])


def sentences():
    return torch.randint(0, 11, (B, 6), generator=torch.Generator().manual_seed(1))


hugging_face = functools.partial(construct, "Hugging Face", batch=sentences)
hugging_face("GPT-2 from a configuration", params=gpt2)(next_token)
hugging_face("LoRA by PEFT", params=adapted)(next_token)


# ---------------------------------------------------------------- Python

python = functools.partial(construct, "Python")
COUNTS = {"calls": 0}
KEPT = []


@python("`print`")
def _(w, x):
    print("called", x.shape)
    return (w @ x) ** 2


@python("`warnings.warn`")
def _(w, x):
    warnings.warn("called", stacklevel=1)
    return (w @ x) ** 2


@python("`try`/`except` around a missing key")
def _(w, x):
    try:
        return COUNTS["missing"] * (w @ x)
    except KeyError:
        return (w @ x) ** 2


@python("`try`/`except NameError` around a global that is not there", captured=until("2.14", CAPTURE))
def _(w, x):
    try:
        return MISSING * (w @ x)
    except NameError:
        return (w @ x) ** 2


@python("lists and dicts of tensors, comprehensions, `torch.stack`")
def _(w, x):
    parts = [w[t] * x[t] for t in range(3)]
    parts.append(parts[0] * parts[1])
    table = dict(zip("abcd", parts, strict=True))
    return torch.stack(list(table.values())).square().sum()


@python('a counter outside (`counts["calls"] += 1`)')
def _(w, x):
    COUNTS["calls"] += 1
    return (w @ x) ** 2


@python("a tensor appended to a list outside", captured=CAPTURE)
def _(w, x):
    KEPT.append(w * x)
    return (w @ x) ** 2


def closure():
    gamma, target = 0.5, draw(3, seed=4)

    def loss(w, x):
        return gamma * ((w - target) @ x) ** 2

    return loss


python("closures over numbers and tensors")(closure())
python("`functools.partial`")(functools.partial(lambda w, x, power: (w @ x) ** power, power=3))


@dataclasses.dataclass
class Agent:
    gamma: float = 0.5
    target: Tensor = dataclasses.field(default_factory=lambda: draw(3, seed=5))

    def loss(self, w, x):
        return self.gamma * ((w - self.target) @ x) ** 2

    def __call__(self, w, x):
        return self.loss(w, x)


python("methods, dataclasses")(Agent().loss)
python("callable objects")(Agent())


@python("`lambda`, generators, recursion, `getattr`, f-strings")
def _(w, x):
    def power(y, n):
        return y if n == 0 else power(y, n - 1) * y

    sine = getattr(torch, f"{'s'}in")
    return sum(sine(part) for part in (power(a, 2) for a in w * x))


@python("a class defined inside", captured=CAPTURE)
def _(w, x):
    class Scale:
        by = 3.0

    return Scale.by * (w @ x) ** 2


@python("`@functools.cache` on a helper")
def _(w, x):
    return scale_of(3) * (w @ x) ** 2


@functools.cache
def scale_of(n):
    return 1.0 / n


@python("`per_sample_grads` inside, under `no_grad`", captured=CAPTURE)
def _(w, x):
    with torch.no_grad():
        inner = per_sample_grads(lambda v, y: (v * y) ** 2, x.sum().detach(), torch.ones(2, dtype=F64))
    return (w @ x) * inner.sum()


@python("a loss that was wrapped by `torch.compile`")
def _(w, x):
    return COMPILED(w, x)


COMPILED = torch.compile(lambda w, x: (w @ x) ** 2, backend="eager")


# ---------------------------------------------------------------- data

data = functools.partial(construct, "Parameters and batch")


class Transition(NamedTuple):
    s: Tensor
    r: Tensor


@data(
    "dict, nested containers",
    params=lambda: {"w": vector(), "b": [draw(1, seed=3)[0]]},
    batch=lambda: {"x": {"y": rows()}},
)
def _(params, sample):
    return (params["w"] @ sample["x"]["y"] + params["b"][0]) ** 2


@data("NamedTuple", batch=lambda: Transition(rows(), draw(B, seed=3)))
def _(w, sample):
    return (w @ sample.s - sample.r) ** 2


@data("None, strings and numbers in the batch", batch=lambda: (rows(), None, "square", 0.5))
def _(w, x, mask, name, scale):
    return scale * (w @ x) ** 2 if mask is None and name == "square" else w @ x


@data("complex numbers", params=lambda: torch.complex(draw(3, seed=1), draw(3, seed=3)))
def _(w, x):
    return (w * x * (1 + 2j)).abs().square().sum()


@data("bfloat16 inside", batch=lambda: torch.arange(B * 3, dtype=F64).reshape(B, 3))
def _(w, x):
    return (w.bfloat16() @ x.bfloat16()).double()


@data("`torch.autocast` inside", batch=lambda: torch.arange(B * 3, dtype=F64).reshape(B, 3))
def _(w, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (w.float()[None] @ x.float()[:, None]).sum().double()


@data("sparse tensors, closed over", eager=NO_RULE, captured=NO_RULE)
def _(w, x):
    return (SPARSE @ (w * x)[:, None]).square().sum()


SPARSE = torch.eye(3, dtype=F64).to_sparse()


@data("`to_sparse()` of the sample", eager=NO_RULE, captured=NO_RULE)
def _(w, x):
    return (x[None].to_sparse() @ w[:, None]).square().sum()


@data(
    "a list of episodes of different lengths",
    batch=lambda: [draw(2, 3), draw(4, 3)],
    eager=RAGGED,
    captured=RAGGED,
    loop=RAGGED,
)
def _(w, x, _):
    return (w * x).sum()


@data(
    "the same, padded, with a mask", batch=lambda: (draw(B, 4, 3), torch.arange(4) < torch.tensor([[2], [4], [1], [3]]))
)
def _(w, x, mask):
    return torch.where(mask, (x @ w).tanh(), 0).sum()


@data("nested tensors", eager=NO_RULE, captured=NO_RULE)
def _(w, x):
    return torch.nested.as_nested_tensor([w * x, w[:2]]).to_padded_tensor(0.0).square().sum()


@data("float16 inside", batch=lambda: torch.arange(B * 3, dtype=F64).reshape(B, 3) / 4)
def _(w, x):
    return (w.half() * x.half()).double().sum()


@data("float32 and float64 in one product of elements", batch=lambda: draw(B, 3, seed=2).float())
def _(w, x):
    return (w * x).square().sum()


@data("integers among the leaves", batch=lambda: (rows(), torch.arange(B)))
def _(w, x, n):
    return (w @ x) ** 2 * n


@data(
    "channels-last and other strides",
    params=lambda: draw(2, 4, 4, seed=1),
    batch=lambda: (images().to(memory_format=torch.channels_last), draw(4, B, seed=3).T),
)
def _(w, x, y):
    return (w * x.sin()).sum() * y[::2].sum()


@data("0-dim and empty parameters", params=lambda: {"scale": draw(1, seed=3)[0], "none": draw(0, 3), "w": vector()})
def _(params, x):
    return params["scale"] * (params["w"] @ x) + params["none"].sum()


@data("100,000 steps of time", params=lambda: draw(2, seed=1), batch=lambda: draw(B, 100_000, 2, seed=2))
def _(w, x):
    return (x @ w).tanh().cumsum(0).mean()


@data("NaN and ∞ in some samples", batch=lambda: rows() * torch.tensor([[1.0], [float("nan")], [1.0], [float("inf")]]))
def _(w, x):
    return (w @ x).tanh() + (w * x).sum() ** 2


# ---------------------------------------------------------------- the cells


def at(batch, i, keep_batch_dim=False):
    """Return the arguments that the loss gets for one sample."""
    batch = pytree.tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, batch)
    index = slice(i, i + 1) if keep_batch_dim else i
    sample = pytree.tree_map(lambda x: x[index] if isinstance(x, Tensor) else x, batch)
    return sample if type(sample) is tuple else (sample,)


def expected(row, aux):
    def loss(params, i):
        i = int(i)
        if row.replay:
            return row.replay(params, *at(row.batch(), i), aux[i])
        return row.loss(params, *at(row.batch(), i, row.options.get("keep_batch_dim")))

    found = oracle(loss, row.params(), (torch.arange(B),))
    return found.tree(found.grads)


def finite(tree):
    """Return the finite numbers of a tree, and which ones they are."""
    return pytree.tree_map(lambda x: (torch.where(x.isfinite(), x, 0), x.isfinite().double()), tree)


def computed(row, engine, params):
    reduce = (Stack(), Aux()) if row.replay else Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FallbackWarning)
        return per_sample_grads(row.loss, params, row.batch(), reduce, engine=engine, **row.options)


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def cells():
    """Every row with every engine, compiled where it refuses; those that take seconds to trace are slow.

    What is compiled was traced: Inductor, which takes seconds, refuses nothing.
    """
    for row in CONSTRUCTS:
        for engine in [engine for engine in ENGINES if engine != "compiled" or engine in row.refusals]:
            slow = row.group == "Hugging Face" and engine in {"traced", "compiled"}
            yield pytest.param(row, engine, marks=[pytest.mark.slow] if slow else [], id=f"{row.name}-{engine}")


@pytest.mark.parametrize(("row", "engine"), [*cells()])
def test_cell(row, engine):
    params = row.params()
    refusal = row.refusals.get(engine)
    if refusal is not None and refusal.is_expected:
        with pytest.raises(refusal.error, match=refusal.message):
            computed(row, engine, params)
        return
    for _ in range(2 if engine in {"traced", "compiled"} else 1):  # the second call runs the program of the first
        torch.manual_seed(0)
        result = computed(row, engine, params)
        grads, aux = result if row.replay else (result, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_trees_close(finite(grads), finite(expected(row, aux)), 1e-9)


LOOPED = [row for row in CONSTRUCTS if "eager" in row.refusals and "loop" not in row.refusals]
LOOPED = [row for row in LOOPED if row.refusals["eager"].is_expected]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about operations that it loops over
@pytest.mark.parametrize("row", LOOPED, ids=lambda row: row.name)
def test_auto_takes_what_the_loop_takes(row):
    reduce = (Stack(), Aux()) if row.replay else Stack()
    with pytest.warns(FallbackWarning, match="engine='auto' computed .* one after another"):
        result = per_sample_grads(row.loss, row.params(), row.batch(), reduce, engine="auto", **row.options)
    grads, aux = result if row.replay else (result, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_trees_close(finite(grads), finite(expected(row, aux)), 1e-9)


def test_no_random_numbers_unless_asked_for():
    row = next(row for row in CONSTRUCTS if row.replay)
    for engine in ENGINES:
        with pytest.raises(LossError, match="randomness"):
            per_sample_grads(row.loss, row.params(), row.batch(), (Stack(), Aux()), engine=engine)


def test_side_effects_happen_once_for_each_call_of_a_program():
    row = next(row for row in CONSTRUCTS if "a counter outside" in row.name)
    before = COUNTS["calls"]
    for call in range(1, 5):
        computed(row, "traced", row.params())
        assert COUNTS["calls"] == before + call


# ---------------------------------------------------------------- the page

# Threads on GitHub in which users ask for a construct, under vmap or in per-sample gradients.
ASKED = {
    "`if x.sum() > 0:` (a value of the sample)": "pytorch/functorch#90",
    "`if x.isnan().any():`, false for all samples": "pytorch/pytorch#186301",
    "`torch.cond`": "pytorch/pytorch#114136",
    "`x[0].item()` of the sample, used as a factor": "pytorch/functorch#1108",
    "`q[a]`, with `a` in the batch": "pytorch/functorch#747",
    "`q[t, a[t]]` in a loop": "pytorch/pytorch#135018",
    "`q[x > 0]` (a boolean mask)": "pytorch/functorch#59",
    "`x[:a]` (a slice of a length in the batch)": "pytorch/functorch#1130",
    "into `torch.zeros(…)`": "pytorch/pytorch#103329",
    "`F.dropout`": "pytorch/pytorch#96655",
    "`checkpoint(…, use_reentrant=False)`": "pytorch/pytorch#165880",
    "`autograd.Function` whose `forward` takes `ctx`": "state-spaces/mamba#239",
    "`autograd.Function` with `setup_context`": "pytorch/pytorch#129845",
    "`nn.GRU`, `nn.RNN`": "pytorch/pytorch#134606",
    "`nn.LSTM`": "pytorch/pytorch#105311",
    "`nn.MultiheadAttention`": "pytorch/pytorch#151558",
    "`nn.TransformerEncoderLayer`, in train and in eval mode": "pytorch/pytorch#149609",
    "batch norm in eval mode": "pytorch/functorch#867",
    "batch norm in train mode": "pytorch/functorch#115",
    "`torch.linalg.slogdet`, `solve`, `inv`, `cholesky`": "pytorch/functorch#984",
    "`torch.linalg.eigh`, `svdvals`, `matrix_exp`, `pinv`": "pytorch/pytorch#108481",
    "a Sinkhorn loop": "pytorch/functorch#257",
    "a product with a Hessian, `jvp` of `grad`": "pytorch/functorch#986",
    "`log_prob`, `entropy`, `kl_divergence` of distributions, with validation": "pytorch/pytorch#92033",
    "`nn.EmbeddingBag`": "pytorch/pytorch#86819",
    "an operator of your own (`torch.library.custom_op`, `register_autograd`)": "pytorch/pytorch#168393",
    "GPT-2 from a configuration": "TRAIS-Lab/dattri#214",
    "nested tensors": "pytorch/functorch#943",
}


def named(row):
    """Return the first cell of a row: the construct, and where it was asked for."""
    if row.name not in ASKED:
        return row.name
    repository, _, number = ASKED[row.name].partition("#")
    return f"{row.name} ([asked](https://github.com/{repository}/issues/{number}))"


def table():
    """Return the table as Markdown."""
    lines = []
    for group in dict.fromkeys(row.group for row in CONSTRUCTS):
        lines += [f"| **{group}** | {' | '.join(ENGINES)} |", "| --- " * (len(ENGINES) + 1) + "|"]
        for row in (row for row in CONSTRUCTS if row.group == group):
            cells = [f"*{row.refusals[engine].name}*" if engine in row.refusals else "yes" for engine in ENGINES]
            lines.append(f"| {named(row)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def test_what_was_asked_for_is_in_the_table():
    assert not {*ASKED} - {row.name for row in CONSTRUCTS}


def test_the_page_shows_this_table():
    PART.assert_is(table())


if __name__ == "__main__":
    PART.write(table())
    sys.stdout.write(f"{len(CONSTRUCTS)} constructs\n")
