"""What a loss makes for all samples becomes one tensor for each, where it writes into it what differs between them."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle import assert_trees_close, oracle
from torch import nn
from torch.utils.checkpoint import checkpoint

from persample import LossError, Norm, WeightedSum, per_sample_grads

KEPT = torch.ones(3, dtype=torch.float64)
MADE = {
    "zeros": lambda: torch.zeros(3, dtype=torch.float64),
    "empty": lambda: torch.empty(3, dtype=torch.float64).fill_(3.0),
    "full": lambda: torch.full((3,), 2.0, dtype=torch.float64),
    "tensor": lambda: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
    "zeros_like": lambda: torch.zeros_like(KEPT),
    "new_ones": lambda: KEPT.new_ones(3),
    "clone": KEPT.clone,
    "eye": lambda: torch.eye(3, dtype=torch.float64)[1],
}
X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_writes_are_those_of_the_loop(made, chunk_size):
    def loss(model, x):
        out = made()
        out[0] = model(x).sum()
        out[1:2].copy_(x[1:2])
        out.scatter_add_(0, x.argmax()[None], x[:1])
        return (out * model.bias[0]).square().sum()

    model = nn.Linear(3, 2).double()
    found = per_sample_grads(loss, model, X, chunk_size=chunk_size)
    assert_trees_close(list(found.values()), oracle(loss, model, (X,)).grads, 1e-9)
    assert torch.equal(KEPT, torch.ones(3, dtype=torch.float64))


def test_what_the_loss_closes_over_stays_refused():
    def loss(w, x):
        KEPT[0] = x[0]
        return (w * KEPT).sum()

    with pytest.raises(LossError, match="writes"):
        per_sample_grads(loss, KEPT.clone(), X)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers_of_the_second_attempt(randomness):
    """Drawn as if there had been no first one."""

    def loss(w, x):
        out = torch.zeros(3, dtype=torch.float64)
        noise = torch.randn(3, dtype=torch.float64)
        out[:] = x
        return ((w + noise) * out).square().sum()

    norms = []
    for _ in range(2):
        torch.manual_seed(0)
        norms.append(per_sample_grads(loss, KEPT, X, Norm(), randomness=randomness))
    torch.manual_seed(0)
    draws = torch.func.vmap(lambda x: torch.randn(3, dtype=torch.float64) + 0 * x, randomness=randomness)(X)
    torch.testing.assert_close(norms[0], (2 * (KEPT + draws) * X**2).norm(dim=1))
    assert torch.equal(*norms)


W = torch.arange(12.0, dtype=torch.float64).cos().view(4, 3)
PLACES = torch.tensor([0, 2, -1])
ENGINES = "eager", "traced"


def at_a_made_place(w, x, _i):
    place, z = torch.tensor(2), torch.zeros(4, 3, dtype=torch.float64)
    z[0] = x * w[0]
    z[place].copy_(x * w[1])
    return z.square().sum()


def into_out_of_a_maker(w, x, _i):
    z = torch.empty(3, dtype=torch.float64)
    torch.zeros(3, dtype=torch.float64, out=z)[0] = x[0]
    return (z * w[0]).sum()


def written_back(w, x, i):
    z = w * x
    z[i] *= 2
    row = z[i, 1:]
    row += 1
    z[i, 1:] = row
    return z.square().sum()


def of_another_dtype(w, x, i):
    z = w * x
    z[i] = torch.arange(3)
    return z.square().sum()


def into_a_mask_by_a_mask(w, x, i):
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[i] = True
    mask[w * x > 0] = True
    z = w * x
    z[~mask] = w.sum()
    z[z.sum(1) > 0] = 2
    return z.square().sum()


def into_masked_rows_of_another_length(w, x, _i):
    z = w * x
    z[x > 0] = 0  # the mask has 3 elements, z 4 rows
    return z.sum()


RIGHT = [
    (at_a_made_place, "eager"),
    *((f, engine) for f in (written_back, of_another_dtype, into_a_mask_by_a_mask) for engine in ENGINES),
]
REFUSED = [(at_a_made_place, "traced"), *((into_out_of_a_maker, engine) for engine in ENGINES)]


@pytest.mark.parametrize(("loss", "engine"), RIGHT)
def test_rows_get_what_is_written(loss, engine):
    batch = X[:3], PLACES
    found, expected = (per_sample_grads(loss, W, batch, engine=name) for name in (engine, "loop"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("loss", "engine"), REFUSED)
def test_writes_that_would_be_lost_are_refused(loss, engine):
    with pytest.raises(LossError, match=r"x\[i\]|cannot batch"):
        per_sample_grads(loss, W, (X[:3], PLACES), engine=engine)


def test_masks_that_do_not_fit():
    with pytest.raises((IndexError, LossError), match=r"match|reads values"):
        per_sample_grads(into_masked_rows_of_another_length, W, (X[:3], PLACES))


CHANGES = [lambda z, i: z[i].add_(1), lambda z, i: z[i, 1:].mul_(2), lambda z, i: z[i].zero_()]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", CHANGES)
def test_writes_into_copies_of_rows_are_refused(change, engine):
    """One sample alone would write into z: z[i] is a view there."""

    def loss(w, x, i):
        z = w * x
        change(z, i)
        return z.square().sum()

    with pytest.raises(LossError, match=r"in place into x\[i\]"):
        per_sample_grads(loss, W, (X[:3], PLACES), engine=engine)


PRODUCTS = {
    "@": torch.matmul,
    "mm": torch.mm,
    "matrix first": lambda w, x: torch.einsum("ij,jk->ik", w, x),
    "matrix last": lambda w, x: torch.einsum("jk,ij->ik", x, w),
    "linear": torch.nn.functional.linear,
}
VIEWS = {
    "reshape": lambda z: z.reshape(-1),
    "contiguous": torch.Tensor.contiguous,
    "transposed, flatten": lambda z: z.T.flatten(),
    "transposed, contiguous": lambda z: z.T.contiguous(),
}


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_reshaped_products_are_views_as_those_of_one_sample(product, view, written):
    def loss(w, x):
        pair = [z := product(w, x), view(z)]
        pair[written].mul_(2)
        return pair[1 - written].square().sum()

    x = torch.stack([X[:3].T, X[1:4].cos()])
    torch.testing.assert_close(*(per_sample_grads(loss, W[:2], x, engine=name) for name in ("eager", "loop")))


def test_tensors_that_the_loss_keeps_are_plain():
    @functools.cache
    def mask():
        return torch.ones(2, 2).tril()

    def loss(w, x):
        z = torch.zeros(2)
        z[0] = (w * x).sum()
        return (mask() @ z).square().sum()

    w, x = torch.ones(3), torch.ones(4, 3)
    found = per_sample_grads(loss, w, x)
    torch.testing.assert_close(found, per_sample_grads(loss, w, x, engine="loop"))
    assert loss(w, x[0]) == 18


def test_parameters_that_the_loss_freezes():
    """Marks are dropped from captures where nothing changes; a loss that unmarks a parameter is refused."""

    def loss(net, x):
        net.weight.requires_grad_(False)
        return net(x).square().sum()

    with pytest.raises(LossError):
        per_sample_grads(loss, nn.Linear(3, 2).double(), X, engine="traced")


def _filled(w, x):
    z = torch.zeros(4, dtype=torch.float64)
    z[1:] = w @ x
    return z.square().sum()


def in_a_checkpoint(w, x):
    return checkpoint(_filled, w, x, use_reentrant=False)


def in_a_branch(w, x):
    return torch.cond(x.sum() > 0, _filled, lambda w, x: (w @ x).sum(), (w, x))


def either(w, x):
    return _filled(w, x) if x.sum() > 0 else (w @ x).sum()


@pytest.mark.parametrize(("loss", "alone"), [(in_a_checkpoint, _filled), (in_a_branch, either)])
def test_tensors_that_a_called_graph_makes_and_writes_into(loss, alone):
    found, expected = (
        per_sample_grads(*x, engine=e) for *x, e in ((loss, W[:3], X, "traced"), (alone, W[:3], X, "loop"))
    )
    torch.testing.assert_close(found, expected)


def at_a_number_of_the_norm(norm):
    return torch.tensor([1.0, 0.5])[(norm > 2).long()]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_of_norms_that_looks_up(engine):
    weighted = WeightedSum(at_a_number_of_the_norm)
    found, expected = (per_sample_grads(_filled, W[:3], X[:3], weighted, engine=name) for name in (engine, "loop"))
    torch.testing.assert_close(found, expected)
