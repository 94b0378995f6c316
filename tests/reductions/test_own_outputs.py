"""Inner products and cosines among a sample's own outputs, and traces over outputs, against gradients of the loop."""

import itertools

import pytest
import torch
from torch import nn

from persample import ArgumentError, CosineSimilarity, Factored, Gram, Stack, accumulate, per_sample_grads


class Net(nn.Module):
    """Linear layers, tied tables, grouped convolutions, norms, a matrix ``x @ w``, a 0-d and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(7, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.convolution = nn.Conv1d(6, 6, 3, groups=2, padding=1)
        self.scale, self.matrix = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(6, 4))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, tokens):
        x = self.table(tokens)
        x = self.norm(torch.tanh(self.linear(x)) + self.convolution(x.mT).mT)
        return self.head(x).log_softmax(-1) * self.scale, x @ self.matrix


def losses(model, tokens, labels):
    log_p, values = model(tokens)
    return torch.stack([-log_p.gather(-1, labels[:, None]).sum(), values.square().sum(), log_p.exp().square().sum()])


def mlp_losses(model, x):
    return model(x)


def mlp():
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return mlp_losses, net, torch.randn(6, 5, dtype=torch.float64)


def few_terms():
    net = nn.Linear(12, 14).double()
    return (
        lambda model, x: model(x).square().sum(0)[:3],
        net,
        torch.randn(4, 2, 12, dtype=torch.float64),
    )


def mixed():
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(7, (5, 4), generator=generator) for _ in range(2))
    return losses, Net().double(), (tokens, labels)


def lookups():
    def loss(table, tokens):
        rows = nn.functional.embedding(tokens, table)
        return torch.stack([rows.sum(), rows.square().sum()])

    return loss, torch.randn(5, 3, dtype=torch.float64), torch.tensor([[0, 1, 0], [2, 2, 2], [4, 3, 1]])


def oracle(case):
    loss, params, batch = case
    grads = per_sample_grads(loss, params, batch, Stack(), outputs="rows", engine="loop")
    leaves = grads.values() if isinstance(grads, dict) else [grads]
    return torch.cat([g.unsqueeze(-1).flatten(2) for g in leaves], 2)


def unit(x):
    norms = x.norm(dim=-1, keepdim=True)
    return torch.where(norms == 0, 0, x / norms)


EXPECTED = {
    "own": (Gram(rows="own"), lambda g: g @ g.mT),
    "trace": (Gram(rows="trace"), lambda g: g.flatten(1) @ g.flatten(1).T),
    "own cosines": (CosineSimilarity(rows="own"), lambda g: unit(g) @ unit(g).mT),
    "cosines of all": (CosineSimilarity(rows="trace"), lambda g: unit(g.flatten(1)) @ unit(g.flatten(1)).T),
}
CASES = {"mlp": mlp, "few terms": few_terms, "mixed": mixed, "lookups": lookups}


@pytest.mark.parametrize(
    ("engine", "chunk_size"), [("eager", None), ("eager", 2), ("traced", None), ("loop", None), ("loop", 2)]
)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_loop(case, chunk_size, engine):
    loss, params, batch = given = CASES[case]()
    grads = oracle(given)
    wanted = {name: reduction for name, (reduction, _) in EXPECTED.items()}
    found = per_sample_grads(loss, params, batch, wanted, outputs="rows", chunk_size=chunk_size, engine=engine)
    for name, (_, formula) in EXPECTED.items():
        torch.testing.assert_close(
            found[name], formula(grads), rtol=1e-9, atol=1e-9 * float(formula(grads).abs().max())
        )


def test_rows_of_another_batch_and_of_streams():
    loss, params, batch = given = mixed()
    grads, some = oracle(given), tuple(x[:2] for x in batch)
    other = per_sample_grads(loss, params, some, Factored(), outputs="rows")
    for kind, formula in ((Gram, lambda g: g), (CosineSimilarity, unit)):
        flat = formula(grads.flatten(1))
        found = per_sample_grads(loss, params, batch, kind(other, rows="trace"), outputs="rows")
        torch.testing.assert_close(found, flat @ flat[:2].T, rtol=1e-9, atol=1e-9)
    parts = [tuple(x[rows] for x in batch) for rows in (slice(0, 2), slice(2, 5))]
    found = accumulate(loss, params, parts, tuple(one for one, _ in EXPECTED.values()), outputs="rows")
    for one, (_, formula) in zip(found, EXPECTED.values(), strict=True):
        torch.testing.assert_close(one, formula(grads), rtol=1e-9, atol=1e-9)


def test_traces_of_two_losses_that_use_one_kernel_in_unlike_ways():
    """Channels of all outputs are rows of the kernel in a convolution, and columns in a transposed one."""
    kernel, x = torch.randn(4, 4, 3, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)

    def images(function, **settings):
        def loss(kernel, x):
            found = function(x, kernel, **settings)
            return torch.stack([found.sin().sum(), found.square().sum()])

        return loss

    convolve, transposed = nn.functional.conv1d, nn.functional.conv_transpose1d
    kinds = [images(convolve), images(convolve, stride=2), images(transposed)]
    for one, two in itertools.product(kinds, kinds):
        other = per_sample_grads(two, kernel, x[:2], Factored(), outputs="rows", memory="low")
        found = per_sample_grads(one, kernel, x, Gram(other, rows="trace"), outputs="rows", memory="low")
        expected = oracle((one, kernel, x)).flatten(1) @ oracle((two, kernel, x[:2])).flatten(1).T
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_metric_units_and_one_output():
    loss, params, x = given = mlp()
    metric = {name: torch.rand_like(p) + 0.5 for name, p in params.named_parameters()}
    scale = torch.cat([m.flatten() for m in metric.values()]).rsqrt()
    found = per_sample_grads(loss, params, x, Gram(rows="own", metric=metric), outputs="rows")
    scaled = oracle(given) * scale
    torch.testing.assert_close(found, scaled @ scaled.mT)
    pairs = per_sample_grads(loss, params, x, Gram(rows="own"), outputs="rows", unit=2)
    of_units = oracle(given).unflatten(0, (3, 2)).sum(1)
    torch.testing.assert_close(pairs, of_units @ of_units.mT)
    one = per_sample_grads(lambda net, x: net(x)[0], params, x, (Gram(rows="own"), Gram(rows="trace"), Gram()))
    torch.testing.assert_close(one[0], one[2].diagonal())
    torch.testing.assert_close(one[1], one[2])


@pytest.mark.parametrize("size", [0, 1])
def test_few_samples(size):
    loss, params, x = mlp()
    wanted = (Gram(rows="own"), Gram(rows="trace"))
    own, trace = per_sample_grads(loss, params, x[:size], wanted, outputs="rows")
    assert own.shape == (size, 3, 3)
    assert trace.shape == (size, size)


@pytest.mark.parametrize("power", [-30, 25])
def test_extreme_magnitudes_keep_their_digits(power):
    def loss(w, x):
        return torch.stack([w @ x, -(w @ x)]) * 10.0**power

    x = torch.tensor([[3.0, 4.0]])
    cosines = per_sample_grads(loss, torch.ones(2), x, CosineSimilarity(rows="own"), outputs="rows")
    torch.testing.assert_close(cosines, torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]]))


def test_rejected_rows():
    loss, params, x = mlp()
    with pytest.raises(ArgumentError, match="expected 'all', 'own' or 'trace', received 'diagonal'"):
        Gram(rows="diagonal")
    other = per_sample_grads(loss, params, x, Factored(), outputs="rows")
    with pytest.raises(ArgumentError, match="expected 'all' or 'trace' with other, received 'own'"):
        CosineSimilarity(other, rows="own")
    with pytest.raises(ArgumentError, match="gradients of one output, for rows='trace', received 3 outputs"):
        per_sample_grads(lambda net, x: net(x)[0], params, x, Gram(other, rows="trace"))
