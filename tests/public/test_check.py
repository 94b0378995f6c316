"""``check`` finds losses whose readings differ, with module or line, and is silent about losses that are right."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from persample import ArgumentError, check

torch.manual_seed(0)
B, D, A, T = 6, 5, 3, 4
X, Y, LABEL = torch.randn(B, D), torch.randn(B, 1), torch.randint(A, (B,))
R, ADV, SEQ = torch.randn(B), torch.randn(B), torch.randn(B, T, D)
SQUARE, IMAGE = torch.randn(B, D, D), torch.randn(B, 2, 8, 8)
TOKENS, SEEN = torch.randint(9, (B, T)), torch.arange(T) < torch.tensor([[1], [2], [4], [4], [3], [2]])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, A)

    def forward(self, x):
        return self.b(self.a(x).mean(1))


class Net(nn.Module):
    """Layers by name: what a line of the loss calls."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def mlp(out=1, **options):
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, out))


def cnn(norm):
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, A))


def cross_entropy(m, x, y):
    return F.cross_entropy(m(x), y)


def squared(m, x, y):
    return ((m(x) - y) ** 2).mean()


def masked_tokens(m, x, mask):  # a mean over the tokens of the batch
    return (m(x).squeeze(-1) ** 2 * mask).sum() / mask.sum()


def dqn(m, s, a, r, s_next):  # as in CleanRL
    with torch.no_grad():
        target = r + 0.9 * m(s_next).max(dim=1).values
    return F.mse_loss(m(s).gather(1, a[:, None]).squeeze(1), target)


def ppo(m, x, a, adv):
    log_p = m(x).log_softmax(-1)[torch.arange(len(x)), a]
    ratio = (log_p - log_p.detach() * 0.9).exp()
    return torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean() + 0.01 * (log_p.exp() * log_p).mean()


def episode(m, x, r):  # of one sample, as in the documentation
    return -(m(x).log_softmax(-1)[torch.arange(len(x)), 0] * r).sum()


def rnn(m, x, y):
    return F.cross_entropy(m.head(m.gru(x)[0][:, -1]), y)


def language(m, ids):
    logits = m.head(m.table(ids[:, :-1]))
    return F.cross_entropy(logits.reshape(-1, 9), ids[:, 1:].reshape(-1))


def regularized(m, x, y):
    return squared(m, x, y) + 0.1 * sum(p.square().sum() for p in m.parameters())


RIGHT = {
    "regression": (squared, mlp(), (X, Y)),
    "classification": (cross_entropy, mlp(A), (X, LABEL)),
    "images": (cross_entropy, cnn(nn.GroupNorm(2, 4)), (IMAGE, LABEL)),
    "batch norm in eval mode": (cross_entropy, cnn(nn.BatchNorm2d(4)).eval(), (IMAGE, LABEL)),
    "a sum": (lambda m, x, y: ((m(x) - y) ** 2).sum(), mlp(), (X, Y)),
    "a mean over tokens": (masked_tokens, nn.Linear(D, 1), (SEQ, SEEN)),
    "DQN": (dqn, mlp(A), (X, LABEL, R, X.flip(0))),
    "PPO": (ppo, mlp(A), (X, LABEL, ADV)),
    "an episode": (episode, mlp(A), (SEQ, torch.randn(B, T))),
    "a recurrent network": (rnn, Net(gru=nn.GRU(D, 6, batch_first=True), head=nn.Linear(6, A)), (SEQ, LABEL)),
    "a language model": (language, Net(table=nn.Embedding(9, 6), head=nn.Linear(6, 9)), (TOKENS,)),
    "weight decay": (regularized, mlp(), (X, Y)),
    "one sample, by an index": (lambda m, x, a: -m(x).log_softmax(-1)[a], mlp(A), (X, LABEL)),
    "one sample, a row": (lambda m, x, y: (m(x)[0] - y[0]) ** 2, mlp(), (X, Y)),
    "one sample, unsqueezed": (lambda m, x, y: F.cross_entropy(m(x[None]), y[None]), mlp(A), (X, LABEL)),
    "classes with weights": (
        lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 3.0])),
        mlp(A),
        (X, LABEL),
    ),
    "attention": (
        lambda m, x, y: F.cross_entropy(m.head(m.layer(x).mean(-2)), y),
        Net(layer=nn.TransformerEncoderLayer(D, 1, 8, 0.0, batch_first=True), head=nn.Linear(D, A)),
        (SEQ, LABEL),
    ),
    "dropout": (cross_entropy, nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.Linear(8, A)), (X, LABEL)),
    "layer norm": (cross_entropy, nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.Linear(8, A)), (X, LABEL)),
    "an outer product of axes": (lambda m, x: torch.bmm(m(x), m(x).mT).square().sum(), nn.Linear(D, D), (SQUARE,)),
}


