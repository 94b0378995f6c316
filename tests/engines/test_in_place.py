"""Losses that write into tensors they made themselves, through views of all kinds: as in the plain loop."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close, oracle, reals

import persample as ps
from persample import per_sample_grads

F64 = torch.float64
WANTED = (ps.Stack(), ps.Norm(), ps.Mean())


def every_other_scaled(p, x):
    y = p["w"] * x
    y[::2] *= 2
    return y.sin().sum()


def neighbours_added(p, x):
    z = torch.zeros_like(x) * p["w"]
    z[1:] = p["w"][1:] * x[1:]
    z[:-1] += x[:-1]
    return z.sin().sum()


def neighbours_multiplied(p, x):
    z = torch.zeros_like(x) * p["w"]
    z[1:] = p["w"][1:] * x[1:]
    z[:-1] *= p["w"][:-1].sin()
    return z.sin().sum()


def view_of_a_view(p, x):
    y = p["w"] * x
    view = y[1:][::2]
    view.mul_(p["w"][:3])
    view[1:].add_(1)
    return (y * y).sin().sum()


def transposed(p, x):
    y = torch.outer(p["w"], x)
    y.T[::2].mul_(p["w"])
    y.t()[1] += x
    return y.sin().sum()


def diagonal(p, x):
    y = torch.outer(p["w"], x)
    y.diagonal()[::2].mul_(3 * p["w"][::2])
    y.fill_diagonal_(0.5)
    return y.sin().sum()


def reshaped(p, x):
    y = p["w"] * x
    y.view(2, 3)[:, ::2] += p["w"].view(2, 3)[:, 1:]
    y.view(3, 2)[1].exp_()
    return y.sin().sum()


def returns(p, x):
    g_t = p["w"] * x
    for t in reversed(range(5)):
        g_t[t] += 0.9 * g_t[t + 1]
    return (g_t * p["w"]).sin().sum()


def recurrence(p, x):
    h = torch.zeros(4, 6, dtype=x.dtype) * x
    for t in range(4):
        h[t] = torch.tanh(p["v"] @ x + (h[t - 1].clone() if t else 0))
    return h.sin().sum()


def blocks(p, x):
    y = torch.outer(p["w"], p["v"] @ x)
    y[::2, 1::2] -= p["w"][:3]
    y[1::2][:, :3] *= 2
    return y.sin().sum()


def halves(p, x):
    y = p["v"] @ x
    a, b = y[:3], y[3:]
    a *= p["w"][3:]
    b += a
    return y.sin().sum()


def view_taken_before(p, x):
    y = p["w"] * x
    view = y[::2]
    y.mul_(p["w"])
    view.add_(1)
    y += 1
    return (view.sin() * y[1::2]).sum()


def unfolded(p, x):
    y = p["w"] * x
    y.unfold(0, 2, 2).mul_(p["w"][:2])
    y.as_strided((2, 2), (3, 1)).mul_(3)
    return y.sin().sum()


def masked(p, x):
    y = p["w"] * x
    y[::2] = torch.where(x[::2] > 0, y[::2], 0.5)
    y[1::2].neg_()
    y[::3].copy_(p["w"][:2])
    return y.sin().sum()


def at_indices(p, x):
    y = p["w"] * x
    y[::2].index_add_(0, torch.tensor([0, 2]), p["w"][:2])
    y[1:].scatter_add_(0, torch.tensor([0, 3]), p["w"][2:4])
    return y.sin().sum()


def of_complex_numbers(p, x):
    y = torch.complex(p["w"] * x, p["w"])
    y[::2] *= 1j
    y[1:] += y[:1].clone() * p["w"][1:]
    return y.abs().sum()


LOSSES = (
    *(every_other_scaled, neighbours_added, neighbours_multiplied, view_of_a_view, transposed, diagonal, reshaped),
    *(returns, recurrence, blocks, halves, view_taken_before, unfolded, masked, at_indices, of_complex_numbers),
)
SOON = {every_other_scaled, neighbours_added}


def draw(batch):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        params = {"w": torch.rand(6, dtype=F64) + 0.2, "v": torch.randn(6, 6, dtype=F64)}
        return params, torch.randn(batch, 6, dtype=F64)


def assert_is_loop(loss, batch, engine):
    params, x = draw(batch)
    rows = oracle(loss, params, (x,))
    expected = rows.grads, reals(rows).norm(dim=1), [grad.mean(0) for grad in rows.grads]
    stack, norms, mean = per_sample_grads(loss, params, x, WANTED, engine=engine)
    assert_trees_close((list(stack.values()), norms, list(mean.values())), expected, 1e-9)
    assert_trees_close(per_sample_grads(loss, params, x, ps.Norm(), engine=engine), expected[1], 1e-9)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_writes_equal_the_loop(loss, batch):
    assert_is_loop(loss, batch, "eager")


@pytest.mark.parametrize(
    "loss", [pytest.param(loss, marks=[] if loss in SOON else [pytest.mark.slow]) for loss in LOSSES]
)
def test_compiled_writes_equal_the_loop(loss):
    params, x = draw(4)
    rows = oracle(loss, params, (x,))
    expected = rows.grads, reals(rows).norm(dim=1), [grad.mean(0) for grad in rows.grads]
    stack, norms, mean = per_sample_grads(loss, params, x, WANTED, engine="compiled")
    assert_trees_close((list(stack.values()), norms, list(mean.values())), expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [every_other_scaled, returns, blocks, reshaped])
def test_compiled_writes_into_batches_of_any_size(loss):
    for batch in (4, 7, 1, 12):
        params, x = draw(batch)
        expected = reals(oracle(loss, params, (x,))).norm(dim=1)
        assert_trees_close(per_sample_grads(loss, params, x, ps.Norm(), engine="compiled"), expected, 1e-9)


@pytest.mark.parametrize("batch", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_writes_of_torchs_own_backward_pass_into_a_view_of_a_product(batch):
    def loss(p, x):
        return p["v"].norm(p=3, dim=1).logsumexp(0) * x.sum()

    assert_is_loop(loss, batch, "compiled")


# By the name of a method: its arguments beside the tensor ``[2, 3]`` that it writes into.
TWICE_BATCHED = {
    "addmm": lambda w, x: (w, x),
    "addmv": lambda w, x: (w, x[:, 0]),
    "addr": lambda w, x: (w[0], x[0]),
    "addbmm": lambda w, x: (w[None], x[None]),
    "baddbmm": lambda w, x: (w[None], x[None]),
    "addcmul": lambda w, x: (x, w.sum() * x),
    "addcdiv": lambda w, x: (w.sum() * x, x.exp()),
    "lerp": lambda w, x: (w.sum() * x, 0.3),
    "clamp": lambda w, x: (w.sum() * x - 0.5, x.exp()),
    "fmod": lambda w, x: (w.sum() * x,),
    "remainder": lambda w, x: (w.sum() * x,),
    "scatter": lambda w, x: (0, torch.zeros(2, 3, dtype=torch.long), w.sum() * x),
    "masked_scatter": lambda w, x: (x > 0, w.sum() * x),
    "xlogy": lambda w, x: (w.sum().square() * x.square() + 1,),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the loop, inside of torch.func.vmap
@pytest.mark.parametrize("name", TWICE_BATCHED)
def test_writes_under_a_vmap_of_the_loss(name):
    generator = torch.Generator().manual_seed(0)
    w, x, rows = (torch.randn(*size, generator=generator, dtype=F64) for size in ((2, 2), (4, 2, 3), (4, 5, 2, 3)))

    def loss(w, x, rows):
        def one(row):
            written = {"addmv": lambda: row.mT[0], "baddbmm": lambda: row[None]}.get(name, lambda: row)().clone()
            getattr(written, f"{name}_")(*TWICE_BATCHED[name](w, x))
            return written.sin().sum() * w.sum()

        return torch.func.vmap(one)(rows).sum()

    for reduction in WANTED:
        found, expected = (per_sample_grads(loss, w, (x, rows), reduction, engine=e) for e in ("eager", "loop"))
        assert_trees_close(found, expected, 1e-9)


def test_a_write_that_would_change_the_dtype_raises_torchs_error():
    with pytest.raises(RuntimeError, match="can't be cast"):
        per_sample_grads(
            lambda w, x: w * (x > 0).long().addcmul_(x, x).sum(), torch.ones((), dtype=F64), torch.ones(3, 2, dtype=F64)
        )
