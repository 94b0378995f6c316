"""Operations that torch.func batches wrongly, in one vmap or in two nested ones, against the loop."""

import functools

import pytest
import torch
from agreement import WANTED, assert_eager_is_loop, assert_mapped_is_looped
from oracle import assert_trees_close
from torch.func import hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional as F

from persample import per_sample_grads

ROWS = torch.tensor([0, 2, 2])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


FILLS = {
    "shared": lambda w, x: w.index_fill(0, ROWS, x[0]),
    "function": lambda w, x: torch.index_fill(input=w, dim=-2, index=ROWS, value=x[0] * w[0, 1]),
    "own": lambda w, x: (w * x[0]).index_fill(1, ROWS, w[0, 1]),
    "in place": lambda w, x: (w * x).index_fill_(0, ROWS, x[0] * w[0, 1]),
    "number": lambda w, x: (w * x).index_fill_(0, ROWS, 2.0),
    "scalar": lambda w, x: w[0, 0].index_fill(0, ROWS[:1], x[0]) + w,
    "integer": lambda w, x: (w > 0).long().index_fill(0, ROWS, x[0] * 3) * w,
    "own index": lambda w, x: w.index_fill(0, (x > 0).long(), x[0]),
}


@pytest.mark.parametrize("case", FILLS)
def test_filling(case):
    assert_eager_is_loop(lambda w, x: FILLS[case](w, x).sin().sum(), draw(5, 3), draw(4, 3), WANTED)


@pytest.mark.parametrize("own", [lambda w, x: w, lambda w, x: w * x[0]], ids=["shared", "own"])
def test_filling_within_a_vmap(own):
    assert_mapped_is_looped(
        lambda w, y, x: own(w, x).index_fill(0, ROWS, y[0]).sin().sum(), draw(5, 3), (draw(4, 5, 3),)
    )


def test_selecting_from_what_is_smaller_than_the_mask():
    mask = torch.tensor([[True, False, True], [False, True, True]])
    assert_eager_is_loop(lambda w, x: (w.masked_select(mask) * x).sum(), draw(3), draw(4), WANTED)
    assert_eager_is_loop(lambda w, x: (torch.masked_select(w * x, mask[0])).sum(), draw(2, 1), draw(4), WANTED)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_undoing_a_pooling(axes):
    pool, unpool = (getattr(F, f"max_{name}{axes}d") for name in ("pool", "unpool"))
    x = draw(4, *(2, 6, 4, 4)[: axes + 1])
    kernel = (2,) * axes
    places = pool(x[0], kernel, return_indices=True)[1]
    nearby = x[0] * 0.9
    assert_eager_is_loop(lambda w, x: unpool(*pool(x * w, kernel, return_indices=True), 2).sin().sum(), draw(()), x)
    assert_eager_is_loop(lambda w, x: (unpool(pool(w, 2), places, 2) * x).sum(), nearby, x, WANTED)
    assert_eager_is_loop(lambda w, x: unpool(pool(w, 2), places, 2).sum() + (w * x).sum(), nearby, x, WANTED)


def test_undoing_a_pooling_of_channels_that_come_last():
    x = draw(4, 1, 2, 6, 4)
    pooled, places = F.max_pool2d(x[0].to(memory_format=torch.channels_last), 2, return_indices=True)
    assert_eager_is_loop(lambda w, x: (F.max_unpool2d(w, places, 2) * x).sum(), pooled, x, WANTED)


def test_scalars_are_not_rolled_from_sample_to_sample():
    assert_eager_is_loop(lambda w, x: (w * x).roll(1) + torch.roll(x, 2) * w, draw(()), draw(4), WANTED)