class Standardized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 8), nn.Linear(8, A)

    def forward(self, x):
        h = self.a(x)
        return self.b((h - h.mean(0)) / (h.std(0, unbiased=False) + 1e-5))


class Attention(nn.Module):
    """Softmax over the axis of the queries, and not of the keys."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(0) @ x


def centred(m, x, a):
    return ((a - a.mean()) * m(x)[:, 0]).mean()


def contrastive(m, x):
    z = F.normalize(m(x), dim=-1)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)))


def broadcast(m, x, r):
    return ((m(x) - r) ** 2).mean()  # [B, 1] - [B]


def wrong_softmax(m, x, y):
    return -(m(x).softmax(0).log() * F.one_hot(y, A)).sum()


def wrong_maximum(m, s, a, r, s_next):
    target = r + 0.9 * m(s_next).max(dim=0).values.max().detach()
    return ((m(s).gather(-1, a[..., None]).squeeze(-1) - target) ** 2).mean()


def squeezed(m, x):
    return m.b(m.a(x.squeeze()).mean(1)).square().sum()


def flattened(m, x):
    return (m(x).reshape(-1).softmax(0) ** 2).sum()


def worst(m, x, y):
    return ((m(x) - y) ** 2).max()


def log_of_mean(m, x, y):
    return ((m(x) - y) ** 2).mean().sqrt()


def order(m, x):
    return torch.logsumexp(m(x).squeeze(-1), 0) - m(x).mean()


WRONG = {  # and what the finding names
    "a mean over axis 1": (cross_entropy, Pooled(), (SQUARE, LABEL), r"mean of Pooled, in forward \(.*mean\(1\)"),
    "group norm where C = H": (
        lambda m, x: m(x).square().sum(),
        nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.Tanh(), nn.Conv2d(6, 1, 3)),
        (IMAGE,),
        r"group_norm of '1' \(GroupNorm\)",
    ),
    "centred advantages": (centred, mlp(), (X, ADV), r"a - a.mean"),
    "contrastive": (contrastive, mlp(A), (X,), r"z @ z.T"),
    "broadcasting": (broadcast, mlp(), (X, R), r"m\(x\) - r"),
    "softmax over axis 0": (wrong_softmax, mlp(A), (X, LABEL), r"softmax\(0\)"),
    "a maximum over axis 0": (wrong_maximum, mlp(A), (X, LABEL, R, X.flip(0)), r"max\(dim=0\)"),
    "standardized by the batch": (cross_entropy, Standardized(), (X, LABEL), r"of Standardized, in forward .*h.mean"),
    "batch norm": (cross_entropy, cnn(nn.BatchNorm2d(4)), (IMAGE, LABEL), r"'1' \(BatchNorm2d\) is in train mode"),
    "batch norm without running statistics": (
        cross_entropy,
        cnn(nn.BatchNorm2d(4, track_running_stats=False)),
        (IMAGE, LABEL),
        r"batch_norm of '1' \(BatchNorm2d\)",
    ),
    "squeezed": (squeezed, Pooled(), (SQUARE[:, None],), r"x.squeeze\(\)"),
    "flattened over samples": (flattened, mlp(A), (X,), r"reshape\(-1\).softmax\(0\)"),
    "the largest of the batch": (worst, mlp(), (X, Y), r"\.max\(\)"),
    "a root of the mean": (log_of_mean, mlp(), (X, Y), r"sqrt"),
    "attention over queries": (lambda m, x: m(x).square().sum(), Attention(), (SEQ,), r"softmax of Attention"),
    "time first": (
        lambda m, x: m(x)[0].square().mean(),
        nn.GRU(D, D),
        (SEQ,),
        r"gru of GRU",
    ),
    "a ranking": (order, mlp(), (X,), r"logsumexp"),
    "cosine similarity over samples": (
        lambda m, x: F.cosine_similarity(m(x), x, dim=0).sum(),
        nn.Linear(D, D),
        (X,),
        r"cosine_similarity",
    ),
    "norm of the batch": (lambda m, x: m(x).norm(), nn.Linear(D, D), (X,), r"norm"),
    "no gradient": (lambda m, x: m(x).square().sum() * 0, nn.Linear(D, D), (X,), r"of all 4 samples read are 0 or NaN"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_losses_that_are_right(name):
    loss, model, batch = RIGHT[name]
    found = check(loss, model, batch, engines=())
    assert found.ok, str(found)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_losses_are_found_with_module_or_line(name):
    loss, model, batch, place = WRONG[name]
    found = check(loss, model, batch, engines=())
    assert not found.ok

    assert any(re.search(place, line) for line in found.findings), str(found)


class WrongRule(torch.autograd.Function):
    """Twice its input, but for a rule for vmap that forgets it."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

    @staticmethod
    def vmap(info, in_dims, x):
        return 1 * x, in_dims[0]


