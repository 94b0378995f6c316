"""Blocks that run again in their own backward pass, as the adjoint of an ODE and hand-written checkpoints do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from persample import (
    ClippedSum,
    Loss,
    LossError,
    Norm,
    Stack,
    Sum,
    accumulate,
    composite_grads,
    fisher_vector_product,
    naive,
    per_sample_grads,
    stop_gradient,
)

F64 = torch.float64
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
OUTSIDE = "differentiates a parameter itself"
loops = pytest.mark.filterwarnings("ignore:engine='auto' computed")


class Again(torch.autograd.Function):
    """Keeps the inputs of a block alone, and runs it again for their gradients."""

    @staticmethod
    def forward(ctx, run, x, *params):
        ctx.run = run
        ctx.save_for_backward(x, *params)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.run(x), (x, *params), grad, allow_unused=True)


class Reversible(Again):
    """Leaves the gradients of the parameters in ``.grad``, as reversible layers do."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(x), grad)
            return None, x.grad


class ByHand(Again):
    """Differentiates with respect to parameters that it reads from its module."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, torch.autograd.grad(ctx.run(x), (x, *ctx.run.parameters()), grad)[0]


class Method(Again):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.run(x).backward(grad)
            return None, x.grad


def again(block, x):
    return Again.apply(block, x, *block.parameters())


class Net(nn.Module):
    def __init__(self, apply=again):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)
        self.apply_block = apply

    def forward(self, x):
        return self.last(self.apply_block(self.block, self.first(x)))


def nested(block, x):
    return Again.apply(lambda y: again(block, y).sin(), x, *block.parameters())


def inside(outer, inner):
    return lambda block, x: outer(lambda y: inner(block, y).sin(), x)


def saved(run, x):
    return checkpoint(run, x, use_reentrant=False)


INSIDE = {
    "reversible": inside(Again.apply, Reversible.apply),
    "method": inside(Reversible.apply, Method.apply),
    "by hand": inside(Method.apply, ByHand.apply),
    "thrice": inside(Again.apply, inside(Reversible.apply, Reversible.apply)),
    "block": inside(Again.apply, inside(Reversible.apply, again)),
    "checkpoint": inside(saved, again),
    "checkpoint, by hand": inside(saved, ByHand.apply),
}


def with_and_without(block, x):
    return again(block, x) + block(x)


def detached(block, x):
    return Again.apply(lambda y: y * stop_gradient(block[0].weight).sum(), x, *block.parameters())


def without_grad(block, x):
    def run(y):
        with torch.no_grad():
            return y * block[0].weight.sum() + block[0].bias.detach()

    return Again.apply(lambda y: y * run(torch.ones_like(y)), x, *block.parameters())


APPLY = {
    "once": again,
    "nested": nested,
    "with and without": with_and_without,
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "detached": detached,
    "without grad": without_grad,
    "not at all": lambda block, x: Again.apply(torch.sin, x, *block.parameters()),
}
blocks = pytest.mark.parametrize("apply", APPLY.values(), ids=APPLY)


def net(apply=again, parametrize=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Net(apply).double()
        if parametrize:
            parametrizations.weight_norm(made.block[0])
    return made


def loss(model, x):
    return model(x).square().sum()


def backward(model, x=X):
    """The oracle: ``.backward()`` for one sample after the other, on the module itself."""
    rows = []
    for sample in x:
        model.zero_grad()
        loss(model, sample).backward()
        rows.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    model.zero_grad()
    return dict(zip(dict(model.named_parameters()), map(torch.stack, zip(*rows, strict=True)), strict=True))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def summed(rows):
    return {name: x.sum(0) for name, x in rows.items()}


@blocks
@loops
@pytest.mark.parametrize("engine", ["loop", "auto"])
@pytest.mark.parametrize("parametrize", [False, True], ids=["plain", "parametrized"])
def test_gradients_are_those_of_backward(apply, engine, parametrize):
    model = net(apply, parametrize)
    close(per_sample_grads(loss, model, X, engine=engine), backward(model))


@blocks
def test_every_way_of_the_loop(apply):
    model = net(apply)
    rows = backward(model)
    close(per_sample_grads(loss, model, X, ClippedSum(1e9), engine="loop", chunk_size=3), summed(rows))
    close(accumulate(loss, model, [X[:1], X[1:]], Sum(), engine="loop"), summed(rows))
    outputs = per_sample_grads(lambda m, x: m(x) ** 2, model, X, engine="loop", outputs="rows")
    close({name: x.sum(1) for name, x in outputs.items()}, rows)
    differentiable = per_sample_grads(loss, model, X, engine="loop", differentiable=True)
    close({name: x.detach() for name, x in differentiable.items()}, rows)
    product = fisher_vector_product(
        loss, model, X, {n: torch.ones_like(p) for n, p in model.named_parameters()}, engine="loop"
    )
    inner = sum(x.flatten(1).sum(1) for x in rows.values())
    close(product, {name: (inner.view(-1, *[1] * (x.ndim - 1)) * x).mean(0) for name, x in rows.items()})


@blocks
@pytest.mark.parametrize(
    "options", [{"chunk_size": 2, "batched": True}, {"chunk_size": None, "batched": True}, {"engine": "loop"}], ids=str
)
def test_composite_gradients(apply, options):
    model = net(apply)
    expected = summed(backward(model))
    close(composite_grads(lambda m, x: m(x), lambda z: z.square().sum(), model, X, **options)[1], expected)


def test_the_parameters_of_the_loss_of_composite_gradients():
    model = net()
    _, (_, found) = composite_grads(lambda w, x: w * x, loss, torch.ones(3, dtype=F64), X, loss_params=model)
    close(found, summed(backward(model)))


def test_several_modules():
    first, second = net(), net(nested)
    found = per_sample_grads(
        lambda m, x: loss(m["a"], x) + 2 * loss(m["b"], x), {"a": first, "b": second}, X, engine="loop"
    )
    close(found, {"a": backward(first), "b": {name: 2 * x for name, x in backward(second).items()}})


@pytest.mark.parametrize("apply", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("engine", ["loop", "auto"])
@loops
def test_blocks_inside_of_blocks(apply, engine):
    model = net(apply)
    close(per_sample_grads(loss, model, X, engine=engine), backward(model))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"batched": True}, {"batched": True, "chunk_size": None}], ids=str)
def test_gradients_that_a_block_leaves_in_its_parameters(options):
    model = net(Reversible.apply)
    rows = backward(model)
    if options:
        found = composite_grads(lambda m, x: m(x), lambda z: z.square().sum(), model, X, **options)[1]
        close(found, summed(rows))
    else:
        close(per_sample_grads(loss, model, X, engine="loop"), rows)
    assert all(p.grad is None for p in model.parameters())


COPIES = {"the module's": lambda p: p, "detached": torch.Tensor.detach, "cloned": lambda p: p.detach().clone()}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    "apply",
    [again, nested, Reversible.apply, ByHand.apply, *INSIDE.values()],
    ids=["once", "nested", "reversible", "by hand", *(f"inside: {name}" for name in INSIDE)],
)
def test_parameters_that_functional_call_has_put_back_are_refused(apply, copied):
    model = net(apply)
    params = {name: copied(p) for name, p in model.named_parameters()}

    def called(params, x):
        return functional_call(model, params, (x,)).square().sum()

    with pytest.raises(LossError, match=OUTSIDE):
        per_sample_grads(called, params, X, engine="loop")
    with pytest.raises(LossError, match=OUTSIDE):
        list(naive.loop(called, params, (X,)))
    assert all(p.grad is None for p in model.parameters())


def test_a_plain_dict_that_the_block_is_given():
    model = net()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def called(p, x):
        w, b = p["block.0.weight"], p["block.0.bias"]
        h = x @ p["first.weight"].T + p["first.bias"]
        h = Again.apply(lambda y: torch.tanh(y @ w.T + b), h, w, b)
        return (h @ p["last.weight"].T + p["last.bias"]).square().sum()

    close(per_sample_grads(called, params, X, engine="loop"), backward(model))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    "apply",
    [detached, without_grad, APPLY["not at all"], APPLY["checkpoint"]],
    ids=["detached", "without grad", "not at all", "checkpoint"],
)
def test_what_loses_no_gradient_is_accepted_under_functional_call(apply, copied):
    model = net(apply)
    params = {name: copied(p) for name, p in model.named_parameters()}
    close(
        per_sample_grads(lambda p, x: functional_call(model, p, (x,)).square().sum(), params, X, engine="loop"),
        backward(model),
    )


def test_another_network_in_the_block_is_no_parameter():
    other = nn.Linear(3, 3, dtype=F64)
    model = net(lambda block, x: Again.apply(lambda y: block(other(y)), x, *block.parameters()))
    close(per_sample_grads(loss, model, X, engine="loop"), backward(model))


@pytest.mark.parametrize("of", ["gradients", "loss"])
def test_a_second_backward_pass_is_refused(of):
    model = net()
    found = per_sample_grads(
        loss, model, X, {"gradients": Stack(), "loss": Loss()}, engine="loop", differentiable=True
    )[of]
    total = found.sum() if of == "loss" else found["last.weight"].square().sum()
    with pytest.raises(LossError, match="cannot be differentiated twice"):
        total.backward()


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_reentrant_checkpoints_are_refused_by_torch(engine):
    model = net(lambda block, x: checkpoint(block, x, use_reentrant=True))
    with pytest.raises(RuntimeError, match=r"use_reentrant=True, torch.utils.checkpoint is incompatible"):
        per_sample_grads(loss, model, X, engine=engine)


class Checkpointing(nn.Module):
    """Checkpoints by the attribute that modules of transformers have."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.gradient_checkpointing = nn.Linear(3, 8), nn.Linear(8, 1), True

    def forward(self, x):
        h = F.dropout(self.a(x), 0.5)
        block = lambda h: self.b(h.tanh())
        return checkpoint(block, h, use_reentrant=False) if self.gradient_checkpointing else block(h)


def test_a_call_with_checkpoints_draws_the_numbers_of_the_loop():
    model, x, found = Checkpointing().double(), torch.randn(4, 3, dtype=torch.float64), {}
    for engine in ("loop", "eager"):
        torch.manual_seed(1)
        found[engine] = per_sample_grads(
            lambda m, x: m(x).sum() ** 2, model, x, Norm(), engine=engine, randomness="same"
        )
    torch.testing.assert_close(found["eager"], found["loop"])
    assert model.gradient_checkpointing
