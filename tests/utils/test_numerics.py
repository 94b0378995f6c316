"""NaN in one sample, small gradients of saturated units, and zeros without memory: all engines against the loop."""

import hashlib

import pytest
import torch
from oracle import assert_trees_close
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

from persample import Aux, ClippedMean, ClippedSum, Gram, Loss, Mean, Norm, Project, Stack, Sum, per_sample_grads

F64 = torch.float64
WANTED = {"loss": Loss(), "norm": Norm(), "stack": Stack()}
NAN = [float("nan"), float("inf")]
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, when first used
compiled = pytest.param("compiled", marks=pytest.mark.slow)


def draw(*shape):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def both(loss, params, batch, wanted, engine="eager", **options):
    got = per_sample_grads(loss, params, batch, wanted, engine=engine, **options)
    # torch's other kernel has no forward derivatives, and loses NaN; torch 2.14 takes it in three dimensions, too.
    with sdpa_kernel(SDPBackend.MATH):
        loop = per_sample_grads(loss, params, batch, wanted, engine="loop", **options)
    return tree_flatten(got)[0], tree_flatten(loop)[0]


def assert_is_loop(*args, **options):
    for got, loop in zip(*both(*args, **options), strict=True):
        torch.testing.assert_close(got, loop, rtol=1e-9, atol=1e-13, equal_nan=True)


def attending(role, causal):
    def loss(w, x):
        given = dict.fromkeys("qkv", w[None]) | {role: x[None]}
        out = F.scaled_dot_product_attention(*given.values(), is_causal=causal)
        return (out[0] * torch.arange(1, 13, dtype=F64).view(3, 4)).sum()

    return loss


@pytest.mark.parametrize("value", NAN)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_nan_stays_in_its_sample_and_is_not_lost_in_attention(role, causal, value):
    x = draw(3, 3, 4)
    x[1, 0, 2] = value
    assert_is_loop(attending(role, causal), draw(3, 4), x, WANTED)


def test_nan_of_first_position_under_causal_attention_leaves_what_does_not_see_it():
    x = draw(2, 3, 4)
    x[1, 2] = torch.nan  # position 0 attends to itself alone
    loss = lambda w, x: F.scaled_dot_product_attention(w[None], w[None], x[None], is_causal=True)[0, 0].sum()
    assert_is_loop(loss, draw(3, 4), x, WANTED)


@pytest.mark.parametrize("engine", ["eager", "traced"])
def test_nan_query_is_nan_on_every_engine(engine):
    x = draw(2, 3, 4)
    x[1] = torch.nan
    assert_is_loop(attending("q", False), draw(3, 4), x, WANTED, engine=engine)


def test_nan_query_of_weight_zero_is_gone():
    x, weights = draw(3, 3, 4), torch.tensor([1.0, 0, 1])
    x[1] = torch.nan
    loss, w = attending("q", True), draw(3, 4)
    got = per_sample_grads(loss, w, x, {"sum": Sum(), "clipped": ClippedMean(0.1)}, weights=weights)
    assert_trees_close(
        got, per_sample_grads(loss, w, x[[0, 2]], {"sum": Sum(), "clipped": ClippedMean(0.1)}, engine="loop"), 1e-9
    )


@pytest.mark.parametrize("options", [{}, {"beta": 0.3}, {"reduction": "sum"}, {"beta": 0.0}], ids=str)
def test_nan_target_of_smooth_l1_loss_is_nan_in_the_gradient(options):
    target = draw(3, 5)
    target[1, 2] = torch.nan
    assert_is_loop(
        lambda w, x, t: F.smooth_l1_loss(3 * w * x, t, **options), draw(5), (draw(3, 5).cos(), target), WANTED
    )


def test_nan_scale_of_a_clipped_sample_is_in_all_of_the_sum():
    x = draw(3, 2, 4)
    x[1] = torch.nan
    params = {"table": draw(6, 4), "other": draw(5)}
    loss = lambda p, x: (F.embedding(torch.tensor([0, 2]), p["table"]) * x).sum() + 0 * p["other"].sum()
    assert_is_loop(loss, params, x, ClippedSum(1.0))


