"""Deferred products are what they stand for, in every program: views, sums, writes in place, lost batch axes."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import assert_trees_close, oracle
from test_grid import REDUCTIONS
from torch.func import vjp, vmap
from torch.nn import functional as F

import persample as ps
from persample import per_sample_grads
from persample.engines.deferred import Deferral, Placeholder, factor_of
from persample.factors import Conv, Dense, Embedding, Outer
from persample.factors.cost_model import Plan

B = 5
PLAN = Plan(frozenset())
aten = torch.ops.aten


def placeholder(*, rows=7, columns=9, steps=1):
    """A deferred product, and the tensor it stands for."""
    left, right = torch.randn(B, rows, steps), torch.randn(B, steps, columns)
    with Deferral(PLAN, ()):
        product = torch.bmm(left, right)
    assert type(product) is Placeholder
    return product, torch.bmm(left, right)


# One cell under all views


def test_a_view_is_filled_with_what_it_views():
    product, value = placeholder()
    view = product.transpose(1, 2)[:, 2:5]
    assert type(view) is Placeholder
    torch.testing.assert_close(view.sin(), value.transpose(1, 2)[:, 2:5].sin())
    assert product.buffer is view.buffer
    assert product.buffer.value is not None  # computed once, for all views
    torch.testing.assert_close(product.cos(), value.cos())


@pytest.mark.parametrize("write", ["mul_", "relu_", "zero_", "copy_", "add_"])
@pytest.mark.parametrize("through", ["view", "base"])
def test_a_write_in_place_is_seen_by_every_alias(through, write):
    product, value = placeholder()
    args = {"mul_": (2.5,), "copy_": (torch.ones(()),), "add_": (torch.ones(()),)}.get(write, ())
    view, expected = product[:, 1:4], value[:, 1:4]
    target, reference = (view, expected) if through == "view" else (product, value)
    getattr(target, write)(*args)
    getattr(reference, write)(*args)
    torch.testing.assert_close(product + 0 * torch.ones(()), value)
    torch.testing.assert_close(view + 0 * torch.ones(()), expected)


def test_accumulating_in_place_stays_deferred_and_is_seen_by_every_alias():
    product, value = placeholder()
    more, its_value = placeholder()
    view = product.transpose(1, 2)
    product.add_(more, alpha=2)
    assert product.buffer.value is None
    assert isinstance(factor_of(view, PLAN), Outer)
    torch.testing.assert_close(factor_of(view, PLAN).materialize(), (value + 2 * its_value).transpose(1, 2))
    product.sub_(more)
    torch.testing.assert_close(product * torch.ones(B, 7, 9), value + its_value)


def test_writing_into_what_a_product_is_computed_from_computes_it_first():
    left, right = torch.randn(B, 7, 1), torch.randn(B, 1, 9)
    with Deferral(PLAN, ()):
        product = torch.bmm(left, right)
        row = product.transpose(1, 2)[:, :3]
        value = torch.bmm(left.clone(), right.clone()).cos()
        left.mul_(3)
        right[0].zero_()
    torch.testing.assert_close(product.cos(), value)
    torch.testing.assert_close(row.cos(), value.transpose(1, 2)[:, :3])


def test_writing_into_a_computed_value_computes_the_sums_it_is_part_of_first():
    left, right, real = torch.randn(B, 7, 1), torch.randn(B, 1, 9), torch.randn(B, 7, 9)
    value = real.clone()
    with Deferral(PLAN, ()):
        product = torch.bmm(left, right)
        total, again = product + real, product.cos().neg_()  # the second has computed the product
        doubled = product + product
        real.zero_()
        product.zero_()
    torch.testing.assert_close(total.cos(), (left @ right + value).cos())
    torch.testing.assert_close(doubled.cos(), (2 * left @ right).cos())
    torch.testing.assert_close(again, -(left @ right).cos())


# The batch axis is tracked, never guessed


def test_an_unbatched_product_of_the_size_of_the_batch_is_not_taken_for_a_batched_one():
    table, mix = torch.randn(B, 6, 2).double(), torch.randn(B, 2, 6).double()

    def loss(w, x):
        per_head = torch.bmm(table, w)  # unbatched: the gradient's first axis is heads, and there are B of them
        return (x * (per_head**2).sum((1, 2))).sum() + (torch.bmm(mix, table).sum() * x).sum() * w.sum()

    check(loss, torch.randn(B, 2, 8).double(), (torch.randn(B, B).double(),))


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
def test_square_gradients_in_which_the_batch_axis_could_be_either(dims):
    def loss(w, x):
        return torch.tanh(w.permute(dims) @ x).square().sum()

    check(loss, torch.randn(B, B).double(), (torch.randn(B, B).double(),))


def test_a_merged_batch_axis_is_dense():
    product, value = placeholder()
    assert isinstance(factor_of(product.reshape(B * 7, 9).reshape(B, 7, 9), PLAN), Outer)  # taken apart again
    merged = product.reshape(7, B, 9)  # B is another axis now
    factor = factor_of(merged, PLAN)
    torch.testing.assert_close(factor.materialize(), value.reshape(7, B, 9))
    assert isinstance(factor_of(product.flip(0), PLAN), Dense)


def check(loss, params, batch, **options):
    """Compare reductions that are contracted with the loop, and return the factors."""
    rows = oracle(loss, params, batch)
    names = ["Sum", "Mean", "Norm-per_param", "ClippedMean", "Gram", "CosineSimilarity", "Dot-stacked", "Variance"]
    names += ["SecondMoment", "Project"]
    wanted = {name: REDUCTIONS[name][0](rows, torch.float64) for name in names}
    got = per_sample_grads(loss, params, batch, wanted, **options)
    for name in names:
        assert_trees_close(got[name], REDUCTIONS[name][1](rows), 1e-8)
    return per_sample_grads(loss, params, batch, ps.Factored(), **options)


@pytest.mark.parametrize("view", [(1, B), (B, 1)], ids=["across", "along"])
def test_tables_are_known_by_where_their_numbering_comes_from(view):
    """With as many tokens as samples, arange(B)·V is the samples' numbering only if it counts the first axis."""
    signals, tokens = torch.randn(B, B, 9), torch.randint(7, (B, B))
    with Deferral(PLAN, ()):
        index = tokens + aten.view(aten.arange.start_step(0, B * 7, 7), view)
        table = aten.embedding_dense_backward(signals, index, B * 7, -1, False)
    assert (type(table) is Placeholder) == (view == (B, 1))
    torch.testing.assert_close(
        table + 0 * torch.ones(()), aten.embedding_dense_backward(signals, index, B * 7, -1, False)
    )


