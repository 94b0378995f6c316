"""Under vmap, against the loop: access past autograd (.data, linearize), strided memory, inputs of another dtype."""

import pytest
import torch
from agreement import assert_eager_is_loop
from torch.func import grad, hessian, linearize
from torch.nn import functional as F

from persample import LossError, Stack, per_sample_grads

forward_mode = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.* is deprecated", "ignore:Attempted to insert a get_attr"
)
W = torch.tensor([0.5, -1.5], dtype=torch.float64)
X = torch.linspace(-2, 3, 30, dtype=torch.float64).sin().reshape(5, 2, 3)


@forward_mode
@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
def test_linearize_has_no_gradient_under_torch_func_and_is_refused(engine):
    def loss(w, x):
        return linearize(torch.sin, w)[1](w) @ x[:, 0]

    assert per_sample_grads(loss, W, X, engine="loop").abs().min() > 0
    with pytest.raises(LossError, match=r"torch.func.linearize.*Use torch.func.jvp"):
        per_sample_grads(loss, W, X, engine=engine)


@forward_mode
def test_forward_derivatives_by_other_means_are_not_refused():
    def loss(w, x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(w.exp(), w)
            return torch.autograd.forward_ad.unpack_dual(dual.sin()).tangent @ x[:, 0]

    assert_eager_is_loop(loss, W, X)


def of_a_sample(w, x):
    return (w[:, None] * x.data).sin().sum() * x.data.sum()


def of_parameters(w, x):
    return (w[:, None] * x).sin().sum() * w.data.sum()


def in_a_gradient(w, x):  # constant for the inner derivative, not for the outer one
    return grad(lambda v: (v.data * v).sum())(2 * w) @ x[:, 0]


@pytest.mark.parametrize("loss", [of_a_sample, of_parameters, in_a_gradient])
def test_data(loss):
    assert_eager_is_loop(loss, W, X, Stack())


STRIDED = {
    "repeated": lambda x: x.reshape(-1).repeat(2)[:6].reshape(1, 2, 3),
    "transposed": lambda x: x.T.reshape(1, 2, 3).mT.reshape(1, 2, 3),
    "several": lambda x: x[None].expand(4, 2, 3),
    "images": lambda x: x.reshape(1, 2, 3, 1).expand(1, 2, 3, 2).mT,
}


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_group_norm_of_strided_memory(kind, dim, affine):
    def loss(w, x):
        out = F.group_norm(STRIDED[kind](x), 1, *((w, w.sin()) if affine else ()), eps=0.1)
        return (out.movedim(1, -1) * w).sin().sum()

    assert_eager_is_loop(loss, W, X.movedim(0, dim), in_dims=(None, dim))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm_in_groups_and_differentiated_twice(groups):
    def loss(w, x):
        inner = grad(lambda v: F.group_norm(v, groups, w.repeat(2), eps=0.1).sin().sum())
        return inner(x.reshape(1, 2, 3).repeat(2, 2, 1) * w.sum()).square().sum()

    assert_eager_is_loop(loss, W, X)


@forward_mode
def test_group_norm_of_third_order_in_forward_mode():
    def loss(w, x):
        inner = hessian(lambda v: F.group_norm(v.repeat(4).reshape(2, 4, 1), 2, x.flatten()[:4], eps=0.1).sin().sum())
        return inner(w).sin().sum()

    assert_eager_is_loop(loss, W, X)


def test_group_norm_refuses_what_torch_refuses():
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        per_sample_grads(lambda w, x: F.group_norm(x[None] * w.sum(), 3).sum(), W, X)


def test_bias_of_another_dtype_added_to_one_vector():
    def loss(params, x):
        return F.linear(x[:, 0], params["w"], params["b"]).sin().sum()

    params = {"w": torch.eye(3, 2, dtype=torch.float64), "b": torch.ones(3, dtype=torch.float32)}
    assert_eager_is_loop(loss, params, X, rtol=1e-6)


def test_gru_cell_whose_state_is_of_another_dtype():
    def loss(w, x):
        state = torch.zeros(1, 2) + w.float()[None]
        return torch.gru_cell(x[None, :, 0], state, w[:, None].repeat(3, 2), w.float()[:, None].repeat(3, 2)).sum()

    assert_eager_is_loop(loss, W, X, rtol=1e-6)