SATURATED = {
    "tanh": torch.tanh,
    "tanh of tanh": lambda z: torch.tanh(torch.tanh(z)),
    "soft margin": lambda z: F.soft_margin_loss(z, torch.ones_like(z)),
    "hard sigmoid": F.hardsigmoid,
    "cross entropy": lambda z: F.binary_cross_entropy(z.sigmoid(), torch.full_like(z, 0.3)),
    "softplus": F.softplus,
    "log sigmoid": F.logsigmoid,
    "gelu": lambda z: F.gelu(z, approximate="tanh"),
    "log softmax": lambda z: F.log_softmax(z, 0)[0],
}


@pytest.mark.filterwarnings("ignore:.*soft_margin_loss")
def test_small_gradients_of_saturated_units_are_those_of_the_loop_in_compiled_code():
    def loss(params, x):
        return sum(f(params[name] * x).sum() for name, f in SATURATED.items())

    params = {name: 1 + draw(4) / 20 for name in SATURATED}
    x = torch.tensor([-36.0, -20, -17, -15, -9, -2, 2, 9, 15, 17, 18, 20], dtype=F64)
    wanted = {"norm": Norm(per_param=True), "stack": Stack()}
    got, loop = (per_sample_grads(loss, params, x, wanted, engine=e) for e in ("compiled", "loop"))
    for name in SATURATED:
        norms = loop["norm"][name]
        torch.testing.assert_close(got["norm"][name], norms, rtol=1e-9, atol=0, msg=name)
        apart = (got["stack"][name] - loop["stack"][name]).norm(dim=1)
        assert (apart <= 1e-9 * norms).all(), name


ZEROS = {
    "sgn": torch.sgn,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
}
REDUCTIONS = {"norm": Norm(), "stack": Stack(), "mean": Mean(), "gram": Gram(), "clipped": ClippedMean(1.0)}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ZEROS)
def test_zeros_without_memory_are_gradients_like_others(name, size):
    params = {"w": draw(4), "u": draw(4)}
    x = draw(size, 4)
    losses = [
        lambda p, x: (ZEROS[name](p["w"]) * x).sum(),
        lambda p, x: (ZEROS[name](p["w"]) * x + p["u"] * x).sum(),
        lambda p, x: (ZEROS[name](p["w"]) * p["u"] + torch.cat([p["u"][:2], ZEROS[name](p["w"])[2:]]) * x).sum(),
    ]
    for loss in losses:
        for reduction in REDUCTIONS.values():
            assert_is_loop(loss, params, x, reduction)
            for leaf in tree_flatten(per_sample_grads(loss, params, x, reduction))[0]:
                leaf.add_(1)  # has memory of its own
    for reduction in REDUCTIONS.values():
        assert_is_loop(lambda w, x: (ZEROS[name](w) * x).sum(), draw(4), x, reduction)


@forward_mode
def test_zeros_without_memory_as_aux():
    def loss(w, x):
        return (w * x).sum(), torch.func.jvp(torch.sgn, (x,), (x,))[1]

    for engine in ("eager", "loop"):
        aux = per_sample_grads(loss, draw(4), draw(1, 4), Aux(), engine=engine)
        assert not aux.any()
        assert aux.add_(1).all()


def cat(w, z):
    return torch.cat([z, w]).tanh()


def attention(w, z):
    return F.scaled_dot_product_attention(z[None], w[None], w[None])[0]


def causal(w, z):
    return F.scaled_dot_product_attention((z @ w)[None], z[None], w[None], is_causal=True)[0]


FUNCTIONS = {"cat": cat, "stack": lambda w, z: torch.stack([z, w]).sin(), "attention": attention, "causal": causal}
TRANSFORMS = {
    "jvp": lambda f, z: torch.func.jvp(f, (z,), (z.cos(),))[1].square().sum(),
    "hessian": lambda f, z: torch.func.hessian(lambda y: f(y).sin().sum())(z).square().sum(),
}


