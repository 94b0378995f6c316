"""Compiled losses that multiply by transposes, single rows and vectors: the numbers of the loop in every spelling."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from persample import ClippedMean, LossError, Stack, clear_cache, per_sample_grads

F64 = torch.float64

TRANSPOSED = {
    "T": lambda y: y.T,
    "mT": lambda y: y.mT,
    "t": lambda y: y.t(),
    "transpose": lambda y: torch.transpose(y, 0, -1),
    "permute": lambda y: y.permute(1, 0),
    "swapaxes": lambda y: y.swapaxes(0, 1),
}
PRODUCTS = {
    "@": lambda w, x: w @ x,
    "torch.matmul": torch.matmul,
    "Tensor.matmul": torch.Tensor.matmul,
    "torch.mm": torch.mm,
    "torch.mm by name": lambda w, x: torch.mm(input=w, mat2=x),
}


def layer(w, x):
    return (w @ x.T).T


def one(w, x):
    """A product of one number, which is its own transpose."""
    return w[:1] @ x[:1].T


def added(w, x):
    y = one(w, x)
    y += w.sum()
    return y.cos()


def without_gradient(w, x):
    y = w @ x.T
    with torch.no_grad():
        z = y.T
    return z * w.sum() * y.T


def conjugate(w, x):
    y = (w.to(torch.complex128) * 1j) @ x.T.to(torch.complex128)
    return torch.view_as_real(y.mH.resolve_conj())


def viewed_in_a_checkpoint(w, x):
    return checkpoint(lambda y: y.T.view(-1).sin(), torch.tanh(layer(w, x)), use_reentrant=False)


def written_in_a_vmap(w, x):
    y = torch.tanh(layer(w, x))

    def of_column(column):
        z = column[:, None] * y
        z.T.view(-1).mul_(2)
        return z.cos()

    return vmap(of_column)(y.T)


def two_transposes(w, x):
    y = w @ x.T
    return y.T.cos() * y.mT.sin()


def transposed_and_not(w, x):
    y = w @ x.T
    return y.T.cos(), y.sin()


def written(shaped, y_of=lambda w, x: layer(w, x) + 1):
    """Write into a tensor that is a copy of y, or y itself, depending on the layout."""

    def loss(w, x):
        y = y_of(w, x)
        z = shaped(y)
        z.mul_(2)
        return y.cos(), z

    return loss


def written_after(w, x):
    y = layer(w, x) * 2
    c = y.contiguous()
    y.mul_(2)
    return c.cos() + y


def written_zeros(w, x):
    y = layer(w, x).tanh()
    z = torch.zeros_like(y)
    z.T.reshape(-1)[2] = 1
    return y * z


def in_place_activation(w, x):
    y = layer(w, x) + 1
    z = F.relu(y.flatten(), inplace=True)
    return torch.cat([z, y.flatten()])


# Losses that could see another layout, or where the shapes are unlike those of a layer.
OTHERS = {
    "view of the transposed": lambda w, x: torch.tanh(layer(w, x)).T.view(-1),
    "view in another dtype": lambda w, x: layer(w, x).tanh() * layer(w, x).detach().view(torch.int64).sign(),
    "viewed in a checkpoint": viewed_in_a_checkpoint,
    "in a vmap": lambda w, x: vmap(lambda c: torch.tanh((w @ (x * c).T).T))(x.mean(0)),
    "in a gradient": lambda w, x: grad(lambda v: layer(v, x).cos().sum())(w),
    "in a checkpoint": lambda w, x: checkpoint(lambda x: torch.tanh(layer(w, x)), x.sin(), use_reentrant=False),
    "written": lambda w, x: layer(w, x).mul_(2).tanh(),
    "written view": written(lambda y: y.T.view(-1)),
    "written reshape": written(lambda y: y.T.reshape(-1)),
    "written ravel": written(lambda y: y.ravel()),
    "written reshape of an activation": written(lambda y: y.T.reshape(-1), lambda w, x: layer(w, x).tanh().clone()),
    "written in a vmap": written_in_a_vmap,
    "written after": written_after,
    "written zeros": written_zeros,
    "in-place activation": in_place_activation,
    "without gradient": without_gradient,
    "conjugate": conjugate,
    "one number": lambda w, x: one(w, x).T.cos(),
    "one number, written": lambda w, x: one(w, x).add_(w.sum()).cos(),
    "one number, added": added,
    "one number, filled": lambda w, x: one(w, x).fill_(2) * w.sum(),
    "one number, detached": lambda w, x: one(w, x).detach() * w.sum(),
    "two transposes": two_transposes,
    "transposed and not": transposed_and_not,
    "of columns": lambda w, x: (w @ x.T.contiguous()).T.tanh(),
    "sample from the left": lambda w, x: (x @ w.T).T.tanh(),
    "of samples": lambda w, x: (x @ x.T).T.tanh() * w.sum(),
    "of weights": lambda w, x: (w @ w.T).T.tanh() * x.sum(),
    "weights in a batch": lambda w, x: (w.expand(2, 3, 5) @ x.T).mT.tanh(),
    "other axes": lambda w, x: (w.expand(2, 3, 5) @ x.T).transpose(0, 1).tanh(),
    "vectors": lambda w, x: (w.expand(2, 3, 5) @ x[0]).T.tanh(),
    "a vector from the left": lambda w, x: (w[0] @ torch.stack([x, x]).mT).T.tanh(),
    "of one vector": lambda w, x: (w @ x[0]).t().tanh(),
    "a vector of samples times samples": lambda w, x: (x @ x[0]).tanh() * w.sum(),
    "a vector of weights": lambda w, x: x @ w[0],
    "two vectors": lambda w, x: w[0] @ x[0],
    "weights times weights": lambda w, x: (w @ w[0]).tanh() * x.sum(),
    "a vector, written": lambda w, x: (w @ x[0]).add_(1).tanh() * (w @ x[1]),
    "a vector, by name": lambda w, x: torch.mv(input=w, vec=x[0]),
    "a vector in a vmap": lambda w, x: vmap(lambda row: (w @ row).tanh())(x),
    "a vector in a gradient": lambda w, x: grad(lambda v: (v @ x[0]).cos().sum())(w),
    "columns of one number": lambda w, x: (w @ x[:1].T).T.tanh(),
}


def loss_of(product):
    def loss(w, x):
        found = product(w, x)
        found = found if isinstance(found, tuple) else (found,)
        # Weighted, so that numbers in another order make another sum.
        return sum((y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum() for y in found)

    return loss


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(3, 5, dtype=torch.float64), torch.randn(6, 4, 5, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _fresh():
    clear_cache()


def assert_like_the_loop(loss, w, x):
    expected = per_sample_grads(loss, w, x, Stack(), engine="loop")
    torch.testing.assert_close(per_sample_grads(loss, w, x, Stack(), engine="traced"), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_spelling(product, transposed, data):
    multiply, transpose = PRODUCTS[product], TRANSPOSED[transposed]
    assert_like_the_loop(loss_of(lambda w, x: torch.tanh(transpose(multiply(w, x.T)))), *data)


@pytest.mark.parametrize("other", OTHERS)
def test_others(other, data):
    assert_like_the_loop(loss_of(OTHERS[other]), *data)


def test_strides_are_those_of_the_loss(data):
    """Strides of a sample that is laid out in another way would read other numbers."""
    loss = loss_of(lambda w, x: torch.as_strided((w @ x.T).T.tanh(), (12,), (1,)) * torch.arange(12.0))
    with pytest.raises(LossError, match="as_strided reads memory by strides"):
        per_sample_grads(loss, *data, engine="traced")


def test_compiled_code(data):
    assert_like_the_loop(loss_of(lambda w, x: torch.tanh(w.T @ torch.tanh((w @ x.T).T).T).T), *data)


@pytest.fixture
def params():
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 5), "b": (3,), "v": (1, 3)}
    return {name: torch.randn(shape, dtype=F64, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def row():
    return torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))


def written_row(p, x):
    y = F.linear(x[None], p["w"], p["b"])
    y[0].mul_(2)
    return y.sin()


def written_output(p, x):
    y = F.linear(x[None], p["w"], p["b"])
    z = y.T
    y.mul_(2)
    return y.sin().sum() + z.cos()


def autocast(p, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.addmm(p["b"].float(), x[None].float(), p["w"].T.float())[0]
        return y.tanh() + F.linear(x[None].float(), p["w"].float(), p["b"].float())[0]


ROWS = {
    "linear": lambda p, x: F.linear(x[None], p["w"], p["b"])[0].tanh(),
    "linear without bias": lambda p, x: F.linear(x[None], p["w"])[0].tanh(),
    "linear by name": lambda p, x: F.linear(x[None], weight=p["w"], bias=p["b"])[-1].tanh(),
    "linear with a matrix": lambda p, x: F.linear(x[None], p["w"], p["b"][None])[0, 1].tanh(),
    "linear of two rows": lambda p, x: F.linear(torch.stack([x, x.sin()]), p["w"], p["b"])[0].tanh(),
    "linear of one row of a batch": lambda p, x: F.linear(x[None, None], p["w"], p["b"])[0, 0].tanh(),
    "rows of weights": lambda p, x: F.linear(p["v"], p["w"].T, x)[0].tanh(),
    "addmm": lambda p, x: torch.addmm(p["b"], x[None], p["w"].T)[0].tanh(),
    "addmm of a matrix": lambda p, x: torch.addmm(p["b"][None], x[None], p["w"].T)[0, 1].tanh(),
    "addmm of a number": lambda p, x: torch.addmm(p["b"].sum(), x[None], p["w"].T)[0].tanh(),
    "addmm of a row for one number": lambda p, x: torch.addmm(p["b"][:1], x[None], p["w"].T)[0].tanh(),
    "addmm with factors": lambda p, x: torch.addmm(p["b"], x[None], p["w"].T, beta=2, alpha=3)[0].tanh(),
    "addmm of two rows": lambda p, x: torch.addmm(p["b"], torch.stack([x, x]), p["w"].T)[0].tanh(),
    "index of a parameter": lambda p, x: p["v"][0] * p["b"] * x.sum(),
    "index that adds an axis": lambda p, x: p["v"][True][0, 0] * F.linear(x, p["w"]),
    "slice": lambda p, x: p["v"][:1].T @ x[None],
    "index of rows": lambda p, x: F.linear(x[None], p["w"], p["b"])[None][0][0].tanh(),
    "index of a tuple": lambda p, x: F.linear(x[None], p["w"], p["b"]).split(2, -1)[0],
    "written row": written_row,
    "written output": written_output,
    "autocast": autocast,
    "in a checkpoint": lambda p, x: checkpoint(
        lambda x: F.linear(x[None], p["w"], p["b"])[0].tanh(), x, use_reentrant=False
    ),
    "in a vmap": lambda p, x: vmap(lambda c: F.linear(c * x[None], p["w"], p["b"])[0].tanh())(x),
    "of an inner vmap alone": lambda p, x: vmap(lambda row: F.linear(row[None], p["w"], p["b"])[0].tanh())(x[None]),
}


@pytest.mark.parametrize("output", ROWS)
def test_rows(output, params, row):
    expected, found = (
        per_sample_grads(loss_of(ROWS[output]), params, row, Stack(), engine=engine) for engine in ("loop", "traced")
    )
    tolerance = 1e-2 if output == "autocast" else 1e-9
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_keep_batch_dim(row):
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    expected, found = (
        per_sample_grads(lambda m, x: m(x).squeeze(), model, row, ClippedMean(0.1), keep_batch_dim=True, engine=engine)
        for engine in ("loop", "compiled")
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
