"""Several losses with batches of several sizes, whose samples are rows of one result."""

from __future__ import annotations

import pytest
import torch
from grid import like_params, reals
from oracle import assert_trees_close, oracle
from torch import nn
from torch.func import functional_call, hessian

import persample as ps
from persample import ArgumentError, NaturalGradient, accumulate
from persample.streams.accumulation import check_losses

F64 = torch.float64
ENGINES = pytest.mark.parametrize(
    "options", [{}, {"chunk_size": 2}, {"engine": "loop"}, {"engine": "traced"}, {"engine": "auto"}], ids=str
)
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
PARAMS = {name: p.detach().clone() for name, p in MODEL.named_parameters()}


def u(params, x):
    return functional_call(MODEL, params, (x,))[0]


def interior(params, x):
    """Δu − 1, and the same as aux."""
    residual = hessian(u, argnums=1)(params, x).diagonal().sum() - 1
    return residual, residual


def boundary(params, x, value):
    return (residual := u(params, x) - value), residual


LOSSES = {"interior": interior, "boundary": boundary}


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


BATCH = {"interior": draw(7, 2), "boundary": (draw(3, 2, seed=1), draw(3, seed=2))}


def residual(aux):
    return aux


def alone(loss, batch):
    return oracle(lambda *sample: loss(*sample)[0], PARAMS, batch)


def rows_of(batch=BATCH):
    """The rows of each loss by the plain loop, and their losses."""
    found = [alone(LOSSES[name], x if isinstance(x, tuple) else (x,)) for name, x in batch.items()]
    return [reals(rows) for rows in found], [rows.losses for rows in found], found[0]


def solved(parts, targets, weights, damping, like):
    """A dense solve in the space of parameters: the losses are added up, then divided by the sum of the weights."""
    n = sum(w.sum() for w in weights)
    fisher = sum((g.T * w) @ g for g, w in zip(parts, weights, strict=True)) / n
    right = sum((w * v) @ g for g, v, w in zip(parts, targets, weights, strict=True)) / n
    return like_params(like, torch.linalg.solve(fisher + damping * torch.eye(len(fisher), dtype=F64), right))


def per_loss(parts):
    return [torch.full((len(g),), 1 / len(g), dtype=F64) for g in parts]


@ENGINES
@pytest.mark.parametrize("solver", ["gram", "qr"])
def test_one_system_has_the_rows_of_both_losses(options, solver):
    parts, targets, like = rows_of()
    wanted = NaturalGradient(0.1, residual, solver=solver)
    found = accumulate(LOSSES, PARAMS, [BATCH], wanted, **options)
    assert_trees_close(found, solved(parts, targets, per_loss(parts), 0.1, like), 1e-9)
    by_rows = NaturalGradient(0.1, torch.cat(targets), solver=solver)
    assert_trees_close(accumulate(LOSSES, PARAMS, [BATCH], by_rows, **options), found, 1e-12)


@ENGINES
def test_every_loss_counts_the_same(options):
    parts, targets, like = rows_of()
    wanted = {"mean": ps.Mean(), "sum": ps.Sum(), "norms": ps.Norm(), "losses": ps.Loss(), "gram": ps.Gram()}
    found = accumulate(LOSSES, PARAMS, [BATCH], wanted, **options)
    together = torch.cat(parts)
    assert_trees_close(found["sum"], like_params(like, sum(g.mean(0) for g in parts)), 1e-9)
    assert_trees_close(found["mean"], like_params(like, sum(g.mean(0) for g in parts) / 2), 1e-9)
    assert_trees_close(found["norms"], together.norm(dim=1), 1e-9)
    assert_trees_close(found["losses"], torch.cat(targets), 1e-9)
    assert_trees_close(found["gram"], together @ together.T, 1e-9)


@ENGINES
def test_weights_of_each_loss(options):
    parts, targets, like = rows_of()
    weights = {"interior": torch.tensor([1.0, 2, 0, 1, 3, 1, 1]), "boundary": torch.tensor([5.0, 0, 1])}
    expected = solved(parts, targets, [w.double() for w in weights.values()], 0.1, like)
    for given in ([weights], lambda batch: weights):
        found = accumulate(LOSSES, PARAMS, [BATCH], NaturalGradient(0.1, residual), weights=given, **options)
        assert_trees_close(found, expected, 1e-9)
    some = [{"interior": weights["interior"], "boundary": None}]
    expected = solved(parts, targets, [weights["interior"].double(), torch.ones(3, dtype=F64) / 3], 0.1, like)
    found = accumulate(LOSSES, PARAMS, [BATCH], NaturalGradient(0.1, residual), weights=some, **options)
    assert_trees_close(found, expected, 1e-9)


