"""Losses for ``check``: it is silent about the right ones, and finds the wrong ones with their line."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from persample import check

torch.manual_seed(0)
B, D, A, T = 8, 5, 3, 8  # as many steps as samples
X, Y, LABEL, ADV = torch.randn(B, D), torch.randn(B), torch.randint(A, (B,)), torch.randn(B)
SEQ, IMAGE, SMALL = torch.randn(B, T, D), torch.randn(B, 3, 8, 8), torch.randn(B, 1, 8, 8)
IDS, MASK = torch.randint(9, (B, T)), torch.arange(T) < torch.randint(2, T + 1, (B, 1))
ACTIONS, REWARDS = torch.randint(A, (B, T)), torch.randn(B, T)


class Net(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def mlp(outputs=1):
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, outputs))


RIGHT, WRONG = {}, {}


def right(name, model, *batch):
    return lambda loss: RIGHT.setdefault(name, (loss, model, batch))


def wrong(name, model, *batch, place):
    return lambda loss: WRONG.setdefault(name, (loss, model, batch, place))


@right("label smoothing", mlp(A), X, LABEL)
def _(m, x, y):
    return F.cross_entropy(m(x), y, label_smoothing=0.1)


@right("focal", mlp(A), X, LABEL)
def _(m, x, y):
    ce = F.cross_entropy(m(x), y, reduction="none")
    p = (-ce).exp()
    return ((1 - p) ** 2 * ce).mean()


@right("masked LM with ignore", Net(e=nn.Embedding(9, 6), h=nn.Linear(6, 9)), IDS)
def _(m, ids):
    lab = ids.masked_fill(ids < 3, -100)
    return F.cross_entropy(m.h(m.e(ids)).transpose(1, 2), lab)


@right("masked mean per sequence", Net(h=nn.Linear(D, 1)), SEQ, MASK)
def _(m, x, mask):
    v = m.h(x).squeeze(-1) ** 2 * mask
    return (v.sum(-1) / mask.sum(-1)).mean()


@right("DPO", mlp(1), X, X.flip(0))
def _(m, a, b):
    return -F.logsigmoid(0.1 * (m(a) - m(b))).mean()


@right("VAE", Net(e=nn.Linear(D, 8), d=nn.Linear(4, D)), X)
def _(m, x):
    mu, lv = m.e(x).chunk(2, -1)
    z = mu + 0.3 * (lv / 2).exp()
    return (F.mse_loss(m.d(z), x, reduction="none").sum(-1) + 0.5 * (mu**2 + lv.exp() - lv - 1).sum(-1)).mean()


@right("cumsum over time", nn.Linear(D, 1), SEQ)
def _(m, x):
    return m(x).squeeze(-1).cumsum(1).square().mean()


@right("top-k over classes", mlp(A), X)
def _(m, x):
    return m(x).topk(2, -1).values.sum(-1).mean()


@right(
    "transformer causal",
    Net(l=nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), p=nn.Linear(D, 8), h=nn.Linear(8, A)),
    SEQ,
    LABEL,
)
def _(m, x, y):
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return F.cross_entropy(m.h(m.l(m.p(x), src_mask=mask)[:, -1]), y)


@right(
    "groupnorm unet",
    nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.ConvTranspose2d(4, 3, 2, stride=2)),
    IMAGE,
)
def _(m, x):
    return (m(x) - F.interpolate(x, scale_factor=2)).square().mean()


@right("lstm last state", Net(r=nn.LSTM(D, 6, batch_first=True), h=nn.Linear(6, A)), SEQ, LABEL)
def _(m, x, y):
    return F.cross_entropy(m.h(m.r(x)[1][0][-1]), y)


@right("quantile huber", mlp(A), X, Y)
def _(m, x, y):
    tau = torch.tensor([0.1, 0.5, 0.9])
    d = y[:, None] - m(x)
    return ((tau - (d < 0).float()).abs() * F.huber_loss(m(x), y[:, None].expand(-1, A), reduction="none")).mean()


@right("triplet own rows", mlp(A), X, X.flip(0), X.roll(1, 0))
def _(m, a, p, n):
    return F.triplet_margin_loss(m(a), m(p), m(n))


@right("one sample: masked softmax row", nn.Linear(D, 1), SEQ, MASK)
def _(m, x, mask):
    s = m(x).squeeze(-1).masked_fill(~mask, -1e9).softmax(-1)
    return -(s * torch.arange(s.shape[-1])).sum()


@right("one sample: 1-d conv unbatched", nn.Conv1d(D, 2, 3), SEQ.mT.contiguous())
def _(m, x):
    return m(x).square().sum()


@right("entropy bonus, mean over batch", mlp(A), X, LABEL, ADV)
def _(m, x, a, adv):
    d = torch.distributions.Categorical(logits=m(x))
    return -(d.log_prob(a) * adv).mean() - 0.01 * d.entropy().mean()


@right("spectral/weight norm", nn.utils.parametrizations.weight_norm(nn.Linear(D, 2)), X)
def _(m, x):
    return m(x).square().sum(-1).mean()


@right("instance norm", nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.ReLU()), IMAGE)
def _(m, x):
    return m(x).square().mean()


@right("BCE pos weight", mlp(1), X, (Y > 0).float())
def _(m, x, y):
    return F.binary_cross_entropy_with_logits(m(x).squeeze(-1), y, pos_weight=torch.tensor(2.0))


@wrong("advantages normalised", mlp(A), X, LABEL, ADV, place="adv")
def _(m, x, a, adv):
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    return -(m(x).log_softmax(-1).gather(1, a[:, None]).squeeze(1) * adv).mean()


@wrong("pairwise contrastive NT-Xent", mlp(A), X, X + 0.1 * torch.randn(B, D), place="@|mm|cat")
def _(m, a, b):
    z = F.normalize(torch.cat([m(a), m(b)]), dim=1)
    s = z @ z.T / 0.5
    n = len(a)
    s = s.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(s, torch.arange(2 * n).roll(n))


@wrong("hard mining: topk over batch", mlp(1), X, Y, place="topk|sort")
def _(m, x, y):
    error = (m(x).squeeze(-1) - y) ** 2
    return error.topk(max(1, len(error) // 2)).values.mean()


@wrong("target of position 0", mlp(A), X, LABEL, place=r"y\[0\]|y|expand|cross")
def _(m, x, y):
    return F.cross_entropy(m(x), y[:1].expand(len(x)))


@wrong("cumsum over axis 0", nn.Linear(D, 1), SEQ, place="cumsum")
def _(m, x):
    return m(x).squeeze(-1).cumsum(0).square().mean()


@wrong("flip over batch", mlp(A), X, place="flip")
def _(m, x):
    return (m(x) - m(x).flip(0)).square().mean()


@wrong("previous row (roll)", mlp(A), X, place="roll")
def _(m, x):
    return F.cosine_similarity(m(x), m(x).roll(1, 0)).mean()


@wrong("VICReg covariance", mlp(A), X, place="mean|T @|cov|mm")
def _(m, x):
    z = m(x)
    z = z - z.mean(0)
    c = z.T @ z / max(1, len(z) - 1)
    return (c - torch.diag(c.diagonal())).square().sum()


@wrong("normalize dim=0", mlp(A), X, LABEL, place="normalize")
def _(m, x, y):
    return F.cross_entropy(5 * F.normalize(m(x), dim=0), y)


@wrong("dot over the batch", mlp(1), X, Y, place="dot|@|norm")
def _(m, x, y):
    p = m(x).squeeze(-1)
    return -(p @ y) / (p.norm() * y.norm())


@wrong(
    "transformer encoder layer without batch_first",
    Net(l=nn.TransformerEncoderLayer(D, 1, 8, 0.0), h=nn.Linear(D, A)),
    SEQ,
    LABEL,
    place="attention|TransformerEncoderLayer|Multihead",
)
def _(m, x, y):
    return F.cross_entropy(m.h(m.l(x)[:, 0]), y)


@wrong("squeeze() of a batch of 1 then broadcasting", mlp(1), X, torch.randn(B, 1), place="squeeze|-")
def _(m, x, y):
    return (m(x).squeeze() - y).square().mean()


@wrong("layernorm over batch axis too", nn.Sequential(nn.Linear(D, 4)), X, place="layer_norm")
def _(m, x):
    z = m(x)
    return F.layer_norm(z, z.shape).pow(3).sum()


@wrong("max-normalised rewards", mlp(A), X, LABEL, ADV, place="max|adv")
def _(m, x, a, r):
    return -(m(x).log_softmax(-1).gather(1, a[:, None]).squeeze(1) * r / r.abs().max()).mean()


@wrong("quantile over the batch", mlp(1), X, Y, place="quantile|median")
def _(m, x, y):
    error = (m(x).squeeze(-1) - y).abs()
    return torch.where(error < error.detach().median(), error, 0 * error).mean()


@wrong("std loss of predictions", mlp(1), X, place="std")
def _(m, x):
    return m(x).std(0, unbiased=False).sum()


@wrong("flatten batch into LSTM time", Net(r=nn.GRU(D, 6), h=nn.Linear(6, 1)), X, place="gru|r\\b")
def _(m, x):
    return m.h(m.r(x)[0]).square().mean()


@right(
    "cnn avgpool",
    nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, A)),
    SMALL,
    LABEL,
)
def _(m, x, y):
    return F.cross_entropy(m(x), y)


@right("hinge margin", mlp(A), X, LABEL)
def _(m, x, y):
    return F.multi_margin_loss(m(x), y)


@right("gaussian nll", mlp(2), X, Y)
def _(m, x, y):
    mu, lv = m(x).chunk(2, -1)
    return F.gaussian_nll_loss(mu.squeeze(-1), y, lv.squeeze(-1).exp())


@right("gradient penalty in loss", mlp(1), X)
def _(m, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return ((g.norm(dim=-1) - 1) ** 2).mean()


@right("ema of own target", mlp(1), X, Y)
def _(m, x, y):
    with torch.no_grad():
        t = 0.9 * m(x).squeeze(-1) + 0.1 * y
    return F.smooth_l1_loss(m(x).squeeze(-1), t)


@right("SAC like with fixed eps", mlp(2), X, torch.randn(B, 1))
def _(m, x, e):
    mu, ls = m(x).chunk(2, -1)
    a = torch.tanh(mu + ls.clamp(-5, 2).exp() * e)
    lp = (-0.5 * e**2 - ls - torch.log(1 - a**2 + 1e-6)).sum(-1)
    return (0.2 * lp - a.squeeze(-1)).mean()


@right("embedding bag mean text", Net(e=nn.EmbeddingBag(9, 6), h=nn.Linear(6, A)), IDS, LABEL)
def _(m, x, y):
    return F.cross_entropy(m.h(m.e(x)), y)


@right("pinn", mlp(1), X)
def _(m, x):
    f = lambda z: m(z).squeeze(-1)
    g = torch.func.vmap(torch.func.grad(f))(x)
    return g.square().sum(-1).mean()


@right("REINFORCE per episode, one sample", mlp(A), SEQ, ACTIONS, REWARDS)
def _(m, x, a, r):
    G = r.flip(-1).cumsum(-1).flip(-1)
    lp = m(x).log_softmax(-1).gather(-1, a[..., None]).squeeze(-1)
    return -(lp * G).sum()


@right(
    "conv transpose autoencoder sum",
    nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2, 2)),
    IMAGE,
)
def _(m, x):
    return F.mse_loss(m(x), x, reduction="sum")


@right("rmsnorm residual", Net(a=nn.Linear(D, D), n=nn.RMSNorm(D)), X)
def _(m, x):
    return (x + m.a(m.n(x))).square().mean()


@right("positional embedding arange", Net(e=nn.Embedding(9, 6), p=nn.Embedding(T, 6), h=nn.Linear(6, 9)), IDS)
def _(m, i):
    h = m.e(i) + m.p(torch.arange(i.shape[1]))
    return F.cross_entropy(m.h(h).flatten(0, 1), i.flatten())


@wrong("GAE over the batch axis", mlp(1), X, ADV, place="flip|cumsum|zeros|stack|add|value|mul")
def _(m, x, r):
    v = m(x).squeeze(-1)
    d = (r[:-1] + 0.9 * v[1:] - v[:-1]) if len(r) > 1 else r - v
    return d.flip(0).cumsum(0).square().mean()


@wrong("diversity: logdet of gram", mlp(3), X, place="@|matmul")
def _(m, x):
    z = F.normalize(m(x), dim=-1)
    return -torch.logdet(z @ z.T + 0.1 * torch.eye(len(z)))


@wrong("attention across the batch", Net(a=nn.MultiheadAttention(D, 1), h=nn.Linear(D, A)), X, LABEL, place="attention")
def _(m, x, y):
    return F.cross_entropy(m.h(m.a(x, x, x)[0]), y)


@wrong("argmax over axis 0", mlp(A), X, place="argmax|max")
def _(m, x):
    z = m(x)
    return z.gather(0, z.argmax(0, keepdim=True)).sum()


@wrong("gini/entropy of the mean prediction", mlp(A), X, place="log|mean|mul")
def _(m, x):
    p = m(x).softmax(-1).mean(0)
    return (p * p.log()).sum()


@wrong("view(-1) mixing classes", mlp(A), X, torch.randn(B * 1, A), place="softmax")
def _(m, x, y):
    return F.kl_div(m(x).view(-1).log_softmax(0), y.view(-1).softmax(0), reduction="sum")


@wrong("batch minimum baseline", mlp(1), X, Y, place="min")
def _(m, x, y):
    error = (m(x).squeeze(-1) - y) ** 2
    return (error - error.min().detach()).clamp_min(0).sqrt().sum() if len(error) > 1 else error.sum().sqrt()


@wrong("sinkhorn over the batch", mlp(2), X, X.flip(0), place="cdist")
def _(m, a, b):
    C = torch.cdist(m(a), m(b))
    return (C * (-C).softmax(-1)).sum()


@wrong("pairwise hinge ranking", mlp(1), X, Y, place="sub|relu|r\\b|-")
def _(m, x, y):
    s = m(x).squeeze(-1)
    d = s[:, None] - s[None]
    return (F.relu(1 - d) * (y[:, None] > y[None])).sum() + s.square().sum()


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_losses_that_are_right(name):
    found = check(*RIGHT[name], engines=())
    assert found.ok, str(found)


@pytest.mark.filterwarnings("ignore:(std|var)\\(\\):UserWarning", "ignore:The use of `x.T`:UserWarning")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_losses_are_found_with_module_or_line(name):
    loss, model, batch, place = WRONG[name]
    found = check(loss, model, batch, engines=())
    assert any(re.search(rf"first at .*({place})", line) for line in found.findings), str(found)


def test_writes_into_the_batch():
    """Every engine refuses them; the next call would see other samples."""
    net, x = nn.Linear(3, 2), torch.randn(6, 3)
    found = check(lambda net, x: net(x.mul_(2)).square().sum(), net, x, engines=("loop", "eager"))
    assert not found.ok
    assert re.search(r"engine='loop'.*wrote in place into batch", str(found))


def test_weights_of_samples_without_loss():
    """Their gradients say nothing of their weights, which sum to 1."""

    def loss(w, x, m):
        return (F.relu((w * x).sum(-1)) * m).sum() / m.sum()

    x = torch.tensor([[1.0, 2, 3], [-1, -1, -1], [2, 1, 0], [1, 1, 1]])
    batch = x, torch.tensor([1.0, 2, 3, 4])
    assert check(loss, torch.ones(3), batch, engines=(), keep_batch_dim=True).ok


@pytest.mark.parametrize("seed", range(4))
def test_losses_under_autocast(seed):
    def loss(net, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
        return out.float().square().mean()

    torch.manual_seed(seed)
    net, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(6, 8)
    assert check(loss, net, x, engines=()).ok
    assert not check(lambda net, x: loss(net, x - x.mean(0)), net, x, engines=(), keep_batch_dim=True).ok