def test_every_engine_is_compared_and_timed():
    found = check(squared, mlp(), (X, Y), engines=("loop", "eager", "traced"))
    assert found.ok
    assert [(run.engine, run.keep_batch_dim) for run in found.runs] == [
        (engine, keep) for keep in (False, True) for engine in ("loop", "eager", "traced")
    ]
    assert all(run.result == "as the loop" and run.first > 0 and run.later > 0 for run in found.runs)
    assert re.search(r"traced +True .* as the loop\n", repr(found))
    assert re.search(r"params\['0.weight'\] +\[8, 5\] +Outer", repr(found))


@pytest.mark.parametrize("offset", [0, 1e6])
def test_an_engine_with_another_result_is_found(offset):
    def loss(w, x):
        return WrongRule.apply(w * x).sum() + offset

    found = check(loss, torch.ones(D, dtype=torch.float64), X.double(), engines=("loop", "eager"))
    assert [run.result for run in found.runs] == ["as the loop", "differs from the loop"] * 2
    assert any("engine='eager', keep_batch_dim=True: differs from the loop" in line for line in found.findings)


def test_what_an_engine_refuses_is_a_row_of_the_table():
    found = check(lambda w, x: (w * x).sum() * (2 if x.sum() > 0 else 1), torch.ones(D), X, engines=("eager", "loop"))
    assert re.search(r"eager .* reads values of a sample .*, in <lambda> \(.*engine='loop'", str(found))
    assert found.runs[1].result == "as the loop"


class LostError(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyError, LostError])
def test_what_the_loss_raises_is_part_of_the_result(kind):
    def loss(w, x):
        raise kind("lost")

    found = check(loss, torch.ones(D), X)
    assert re.search(r"keep_batch_dim=True fails: (Key|Lost)Error: '?lost'?, in loss \(.*raise kind", found.findings[1])
    assert not found.runs
    assert found.storage is None


def test_the_setting_that_is_meant_alone_counts():
    softmax = (wrong_softmax, mlp(A), (X, LABEL))
    of_one = check(*softmax, keep_batch_dim=False, engines=("loop",))
    assert of_one.ok
    assert [run.keep_batch_dim for run in of_one.runs] == [False]
    of_batches = check(*softmax, keep_batch_dim=True, engines=())
    assert "Samples influence each other" in of_batches.findings[0]
    fails = check(lambda m, x: m(x)[0] * x[1], mlp(), (X,), keep_batch_dim=True, engines=())
    assert "keep_batch_dim=True fails: IndexError" in fails.findings[0]