# Random programs


def random_weight(rng, w, n):
    """Change a square weight in random ways, some of which can be deferred and some of which cannot."""
    half = n // 2
    changes = [
        lambda w: w.T,
        lambda w: -w,
        lambda w: 0.5 * w,
        lambda w: w / 3,
        lambda w: w.flip(0),
        lambda w: w.tanh(),
        lambda w: w.reshape(n * n).view(n, n),
        lambda w: torch.cat([w[half:], w[:half]]),
        lambda w: torch.cat([w[:, half:], w[:, :half]], 1),
        lambda w: torch.stack(w.unbind(1)),
        lambda w: torch.stack([w[i] for i in reversed(range(n))], 1),
        lambda w: w[:, ::2].repeat_interleave(2, 1)[:, :n],
        lambda w: F.pad(w[1:, 1:], (1, 0, 0, 1)),
        lambda w: w.view(n, n, 1).permute(2, 1, 0)[0],
        lambda w: w + w.T,
        lambda w: w @ torch.linspace(-1, 1, n * n, dtype=w.dtype).view(n, n),
        lambda w: torch.linspace(-1, 1, n * n, dtype=w.dtype).view(n, n) @ w,
        lambda w: w @ w,
        lambda w: w * torch.linspace(0, 2, n, dtype=w.dtype),
        lambda w: w * torch.linspace(0, 2, n, dtype=w.dtype)[:, None],
        lambda w: w * w.detach(),
        lambda w: w.clone().mul_(2),
        lambda w: w.clone().index_add(0, torch.tensor([0, 0]), w[:2]),
        lambda w: w.expand(3, n, n).sum(0),
        lambda w: w.masked_fill(torch.eye(n, dtype=torch.bool), 0),
        lambda w: w.roll(1, 0),
    ]
    for _ in range(rng.randrange(4)):
        w = rng.choice(changes)(w)
    return w


