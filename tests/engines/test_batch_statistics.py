"""A loss written for batches, under ``keep_batch_dim``: the statistic that leaves no gradient is named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import persample as ps
from persample import BatchStatisticsWarning, per_sample_grads

REDUCTIONS = {
    "Stack": None,
    "Norm": ps.Norm(),
    "Norm, each": ps.Norm(per_param=True),
    "Sum": ps.Sum(),
    "Mean": ps.Mean(),
    "ClippedMean": ps.ClippedMean(1.0),
    "Gram": ps.Gram(),
    "Cosine": ps.CosineSimilarity(),
    "SecondMoment": ps.SecondMoment(),
    "Variance": ps.Variance(),
    "Project": ps.Project(4, 0),
    "with losses": {"loss": ps.Loss(), "norms": ps.Norm()},
}


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


X, A = draw(6, 4), draw(6)


def centred(m, x, a):
    return ((a - a.mean()) * m(x)[:, 0]).mean()


def whitened(m, x, a):
    scores = m(x).squeeze(-1)
    return -(scores * ((a - a.mean(0, keepdim=True)) / (a.std(0, unbiased=False, keepdim=True) + 1e-8))).mean()


def std_of_one(m, x, a):
    return ((a / a.std()) * m(x)[:, 0]).mean()


def var_mean_of_one(m, x, a):
    var, mean = torch.var_mean(a)
    return ((a - mean) / var.sqrt() * m(x)[:, 0]).sum()


def centred_outputs(m, x, a):
    y = m(x)
    return ((y - y.mean(dim=0)).square()).mean()


def batch_norm_by_hand(m, x, a):
    h = m[0](x)
    return (m[2]((h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()) - m[2].bias).square().mean()


def softmax_over_the_batch(m, x, a):
    return (torch.softmax(m(x)[:, 0], 0) * a).sum()


def info_nce(m, x, a):
    z = m(x)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)))


def info_nce_by_hand(m, x, a):
    logits = m(x) @ m(x + 1).T
    return (logits.logsumexp(1) - logits.diagonal()).mean()


def covariance(m, x, a):
    return torch.cov(torch.stack([m(x)[:, 0], a]))[0, 1]


def pairs(m, x, a):
    y = m(x)
    return torch.cdist(y, y).square().mean()


def ranking(m, x, a):
    y = m(x)[:, 0]
    return F.softplus(-(y[:, None] - y[None]) * (a[:, None] - a[None]).sign()).triu(1).sum()


def centred_inputs(m, x, a):
    """Its gradients cancel in every batch."""
    return (x - x.mean(0)).sum() * m[2].bias.square().sum()


def clipped_ratios(m, x, a):
    """The gradients of all samples are 0 for another reason, too."""
    advantages = (a - a.mean()) / (a.std(correction=0) + 1e-8)
    return (m(x)[:, 0].clamp(100, 101) * advantages).mean()


LOSSES = {
    centred: "Tensor.mean",
    centred_inputs: "Tensor.mean",
    clipped_ratios: "Tensor.mean",
    whitened: "Tensor.mean",
    std_of_one: "Tensor.std",
    var_mean_of_one: "var_mean",
    centred_outputs: "Tensor.mean",
    batch_norm_by_hand: "Tensor.mean",
    softmax_over_the_batch: "softmax",
    info_nce: "Tensor.(__matmul__|matmul)",
    info_nce_by_hand: "Tensor.(__matmul__|matmul)",
    covariance: "cov",
    pairs: "functional.cdist",
    ranking: "",
}


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize(("loss", "name"), LOSSES.items(), ids=[loss.__name__ for loss in LOSSES])
@pytest.mark.filterwarnings("ignore:(std|var|var_mean|cov)\\(\\):UserWarning")  # of torch: no degrees of freedom
def test_the_statistic_is_named(loss, name, engine):
    with pytest.warns(
        BatchStatisticsWarning, match=rf"takes a statistic .*{name}, in {loss.__name__} \(.*: `.*`"
    ) as said:
        norms = per_sample_grads(loss, model(), (X, A), ps.Norm(), keep_batch_dim=True, engine=engine)
    assert not norms.nan_to_num().any()
    assert [w.filename for w in said if w.category is BatchStatisticsWarning] == [__file__]


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
def test_every_reduction_warns(reduce, chunk_size):
    with pytest.warns(BatchStatisticsWarning, match=r"Tensor.mean, in centred .*`return \(\(a - a.mean"):
        per_sample_grads(centred, model(), (X, A), reduce, keep_batch_dim=True, chunk_size=chunk_size)


@pytest.mark.parametrize("engine", ["traced", "compiled", "loop", "auto"])
def test_every_engine_warns(engine):
    wanted = {"loss": ps.Loss(), "mean": ps.ClippedMean(1.0), "gram": ps.Gram()}
    with pytest.warns(BatchStatisticsWarning, match=r"Tensor.mean, in centred .*`return \(\(a - a.mean"):
        per_sample_grads(centred, model(), (X, A), wanted, keep_batch_dim=True, engine=engine)


def test_options_that_change_the_way():
    for options in (
        {"differentiable": True},
        {"weights": torch.ones(6)},
        {"out": torch.empty(6)},
        {"randomness": "different"},
        {"in_dims": (None, (0, 0))},
    ):
        with pytest.warns(BatchStatisticsWarning):
            per_sample_grads(centred, model(), (X, A), ps.Norm(), keep_batch_dim=True, **options)
    with pytest.warns(BatchStatisticsWarning):
        per_sample_grads(centred, model(), (X.T, A), ps.Norm(), keep_batch_dim=True, in_dims=(None, (1, 0)))


def hinge(m, x, a):
    return F.relu(-1e3 - m(x)[:, 0]).mean() + 0 * a.mean()


def detached(m, x, a):
    return (m(x).detach() * a.mean()).mean() + 0 * m(x).sum()


def saturated(m, x, a):
    return torch.sigmoid(m(x) + 200).mean()


def converged(m, x, a):
    return F.cross_entropy(torch.cat([200 + m(x), -200 - m(x)], 1), torch.zeros(len(x), dtype=torch.long))


def not_a_number(m, x, a):
    return (m(x)[:, 0] * torch.log(-a.abs() - 1)).mean()


def masked(m, x, a):
    return (m(x)[:, 0] * (a > 100)).sum() / len(a)


def over_an_axis_of_its_own(m, x, a):
    y = m(x)  # [1, 1]: the mean over its one feature
    return ((y - y.mean(1, keepdim=True)) * a[:, None]).sum()


def logged(m, x, a):
    return F.relu(-1e3 - m(x)[:, 0]).sum(), {"mean": a.mean(), "spread": (a.amax() - a.amin()).sqrt()}


def mean_of_parameters(m, x, a):
    return (F.relu(-1e3 - m(x)[:, 0]) * (m[0].weight - m[0].weight.mean()).square().sum()).mean()


def mean_of_each_image(m, x, a):
    image = x[:, None, :2, None] * x[:, None, None, 2:]  # [1, 1, 2, 2]
    centred = image - image.mean((1, 2, 3), keepdim=True)
    return F.relu(m(centred.flatten(1)) - 1e3).mean()


def normalized_within(m, x, a):
    h = m[0](x)
    return (0 * m[2](F.layer_norm(h, h.shape[1:]))).mean()


def fits(m, x, a):
    return (m(x) - m(x).detach()).square().mean()


SILENT = [
    normalized_within,
    hinge,
    detached,
    saturated,
    converged,
    not_a_number,
    masked,
    over_an_axis_of_its_own,
    logged,
    mean_of_parameters,
    mean_of_each_image,
    fits,
]


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("loss", SILENT, ids=lambda loss: loss.__name__)
def test_gradients_that_vanish_for_other_reasons(loss, engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms = per_sample_grads(loss, model(), (X, A), ps.Norm(), keep_batch_dim=True, engine=engine)
    assert not norms.nan_to_num().any()


def test_gradients_that_do_not_vanish():
    """Equal gradients have no variance; a mean may cancel; one sample may have none."""

    def linear(w, x, a):
        return (w * (a - 0 * a.mean()) + 0 * x.sum()).mean()

    def one_of_them(w, x, a):
        return (w * a.clamp_min(0) * (1 + 0 * a.std(unbiased=False))).sum()

    w, a = torch.ones(()), torch.tensor([1.0, -1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert per_sample_grads(linear, w, (X[:2], a.abs()), ps.Variance(), keep_batch_dim=True) == 0
        assert per_sample_grads(linear, w, (X[:2], a), ps.Mean(), keep_batch_dim=True) == 0
        assert per_sample_grads(one_of_them, w, (X[:2], a), ps.Norm(), keep_batch_dim=True).tolist() == [1, 0]
        per_sample_grads(centred, model(), (X, A), ps.Loss(), keep_batch_dim=True)
        own = {"keep_batch_dim": True, "in_dims": (0, 0)}  # parameters of each sample
        assert not per_sample_grads(lambda w, a: (w * (a - a.mean())).sum(), torch.ones(6), A, **own).any()
        per_sample_grads(lambda m, x, a: (0 * m(x)).sum(), model(), (X[:1], A[:1]), keep_batch_dim=True)


def test_the_loss_and_the_random_stream_are_as_without_the_check():
    def noisy(m, x, a):
        return (F.dropout(m(x)[:, 0]) * (a - a.mean())).sum()

    streams = []
    for category in ("ignore", "always"):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter(category, BatchStatisticsWarning)
            if category == "ignore":
                per_sample_grads(noisy, model(), (X, A), ps.Norm(), keep_batch_dim=True, randomness="different")
            else:
                with pytest.warns(BatchStatisticsWarning):
                    per_sample_grads(noisy, model(), (X, A), ps.Norm(), keep_batch_dim=True, randomness="different")
        streams.append(torch.rand(3))
    torch.manual_seed(3)
    assert torch.equal(*streams)


@pytest.mark.parametrize("reduce", [ps.Norm(), ps.Mean(), None], ids=str)
def test_ordinary_calls_do_not_run_the_loss_again(reduce):
    calls = []

    def loss(m, x, a):
        calls.append(1)
        return (m(x)[:, 0] * a).mean()

    per_sample_grads(loss, model(), (X, A), reduce, keep_batch_dim=True)
    assert len(calls) == 1