@forward_mode
@pytest.mark.filterwarnings("ignore:engine='compiled' compiles the same loss_fn")
@pytest.mark.parametrize("engine", ["eager", compiled])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_inside_a_loss(name, transform, engine):
    loss = lambda w, x: TRANSFORMS[transform](lambda z: FUNCTIONS[name](w, z), x)
    wanted = {"norm": Norm(), "clipped": ClippedMean(0.5), "stack": Stack()}
    for reduction in (wanted, Norm()):
        assert_is_loop(loss, draw(4, 4), draw(2, 4, 4), reduction, engine=engine)


@forward_mode
def test_zero_tangents_in_compiled_code():  # they ended the process
    def loss(w, x, t):
        return torch.func.jvp(lambda z: torch.cat([z, w]).tanh() * torch.cat([w, z]), (x,), (t,))[1].sum()

    assert_is_loop(loss, draw(3), (draw(5, 3), draw(5, 3) + 1), {"norm": Norm(), "stack": Stack()}, engine="compiled")


def test_the_signs_of_projections_are_the_same_in_every_version():
    """Projections of one seed are compared across runs and versions: the first signs are written down here."""
    params = {"w": torch.ones(3)}
    found = per_sample_grads(lambda p, x: p["w"] @ x, params, torch.eye(3), Project(8, seed=0)) * 8**0.5
    digest = hashlib.sha256(b"0:params['w']").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    left, right = (torch.randint(0, 2, (8, n), generator=generator) * 2.0 - 1.0 for n in (3, 1))
    torch.testing.assert_close(found, (left * right).T)


@pytest.mark.parametrize("engine", ["loop", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_beside_a_parameter_without_elements(dtype, engine):
    params, x = (
        {"w": torch.randn(3, 4, dtype=dtype), "none": torch.zeros(0, dtype=dtype)},
        torch.randn(5, 4, dtype=dtype),
    )
    loss = lambda p, x: (p["w"] @ x).sum() + p["none"].sum()
    norms, clipped = per_sample_grads(loss, params, x, (Norm(per_param=True), ClippedSum(0.5)), engine=engine)
    torch.testing.assert_close(norms["w"], 3**0.5 * x.norm(dim=1))
    assert not norms["none"].any()
    assert clipped["none"].shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-30, 1e30, torch.nan])
@pytest.mark.parametrize("count", [3, 2**15])
def test_norms_of_one_row_for_all_samples(count, scale, dtype):
    w, x = torch.ones(count, dtype=dtype), torch.ones(6, 3, dtype=dtype)
    norms = per_sample_grads(lambda w, x: (w * scale).sum(), w, x, Norm())
    torch.testing.assert_close(norms, torch.full((6,), scale * count**0.5, dtype=dtype), equal_nan=True)


@pytest.mark.parametrize("of", [1.0, -2.0, 0.0, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("option", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ["huber_loss", "smooth_l1_loss"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_losses_with_an_infinite_gradient_of_the_result(name, option, of, differentiable):
    values = [0.0, 0.3, -0.3, 0.5, -0.5, 1.0, -1.0, 1.5, 2.0, -3.0, 1e30, torch.inf, -torch.inf, torch.nan]
    w, x = torch.tensor(values, dtype=torch.float64), torch.ones(2, len(values), dtype=torch.float64)

    def loss(w, x):
        option_of = {"delta" if name == "huber_loss" else "beta": option}
        return (getattr(F, name)(w * x, torch.zeros_like(w), reduction="none", **option_of) * of).sum()

    expected = per_sample_grads(loss, w, x, engine="loop")
    found = per_sample_grads(loss, w, x, differentiable=differentiable)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["huber_loss", "smooth_l1_loss"])
def test_second_derivatives_of_losses(name):
    values = torch.tensor([0.0, 0.3, -0.3, 1.5, -3.0, torch.inf], dtype=torch.float64)

    def loss(w, x):
        return getattr(F, name)(w, x)

    w = values[:, None].clone().requires_grad_()
    x = torch.zeros(len(values), 1, dtype=torch.float64)
    seconds = [
        torch.autograd.grad(per_sample_grads(loss, w, x, in_dims=(0, 0), engine=engine, differentiable=True).sum(), w)[
            0
        ]
        for engine in ("eager", "loop")
    ]
    torch.testing.assert_close(*seconds, equal_nan=True)