def test_dropout_random_numbers_and_weights_are_noted():
    loss, model, batch = RIGHT["dropout"]
    drops = check(loss, model, batch, engines=("loop", "eager"), randomness="different")
    assert drops.ok
    assert "Dropout is on ('1')" in drops.notes[0]
    assert {run.result for run in drops.runs} == {"random"}
    noisy = check(lambda w, x: (w * (x + torch.randn_like(x))).sum(), torch.ones(D), X, engines=())
    assert noisy.ok
    assert "draws random numbers: samples together are not compared" in noisy.notes[0]


def test_weights_are_noted_with_the_line_that_makes_them():
    def tested(m, x, mask):
        mask.bool().all()  # asked of all samples, as transformers does
        return masked_tokens(m, x, mask)

    found = check(tested, *RIGHT["a mean over tokens"][1:], engines=())
    said = r"count with weights 0\.0909, 0\.182, 0\.364, 0\.364, first at Tensor\.div, in masked_tokens"
    assert any(re.search(said, note) for note in found.notes), found


def test_weights_that_depend_on_the_batch_are_noted_with_their_line():
    def hardest(m, x, y):
        loss = (m(x) - y).square().squeeze(-1)
        return (loss * loss.detach().softmax(0)).sum()

    found = check(hardest, mlp(), (X, Y), engines=())
    assert found.ok
    assert any(re.search(r"count with weights .*first at Tensor.softmax, in hardest", note) for note in found.notes)


@pytest.mark.parametrize("kind", ["generator", "numpy", "state"])
def test_losses_that_give_other_numbers_each_time_are_noted(kind):
    generator, numbers, calls = torch.Generator(), np.random.default_rng(0), []

    def loss(w, x):
        if kind == "generator":
            return (w * (x + torch.randn(D, generator=generator))).sum()
        if kind == "numpy":
            return (w * x).sum() * float(numbers.random())
        calls.append(0)
        return (w * x).sum() * len(calls)

    found = check(loss, torch.ones(D), X, engines=("loop", "eager"), randomness="different")
    assert found.ok, str(found)
    assert any("Called twice with one sample, the loss gives other numbers" in note for note in found.notes)
    assert {run.result for run in found.runs} == {"random"}


def test_the_loop_runs_twice_for_each_setting():
    calls = []

    def loss(w, x):
        calls.append(0)
        return (w * x).square().sum()

    check(loss, torch.ones(D), X, engines=())
    readings, count = len(calls), 0
    calls.clear()
    check(loss, torch.ones(D), X, engines=("loop",))
    count = len(calls) - readings
    assert count == 2 * 2 * 4


def test_nothing_is_changed():
    model, before = cnn(nn.BatchNorm2d(4)), torch.get_rng_state()
    held = {name: x.clone() for name, x in model.state_dict().items()}
    check(cross_entropy, model, (IMAGE, LABEL))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, held[name]) for name, x in model.state_dict().items())


def test_parameters_of_each_sample_complex_ones_outputs_and_other_axes():
    w = torch.randn(D, B, dtype=torch.complex128)
    found = check(lambda w, x: (w * x).abs().square().sum(), w, X.double(), in_dims=(1, 0), engines=("loop", "eager"))
    assert found.ok
    assert len(found.runs) == 4
    rows = check(lambda m, x: m(x).reshape(-1), nn.Linear(D, A), X, outputs="rows", engines=("loop", "eager"))
    assert rows.ok
    assert {run.result for run in rows.runs} == {"as the loop"}