@ENGINES
def test_several_entries_and_empty_batches(options):
    x, (points, values) = BATCH["interior"], BATCH["boundary"]
    entries = [
        {"interior": x[:4], "boundary": (points, values)},
        {"boundary": (points[:0], values[:0]), "interior": x[4:]},  # in any order
    ]
    parts, targets, like = rows_of()
    first, second, third = parts[0][:4], parts[1], parts[0][4:]
    order = [first, second, third]
    values = [targets[0][:4], targets[1], targets[0][4:]]
    wanted = {"solution": NaturalGradient(0.1, residual), "norms": ps.Norm()}
    found = accumulate(LOSSES, PARAMS, entries, wanted, **options)
    assert_trees_close(found["solution"], solved(order, values, per_loss(order), 0.1, like), 1e-9)
    assert_trees_close(found["norms"], torch.cat(order).norm(dim=1), 1e-9)


def test_a_folder_is_resumed(tmp_path):
    entries = [BATCH, {"interior": BATCH["interior"] + 1, "boundary": BATCH["boundary"]}]
    wanted = {"norms": ps.Norm(), "mean": ps.Mean()}

    def source(stops):
        yield entries[0]
        if stops:
            raise OSError("the source has failed")
        yield entries[1]

    expected = accumulate(LOSSES, PARAMS, entries, wanted)
    with pytest.raises(OSError, match="the source has failed"):
        accumulate(LOSSES, PARAMS, source(True), wanted, sink=tmp_path / "run", resume=True)
    found = accumulate(LOSSES, PARAMS, source(False), wanted, sink=tmp_path / "run", resume=True)
    assert_trees_close(found, expected, 1e-12)


def test_one_loss_with_a_name_counts_as_one():
    rows = alone(boundary, BATCH["boundary"])
    found = accumulate({"only": boundary}, PARAMS, [{"only": BATCH["boundary"]}], ps.Sum())
    assert_trees_close(found, like_params(rows, reals(rows).mean(0)), 1e-9)


def test_a_pinn_learns_the_solution():
    """u'' = −sin on (0, π), 0 at both ends: u = sin."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def value(params, x):
        return functional_call(model, params, (x[None],))[0]

    def equation(params, x):
        residual = torch.func.grad(torch.func.grad(value, argnums=1), argnums=1)(params, x) + x.sin()
        return residual, residual

    def end(params, x):
        return (found := value(params, x)), found

    x, ends, previous = torch.linspace(0.1, 3.0, 30, dtype=F64), torch.tensor([0.0, torch.pi], dtype=F64), None
    for _ in range(60):
        wanted = NaturalGradient(1e-4, residual, previous=previous, momentum=0.3)
        batch = {"inside": x, "ends": ends}
        previous = accumulate({"inside": equation, "ends": end}, params, [batch], wanted)
        params = {name: p - previous[name] for name, p in params.items()}
    found = torch.stack([value(params, one) for one in x])
    assert (found - x.sin()).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("batches", "weights", "message"),
    [
        ([BATCH["interior"]], None, r"batches\[0\]: batches: expected a dict with the names .*received Tensor"),
        ([{"interior": BATCH["interior"]}], None, r"batches\[0\]: batches: .*received the names \['interior'\]"),
        ([BATCH], [torch.ones(7)], r"batches\[0\]: weights: expected a dict with the names .*received Tensor"),
        ([BATCH, BATCH | {"interior": torch.ones(2)}], None, r"batches\[1\]\['interior'\]"),
    ],
)
def test_no_batches_of_each_loss(batches, weights, message):
    with pytest.raises(Exception, match=message) as caught:
        accumulate(LOSSES, PARAMS, batches, ps.Mean(), weights=weights)
    assert isinstance(caught.value, ArgumentError) or "batches[1]['interior']" in str(caught.value)


def test_what_several_losses_do_not_support():
    with pytest.raises(ArgumentError, match=r"loss_fn: expected losses by name, received the names \[\]"):
        accumulate({}, PARAMS, [BATCH], ps.Mean())
    with pytest.raises(ArgumentError, match="unit: expected None for several losses, received 2"):
        accumulate(LOSSES, PARAMS, [BATCH], ps.Mean(), unit=2)
    with pytest.raises(ArgumentError, match="order: expected 'contiguous' for several losses"):
        check_losses(LOSSES, None, object(), "interleaved")
    check_losses(LOSSES, None, object(), "contiguous")
    with pytest.raises(ArgumentError, match=r"'boundary'.*loss_fn: expected a function, received int"):
        accumulate(LOSSES | {"boundary": 3}, PARAMS, [BATCH], ps.Mean())
