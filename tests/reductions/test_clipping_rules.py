"""Clipping rules, the sensitivity of clipped sums, and norms in another metric, against formulas."""

import math

import pytest
import torch
from compiler import compilations
from units import by_loop, close, flat, loss, made

from persample import (
    ArgumentError,
    ClippedMean,
    ClippedSum,
    CosineSimilarity,
    Factored,
    Gram,
    Mean,
    Norm,
    WeightedSum,
    clipping,
    per_sample_grads,
)
from persample.reductions import RankOne

ENGINES = ["eager", "traced"]
IDS = torch.tensor([0, 1, 2, 2, 3, 3, 3, 4] * 3)
RULES = {
    "automatic": (clipping.Automatic(2.0, gamma=0.5), lambda norm: 2 / (norm + 0.5)),
    "normalize": (clipping.Normalize(2.0), lambda norm: torch.where(norm == 0, 1, 2 / norm)),
    "adaptive": (clipping.PerSampleAdaptive(2.0, r=0.3), lambda norm: 2 / (norm + 0.3 / (norm + 0.3))),
    "tensor": (
        clipping.Normalize(torch.tensor(3.0, dtype=torch.float64)),
        lambda norm: torch.where(norm == 0, 1, 3 / norm),
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RULES)
def test_clipping_by_a_rule(engine, name):
    net, batch = made()
    rule, formula = RULES[name]
    _, grads, *_ = by_loop(net, batch, IDS)
    total = (formula(grads.norm(dim=1))[:, None] * grads).sum(0)
    wanted = {"sum": ClippedSum(rule), "mean": ClippedMean(rule), "weighted": WeightedSum(rule)}
    found = per_sample_grads(loss, net, batch, wanted, unit=IDS, engine=engine)
    close(flat(found["sum"]), total)
    close(flat(found["weighted"]), total)
    close(flat(found["mean"]), total / len(grads))


def by_groups(net, grads, formulas, *, per_param):
    """Return the sum of the gradients whose groups of parameters are scaled by formulas, by name."""
    total, start = torch.zeros(grads.shape[1]).double(), 0
    groups = {}
    for name, p in net.named_parameters():
        key = max((key for key in formulas if key in ("", name) or name.startswith(f"{key}.")), key=len)
        groups.setdefault(name if per_param else key, (key, []))[1].append(torch.arange(start, start + p.numel()))
        start += p.numel()
    for key, places in groups.values():
        index = torch.cat(places)
        total[index] = (formulas[key](grads[:, index].norm(dim=1))[:, None] * grads[:, index]).sum(0)
    return total


@pytest.mark.parametrize(("engine", "per_param"), [("eager", False), ("eager", True), ("traced", True)])
def test_clipping_by_rules_and_functions_by_name(engine, per_param):
    net, batch = made()
    _, grads, *_ = by_loop(net, batch, torch.arange(24))

    def damped(norm):
        return 1 / (1 + norm)

    automatic, normalize = RULES["automatic"], RULES["normalize"]
    cases = [
        (WeightedSum({"gru": damped, "": normalize[0]}, per_param), {"gru": damped, "": normalize[1]}),
        (WeightedSum(damped, per_param), {"": damped}),
        (WeightedSum({"gru": automatic[0], "": normalize[0]}, per_param), {"gru": automatic[1], "": normalize[1]}),
        (
            ClippedSum({"gru": automatic[0], "table": 0.5, "": normalize[0]}, per_param),
            {"gru": automatic[1], "table": lambda norm: (0.5 / norm).clamp(max=1), "": normalize[1]},
        ),
    ]
    for reduction, formulas in cases:
        for _ in range(2):
            found = flat(per_sample_grads(loss, net, batch, reduction, engine=engine))
            close(found, by_groups(net, grads, formulas, per_param=per_param))


def test_clipping_rules_keep_their_bounds_and_edges():
    norms = torch.cat([torch.zeros(1), torch.logspace(-12, 12, 50)]).double()
    for rule, _ in RULES.values():
        bound = float(rule.max_norm)
        assert (rule.scale(norms) * norms <= bound * (1 + 1e-12)).all()
    for kind in (clipping.Automatic, clipping.Normalize, clipping.PerSampleAdaptive):
        x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        assert per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, ClippedSum(kind(0.0))).tolist() == [0, 0]
        found = per_sample_grads(lambda w, x: w @ x, torch.ones(2), x[:1], ClippedSum(kind(1.0)))
        assert found.tolist() == [0, 0]
        for bad in (torch.inf, torch.nan):
            x = torch.tensor([[1.0, bad], [3.0, 4.0]])
            assert per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, ClippedSum(kind(1.0))).isnan().any()


