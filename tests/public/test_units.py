"""Units of samples against the plain loop over units, in float64."""

import itertools

import pytest
import torch
from units import by_loop, close, flat, loss, made

from persample import (
    ArgumentError,
    Aux,
    ClippedMean,
    ClippedSum,
    CosineSimilarity,
    Dot,
    Factored,
    Gram,
    Leverage,
    Loss,
    Mean,
    NaturalGradient,
    NoiseScale,
    Norm,
    SecondMoment,
    Sum,
    UnitIds,
    Variance,
    explain,
    fisher_vector_product,
    per_sample_grads,
)

SIZES = [1, 2, 2, 3, 5, 11]
SHUFFLE = torch.randperm(24, generator=torch.Generator().manual_seed(1))
UNITS = {
    "number": (4, torch.arange(24) // 4),
    "consecutive": (torch.arange(24) // 4, torch.arange(24) // 4),
    "shuffled": ((torch.arange(24) // 4)[SHUFFLE], (torch.arange(24) // 4)[SHUFFLE]),
    "ragged": (ids := (torch.arange(6).repeat_interleave(torch.tensor(SIZES)) * 10 - 3)[SHUFFLE], ids),
    "one": (torch.zeros(24, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)),
    "each": (1, torch.arange(24)),
}


def expected_of(grads, losses, counts, bound):
    """Return what the reductions give, by formulas on the gradients of units."""
    norms, counted, n = grads.norm(dim=1), grads * counts[:, None], counts.sum()
    scale = torch.where(norms == 0, 1, (bound / norms).clamp(max=1)) * counts
    clipped, mean = (scale[:, None] * grads).sum(0), counted.sum(0) / n
    fisher = counted.T @ counted / n
    return {
        "stack": grads,
        "norm": norms,
        "clipped sum": clipped,
        "clipped mean": clipped / n,
        "sum": counted.sum(0),
        "mean": mean,
        "gram": grads @ grads.T,
        "loss": losses,
        "second": (counted**2).sum(0) / n,
        "natural": torch.linalg.solve(fisher + 0.3 * torch.eye(len(mean)).double(), mean),
        **({"variance": (counts[:, None] * (grads - mean) ** 2).sum(0) / (n - 1)} if n > 1 else {}),
    }


def wanted(bound, *, several):
    """Return reductions for units."""
    reductions = {
        "stack": None,
        "norm": Norm(),
        "clipped sum": ClippedSum(bound),
        "clipped mean": ClippedMean(bound),
        "sum": Sum(),
        "mean": Mean(),
        "gram": Gram(),
        "loss": Loss(),
        "second": SecondMoment(),
        "natural": NaturalGradient(0.3),
        "leverage": Leverage(0.3),
        "aux": Aux(),
        "cosine": CosineSimilarity(),
        "factored": Factored(),
    }
    return reductions | ({"variance": Variance(), "noise": NoiseScale()} if several else {})


def agree(found, expected):
    for name, one in expected.items():
        result = found[name]
        if isinstance(result, dict):
            result = torch.cat([x.flatten(1) for x in result.values()], 1) if name == "stack" else flat(result)
        close(result, one)


@pytest.mark.filterwarnings("ignore::persample.RecompilationWarning")  # of one loss with many sizes
@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize(
    ("engine", "weighted", "reduce"),
    [
        *itertools.product(["eager"], [False, True], ["sum", "mean"]),
        ("loop", False, "sum"),
        ("loop", True, "mean"),
        ("traced", True, "mean"),  # sums in test_stream_units.py
    ],
)
def test_reductions_speak_of_units(engine, kind, weighted, reduce):
    net, batch = made()
    unit, ids = UNITS[kind]
    weights = torch.rand(24, dtype=torch.float64) + 0.5
    weights[ids == ids[0]] = 0 if kind != "one" else 1
    weights[3] = 0
    weights = weights if weighted else None
    order, grads, losses, counts = by_loop(net, batch, ids, weights, reduce)
    bound = float(grads.norm(dim=1).median())
    expected = expected_of(grads, losses, counts, bound)
    reductions = wanted(bound, several=counts.sum() > 1)
    if not isinstance(unit, int):
        reductions["ids"] = UnitIds()
    for chunk_size in (None, 7, 3) if engine == "eager" else (7,) if weighted else (None,):
        options = {"unit": unit, "unit_reduce": reduce, "weights": weights, "chunk_size": chunk_size}
        found = per_sample_grads(loss, net, batch, reductions, engine=engine, **options)
        agree(found, expected)
        assert torch.equal(found["aux"]["index"], batch[0])  # rows of samples, in the order of the batch
        if "ids" in found:
            assert found["ids"].tolist() == order


def test_unit_whose_weights_are_0_is_removed_with_its_nan():
    net, (index, image) = made()
    image[4:8] = torch.nan
    weights = torch.ones(24)
    weights[4:8] = 0
    rest = torch.cat([torch.arange(4), torch.arange(8, 24)])
    for unit in (4, torch.arange(24) // 4):
        found = per_sample_grads(loss, net, (index, image), ClippedMean(1.0), weights=weights, unit=unit)
        expected = per_sample_grads(loss, net, (index[rest], image[rest]), ClippedMean(1.0), unit=4)
        close(flat(found), flat(expected))


def test_units_of_a_program_are_remembered():
    net, batch = made()
    ids = UNITS["shuffled"][1]
    first = per_sample_grads(loss, net, batch, ClippedMean(1.0), unit=ids, engine="traced")
    for unit in (ids, ids.numpy(), ids.tolist()):
        close(flat(per_sample_grads(loss, net, batch, ClippedMean(1.0), unit=unit, engine="traced")), flat(first))
    other = ids.flip(0)
    found = per_sample_grads(loss, net, batch, Norm(), unit=other, engine="traced")
    close(found, by_loop(net, batch, other)[1].norm(dim=1))


def test_units_of_a_compiled_program():
    w, x = {"a": torch.randn(4, 3).double(), "b": torch.randn(4).double()}, torch.randn(12, 3).double()
    ids = torch.arange(4).repeat(3)
    each = per_sample_grads(lambda w, x: w["b"] @ torch.tanh(w["a"] @ x), w, x)
    rows = torch.cat([each["a"].flatten(1), each["b"]], 1)
    grads = torch.stack([rows[ids == unit].sum(0) for unit in range(4)])
    wanted = {"norm": Norm(), "sum": ClippedSum(0.5)}
    for unit, batch in ((ids, x), (3, x[ids.argsort(stable=True)])):
        found = per_sample_grads(
            lambda w, x: w["b"] @ torch.tanh(w["a"] @ x), w, batch, wanted, unit=unit, engine="compiled"
        )
        norms = grads.norm(dim=1)
        close(found["norm"], norms)
        close(flat(found["sum"]), ((0.5 / norms).clamp(max=1)[:, None] * grads).sum(0))


def test_units_of_rows_of_outputs():
    x, w = torch.randn(6, 3).double(), torch.randn(2, 3).double()
    ids = torch.tensor([0, 1, 0, 2, 2, 2])
    found = per_sample_grads(
        lambda w, x: torch.tanh(w @ x), w, x, {"stack": None, "norm": Norm()}, outputs="rows", unit=ids
    )
    each = per_sample_grads(lambda w, x: torch.tanh(w @ x), w, x, outputs="rows")
    expected = torch.stack([each[ids == unit].sum(0) for unit in range(3)])
    close(found["stack"], expected)
    close(found["norm"], expected.flatten(2).norm(dim=2))


def test_units_have_derivatives():
    x, ids = torch.randn(6, 3).double(), [0, 1, 0, 2, 2, 2]
    w = torch.randn(3).double().requires_grad_()

    def penalty(w):
        return per_sample_grads(lambda w, x: torch.tanh(w @ x) ** 2, w, x, Norm(), unit=ids, differentiable=True).sum()

    assert torch.autograd.gradcheck(penalty, w)


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_parts_of_a_unit_draw_the_same_numbers(engine):
    def dropped(w, x):
        return (torch.nn.functional.dropout(w, 0.5) @ x - 1) ** 2

    w, x = torch.randn(3).double(), torch.randn(12, 3).double()
    found = []
    for chunk_size in (None, 2):
        torch.manual_seed(3)
        options = {"unit": 4, "chunk_size": chunk_size, "randomness": "same", "engine": engine}
        found.append(per_sample_grads(dropped, w, x, Sum(), **options))
    close(found[1], found[0])


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_units_in_half_precision(engine):
    half, options = torch.ones((), dtype=torch.float16), {"engine": engine, "unit_reduce": "mean"}
    losses = per_sample_grads(lambda w, x: w * x, half, torch.full((2,), 4e4).half(), Loss(), unit=2, **options)
    assert losses.tolist() == [40000]
    norm = per_sample_grads(
        lambda w, x: (w @ x).sum() * 6e-8, torch.zeros(4, 3).half(), torch.ones(6, 3).half(), Norm(), unit=6, **options
    )
    assert abs(float(norm) / 2.0648e-7 - 1) < 1e-3
    for chunk_size in (None, 1, 100):
        found = per_sample_grads(
            lambda w, x: w * x,
            half.bfloat16(),
            torch.ones(1024).bfloat16(),
            (Norm(), Sum()),
            unit=1024,
            chunk_size=chunk_size,
            engine=engine,
        )
        assert [float(x) for x in found] == [1024, 1024]


def test_ids_of_a_program_do_not_disturb_later_calls():
    def own(w, x, y):
        return (w @ x - y) ** 2

    w, x, y, ids = torch.randn(3), torch.randn(12, 3), torch.randn(12), torch.arange(12) // 3
    options = {"in_dims": (None, (0, 0)), "engine": "traced"}
    expected = per_sample_grads(own, w, (x, y), Norm(), unit=3)
    for unit in (ids, 3, ids.numpy(), 3, ids):
        torch.testing.assert_close(per_sample_grads(own, w, (x, y), Norm(), unit=unit, **options), expected)
    assert len(per_sample_grads(own, w, (x, y), Norm(), **options)) == 12


def test_units_under_transforms_of_the_caller():
    w, x, ids = torch.randn(3).double(), torch.randn(12, 3).double(), torch.arange(12) // 3

    def own(w, x):
        return (w @ x - 1) ** 2

    def total(w, unit):
        return per_sample_grads(own, w, x, Norm(), unit=unit).sum()

    close(torch.func.grad(total)(w, ids), torch.func.grad(total)(w, ids.tolist()))
    weights = torch.rand(4, 12).double()
    found = torch.func.vmap(lambda q: per_sample_grads(own, w, x, Norm(), unit=ids, weights=q))(weights)
    close(found, torch.stack([per_sample_grads(own, w, x, Norm(), unit=ids, weights=q) for q in weights]))


@pytest.mark.parametrize("engine", ["eager", "traced"])
def test_gram_of_few_terms_that_cancel(engine):
    w, x = torch.randn(40, 30).double(), torch.randn(12, 30).double()
    x[1::2] = -x[::2] + 1e-6 * x[1::2]
    each = per_sample_grads(lambda w, x: (w @ x).square().sum(), w, x).flatten(1)
    grads = each.unflatten(0, (6, 2)).sum(1)
    found = per_sample_grads(lambda w, x: (w @ x).square().sum(), w, x, Gram(), unit=2, engine=engine)
    close(found, grads @ grads.T)


def test_fisher_vector_product_of_units():
    net, batch = made()
    ids = UNITS["ragged"][1]
    v = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    _, grads, *_ = by_loop(net, batch, ids, reduce="mean")
    found = fisher_vector_product(loss, net, batch, v, unit=ids, unit_reduce="mean")
    close(flat(found), (grads @ flat(v)) @ grads / len(grads))
    dots = per_sample_grads(loss, net, batch, Dot(v), unit=ids, unit_reduce="mean")
    close(dots, grads @ flat(v))


def test_explain_says_how_units_are_stored():
    found = explain(lambda net, x: net(x).sum(), torch.nn.Linear(64, 64), torch.ones(8, 64), Norm(), unit=4)
    assert found.rows[0].steps == 4
    assert found.rows[0].written == 2 * 64 * 64 * 4


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_units_of_few_samples(size, engine):
    net, batch = made(size)
    for unit in (1, torch.zeros(size, dtype=torch.long)):
        found = per_sample_grads(loss, net, batch, {"norm": Norm(), "sum": Sum()}, unit=unit, engine=engine)
        assert found["norm"].shape == (size,)


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (5, "unit: expected a positive int that divides B = 24, received 5"),
        (0, "unit: expected a positive int that divides B = 24, received 0"),
        (True, "unit: expected an int, or one integer for each of 24 samples, received True"),
        (torch.zeros(23, dtype=torch.long), r"unit: expected .* received shape \[23\], int64"),
        (torch.zeros(24), r"unit: expected .* received shape \[24\], torch.float32"),
        (["a"] * 24, r"unit: expected .* numpy.unique\(names, return_inverse=True\)"),
    ],
)
def test_units_that_are_none(unit, message):
    net, batch = made()
    with pytest.raises(ArgumentError, match=message):
        per_sample_grads(loss, net, batch, Mean(), unit=unit)


def test_units_and_what_does_not_go_with_them():
    net, batch = made()
    with pytest.raises(ArgumentError, match="unit_reduce: expected 'sum' or 'mean', received 'max'"):
        per_sample_grads(loss, net, batch, Mean(), unit=4, unit_reduce="max")
    with pytest.raises(ArgumentError, match=r"weights: expected no negative weight, received -1 among them"):
        per_sample_grads(loss, net, batch, Sum(), unit=4, unit_reduce="mean", weights=-torch.ones(24))
    for unit, received in ((4, "the size of units"), (None, "none")):
        with pytest.raises(ArgumentError, match=rf"unit: expected ids \[B\] for UnitIds\(\), received {received}"):
            per_sample_grads(loss, net, batch, UnitIds(), unit=unit)
    targets = NaturalGradient(0.1, targets=lambda aux: aux["index"].sum())
    with pytest.raises(ArgumentError, match="targets: expected one number for each unit, as aux are of samples"):
        per_sample_grads(loss, net, batch, targets, unit=4)
    with pytest.raises(ArgumentError, match=r"Variance\(\): expected samples .* more than 1, received B = 1"):
        per_sample_grads(loss, net, batch, Variance(), unit=24)
