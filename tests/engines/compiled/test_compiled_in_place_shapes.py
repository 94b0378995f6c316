"""Losses that change the shape of a tensor in place: compiled with the numbers of the loop, or refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from persample import LossError, Stack, per_sample_grads


def transposed(w, x):
    y = torch.outer(x.sin()[:2], w[0] * x)
    y.t_()
    return (y.T.cumsum(0) * y[:, 0]).sum()


def a_view_of_it_afterwards(w, x):
    y = torch.outer(x.sin()[:1], w[0] * x)
    y.t_()
    return (y[0] * y).sum()


def a_view(w, x):
    y = torch.outer(x.sin()[:2], w[0] * x)
    z = y.T
    z.unsqueeze_(0)
    return (z.cumsum(1) * y.T).sum()


def written_before(w, x):
    y = torch.outer(x.sin()[:2], w[0] * x)
    y.mul_(2)
    y.transpose_(0, 1)
    return y.cumsum(0).sum()


def of_a_layer(w, x):
    y = F.linear(x[None], w, w[0])
    y.unsqueeze_(0)
    return (y[0].sin() * y).sum()


def a_matrix_that_becomes_a_vector(w, x):
    column = (w @ x)[:, None].clone()
    y = torch.linspace(0, 1, 10, dtype=x.dtype).view(2, 5) @ column
    column.squeeze_(1)
    return (y.sin() * column).sum()


def rows_that_become_one(w, x):
    rows = (w @ x)[:, None].clone()
    y = F.linear(rows, torch.linspace(0, 1, 2, dtype=x.dtype)[:, None], torch.ones(2, dtype=x.dtype))
    rows.t_()
    return (y.cumsum(0).sin().T @ rows.T).sum()


LOSSES = (
    transposed,
    a_view_of_it_afterwards,
    a_view,
    written_before,
    of_a_layer,
    a_matrix_that_becomes_a_vector,
    rows_that_become_one,
)


def a_view_before(w, x):
    y = torch.outer(x.sin()[:1], w[0] * x)
    a = y[0]
    y.t_()
    return a.sum() * y.sum()


def a_row_before(w, x):
    y = F.linear(x[None], w, w[0])
    z = y[0]
    y.unsqueeze_(0)
    return (z.sin() * y).sum()


REFUSED = {a_view_before: "t_", a_row_before: "unsqueeze_"}


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(5, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES)
def test_shapes_that_change(loss, data):
    expected, found = (per_sample_grads(loss, *data, Stack(), engine=engine) for engine in ("loop", "traced"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", REFUSED)
def test_a_shape_that_changes_after_a_view_was_taken_is_refused(loss, data):
    """torch replays the view with the new shape."""
    name = REFUSED[loss]
    for _ in range(2):
        with pytest.raises(
            LossError, match=f"{name} changes the shape of a tensor of which it has a view: use {name[:-1]} instead"
        ):
            per_sample_grads(loss, *data, engine="traced")
    expected, found = (per_sample_grads(loss, *data, Stack(), engine=engine) for engine in ("loop", "eager"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
