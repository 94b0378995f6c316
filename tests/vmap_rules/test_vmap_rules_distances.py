"""torch.cdist under vmap, against the loop; and arguments that torch rejects."""

import pytest
import torch
from agreement import WANTED, assert_eager_is_loop, assert_mapped_is_looped
from torch.func import grad
from torch.nn import functional as F

from persample import Loss, Stack, per_sample_grads

POWERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")]
ROWS = torch.tensor([0, 2, 2])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("p", POWERS)
def test_distances_that_no_sample_has_a_part_in(p):
    factor = torch.arange(1.0, 5, dtype=torch.float64)
    assert_eager_is_loop(lambda w, x: (torch.cdist(w, w * 0.5 + 1, p) * x).sum(), draw(5, 3), factor, WANTED)
    assert_eager_is_loop(lambda w, x: (torch.cdist(w, w.clone(), p) * x).sum() + w.sum(), draw(5, 3), factor, WANTED)


@pytest.mark.parametrize("p", POWERS)
def test_distances_to_samples(p):
    x = draw(4, 6, 3)
    assert_eager_is_loop(lambda w, x: torch.cdist(x, w, p).sin().sum(), draw(5, 3), x, WANTED)
    assert_eager_is_loop(lambda w, x: torch.cdist(w, x * w[0], p).sin().sum(), draw(5, 3), x, WANTED)
    assert_eager_is_loop(lambda w, x: torch.cdist(x[None], w[:4, None], p).sin().sum(), draw(5, 3), x, WANTED)


def test_distances_by_a_matrix_product():
    factor = torch.arange(1.0, 5, dtype=torch.float64)
    assert_eager_is_loop(lambda w, x: (torch.cdist(w, w * 0.5 + 1) * x).sum(), draw(30, 3), factor, WANTED)


@pytest.mark.parametrize("p", POWERS)
def test_distances_in_a_loss_that_differentiates_twice_or_maps(p):
    x = draw(4, 5, 3)

    def twice(w, x):
        return (torch.cdist(w, w * 0.5 + 1, p) * x[0, 0]).sum() + grad(lambda v: (v.sin() * w).sum())(x).sum()

    assert_eager_is_loop(twice, draw(5, 3), x, WANTED)
    assert_mapped_is_looped(lambda w, y, x: (torch.cdist(w, w * 0.5 + 1, p) * y[0]).sum() + w.sum(), draw(5, 3), (x,))
    assert_mapped_is_looped(lambda w, y, x: torch.cdist(w * x[0], y * w[:1], p).sum() + w.sum(), draw(5, 3), (x,))


def test_distances_of_a_function_that_torch_calls_back():
    def distances(a, b):
        return torch.cdist(a, b, 1.0)[0]

    def loss(w, x):
        triplets = F.triplet_margin_with_distance_loss(
            w, w + 1, w * 0.5, distance_function=distances, margin=9.0, reduction="none"
        )
        return triplets @ x

    assert_eager_is_loop(loss, draw(5, 3), draw(4, 5), WANTED)


def test_all_of_several_largest_differences_have_the_gradient():
    w = torch.tensor([[1.0, 1.0, 0.5], [3.0, -1.0, 0.0]], dtype=torch.float64)
    for again in (0, 1):  # by the kernel, and by its composition

        def loss(w, x, again=again):
            twice = grad(lambda v: v.square().sum() * w.sum())(x[None]).sum()
            return (torch.cdist(w, 0 * w, float("inf")) * x).sum() + again * twice

        assert_eager_is_loop(loss, w, torch.arange(1.0, 4, dtype=torch.float64))


def test_distances_under_autocast_are_of_single_precision():
    w, x = torch.randn(5, 3), torch.arange(1.0, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert_eager_is_loop(lambda w, x: (torch.cdist(w, w.bfloat16() + 1) * x).sum(), w, x, rtol=1e-6)


BAD = {
    "power": (lambda w: torch.cdist(w, w, -1.0), "non-negative p"),
    "mode": (lambda w: torch.cdist(w, w, compute_mode="exact"), "not a valid value for compute_mode"),
    "columns": (lambda w: torch.cdist(w, w[:, :2]), "same number of columns"),
    "dtypes": (lambda w: torch.cdist(w, w.float()), "expected scalar type"),
    "fill": (lambda w: w.index_fill(0, ROWS, w[0, :1]), "0-dimensional value"),
    "fill beyond": (lambda w: w.index_fill(0, torch.tensor([7]), w[0, 0]), "out of bounds"),
    "fill axis": (lambda w: w.index_fill(2, ROWS, w[0, 0]), "out of range"),
    "scattered": (lambda w: torch.select_scatter(w, w, 0, 1), "size"),
    "rolled": (lambda w: w[0, 0].roll(1, 0), "no dimensions"),
    "slopes": (lambda w: F.prelu(w, w[0, :2]), "Mismatch of parameter numbers"),
}


def test_a_loss_that_is_differentiated_twice_refuses_negative_powers():
    def loss(w, x):
        return grad(lambda v: torch.cdist(w * v.sum(), w, -1.0).sum())(x[None]).sum()

    with pytest.raises(RuntimeError, match="non-negative p"):
        per_sample_grads(loss, draw(5, 3), draw(4))


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("case", BAD)
def test_what_torch_refuses(case, engine):
    call, match = BAD[case]
    with pytest.raises((RuntimeError, IndexError, ValueError), match=match):
        per_sample_grads(lambda w, x: call(w).sum() * x, draw(5, 3), draw(4), engine=engine)


@pytest.mark.parametrize("differentiable", [False, True], ids=["once", "recorded"])
@pytest.mark.parametrize("special", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0])
def test_distances_of_nan_and_infinite_rows(p, special, differentiable):
    w, x = draw(3, 3), draw(4, 3, 3)
    w[0, 1] = special
    x[0, 0, 1] = special

    def loss(w, x):
        return torch.cdist(w, x, p).sum()

    rows, values = [], []
    for row in x:
        own = w.clone().requires_grad_()
        values.append(loss(own, row))
        rows.append(torch.autograd.grad(values[-1], own)[0])
    wanted = {"rows": Stack(), "values": Loss()}
    found = per_sample_grads(loss, w.requires_grad_(differentiable), (x,), wanted, differentiable=differentiable)
    expected = {"rows": torch.stack(rows), "values": torch.stack(values)}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0, equal_nan=True)


@pytest.mark.parametrize("of", [0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("p", [0.0, 1.0, torch.inf])
@pytest.mark.parametrize("differentiable", [False, True])
def test_distances_of_what_is_no_number(p, of, differentiable):
    """Also where what arrives in the backward pass is infinite."""
    special = torch.tensor([0.0, 1.0, -1.0, 2.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    x = torch.cartesian_prod(special, special)[:, None]
    w = torch.tensor([[0.0, 0.0], [1.0, 0.0], [torch.inf, 1.0], [torch.nan, 2.0]], dtype=torch.float64)

    def loss(w, x):
        return (torch.cdist(x, w, p) * of).sum()

    expected = per_sample_grads(loss, w, x, engine="loop")
    found = per_sample_grads(loss, w, x, differentiable=differentiable)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=0, equal_nan=True)