SCALARS = {
    "squeeze": lambda z: z.squeeze(-1),
    "squeeze of several axes": lambda z: torch.squeeze(z, (0,)),
    "squeeze in place": lambda z: (2 * z).squeeze_(-1),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_have_an_axis_of_minus_1(name):
    assert_eager_is_loop(lambda w, x: SCALARS[name](w * x).sin(), draw(()), draw(4), WANTED)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        per_sample_grads(lambda w, x: (w * x).squeeze(-2), draw(()), draw(4))


NESTED = {
    "mse": lambda w, y, x: F.mse_loss(w * 1.5, y),
    "mse of one": lambda w, y, x: F.mse_loss(w[:1] * x[0, :1], y[:1], reduction="sum"),
    "huber": lambda w, y, x: F.huber_loss(w * x[0], y, delta=0.4),
    "huber of one": lambda w, y, x: F.huber_loss(w[:1] * 1.5, y[:1], reduction="none").sum(),
    "smooth": lambda w, y, x: F.smooth_l1_loss(y, w * x[0], beta=0.4),
    "smooth of beta 0": lambda w, y, x: F.smooth_l1_loss(y, w, beta=0),
    "slope": lambda w, y, x: F.prelu(y * x[0], w[:1]).sum(),
    "slope of each": lambda w, y, x: F.prelu(x[0], (w * y)[:1]).sum(),
    "slopes": lambda w, y, x: F.prelu(torch.stack([y, x[0]]), w).sum(),
    "scattered": lambda w, y, x: torch.select_scatter(x, w * y, 0, -1).square().sum(),
    "scattered rows": lambda w, y, x: w.expand(2, 3).select_scatter(y[:2], 1, 2).square().sum(),
}


@pytest.mark.parametrize("case", NESTED)
def test_one_vmap_inside_of_another(case):
    assert_mapped_is_looped(NESTED[case], draw(3), (draw(4, 3, 3),))
    assert_mapped_is_looped(NESTED[case], draw(3), (draw(4, 1, 3),))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["mse_loss", "huber_loss", "smooth_l1_loss"])
def test_losses_at_their_edges(name, reduction):
    function = getattr(F, name)
    x = torch.tensor([[0.0, 1.0, -1.0, 3.0, torch.inf], [0.5, 0.0, 2.0, -torch.inf, 1e200]], dtype=torch.float64)

    def loss(w, x):
        return function(w * x, torch.zeros_like(x), reduction=reduction).sum()

    got, expected = (per_sample_grads(loss, torch.ones(5, dtype=torch.float64), x, engine=e) for e in ("eager", "loop"))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0, equal_nan=True)


def test_infinite_inputs_leave_the_slope_alone():
    x = torch.tensor([[1.0, torch.inf], [-1.0, 2.0], [-torch.inf, 1.0]], dtype=torch.float64)
    slope = draw(1)
    got, expected = (per_sample_grads(lambda w, x: F.prelu(x, w).sum(), slope, x, engine=e) for e in ("eager", "loop"))
    assert expected.isfinite().tolist() == [[True], [True], [False]]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", ["fill", "distances", "mse", "prelu", "unpool", "scattered"])
def test_in_a_program(case):
    places = F.max_pool2d(draw(1, 4, 4), 2, return_indices=True)[1]
    loss = {
        "distances": lambda w, x: (torch.cdist(w, w * 0.5 + 1, 1.5) * x[0, 0]).sum(),
        "fill": lambda w, x: w.index_fill(0, ROWS, x[0, 0]).sin().sum(),
        "mse": lambda w, x: vmap(lambda row: F.mse_loss(w[0], row))(x).sum(),
        "prelu": lambda w, x: vmap(lambda row: F.prelu(row, w[0, :1]).sum())(x).sum(),
        "unpool": lambda w, x: (F.max_unpool2d(w[None, :2, :2], places, 2) * x[0, 0]).sum(),
        "scattered": lambda w, x: torch.select_scatter(x, w[0], 0, 1).square().sum(),
    }[case]
    w, x = draw(5, 3), draw(4, 5, 3)
    expected = per_sample_grads(loss, w, x, WANTED)
    assert_trees_close(per_sample_grads(loss, w, x, WANTED, engine="traced"), expected, 1e-9)


