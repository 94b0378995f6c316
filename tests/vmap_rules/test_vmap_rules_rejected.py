"""Rules reject the arguments that torch rejects, and accept those that it accepts."""

import pytest
import torch
from agreement import assert_eager_is_loop
from torch import nn
from torch.nn import functional as F

from persample import LossError, Norm, Stack, per_sample_grads

D = torch.float64


def draw(*shape, dtype=D):
    return torch.randn(*shape, dtype=dtype)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


ROWS = torch.tensor([[0, 3, 1], [2, 2, 4]])
REFUSED = {
    "linear, bias of another dtype": (lambda w, x: F.linear(x, w, torch.ones(5)), draw(5, 3), draw(2, 3)),
    "linear, vectors of another dtype": (lambda w, x: F.linear(x, w, torch.ones(5)), draw(5, 3), draw(2, 4, 3)),
    "bilinear, rows that are broadcast": (lambda w, x: F.bilinear(x[:1], x, w), draw(5, 3, 3), draw(2, 4, 3)),
    "bilinear, a bias of one": (lambda w, x: F.bilinear(x, x, w, draw(1)), draw(5, 3, 3), draw(2, 4, 3)),
    "weight norm, gains of another dtype": (
        lambda w, x: torch._weight_norm(w * x, torch.ones(3, 1)),
        draw(3, 4),
        draw(2, 4),
    ),
    "GRU cell, one state for two rows": (
        lambda w, x: torch.gru_cell(x, x[:1], w, w),
        draw(9, 3),
        draw(2, 2, 3),
    ),
    "LSTM cell, a narrow cell state": (
        lambda w, x: torch.lstm_cell(x, (x, x[:, :1]), w, w)[0],
        draw(12, 3),
        draw(2, 2, 3),
    ),
    "RNN, a state of another dtype": (
        lambda w, x: torch.rnn_tanh(x, torch.zeros(1, 2, 3), [w, w], False, 1, 0.0, False, False, False)[0],
        draw(3, 3),
        draw(2, 4, 2, 3),
    ),
    "variances of another shape": (lambda w, x: F.gaussian_nll_loss(w * x, x, draw(3).exp()), draw(3), draw(2, 4, 3)),
    "a variance below 0": (lambda w, x: F.gaussian_nll_loss(w * x, x, -0.5), draw(3), draw(2, 4, 3)),
    "an unknown reduction": (
        lambda w, x: F.gaussian_nll_loss(w * x, x, x.exp(), reduction="all"),
        draw(3),
        draw(2, 4, 3),
    ),
    "a selection by a matrix": (lambda w, i: torch.index_select(w, 0, i.view(3, 1)), draw(5, 3), ROWS),
    "a selection beyond a sample's own rows": (
        lambda w, i: torch.index_select(w * i[:, None], 0, i + 1),
        draw(3, 3),
        ROWS,
    ),
    "one-hot beyond its classes": (lambda w, i: F.one_hot(i + 4, 5) * w, draw(5), ROWS),
    "one-hot below 0": (lambda w, i: F.one_hot(i - 3, 5) * w, draw(5), ROWS),
    "layer norm, a weight of another shape": (
        lambda w, x: torch.func.grad(lambda x: F.layer_norm(x, (3,), w).square().sum())(x),
        draw(1),
        draw(2, 3),
    ),
    "batch norm, a bias of another shape": (
        lambda w, x: torch.func.grad(lambda x: F.batch_norm(x, None, None, None, w, True).square().sum())(x),
        draw(1),
        draw(2, 4, 3),
    ),
    "a vector for lu_solve": (
        lambda w, x: torch.func.grad(lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(w), x).sum())(x),
        draw(3, 3),
        draw(2, 3),
    ),
    "vectors from the right": (
        lambda w, x: torch.func.grad(lambda x: torch.linalg.solve(w, x, left=False).sum())(x),
        draw(3, 3),
        draw(2, 3),
    ),
    "a row beyond the table of a sample": (
        lambda w, i: F.embedding(i, w * (1 + i[0])),
        draw(5, 3),
        torch.tensor([[5], [0]]),
    ),
    "a row before the table of a sample": (
        lambda w, i: F.embedding(i, w * (1 + i[0])),
        draw(5, 3),
        torch.tensor([[0], [-1]]),
    ),
    "bags of rows beyond the table of a sample": (
        lambda w, i: F.embedding_bag(i[None], w * (1 + i[0]), mode="sum"),
        draw(5, 3),
        torch.tensor([[5], [0]]),
    ),
    "one-hot of floats": (lambda w, i: F.one_hot(i.double(), 5) * w, draw(5), ROWS),
    "bags of one vector": (lambda w, i: F.embedding_bag(i, w, mode="sum"), draw(5, 3), ROWS),
    "bags, padding beyond the table": (
        lambda w, i: F.embedding_bag(i[None], w, mode="sum", padding_idx=7),
        draw(5, 3),
        ROWS,
    ),
    "bags, one weight for all": (
        lambda w, i: F.embedding_bag(i[None], w, mode="sum", per_sample_weights=draw(1, 1)),
        draw(5, 3),
        ROWS,
    ),
    "cross-entropy, one class for all rows": (
        lambda w, x: F.cross_entropy(x @ w, torch.zeros(1, dtype=torch.long)),
        draw(3, 5000),
        draw(2, 4, 3),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_what_torch_refuses(case, engine):
    fn, params, batch = REFUSED[case]
    with pytest.raises((RuntimeError, ValueError, IndexError, TypeError)):
        per_sample_grads(lambda w, x: fn(w, x).sum(), params, (batch,), engine=engine)


TAKEN = {
    "linear, a weight of one axis": (lambda w, x: F.linear(x, w), draw(3), draw(2, 3)),
    "a cell, biases by name": (
        lambda w, x: torch.gru_cell(x, x, w, w, b_ih=w[:, 0], b_hh=w[:, 1]),
        draw(9, 3),
        draw(2, 2, 3),
    ),
    "variances of one number": (lambda w, x: F.gaussian_nll_loss(w * x, x, x[:, :1].exp()), draw(3), draw(2, 4, 3)),
    "cross-entropy of one row": (lambda w, x: F.cross_entropy(w @ x, torch.tensor(7)), draw(5000, 3), draw(2, 3)),
    "cross-entropy of a bias": (lambda w, x: F.cross_entropy(w + 0 * x.sum(), torch.tensor(7)), draw(5000), draw(2, 3)),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_torch_takes(case):
    fn, params, batch = TAKEN[case]
    assert_eager_is_loop(lambda w, x: fn(w, x).sum(), params, (batch,), wanted={"stack": Stack(), "norm": Norm()})


def test_compiled_code_refuses_indices_out_of_range():
    def loss(w, i):
        return (F.embedding(i, w * (1 + i[0])) @ w[0]).sum()

    w = draw(5, 3)
    per_sample_grads(loss, w, torch.tensor([[0, 4], [0, 0]]), engine="compiled")
    for indices in ([[0, 5], [0, 0]], [[0, 0], [0, -1]]):
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|num_classes|non-negative"):
            per_sample_grads(loss, w, torch.tensor(indices), engine="compiled")


def test_the_likelihood_of_an_infinite_variance():
    loss = lambda w, var: F.gaussian_nll_loss(w, torch.zeros(2).double(), var)
    assert_eager_is_loop(loss, draw(2), (torch.tensor([[1.0, torch.inf], [0.0, 2.0]]).double(),))


def test_a_padded_row_that_is_nan_adds_nothing():
    table = draw(5, 3)
    table[2] = torch.nan

    def loss(w, i):
        return (F.embedding_bag(i[None], table, mode="mean", padding_idx=2) @ w).sum()

    assert_eager_is_loop(loss, draw(3), (ROWS,))


@pytest.mark.parametrize("padding", [0, 2, -1])
@pytest.mark.parametrize("by_frequency", [True, False])
def test_padding_of_tables_of_the_samples(padding, by_frequency):
    def loss(w, i):
        table = w["table"] * w["scale"].exp() * i.sum()
        rows = F.embedding(i, table, padding_idx=padding, scale_grad_by_freq=by_frequency)
        return rows.tanh().sum()

    assert_eager_is_loop(
        loss, {"table": draw(5, 3), "scale": draw(1)}, (torch.tensor([[0, 2, 2], [4, 4, 2], [0, 1, 0]]),)
    )


@pytest.mark.parametrize("options", [{}, {"batch_chunk_size": 2}], ids=str)
def test_linear_cross_entropy_in_parts(options):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    def loss(w, x):
        labels, settings = torch.arange(len(x)) % 7, LinearCrossEntropyOptions(**options)
        return F.linear_cross_entropy((x @ w["v"]).tanh(), w["w"], labels, options=settings)

    assert_eager_is_loop(loss, {"w": draw(7, 3), "v": draw(3, 3)}, (draw(2, 6, 3),))


def test_linear_cross_entropy_in_parts_in_forward_mode():
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    def loss(w, x):
        options = LinearCrossEntropyOptions(batch_chunk_size=2)
        of_parts = lambda w: F.linear_cross_entropy(x, w, torch.tensor([0, 1, 2, 0]), options=options)
        return torch.func.jvp(of_parts, (w,), (w,))[1]

    with pytest.raises(LossError, match=r"differentiated in forward mode.*Leave options out"):
        per_sample_grads(loss, torch.randn(3, 2), torch.randn(5, 4, 2))


def test_linear_cross_entropy_in_parts_with_weights_of_classes():
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    def loss(w, x):
        labels = torch.arange(len(x)) % 7
        options = LinearCrossEntropyOptions(batch_chunk_size=2)
        return F.linear_cross_entropy(x, w["w"], labels, weight=w["c"], options=options)

    with pytest.raises(LossError, match="expected weights of classes that depend on no parameter"):
        per_sample_grads(loss, {"w": draw(7, 3), "c": draw(7)}, draw(2, 6, 3))


def test_cross_entropy_differentiated_by_the_loss_first():
    def loss(w, x):
        logits = x @ w
        value = F.cross_entropy(logits, torch.arange(len(x)))
        (signals,) = torch.autograd.grad(value, logits, retain_graph=True)
        return value + (signals.detach() * logits).sum()

    assert_eager_is_loop(loss, draw(3, 2000), (draw(2, 4, 3),))


def test_cross_entropy_mapped_within_a_sample():
    def loss(w, x):
        values = torch.func.vmap(lambda row, label: F.cross_entropy(row @ w, label))(x, torch.arange(len(x)))
        return (values * x[:, 0]).sum()

    assert_eager_is_loop(loss, draw(3, 5000), (draw(2, 4, 3),))


def test_cross_entropy_under_autocast_is_of_single_precision():
    def loss(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            value = F.cross_entropy(x @ w, torch.arange(len(x)))
        assert value.dtype == torch.float32
        return value

    assert_eager_is_loop(loss, draw(3, 2000, dtype=torch.float32), (draw(2, 4, 3, dtype=torch.float32),), rtol=5e-2)


LAYERS = {
    "LayerNorm": (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), (4, 6)),
    "GroupNorm": (nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8)), (1, 4, 6)),
    "BatchNorm": (nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8)).eval(), (1, 4, 6)),
    "InstanceNorm": (nn.Sequential(nn.Conv1d(4, 8, 3), nn.InstanceNorm1d(8, affine=True)), (1, 4, 6)),
    "GRUCell": (nn.GRUCell(6, 5), (4, 6)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (1, 4, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_under_autocast(name):
    module, shape = LAYERS[name]

    def loss(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x).float().sin().sum()

    assert_eager_is_loop(loss, module, (draw(2, *shape, dtype=torch.float32),), Norm(), 5e-2)
