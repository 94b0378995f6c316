"""What a loss makes for all samples becomes one tensor for each, where it writes into it what differs between them."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close, oracle
from torch import nn

from persample import LossError, Norm, per_sample_grads

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