def test_clipping_bounds_of_rules_change_without_a_new_program():
    def own(w, x):
        return (w @ x) ** 2

    x, w = torch.randn(5, 3).double(), torch.randn(3).double()
    before = compilations()
    for bound in (0.1, 0.2, 0.3):
        rule = clipping.Automatic(bound)
        expected = per_sample_grads(own, w, x, ClippedSum(rule))
        close(per_sample_grads(own, w, x, ClippedSum(rule), engine="traced"), expected)
    assert compilations() == before + 1


def test_rules_are_dataclasses():
    with pytest.raises(TypeError, match=r"Mine: expected a dataclass, received a class with __init__\. Declare fields"):

        class Mine(clipping.Rule):
            def __init__(self, max_norm):
                pass


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: clipping.Normalize(-1.0), "max_norm: expected a number >= 0, received -1.0"),
        (lambda: clipping.Normalize(math.inf), "max_norm: expected a finite number, received inf"),
        (lambda: clipping.Automatic(1.0, gamma=0.0), "gamma: expected a positive number, received 0.0"),
        (lambda: clipping.PerSampleAdaptive(1.0, r=-1.0), "r: expected a positive number, received -1.0"),
        (lambda: WeightedSum({1: clipping.Normalize(1.0)}), "weight_fn: expected names as keys, received 1"),
        (lambda: WeightedSum({"": 1.0}), "weight_fn.*: expected a function from one 0-d norm"),
        (lambda: clipping.next_bound(0.0, torch.ones(2)), "max_norm: expected a positive number, received 0.0"),
        (lambda: clipping.next_bound(1.0, torch.ones(2), rate=0.0), "rate: expected a positive number, received 0.0"),
        (lambda: clipping.next_bound(1.0, torch.ones(2), 2.0), "quantile: expected a number from 0 to 1, received 2.0"),
        (lambda: clipping.next_bound(1.0, torch.ones(0)), r"norms: expected norms \[B\], at least one, received shape"),
    ],
)
def test_clipping_rules_reject(made, message):
    with pytest.raises(ArgumentError, match=message):
        made()


def test_clipping_bound_moves_to_the_quantile_of_the_norms():
    norms, bound = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 7, 0.1
    for _ in range(300):
        bound = clipping.next_bound(bound, norms, 0.3)
    assert abs(bound - float(norms.quantile(0.3))) < 0.05


