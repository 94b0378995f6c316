"""Units of samples for tests: a small network with every kind of factor, and the plain loop over units."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A table, a convolution, a linear layer, a recurrent one, and a parameter used elementwise."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(9, 4), nn.Conv2d(2, 3, 2)
        self.linear, self.gru = nn.Linear(4, 3), nn.GRU(4, 3, batch_first=True)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, index, image):
        looked_up, seen = self.table(index), self.conv(image).mean((-1, -2))
        return self.linear(looked_up).sum(-2) * seen * self.scale + self.gru(looked_up)[0].sum(-2)


def loss(net, index, image):
    value = (net(index, image) ** 2).sum()
    return value, {"index": index}


def made(size=24):
    """Return the network and a batch."""
    torch.manual_seed(0)
    return Net().double(), (torch.randint(0, 9, (size, 4)), torch.randn(size, 2, 4, 4, dtype=torch.float64))


def flat(grads) -> Tensor:
    return torch.cat([x.flatten() for x in grads.values()])


def by_loop(net, batch, ids, weights=None, reduce="sum"):
    """Return the units in the order of their first samples, their gradients [U, P], losses [U], and which count [U]."""
    weights = torch.ones(len(ids)) if weights is None else weights
    order = list(dict.fromkeys(ids.tolist()))
    grads, losses = [], []
    for unit in order:
        rows = [i for i, other in enumerate(ids.tolist()) if other == unit and weights[i] != 0]
        total = sum(weights[i] for i in rows) if reduce == "mean" and rows else 1.0
        gradient, value = torch.zeros(sum(p.numel() for p in net.parameters())).double(), torch.zeros(()).double()
        for i in rows:
            one, _ = loss(net, *(x[i] for x in batch))
            own = torch.autograd.grad(one, list(net.parameters()))
            gradient += torch.cat([x.flatten() for x in own]) * weights[i] / total
            value += one.detach() * weights[i] / total
        grads.append(gradient)
        losses.append(value)
    counts = torch.tensor([any(weights[i] != 0 for i in range(len(ids)) if ids[i] == unit) for unit in order])
    return order, torch.stack(grads), torch.stack(losses), counts.double()


def close(found, expected):
    """Assert equality to 1e-9 of the largest number."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()