def test_each_output_is_compared():
    """A statistic of the batch in one of two outputs, which is 0 for each sample alone."""

    def loss(m, x, y, *, inside):
        scores = y - y.mean() * inside
        return torch.stack([(m(x)[:, 0] * scores).mean(), m(x).square().mean()])

    batch = X, torch.randn(len(X))
    for inside in (False, True):
        fn = functools.partial(loss, inside=inside)
        found = check(fn, nn.Linear(D, A), batch, keep_batch_dim=True, outputs="rows", engines=())
        assert found.ok is not inside, str(found)
    assert re.search(r"influence each other, first at .*in loss \(.*`scores = ", found.findings[0])


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_on_another_axis_than_the_one_that_the_loss_gets(axis):
    model = nn.ModuleDict({"rnn": nn.GRU(D, 4, batch_first=axis == 0), "head": nn.Linear(4, A)})

    def loss(m, x, y):
        return F.cross_entropy(m["head"](m["rnn"](x)[0].select(1 - axis, -1)), y)

    batch = torch.randn(*(5, 7)[:: 1 - 2 * axis], D), torch.randint(A, (5,))
    found = check(loss, model, batch, in_dims=(None, (axis, 0)), keep_batch_dim=True, engines=())
    assert found.ok is (axis == 0), str(found)


def test_targets_outside_of_the_batch():
    y = torch.randn(len(X))
    found = check(lambda m, x: (m(x)[:, 0] - y).square().mean(), nn.Linear(D, A), (X,), keep_batch_dim=True, engines=())
    assert re.search(r"several samples together fail: .*belongs to all samples", found.findings[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples: expected a positive int, received 0"),
        ({"engines": "loop"}, r"engines: expected names of engines, received 'loop'. Write engines=\('loop',\)"),
        ({"engines": ("lop",)}, "engine: expected .*received 'lop'"),
        ({"keep_batch_dim": "both"}, "keep_batch_dim: expected False, True or None, received 'both'"),
        ({"randomness": "all"}, "randomness: expected"),
    ],
)
def test_misuse(options, message):
    with pytest.raises(ArgumentError, match=message):
        check(squared, mlp(), (X, Y), **options)


def test_an_empty_batch():
    with pytest.raises(ArgumentError, match="batch: expected at least one sample, received B = 0"):
        check(squared, mlp(), (X[:0], Y[:0]))


def test_gradients_that_consist_of_rounding_errors_are_as_the_loop():
    """Softmax over keys does not depend on the bias of the keys."""
    model = Net(q=nn.Linear(D, D), k=nn.Linear(D, D))

    def attention(m, x):
        return ((m.q(x) @ m.k(x).mT).softmax(-1) @ x).square().sum()

    found = check(attention, model, SEQ, engines=("loop", "eager"))
    assert [run.result for run in found.runs] == ["as the loop"] * 4


def test_dropout_of_no_element_leaves_engines_comparable():
    model = nn.Sequential(nn.Linear(D, 4), nn.Dropout(0.0), nn.Linear(4, 1))
    found = check(lambda m, x: m(x).square().mean(), model, X, engines=("eager",))
    assert {run.result for run in found.runs} == {"as the loop"}
    assert not any("Dropout" in note for note in found.notes)


def test_a_sample_without_labels_is_a_mean_of_nothing():
    model, batch = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), (TOKENS, TOKENS.clone())
    batch[1][2] = -100
    loss = lambda m, ids, labels: F.cross_entropy(m(ids).flatten(0, 1), labels.flatten())
    (finding,) = check(loss, model, batch, keep_batch_dim=True, engines=()).findings
    assert re.search(r"loss or gradient of samples \[2\] is NaN or infinite, first at .*cross_entropy, in <", finding)


@pytest.mark.parametrize("seed", range(20))
def test_a_largest_sample_is_no_mean(seed):
    torch.manual_seed(seed)
    batch = torch.randn(B, D), torch.randn(B)
    found = check(lambda m, x, y: (m(x).squeeze(-1) - y).square().max(), mlp(), batch, keep_batch_dim=True, engines=())
    assert not found.ok


def test_losses_with_transforms_of_their_own():
    def loss(m, x):
        slopes = torch.func.vmap(torch.func.grad(lambda z: m(z).squeeze(-1)))(x)
        return slopes.square().sum(-1).mean()

    assert check(loss, mlp(), X, keep_batch_dim=True).ok