REDUCTIONS = {
    "sum": (ClippedSum(0.7), {}),
    "rule": (ClippedSum(clipping.PerSampleAdaptive(0.7)), {}),
    "weighted": (WeightedSum(clipping.Normalize(0.7)), {}),
    "names": (ClippedSum({"a": 0.3, "": clipping.Normalize(0.4)}), {}),
    "per_param": (ClippedSum(0.7, per_param=True), {"num_params": 2}),
    "per_param names": (ClippedSum({"a": 0.3, "": 0.4}, per_param=True), {"num_params": {"a": 1, "": 1}}),
    "metric": (ClippedSum(0.7, metric={"a": torch.tensor([4.0, 1.0]), "b": torch.tensor(9.0)}), {}),
    "mean": (ClippedMean(0.7), {"size": 6}),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_sensitivity_bounds_the_worst_pairs_of_batches_and_is_met(name, unit, adjacency):
    reduction, options = REDUCTIONS[name]
    if name == "mean" and adjacency == "add-remove":
        with pytest.raises(ArgumentError, match="adjacency: expected 'replace-one' for a mean"):
            reduction.sensitivity(adjacency, size=6)
        return
    bound = reduction.sensitivity(adjacency, **options)
    params = {"a": torch.zeros(2).double(), "b": torch.tensor(0.0).double()}

    def result(x):
        return flat(per_sample_grads(lambda p, x: p["a"] @ x[:2] + p["b"] * x[2], params, x, reduction, unit=unit))

    generator, worst = torch.Generator().manual_seed(0), 0.0
    directions = [torch.randn(3, generator=generator).double() for _ in range(20)]
    directions += [torch.tensor(d).double() for d in ([1e-9, 0, 1], [1, 0, 1], [1, 1, 0], [1, 0, 1e-9], [0, 0, 1])]
    for direction in directions:
        for size in (1e-3, 1e6):
            rest = torch.randn(5 * unit, 3, generator=generator).double()
            own = torch.cat([direction[None] * size, torch.zeros(unit - 1, 3).double()])
            other = torch.cat([rest, own])
            before = rest if adjacency == "add-remove" else torch.cat([rest, -own])
            worst = max(worst, float((result(other) - result(before)).norm()))
    assert worst <= bound * (1 + 1e-9)
    assert worst >= 0.95 * bound


@pytest.mark.parametrize(
    ("reduction", "options", "message"),
    [
        (Mean(), {}, "sensitivity: expected a clipped sum or mean, received Mean, which one unit may move"),
        (Norm(), {}, "sensitivity: expected a clipped sum or mean, received Norm"),
        (WeightedSum(torch.exp), {}, "sensitivity: expected a clipped sum or mean, received WeightedSum"),
        (ClippedSum(math.inf), {}, "max_norm: expected a bound on every gradient, received inf"),
        (ClippedSum(1.0), {"adjacency": "swap"}, "adjacency: expected 'add-remove' or 'replace-one', received 'swap'"),
        (ClippedMean(1.0), {"adjacency": "replace-one"}, "size: expected a positive int for a mean, received None"),
        (ClippedSum(1.0, per_param=True), {}, "num_params: expected the number of parameter tensors, received None"),
    ],
)
def test_sensitivity_refuses(reduction, options, message):
    with pytest.raises(ArgumentError, match=message):
        reduction.sensitivity(**options)


def metrics(net):
    """Return metrics of each form, with what they are written out."""
    torch.manual_seed(3)
    whole = {name: torch.rand_like(p) + 0.5 for name, p in net.named_parameters()}
    rows = {name: whole[name][(slice(None), *[slice(1)] * (p.ndim - 1))] for name, p in net.named_parameters()}
    columns = {name: whole[name][0] if p.ndim > 1 else whole[name] for name, p in net.named_parameters()}
    number = dict.fromkeys(whole, torch.tensor(2.0))
    rank_one = {
        name: RankOne(rows[name].flatten(), columns[name]) if p.ndim > 1 else rows[name]
        for name, p in net.named_parameters()
    }
    products = {name: rows[name] * columns[name] if p.ndim > 1 else rows[name] for name, p in net.named_parameters()}
    found = {"whole": whole, "rows": rows, "columns": columns, "number": number}
    return {name: (one, one) for name, one in found.items()} | {"rank one": (rank_one, products)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["whole", "rows", "columns", "number", "rank one"])
def test_clipping_and_norms_in_a_metric(engine, name):
    net, batch = made()
    metric, written = metrics(net)[name]
    d = torch.cat([written[key].expand(p.shape).flatten() for key, p in net.named_parameters()]).double()
    _, grads, *_ = by_loop(net, batch, IDS)
    scaled = grads / d.sqrt()
    norms = scaled.norm(dim=1)
    bound = float(norms.median())
    other = per_sample_grads(loss, net, batch, Factored())
    others = torch.cat([x.flatten(1) for x in per_sample_grads(loss, net, batch).values()], 1) / d.sqrt()
    wanted = {
        "norm": Norm(metric=metric),
        "gram": Gram(metric=metric),
        "other": Gram(other, metric=metric),
        "cosine": CosineSimilarity(metric=metric),
        "clipped": ClippedSum(bound, metric=metric),
        "plain": Norm(),
    }
    found = per_sample_grads(
        loss, net, batch, wanted, unit=IDS, engine=engine, chunk_size=10 if engine == "eager" else None
    )
    close(found["norm"], norms)
    close(found["gram"], scaled @ scaled.T)
    close(found["other"], scaled @ others.T)
    close(found["cosine"], (scaled @ scaled.T) / norms / norms[:, None])
    close(flat(found["clipped"]), ((bound / norms).clamp(max=1)[:, None] * grads).sum(0))
    close(found["plain"], grads.norm(dim=1))


def test_norm_in_a_metric_of_complex_parameters_and_rows_of_outputs():
    w, x = torch.randn(2, 3, dtype=torch.complex128), torch.randn(4, 3, dtype=torch.complex128)
    d = torch.rand(2, 3).double() + 0.5
    each = per_sample_grads(lambda w, x: torch.view_as_real(w @ x).flatten(), w, x, outputs="rows")
    found = per_sample_grads(lambda w, x: torch.view_as_real(w @ x).flatten(), w, x, Norm(metric=d), outputs="rows")
    close(found, torch.view_as_real(each / d.sqrt()).flatten(2).norm(dim=2))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"a": torch.ones(2)}, "metric: expected the structure"),
        ({"a": torch.ones(3), "b": torch.ones(())}, r"metric\['a'\]: expected a positive .* broadcasts to \[2\]"),
        ({"a": -torch.ones(2), "b": torch.ones(())}, r"metric\['a'\]: expected .*received -1 among its numbers"),
        ({"a": 1.0, "b": torch.ones(())}, r"metric\['a'\]: expected a positive real tensor .* received float"),
    ],
)
def test_metrics_that_are_none(metric, message):
    params = {"a": torch.ones(2), "b": torch.tensor(1.0)}
    with pytest.raises(ArgumentError, match=message):
        per_sample_grads(lambda p, x: p["a"] @ x + p["b"], params, torch.ones(3, 2), Norm(metric=metric))
