"""Norms of the terms of each parameter's gradient, against the gradients and inputs of layers of one sample alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from persample import ClippedMean, LossError, Norm, TermNorm, accumulate, per_sample_grads


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(7, 6, padding_idx=0), nn.Linear(6, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.convolution = nn.Conv1d(6, 6, 3, groups=2, padding=1)
        self.transposed = nn.ConvTranspose1d(6, 4, 3, stride=2)
        self.recurrent = nn.GRU(6, 5, batch_first=True)
        self.unused = nn.Linear(2, 2)
        self.norm.requires_grad_(False)

    def forward(self, tokens):
        x = self.table(tokens)
        x = self.norm(torch.tanh(self.linear(x)) + self.convolution(x.mT).mT)
        return self.head(x).log_softmax(-1), self.transposed(x.mT), self.recurrent(x)[0]


def loss(model, tokens, labels):
    log_p, images, states = model(tokens)
    return -log_p.gather(-1, labels[:, None]).sum() + images.square().sum() + states.sum()


def losses(model, tokens, labels):
    return torch.stack([loss(model, tokens, labels), model(tokens)[0].exp().square().sum()])


def make():
    torch.manual_seed(0)
    tokens, labels = torch.randint(7, (5, 4)), torch.randint(7, (5, 4))
    return Net().double(), (tokens, labels)


def of_layers(net, tokens, labels):
    """What hooks of plain autograd see of one sample: inputs and gradients of the outputs of each layer."""
    seen = {}

    def hook(name, module, inputs, output):
        output.retain_grad()
        seen[name] = inputs[0], output

    handles = [
        getattr(net, name).register_forward_hook(lambda m, i, o, name=name: hook(name, m, i, o))
        for name in ("table", "linear", "convolution", "transposed", "head")
    ]
    loss(net, tokens, labels).backward()
    for handle in handles:
        handle.remove()
    return {name: (inputs, output.grad) for name, (inputs, output) in seen.items()}


def expected_of(net, tokens, labels):
    seen = of_layers(net, tokens, labels)
    x, signal = seen["linear"]
    patches = F.pad(seen["convolution"][0], (1, 1)).unfold(1, 3, 1)  # [6, 4, 3]
    by_group = patches.unflatten(0, (2, 3)).square().sum((1, 3)) * seen["convolution"][1].unflatten(
        0, (2, 3)
    ).square().sum(1)
    inputs, images = seen["transposed"]
    strided = images.unfold(1, 3, 2).square().sum((0, 2)).sqrt()
    (_, rows), (hidden, logits) = seen["table"], seen["head"]
    rows = rows.masked_fill((tokens == 0)[:, None], 0)
    return {
        "table.weight": torch.cat([rows.norm(dim=1), logits.norm(dim=1) * hidden.norm(dim=1)]),
        "linear.weight": signal.norm(dim=1) * x.norm(dim=1),
        "linear.bias": signal.norm(dim=1),
        "convolution.weight": by_group.sum(0).sqrt(),
        "convolution.bias": seen["convolution"][1].norm(dim=0),
        "transposed.weight": inputs.norm(dim=0) * strided,
        "transposed.bias": images.norm(dim=0),
        "unused.weight": torch.zeros(0, dtype=torch.float64),
        "unused.bias": torch.zeros(0, dtype=torch.float64),
    }


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"engine": "traced"}, {"engine": "loop"}], ids=str)
def test_norms_are_those_of_hooks(options):
    net, batch = make()
    found, _ = per_sample_grads(loss, net, batch, (TermNorm(), ClippedMean(1.0)), **options)
    for i, sample in enumerate(zip(*batch, strict=True)):
        for name, expected in expected_of(net, *sample).items():
            torch.testing.assert_close(found[name][i], expected)
    assert found["recurrent.weight_hh_l0"].shape == found["recurrent.bias_hh_l0"].shape == (5, 4)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_norms_of_several_outputs(engine):
    net, batch = make()
    found = per_sample_grads(losses, net, batch, TermNorm(), outputs="rows", engine=engine)
    for place in range(2):
        alone = per_sample_grads(lambda *args, k=place: losses(*args)[k], net, batch, TermNorm())
        for name, norms in found.items():
            of_one = norms[:, place]
            kept = of_one[:, of_one.any(0)]  # the model is called twice: uses that the other output has are zero here
            torch.testing.assert_close(kept, alone[name][:, alone[name].any(0)])


def test_one_term_is_the_norm():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(6, 3)
    terms, norms = per_sample_grads(lambda net, x: net(x).sum(), net, x, (TermNorm(), Norm(per_param=True)))
    for name in norms:
        torch.testing.assert_close(terms[name].squeeze(1), norms[name])
        assert terms[name].dtype == torch.float32


def test_rows_stay_samples_with_units_and_in_streams():
    net, batch = make()
    expected = per_sample_grads(loss, net, batch, TermNorm())
    users = torch.tensor([0, 1, 0, 2, 2])
    parts = [tuple(x[rows] for x in batch) for rows in (slice(0, 3), slice(3, 5))]
    of_units = per_sample_grads(loss, net, batch, (TermNorm(), Norm()), unit=users)
    in_parts = per_sample_grads(loss, net, batch, (TermNorm(), Norm()), unit=users, chunk_size=1)
    assert of_units[1].shape == in_parts[1].shape == (3,)
    for found in (of_units[0], in_parts[0], accumulate(loss, net, parts, TermNorm())):
        for name, norms in expected.items():
            torch.testing.assert_close(found[name], norms)


def test_no_samples_have_no_terms():
    net, (tokens, labels) = make()
    found = per_sample_grads(loss, net, (tokens[:0], labels[:0]), TermNorm())
    assert {norms.shape for norms in found.values()} == {(0, 0)}


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_other_uses_are_refused_by_name(engine):
    net, batch = make()
    net.norm.requires_grad_(True)
    match = r"received other uses of params\['norm.weight'\], params\['norm.bias'\]: .* Freeze these"
    with pytest.raises(LossError, match=match):
        per_sample_grads(loss, net, batch, TermNorm(), engine=engine)
    w, x = torch.ones(2, 3), torch.ones(4, 2, 3)
    for of_two in (lambda w, x: F.linear(x, w).sum() + w.square().sum(), lambda w, x: (w * x).sum()):
        with pytest.raises(LossError, match=r"TermNorm\(\): expected parameters that layers alone use, .* of params"):
            per_sample_grads(of_two, w, x, TermNorm(), engine=engine)


def test_a_large_parameter_without_a_layer_is_refused_by_name():
    params = {"small": torch.ones(3), "large": torch.ones(1100, 1000)}
    with pytest.raises(LossError, match=r"other uses of params\['large'\]: the loss computes something of a large"):
        per_sample_grads(lambda p, x: (p["large"] * x).sum(), params, torch.ones(2), TermNorm())


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_no_positions_are_refused_as_such(engine):
    with pytest.raises(LossError, match=r"at one or more positions, received other uses of params\['weight'\]"):
        per_sample_grads(lambda net, x: net(x).sum(), nn.Linear(3, 2), torch.ones(2, 0, 3), TermNorm(), engine=engine)


def test_losses_without_layers_are_refused_with_the_reason():
    weight, x = torch.ones(2, 3, dtype=torch.complex64), torch.ones(2, 3, dtype=torch.complex64)
    with pytest.raises(LossError, match="expected a loss whose layers are recorded, received another: a parameter is"):
        per_sample_grads(lambda w, x: F.linear(x, w).abs().sum(), weight, x, TermNorm())


def test_unequal_numbers_of_terms_are_refused():
    def loss(net, x):
        return net(x[: 2 if x.sum() > 0 else 3]).sum()

    x = torch.ones(2, 4, 3) * torch.tensor([1.0, -1.0])[:, None, None]
    for options in ({}, {"unit": 2}, {"chunk_size": 1}):
        with pytest.raises(LossError, match=r"received shapes \[2\] and \[3\]\. .* use layers as often \(TermNorm"):
            per_sample_grads(loss, nn.Linear(3, 2), x, TermNorm(), engine="loop", **options)
