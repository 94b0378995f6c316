"""torch's default device and dtype, which results must not depend on."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import persample as ps

torch.manual_seed(0)
MODEL = nn.ModuleDict(
    {"table": nn.Embedding(7, 4), "gru": nn.GRU(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 3)}
)
BATCH = torch.randint(7, (5, 6)), torch.randint(3, (5, 6))
DIRECTION = {name: torch.ones_like(x) for name, x in MODEL.named_parameters()}
DAMPING, WEIGHTS = 0.1, [1.0, 2.0, 0.0, 1.0, 1.0]
REDUCTIONS = {
    "Sum": ps.Sum,
    "Mean": ps.Mean,
    "ClippedSum": lambda: ps.ClippedSum(0.5),
    "ClippedMean": lambda: ps.ClippedMean({"head": 0.5, "": 1.0}),
    "ClippedMean, each": lambda: ps.ClippedMean(0.3, per_param=True),
    "WeightedSum": lambda: ps.WeightedSum(lambda _norm: 1.0),
    "Norm": ps.Norm,
    "Stack": ps.Stack,
    "Loss": ps.Loss,
    "Aux": ps.Aux,
    "Gram": ps.Gram,
    "CosineSimilarity": ps.CosineSimilarity,
    "Dot": lambda: ps.Dot(DIRECTION),
    "Project": lambda: ps.Project(16, seed=0),
    "SecondMoment": ps.SecondMoment,
    "Variance": ps.Variance,
    "NoiseScale": ps.NoiseScale,
    "NaturalGradient": lambda: ps.NaturalGradient(DAMPING),
    "NaturalGradient, list": lambda: ps.NaturalGradient(DAMPING, targets=[1.0, 2.0, 3.0, 4.0, 5.0]),
    "NaturalGradient, number": lambda: ps.NaturalGradient(DAMPING, targets=lambda _aux: 1.0),
    "NaturalGradient, aux": lambda: ps.NaturalGradient(DAMPING, targets=lambda aux: aux),
    "Leverage": lambda: ps.Leverage(DAMPING),
}


def loss(model, tokens, target):
    out = model["norm"](model["gru"](model["table"](tokens))[0])
    value = F.cross_entropy(model["head"](out), target)
    return value, value.detach()


@pytest.fixture(params=["meta", torch.float64, torch.bfloat16], ids=str)
def changed(request):
    """Return a function that calls another one under another default, and restores the default."""

    def call(function):
        try:
            if request.param == "meta":
                torch.set_default_device("meta")
            else:
                torch.set_default_dtype(request.param)
            return function()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)

    return call


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, engine, changed):
    def call():
        return ps.per_sample_grads(loss, MODEL, BATCH, REDUCTIONS[name](), engine=engine, weights=WEIGHTS)

    torch.testing.assert_close(changed(call), call())


@pytest.mark.parametrize("name", ["Mean", "Project", "Variance", "NaturalGradient, list"])
def test_streams(name, changed):
    batches = [[x[part] for x in BATCH] for part in (slice(2), slice(2, 5))]

    def call():
        return ps.accumulate(loss, MODEL, batches, REDUCTIONS[name](), randomness="same")

    torch.testing.assert_close(changed(call), call())


def test_folders(changed, tmp_path):
    wanted = {"grads": ps.Stack(), "mean": ps.Mean(), "none": ps.Aux()}

    def call(folder):
        ps.accumulate(loss, MODEL, [BATCH], wanted, sink=tmp_path / folder)
        return {x.name: x.read_bytes() for x in (tmp_path / folder).iterdir() if x.suffix == ".npy"}

    assert changed(lambda: call("changed")) == call("default")


def test_packed_sequences(changed):
    gru, x = copy.deepcopy(MODEL["gru"]), torch.randn(3, 5, 2, 4)
    lengths = torch.tensor([5, 3])

    def call():
        def packed(model, x):
            out, _ = model(pack_padded_sequence(x, lengths))
            return nn.utils.rnn.pad_packed_sequence(out)[0].square().sum()

        return ps.per_sample_grads(packed, gru, x)

    torch.testing.assert_close(changed(call), call())
