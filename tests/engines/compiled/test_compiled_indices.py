"""Indices out of range: compiled code raises what the eager engine raises, and serves all that is in range."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from compiler import compilations, lowered, without_compiling
from oracle import assert_trees_close, oracle
from torch.nn import functional as F

import persample as ps
from persample import per_sample_grads
from persample.engines.compiled import clear_cache

F64 = torch.float64
B, T, V, D = 4, 3, 12, 5
P = torch.randn(V, D, dtype=F64, generator=torch.Generator().manual_seed(0))
X = torch.randn(B, D, dtype=F64, generator=torch.Generator().manual_seed(1))
I = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))  # noqa: E741
WANTED = {"sum": ps.Sum(), "norms": ps.Norm(), "rows": ps.Stack(), "clipped": ps.ClippedMean(0.5)}


@pytest.fixture(autouse=True)
def _fresh():
    clear_cache()


@pytest.fixture
def _traced_only(monkeypatch):
    """Run the traced graph as it is: enough to see what is noted, and Inductor takes seconds."""
    without_compiling(monkeypatch)


def zeros(*shape):
    return torch.zeros(*shape, dtype=F64)


def many_classes(p, x, i):
    return F.cross_entropy((p @ x).repeat(T, 400)[:, : 400 * V], i, reduction="sum")  # 14 400 logits


def unpooled(x, i):
    return F.max_unpool2d(x[:T, None, None], i[:, None, None], (3, 4))  # [T, 3, 4]


# Losses of (table, features, index), and the range of the index that each of them takes.
LOSSES = {
    "embedding": (lambda p, x, i: F.embedding(i, p).square().sum(), 0, V),
    "linear embedding": (lambda p, x, i: F.embedding(i, p).sum(), 0, V),  # whose lookup has no use but its check
    "int32 embedding": (lambda p, x, i: F.embedding(i.int(), p).square().sum(), 0, V),
    "embedding_bag": (lambda p, x, i: F.embedding_bag(i[None], p).square().sum(), 0, V),
    "p[i]": (lambda p, x, i: p[i].square().sum(), -V, V),
    "p[i] of a scalar": (lambda p, x, i: p[i[0]].square().sum(), -V, V),
    "p[:, i]": (lambda p, x, i: p.T[:, i].square().sum(), -V, V),
    "p[mask, i]": (lambda p, x, i: p.T[torch.arange(2)[:, None], i].square().sum(), -V, V),
    "index_select": (lambda p, x, i: p.index_select(0, i).square().sum(), 0, V),
    "gather": (lambda p, x, i: (p @ x).gather(0, i).square().sum(), 0, V),
    "take": (lambda p, x, i: (p @ x).take(i).square().sum(), -V, V),
    "scatter": (lambda p, x, i: zeros(V).scatter(0, i, (p @ x)[:T]).sum(), 0, V),
    "scatter_add": (lambda p, x, i: zeros(V).scatter_add(0, i, (p @ x)[:T]).square().sum(), 0, V),
    "index_add": (lambda p, x, i: zeros(V, D).index_add(0, i, p[:T] * x).square().sum(), 0, V),
    "index_copy": (lambda p, x, i: zeros(V, D).index_copy(0, i.sort()[0][-1:], p[:1] * x).square().sum(), 0, V),
    "index_put": (lambda p, x, i: zeros(V, D).index_put((i,), p[:T] * x, True).square().sum(), -V, V),
    "max_unpool2d": (lambda p, x, i: (unpooled(x, i) * p[:, 0].view(3, 4)).square().sum(), 0, V),
    "cross_entropy": (lambda p, x, i: F.cross_entropy((p @ x).expand(T, V), i), 0, V),
    "cross_entropy of many classes": (many_classes, 0, 400 * V),
    "nll_loss": (lambda p, x, i: F.nll_loss((p @ x).log_softmax(-1), i[0]), 0, V),
}


def raised(loss, index, wanted, engine, **options):
    with pytest.raises((IndexError, RuntimeError)) as caught:
        per_sample_grads(loss, P, (X, index), wanted, engine=engine, **options)
    return caught.type, str(caught.value)


def of_one_sample(value):
    index = I.clone()
    index[2] = value
    return index


# Each loss with one of the reductions in turn; with all of them in the slow tests.
PAIRS = [
    pytest.param(loss, wanted, marks=[] if (place - other) % len(WANTED) == 0 else [pytest.mark.slow])
    for place, loss in enumerate(LOSSES)
    for other, wanted in enumerate(WANTED)
]


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize(("name", "wanted"), PAIRS)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # take: torch.func has no batching rule
def test_out_of_range(name, wanted):
    (loss, low, high), wanted = LOSSES[name], WANTED[wanted]
    for bad in (low - 1, high):
        index = of_one_sample(bad)
        assert raised(loss, index, wanted, "compiled") == raised(loss, index, wanted, "eager")
    for inside in (I, of_one_sample(low), of_one_sample(high - 1)):
        expected = per_sample_grads(loss, P, (X, inside), wanted, engine="loop")
        assert_trees_close(per_sample_grads(loss, P, (X, inside), wanted, engine="compiled"), expected, 1e-10)
    assert compilations() == 1


@pytest.mark.parametrize(
    "name",
    ["linear embedding", "p[i]", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cross_entropy", "scatter_add"))],
)
def test_compiled_code(name):
    loss, low, high = LOSSES[name]
    for wanted in (ps.Sum(), WANTED):
        for bad in (low - 1, high, 10**12, -(10**12)):
            index = of_one_sample(bad)
            assert raised(loss, index, wanted, "compiled") == raised(loss, index, wanted, "eager")
            rows = oracle(loss, P, (X, of_one_sample(high - 1)))
            found = per_sample_grads(loss, P, (X, of_one_sample(high - 1)), wanted, engine="compiled")
            assert_trees_close(found["sum"] if wanted is WANTED else found, rows.grads[0].sum(0), 1e-10)
    assert compilations() == 2


def test_two_threads_raise_and_do_not_stop_the_process():
    code = """
        import torch, persample as ps
        from torch.nn import functional as F
        table, index = torch.randn(300, 64), torch.randint(0, 300, (256, 32))
        index[200, 3] = 300
        looked_up = lambda p, i: F.embedding(i, p).tanh().sum()
        indexed = lambda p, i: p[i].tanh().sum()
        for loss, wanted in ((looked_up, ps.Sum()), (indexed, ps.Stack())):
            try:
                ps.per_sample_grads(loss, table, index, wanted, engine="compiled")
            except IndexError:
                print("raised")
        """
    command, root = [sys.executable, "-c", textwrap.dedent(code)], Path(ps.__file__).parents[1]
    threads = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=root, env=threads, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["raised"] * 2, done.stderr[-2000:]


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize(
    ("ignored", "classes"), [*((ignored, V) for ignored in (-100, -1, 3, V, 10**9)), (-100, 400 * V)]
)
def test_ignore_index_is_no_index(ignored, classes):
    def loss(p, x, i):
        return F.cross_entropy((p @ x).repeat(T, classes // V), i, ignore_index=ignored, reduction="sum")

    index = I.clone()
    index[0, 1] = index[2, 0] = ignored
    expected = per_sample_grads(loss, P, (X, index), WANTED, engine="loop")
    assert_trees_close(per_sample_grads(loss, P, (X, index), WANTED, engine="compiled"), expected, 1e-9)
    assert compilations() == 1
    index[1, 1] = classes + 1
    assert raised(loss, index, ps.Norm(), "compiled") == raised(loss, index, ps.Norm(), "eager")


@pytest.mark.usefixtures("_traced_only")
def test_indices_that_all_samples_share():
    labels, rows = torch.tensor([1, -100, 3]), torch.tensor([0, -1, 2])

    def loss(p, x):
        return F.cross_entropy((p @ x).expand(T, V), labels) + (p[rows] @ x).square().sum()

    def images(p, x):
        log_p = (p * x).log_softmax(0)[None, :, :, None]  # [1, V classes, D, 1]
        return F.nll_loss(log_p, labels[:1].expand(1, D)[..., None])

    for each in (loss, images):
        labels[:] = torch.tensor([1, -100, 3])
        expected = per_sample_grads(each, P, X, ps.Norm(), engine="loop")
        assert_trees_close(per_sample_grads(each, P, X, ps.Norm(), engine="compiled"), expected, 1e-9)
        labels[0] = V
        for engine in ("eager", "compiled"):
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                per_sample_grads(each, P, X, ps.Norm(), engine=engine)


@pytest.mark.usefixtures("_traced_only")
def test_masks_and_numbers_are_left_alone():
    def loss(p, x):
        mask = torch.zeros(V, dtype=torch.bool)
        return p[..., -1].square().sum() + torch.where(mask, p @ x, 2 * (p @ x)).sum() + p[torch.arange(V - 1)].sum()

    expected = per_sample_grads(loss, P, X, WANTED, engine="loop")
    assert_trees_close(per_sample_grads(loss, P, X, WANTED, engine="compiled"), expected, 1e-10)


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [
        *((x, None) for x in ("embedding", "scatter_add", "cross_entropy")),
        ("p[i]", 4),
    ],
)
def test_sizes_share_a_program(name, chunk_size):
    loss, _, high = LOSSES[name]
    generator = torch.Generator().manual_seed(3)
    for size in (4, 9, 6):
        x = torch.randn(size, D, dtype=F64, generator=generator)
        index = torch.randint(0, V, (size, T), generator=generator)
        for last in (index[-1, -1].item(), high):
            index[-1, -1] = last
            options = {"chunk_size": chunk_size}
            if last < high:
                expected = per_sample_grads(loss, P, (x, index), WANTED, engine="loop")
                found = per_sample_grads(loss, P, (x, index), WANTED, engine="compiled", **options)
                assert_trees_close(found, expected, 1e-10)
            else:
                with pytest.raises((IndexError, RuntimeError)):
                    per_sample_grads(loss, P, (x, index), WANTED, engine="compiled", **options)
    assert compilations() <= (2 if chunk_size is None else 4)


def test_compiled_code_for_many_sizes():
    loss = LOSSES["embedding"][0]
    for size in (4, 9, 17, 33):
        x, index = X[:1].expand(size, D).contiguous(), I[:1].repeat(size, 1)
        expected = per_sample_grads(loss, P, (x, index), WANTED)
        assert_trees_close(per_sample_grads(loss, P, (x, index), WANTED, engine="compiled"), expected, 1e-10)
        index[-1, -1] = V
        with pytest.raises(IndexError):
            per_sample_grads(loss, P, (x, index), WANTED, engine="compiled")
    assert compilations() <= 2


WRITTEN = {
    "index_put": lambda p, x, i: zeros(V, D).index_put((i,), p[:T] * x, accumulate=True),
    "slice_scatter": lambda p, x, i: zeros(V, D).slice_scatter(p[:T] * x, 0, 2, 2 + T),
    "select_scatter": lambda p, x, i: zeros(V, D).select_scatter(p[1] * x, 0, 3),
    "diagonal_scatter": lambda p, x, i: zeros(D, D).diagonal_scatter(p[1] * x),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_zeros_that_samples_share_are_written_for_each(name):
    """Under vmap they are one row for all samples, and Inductor would write into that one."""

    def loss(p, x, i):
        return WRITTEN[name](p, x, i).square().sum()

    rows = oracle(loss, P, (X, I))
    result = per_sample_grads(loss, P, (X, I), {"sum": ps.Sum(), "rows": ps.Stack()}, engine="compiled")
    assert_trees_close(result, {"sum": rows.grads[0].sum(0), "rows": rows.grads[0]}, 1e-9)


def test_an_expanded_index_is_checked_once(monkeypatch):
    graphs = lowered(monkeypatch)
    loss = lambda p, x, i: p.gather(0, i[:, None].expand(-1, D)).square().sum()
    found = per_sample_grads(loss, P, (X, I), ps.Sum(), engine="compiled")
    assert_trees_close(found, oracle(loss, P, (X, I)).grads[0].sum(0), 1e-12)
    checks = [x for x in graphs[0].graph.nodes if x.target in {torch.ops.aten.lt.Scalar, torch.ops.aten.ge.Scalar}]
    assert checks
    assert all(x.meta["val"].numel() == B * T for x in checks)
