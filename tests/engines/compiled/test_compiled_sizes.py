"""One compiled program for many sizes: results equal eager at every size, and compilations are counted."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from compiler import compilations, lowered, without_compiling
from grid import REDUCTIONS
from oracle import assert_trees_close, oracle
from seams import graphs_compared
from torch import nn

import persample as ps
from persample import per_sample_grads, stop_gradient
from persample.engines.compiled import clear_cache

F64 = torch.float64
SIZES = [2, 1000, 3, 5, 8, 26, 33, *random.Random(0).sample(range(40, 1000), 13)]  # small ones too
WANTED = {"update": ps.ClippedMean(0.5), "norms": ps.Norm()}


@pytest.fixture(autouse=True)
def _fresh():
    clear_cache()


@pytest.fixture
def _traced_only(monkeypatch):
    """Run the traced graph as it is: enough to compare numbers at many sizes, and Inductor takes seconds."""
    without_compiling(monkeypatch)


@pytest.fixture(scope="module")
def value():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def td(value, s_tm1, r_t, s_t):
    return (r_t + 0.9 * stop_gradient(value(s_t)) - value(s_tm1)).square().sum()


def agree(loss, params, batch, wanted=WANTED, **options):
    expected = per_sample_grads(loss, params, batch, wanted, **options)
    actual = per_sample_grads(loss, params, batch, wanted, engine="compiled", **options)
    assert_trees_close(actual, expected, 1e-9)


def test_twenty_batch_sizes(value):
    for size in SIZES:
        shapes = (size, 4), (size,), (size, 4)
        agree(td, value, tuple(torch.randn(*shape, dtype=F64) for shape in shapes))
    # torch 2.15 compiles products of two vectors of at most 32 numbers in another way.
    most = 2 if torch.__version__ < "2.15" else 3
    assert compilations() <= most
    for size in (1, 3, 1):  # one sample alone is another program
        agree(td, value, tuple(torch.randn(*shape, dtype=F64) for shape in ((size, 4), (size,), (size, 4))))
    assert compilations() <= most + 1


LOOPED = {  # by torch.func: once for each sample
    "index_add": lambda w, x, i: torch.zeros_like(x).index_add(0, i, x * w).sin().sum(),
    "cumprod": lambda w, x, i: (x * w).cumprod(0).sum(),
    "affine_grid": lambda w, x, i: torch.nn.functional.affine_grid(w * x.view(1, 2, 3), (1, 1, 2, 2)).sin().sum(),
}


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("loss", LOOPED.values(), ids=LOOPED)
def test_one_program_where_torch_loops_over_samples(loss):
    for size in (5, 3, 41, 7):  # odd: clipped to equal lengths, an even number of them may sum up to nothing
        batch = torch.randn(size, 6, dtype=F64), torch.randint(6, (size, 6))
        agree(loss, torch.tensor(0.7, dtype=F64), batch)
    assert compilations() == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.usefixtures("_traced_only")
def test_a_loop_over_samples_is_not_traced_for_a_thousand_of_them(monkeypatch):
    """Without a program for all sizes, each size has its own."""
    compared = graphs_compared(monkeypatch)
    for size in (5, 3):  # odd, as above
        agree(
            lambda w, x: nn.functional.multi_margin_loss(w * x, torch.tensor(2)).sin(),  # has no rule
            torch.tensor(0.7, dtype=F64),
            torch.randn(size, 6, dtype=F64),
            ps.Norm(),
        )
    assert compilations() == 2
    assert not compared


@pytest.mark.usefixtures("_traced_only")
def test_a_program_serves_sizes_whose_gradients_would_take_fresh_memory():
    weight = torch.randn(256, 256, dtype=F64)  # 0.5 MiB; from 33 samples on more than the allocator keeps
    for size in (16, 31, 34, 80, 20):
        agree(lambda w, x: (x @ w).tanh().sum(), weight, torch.randn(size, 3, 256, dtype=F64))
    assert compilations() <= 2


@pytest.mark.filterwarnings("ignore:.*compiles the same loss_fn for the 8th time:RuntimeWarning")
@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_pairs_of_batch_size_and_episode_length(count, value):
    def loss(value, obs_t, return_t, mask_t):
        return (mask_t * (value(obs_t).squeeze(-1) - return_t) ** 2).sum() / mask_t.sum()

    lengths = random.Random(1).sample(range(2, 60), count)
    for size, length in zip([3, 3, *sorted(SIZES)[: count - 2]], lengths, strict=True):  # the length alone, then both
        mask = torch.arange(length) < 1 + torch.arange(size)[:, None] % length
        batch = torch.randn(size, length, 4, dtype=F64), torch.randn(size, length, dtype=F64), mask
        agree(loss, value, batch)
    assert compilations() <= 1 + len(lengths)  # one for each length
    for size, length in zip(SIZES[: -count - 1 : -1], lengths, strict=True):
        mask = torch.ones(size, length, dtype=torch.bool)
        agree(loss, value, (torch.randn(size, length, 4, dtype=F64), torch.randn(size, length, dtype=F64), mask))
    assert compilations() <= 2 + len(lengths)


@pytest.mark.usefixtures("_traced_only")
def test_lengths_of_a_recurrent_layer_are_no_batch_sizes():
    """Else one would be traced with a thousand steps, and other batch sizes would have no program in common."""
    net = torch.nn.GRU(2, 3, batch_first=True).double()
    for size, length in ((3, 4), (3, 5), (4, 5), (5, 5), (7, 5)):
        agree(lambda net, x: net(x)[0].square().sum(), net, torch.randn(size, length, 2, dtype=F64), ps.Norm())
    assert compilations() <= 3


@pytest.mark.filterwarnings("ignore:.*compiles the same loss_fn for the 8th time:RuntimeWarning")
@pytest.mark.usefixtures("_traced_only")
def test_a_loss_that_branches_on_the_length():
    def loss(w, x):
        y = x @ w
        return y.sum() if len(x) > 5 else len(x) * y.square().sum()

    w = torch.randn(3, dtype=F64)
    for size, length in ((3, 4), (3, 5), (3, 9), (3, 6), (4, 7), (4, 4), (7, 5), (7, 12)):
        agree(loss, w, torch.randn(size, length, 3, dtype=F64), (ps.Sum(), ps.Norm()))


@pytest.mark.usefixtures("_traced_only")
def test_a_batch_size_that_equals_another_size():
    """A size that happens to be that of a parameter, or of the directions, must not be taken for it."""
    w = torch.randn(5, 3, dtype=F64)
    directions = torch.randn(6, 5, 3, dtype=F64)
    for size in (5, 3, 6, 15, 7):
        batch = torch.randn(size, 3, dtype=F64)
        agree(lambda w, x: (w @ x).square().sum(), w, batch, (ps.Dot(directions, stacked=True), ps.Mean(), ps.Gram()))
    assert compilations() <= 2


@pytest.mark.usefixtures("_traced_only")
def test_one_sample_does_not_spoil_the_others(value):
    for size in (4, 1, 5, 6, 9, 17, 40):
        agree(td, value, tuple(torch.randn(*shape, dtype=F64) for shape in ((size, 4), (size,), (size, 4))))
    assert compilations() <= 3


@pytest.mark.usefixtures("_traced_only")
def test_sizes_of_chunks(value):
    for size in (7, 8, 11):
        batch = tuple(torch.randn(*shape, dtype=F64) for shape in ((size, 4), (size,), (size, 4)))
        agree(td, value, batch, chunk_size=4)
    assert compilations() <= 3  # 4, then any size, then 1 never


EVERYTHING = {
    "mean": ps.ClippedMean(0.5),
    "norms": ps.Norm(per_param=True),
    "gram": ps.Gram(),
    "stack": ps.Stack(),
    "variance": ps.Variance(0),
    "losses": ps.Loss(),
    "aux": ps.Aux(),
}


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), (4,)),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)), (1, 6, 6)),
    "convolution in one dimension": (lambda: nn.Conv1d(1, 2, 2), (1, 3)),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), (5, 3)),
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), (5, 3)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (6, 8)),
}


def square_of_the_output(model, x):
    y = model(x[None])
    y = y[0] if isinstance(y, tuple) else y
    return y.square().sum(), {"y": y}


# The others are slow: recurrent layers take the longest to trace, and those of two sizes are above.
TRACED = {("mlp", "all"), ("cnn", "clipped"), ("convolution in one dimension", "all"), ("transformer", "clipped")}


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        pytest.param(*pair, marks=[] if pair in TRACED else [pytest.mark.slow])
        for pair in itertools.product(MODELS, ("clipped", "all"))
    ],
)
def test_many_batch_sizes_of_every_kind_of_model(name, reduction):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    wanted = EVERYTHING if reduction == "all" else ps.ClippedMean(0.5)
    sizes = random.Random(0).sample(range(16, 200), 6)  # torch picks other kernels for fewer than 16 images
    for size in sizes:
        agree(square_of_the_output, model, torch.randn(size, *shape, dtype=F64), wanted)
    assert compilations() <= 2


@pytest.mark.usefixtures("_traced_only")
def test_weights_and_few_images():
    conv = nn.Conv1d(1, 2, 2, dtype=F64)
    wanted = {name: reduction for name, reduction in EVERYTHING.items() if name != "stack"}
    for size in (5, 6, 20, 7):
        weights = torch.rand(size, dtype=F64)
        weights[0] = 0
        agree(square_of_the_output, conv, torch.randn(size, 1, 3, dtype=F64), wanted, weights=weights)
    assert compilations() <= 3


def test_padding_inside_of_the_loss(value):
    # torch's padding in Python writes into a slice, which Inductor rejects for sizes that vary.
    def loss(value, x):
        return nn.functional.pad(value(x), (1, 2)).cumsum(-1).square().sum()

    for size in (3, 6, 9):
        agree(loss, value, torch.randn(size, 3, 4, dtype=F64), ps.ClippedMean(0.5))
    assert compilations() == 2


def test_programs_hold_nothing_that_no_output_needs(value, monkeypatch):
    """Inductor would keep what a trace makes on the meta device."""
    graphs = lowered(monkeypatch)
    agree(td, value, (torch.randn(6, 4, dtype=F64), torch.randn(6, dtype=F64), torch.randn(6, 4, dtype=F64)))
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if node.op == "call_function" and not node.users]
    assert not [node for node in graph.graph.nodes if node.kwargs.get("device") == torch.device("meta")]


CONVOLUTIONS = {
    "one axis": (lambda: nn.Conv1d(2, 3, 3, padding=1, dilation=2), (2, 9)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (4, 7, 6)),
    "three axes": (lambda: nn.Conv3d(1, 2, 2), (1, 4, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "groups" else [pytest.mark.slow]) for name in CONVOLUTIONS]
)
def test_compiled_convolutions_take_any_number_of_images(name):
    """Inductor's lowering of the gradients of kernels would make their B times as many groups a constant."""
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    model = make().double()

    def loss(model, x):
        return model(x[None]).square().sum()

    for size in (20, 17, 33):
        images = torch.randn(size, *shape, dtype=F64)
        rows = oracle(loss, model, (images,))
        wanted = {name: REDUCTIONS[name][0](rows, F64) for name in ("Stack", "ClippedMean")}
        actual = per_sample_grads(loss, model, images, wanted, engine="compiled")
        assert_trees_close(actual, {name: REDUCTIONS[name][1](rows) for name in wanted}, 1e-9)
    assert compilations() == 2


def test_a_program_for_any_size_stores_gradients_as_one_for_the_first_size_does(monkeypatch):
    """At the size of tracing, they would take fresh memory."""
    graphs = lowered(monkeypatch)
    model = nn.Conv2d(64, 64, 3)
    for size in (20, 24):
        per_sample_grads(
            square_of_the_output, model, torch.randn(size, 64, 9, 9), ps.ClippedMean(0.5), engine="compiled"
        )
    static, of_any_size = ([str(node.target) for node in graph.graph.nodes] for graph in graphs)
    convolutions = {name for name in static if "convolution" in name}
    assert {name: static.count(name) for name in convolutions} == {
        name: of_any_size.count(name) for name in convolutions
    }
