"""EKFAC influence, as docs/attribution.md spells it, has the scores of kronfluence, and TracIn those of dattri."""

from __future__ import annotations

import re

import pytest
import torch
from dattri.algorithm.tracin import TracInAttributor
from dattri.task import AttributionTask
from oracle import assert_trees_close
from paths import ROOT
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import persample as ps
from benchmarks.influence import kronfluence_scores

pytestmark = pytest.mark.filterwarnings("ignore:.torch.cuda.amp.GradScaler:FutureWarning")
V, T, D = 7, 6, 8


class Joined(nn.Module):
    """A layer whose bias is a column of its weight, as kronfluence sees one."""

    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([layer.weight, layer.bias[:, None]], 1).detach())

    def forward(self, x):
        return F.linear(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1), self.weight)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D))
        self.keys, self.mixed, self.up, self.down, self.head = (
            nn.Linear(*sizes) for sizes in ((D, 3 * D), (D, D), (D, 2 * D), (2 * D, D), (D, V))
        )
        self.norm = nn.LayerNorm(D)

    def forward(self, tokens):
        x = self.table(tokens) + self.places
        q, k, v = self.keys(self.norm(x)).chunk(3, -1)
        hidden = torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1)
        x = x + self.mixed(((q @ k.mT) / D**0.5 + hidden).softmax(-1) @ v)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def mlp(count):
    return (torch.randn(count, 5, dtype=torch.float64), torch.randint(3, (count,)))


def sequences(count):
    tokens = torch.randint(V, (count, T + 1))
    return tokens[:, :-1], tokens[:, 1:]


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), mlp),
    "transformer": (Transformer, sequences),
}


def of_the_page(function):
    """Return a function of the page."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/attribution.md").read_text(), re.DOTALL)
    (block,) = [block for block in code if f"def {function}(" in block]
    namespace = {name: getattr(ps, name) for name in ps.__all__} | {"torch": torch}
    exec(block.split("\n\n\n")[0], namespace)
    return namespace[function]


def summed(outputs, y):
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="sum")


def made(name):
    """Return a model of which only the linear layers are trained, and samples."""
    torch.manual_seed(0)
    model = MODELS[name][0]().double().requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.requires_grad_(True)
    return model, *map(MODELS[name][1], (60, 7))


def sample_loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.slow), "transformer"])
def test_ekfac_has_the_scores_of_kronfluence(name):
    """Equal where a bias is a column of its weight; apart, it has eigenvectors and damping of its own."""
    model, train, test = made(name)
    batches = list(zip(*(x.split(25) for x in train), strict=True))
    apart, joined = made(name)[0], made(name)[0]
    for path, layer in list(joined.named_modules()):
        if isinstance(layer, nn.Linear):
            joined.set_submodule(path, Joined(layer))
    ekfac = of_the_page("ekfac")
    scores = [ekfac(sample_loss, one, batches, test) for one in (joined, apart)]
    theirs = kronfluence_scores(model, summed, train, test, double=True)
    assert_trees_close(scores[0], theirs, 1e-9)
    assert torch.corrcoef(torch.stack([scores[1].flatten(), theirs.flatten()]))[0, 1] > 0.95


def test_tracin_has_the_scores_of_dattri():
    model, train, test = made("mlp")
    params = {name: p.detach().clone() for name, p in model.named_parameters()}  # dattri loads into the model
    checkpoints = [params, {name: 2 * p for name, p in params.items()}]

    def loss(p, x, y):
        return F.cross_entropy(torch.func.functional_call(model, p, x), y)

    loaders = [DataLoader(TensorDataset(*part), batch_size=10) for part in (train, test)]
    task = AttributionTask(lambda p, data: loss(p, *data), model, checkpoints)
    options = {"normalized_grad": False, "projector_kwargs": {"proj_type": "identity"}}
    theirs = TracInAttributor(task, torch.ones(2), **options).attribute(*loaders)
    assert_trees_close(of_the_page("tracin")(loss, checkpoints, [train], test), theirs, 1e-5)