EYE = 4 * torch.eye(3, dtype=torch.float64).roll(1, 0)  # whose factors are of rows in another order
SQUARE = {
    "solve": torch.linalg.solve,
    "solve a column": lambda a, x: torch.linalg.solve(B=x[:, None], A=a),
    "solve a matrix": lambda a, x: torch.linalg.solve(a, torch.stack([x, x.sin()], 1)),
    "solve from the right": lambda a, x: torch.linalg.solve(a, x[None], left=False),
    "lu_solve": lambda a, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), x[:, None]),
    "lu_solve, a matrix for all": lambda a, x: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(torch.stack([a, 2 * a, a @ a])), torch.outer(x, x.sin())
    ).sum(0),
    "lu_solve, adjoint": lambda a, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), x[:, None], adjoint=True),
    "det": lambda a, x: torch.linalg.det(a) * x,
    "slogdet": lambda a, x: a.slogdet().logabsdet * x + torch.linalg.slogdet(-a)[0],
    "logdet": lambda a, x: torch.logdet(a) * x,
    "complex slogdet": lambda a, x: torch.view_as_real(torch.linalg.slogdet(a + 1j * torch.diag(x)).sign) * x[0],
}
# The third derivative of torch's det is NaN.
SAME = {"det": lambda a, x: torch.linalg.slogdet(a)[0] * torch.linalg.slogdet(a)[1].exp() * x}
INNER = {
    "jacfwd": (jacfwd, jacrev),
    "hessian": (lambda f: hessian(lambda x: f(x).pow(3).sum()), lambda f: jacrev(jacrev(lambda x: f(x).pow(3).sum()))),
    "jacrev without gradients": (lambda f: torch.no_grad()(jacrev(f)),) * 2,
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("function", SQUARE)
def test_derivatives_of_linear_systems_and_determinants(function, inner):
    """Against reverse derivatives: those of jacfwd lack a term in torch (pytorch/pytorch#196695), and in the loop."""

    def loss(transform, of, w, x):
        inside = transform(lambda x: of(w + EYE + torch.diag(x) / 8, x))(x)
        return inside.pow(3).sum() + (inside.detach() * w[0, 0]).sum()

    w, x = draw(3, 3), draw(4, 3)
    transform, reverse = INNER[inner]
    found = functools.partial(loss, transform, SQUARE[function])
    expected = functools.partial(loss, reverse, SAME.get(function, SQUARE[function]))
    expected = per_sample_grads(expected, w, x, WANTED, engine="loop")
    for engine in ("eager", "traced") if function == "solve" and inner == "jacfwd" else ("eager",):
        assert_trees_close(per_sample_grads(found, w, x, WANTED, engine=engine), expected, 1e-9)


def by_formula(x, axes, weight, bias):
    return (x - x.mean(axes, keepdim=True)) / (x.var(axes, correction=0, keepdim=True) + 1e-5).sqrt() * weight + bias


NORMS = {
    "layer": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b),
        lambda x, w, b: by_formula(x, -1, w, b),
    ),
    "batch": (
        lambda x, w, b: F.batch_norm(x.mT, None, None, w, b, training=True),
        lambda x, w, b: by_formula(x.mT, 0, w, b),
    ),
    "instance": (
        lambda x, w, b: F.instance_norm(x[None], weight=w, bias=b),
        lambda x, w, b: by_formula(x[None], -1, w[:, None], b[:, None]),
    ),
}
TWICE = {
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),))[1].square().sum(),
    "jacfwd": lambda f, x: jacfwd(f)(x).square().sum(),
    "hessian": lambda f, x: hessian(lambda x: f(x).pow(3).sum())(x).square().sum(),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(lambda x: f(x).pow(3).sum()))(x).square().sum(),
}


@pytest.mark.parametrize("derivatives", TWICE)
@pytest.mark.parametrize("norm", NORMS)
def test_further_derivatives_of_norms(norm, derivatives):
    """Against the formula: in torch's kernels terms are missing, also in the loop."""

    def loss(function, w, x):
        weight, bias = (w[:5], w[5:10]) if norm == "layer" else (w[:2], w[5:7])
        return TWICE[derivatives](lambda x: function(x, weight, bias), x * w[:5])

    w, x = draw(10), draw(3, 2, 5)
    norm_of_torch, formula = NORMS[norm]
    expected = per_sample_grads(functools.partial(loss, formula), w, x, WANTED)
    found = per_sample_grads(functools.partial(loss, norm_of_torch), w, x, WANTED)
    assert_trees_close(found, expected, 1e-9)


def test_a_bias_of_another_dtype():
    """Where the input is neither a matrix nor contiguous, torch adds it."""
    weight, bias = draw(4, 4), torch.randn(4)
    apart = draw(5, 4, 2, 3).movedim(1, -1)
    assert_eager_is_loop(lambda b, x: F.linear(x, weight, b).abs().sum(), bias, apart, WANTED)
    with pytest.raises(RuntimeError, match="dtype"):
        per_sample_grads(lambda b, x: F.linear(x, weight, b).abs().sum(), bias, apart.contiguous(), WANTED)