def multiplied(spelling, w, x):
    n = len(w)
    return [
        lambda: w @ x[0],
        lambda: x @ w,
        lambda: F.linear(x[:2], w),
        lambda: torch.einsum("ti,oi->to", x, w),
        lambda: torch.bmm(x.view(1, -1, n).expand(n, -1, n)[:, :2], w.expand(n, n, n)),
        lambda: F.embedding((x[0].detach().argsort() % n), w) * x[1],
    ][spelling]()


def random_loss(rng, n):
    """Return a loss that uses two weights up to five times, on vectors, matrices and stacks of them."""
    seeds = [rng.randrange(10**6) for _ in range(rng.randrange(2, 6))]
    names = [rng.choice("ab") for _ in seeds]
    spellings = [rng.randrange(6) for _ in seeds]

    def loss(params, x):
        total = x.sum() * 0
        for seed, name, spelling in zip(seeds, names, spellings, strict=True):
            y = multiplied(spelling, random_weight(random.Random(seed), params[name], n), x)
            x = torch.cat([x[1:], torch.tanh(y.reshape(-1, n)[:1])])
            total = total + torch.sin(y).sum()
        return total

    return loss


@pytest.mark.parametrize("seed", range(64))
def test_random_programs(seed):
    rng = random.Random(seed)
    n = rng.choice([B, 4, 6])
    torch.manual_seed(seed)
    params = {"a": torch.randn(n, n).double() / 2, "b": torch.randn(n, n).double() / 2}
    check(random_loss(rng, n), params, (torch.randn(B, 3, n).double(),), chunk_size=rng.choice([None, 2, 1]))


# What comes back deferred is asserted spelling by spelling in test_spellings; here, that nothing else is


def test_products_with_parameters_carry_signals_and_are_not_deferred():
    seen = []

    class LayerGuard(Deferral):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            seen.extend([func] * (type(out) is Placeholder and Placeholder not in types))
            return out

    w = torch.randn(40, 30)

    def one(w, x):
        value, back = vjp(lambda w, x: torch.tanh(F.linear(x, w)).sum(), w, x)
        with LayerGuard(PLAN, (w,)):
            return back(torch.ones_like(value))

    vmap(one, in_dims=(None, 0))(w, torch.randn(B, 30))
    assert seen == [aten.bmm.default]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_products_are_contracted_in_float32(dtype):
    w, x = torch.randn(40, 30, dtype=dtype), torch.randn(B, 30, dtype=dtype)

    def loss(w, x):
        return (w @ x).sin().sum()

    got = per_sample_grads(loss, w, (x,), {"norm": ps.Norm(), "sum": ps.Sum(), "factor": ps.Factored()})
    assert isinstance(got["factor"], Outer)
    signals = (w @ x.T).cos().float().T
    torch.testing.assert_close(got["norm"], signals.norm(dim=1) * x.float().norm(dim=1), rtol=1e-2, atol=0)
    torch.testing.assert_close(got["sum"], (signals.T @ x.float()).to(dtype), rtol=2e-2, atol=5e-2)


def test_kinds():
    def loss(params, tokens, image):
        x = F.embedding(tokens, params["table"])
        return (F.conv2d(image, params["kernel"])[0].sum() * torch.tanh(x @ params["w"])).sum()

    params = {"table": torch.randn(50, 8), "kernel": torch.randn(9, 3, 3, 3), "w": torch.randn(8, 30)}
    batch = (torch.randint(50, (B, 2)), torch.randn(B, 1, 3, 5, 5))
    factors = per_sample_grads(loss, params, batch, ps.Factored())
    assert {name: type(f) for name, f in factors.items()} == {"table": Embedding, "kernel": Conv, "w": Outer}


def test_inside_a_vmap_of_the_callers_gradients_are_dense():
    def norms(w):
        return per_sample_grads(lambda w, x: (w @ x).sin().sum(), w, (X,), ps.Norm())

    X = torch.randn(B, 30)
    stacked = torch.randn(3, 40, 30)
    torch.testing.assert_close(torch.vmap(norms)(stacked), torch.stack([norms(w) for w in stacked]))
