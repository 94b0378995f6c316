"""What ``explain`` says, that it is what the engine does, and that plans weigh what they say."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.nn import functional as F

import persample as ps
from persample import ArgumentError, LossError, explain, per_sample_grads
from persample.factors import cost_model

B = 8
FASTER = "one product instead of two"
PARAMS = {
    "embed": torch.randn(60, 7),
    "w": torch.randn(7, 60),
    "kernel": torch.randn(5, 3, 3, 3),
    "bias": torch.randn(60),
    "masked": torch.randn(60, 50),
    "square": torch.randn(60, 50),
    "unused": torch.randn(40, 30),
    "tied": torch.randn(60, 9),
}
BATCH = (torch.randint(60, (B, 4)), torch.randn(B, 1, 3, 4, 4))


def loss(p, tokens, image):
    x = F.embedding(tokens, p["embed"]).mean(0)
    y = torch.tanh(x @ p["w"] + p["bias"])
    z = y @ (p["masked"] * torch.bernoulli(torch.full((60, 50), 0.5))) + y @ torch.tanh(p["square"])
    tied = torch.softmax(F.embedding(tokens, p["tied"])[0] @ p["tied"].T, 0).square().sum()
    return z.square().sum() + F.conv2d(image, p["kernel"]).square().sum() + tied


def table(reduce=None, **options):
    rows = explain(loss, PARAMS, BATCH, reduce, randomness="same", **options).rows
    return {row.path.removeprefix("params['").removesuffix("']"): row for row in rows}


def test_kinds_steps_and_choices():
    rows = table(ps.ClippedMean(1.0))
    assert {name: (row.factor, row.choice) for name, row in rows.items()} == {
        "embed": ("Embedding", "contract"),
        "w": ("Outer", "contract"),
        "kernel": ("Conv", "materialize"),
        "bias": ("Dense", "materialize"),
        "masked": ("Dense", "materialize"),
        "square": ("Dense", "materialize"),
        "unused": ("Dense", "materialize"),
        "tied": ("Outer + Embedding", "contract"),
    }
    assert {name: row.steps for name, row in rows.items() if row.choice == "contract"} == {
        "embed": 4,
        "w": 1,
        "tied": 5,
    }
    assert [rows[name].reason for name in ("embed", "w", "tied")] == [""] * 3
    assert rows["kernel"].reason == FASTER
    assert table(ps.Norm())["kernel"].choice == "contract"


def test_every_written_out_gradient_has_its_reason():
    reasons = {name: row.reason for name, row in table(ps.Norm()).items() if row.choice == "materialize"}
    assert reasons == {
        "bias": "elementwise, or a sum",
        "masked": "elementwise, or a sum",
        "square": "elementwise, or a sum",
        "unused": "the loss does not depend on it: zeros, stored once",
    }


def test_bytes():
    rows = table(ps.Norm())
    assert rows["w"].stored == 4 * B * (7 + 60)
    assert rows["w"].written == 4 * B * 7 * 60
    assert rows["bias"].stored == rows["bias"].written == 4 * B * 60


def test_a_stack_asks_for_the_gradients_themselves():
    rows = table()
    assert {row.choice for row in rows.values()} == {"materialize"}
    assert rows["w"].factor == "Outer"
    assert rows["w"].reason == "a reduction asks for the gradients themselves"


def test_what_it_says_is_what_the_engine_does():
    wanted = (ps.ClippedMean(1.0), ps.Factored())
    factors = per_sample_grads(loss, PARAMS, BATCH, wanted, randomness="same")[1]
    for name, row in table(wanted).items():
        kinds = {type(part).__name__ for part in getattr(factors[name], "parts", (factors[name],))}
        assert kinds == (set(row.factor.split(" + ")) if row.choice == "contract" else {"Dense"})


def test_small_gradients_of_long_samples_are_written_out_and_plain_sums_contracted():
    model, x = nn.Linear(6, 5), torch.randn(B, 100, 6)

    def square(m, x):
        return m(x).square().sum()

    (row, _) = explain(square, model, (x,), ps.ClippedMean(1.0)).rows
    assert (row.factor, row.steps, row.choice, row.reason) == (
        "Outer",
        100,
        "materialize",
        "no larger than its factors",
    )
    assert explain(square, model, (x,), ps.Mean()).rows[0].choice == "contract"


def test_prints_a_table():
    text = str(explain(loss, PARAMS, BATCH, ps.ClippedMean(1.0), randomness="same"))
    head, *lines = text.splitlines()
    names = "parameter shape factor T choice stored written out ms (estimated) reason"
    assert head.split() == names.split()
    assert len(lines) == len(PARAMS)
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")])
def test_sizes_in_words(count, text):
    from persample.explanation import _size

    assert _size(count) == text


def test_modules_are_left_as_they_are_and_frozen_parameters_are_not_in_the_table():
    model = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 7))
    model[0].requires_grad_(requires_grad=False)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    rows = explain(lambda m, x: m(x).sum(), model, (torch.randn(B, 9),), ps.Norm()).rows
    assert [row.path for row in rows] == ["params['1.weight']", "params['1.bias']"]
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])


def test_bad_input():
    with pytest.raises(ArgumentError, match="batch: expected at least one sample, received B = 0"):
        explain(loss, PARAMS, tuple(x[:0] for x in BATCH), ps.Norm())
    with pytest.raises(ArgumentError, match="randomness"):
        explain(loss, PARAMS, BATCH, ps.Norm(), randomness="perhaps")
    with pytest.raises(LossError, match="draws random numbers"):
        explain(loss, PARAMS, BATCH, ps.Norm())
    with pytest.raises(ArgumentError, match="reduce"):
        explain(loss, PARAMS, BATCH, "mean")


# The cost model


@pytest.mark.parametrize(
    ("ops", "num_terms", "written", "stored", "allowance", "reason"),
    [
        ("squared_norms weighted_sum", 2, 100, 100, 1.0, "no larger than its factors"),
        ("second_moment", 37, 1074 * 26, 37 * 1100, 1.0, ""),  # read once: converted in the cache
        ("squared_norms weighted_sum", 96, 512 * 128, 96 * 640, 2.0, FASTER),  # a little larger than the factor
        ("squared_norms weighted_sum", 96, 512 * 128, 96 * 640, 1.0, ""),
        ("squared_norms weighted_sum", 96, 3 * 96 * 640, 96 * 640, 2.0, ""),
        ("squared_norms weighted_sum", 96, 3 * 96 * 640, 96 * 640, math.inf, FASTER),
        ("squared_norms weighted_sum", 1, 1, 100, math.inf, ""),
        ("weighted_sum", 96, 1, 100, math.inf, ""),
        ("squared_norms", 96, 512 * 128, 96 * 640, math.inf, ""),
        ("squared_norms weighted_sum", 2, 4096 * 4096, 2 * 8192, math.inf, ""),  # inner products
        ("", 2, 1, 100, math.inf, ""),
        ("weighted_sum materialize", 1, 100, 1, 1.0, "a reduction asks for the gradients themselves"),
        ("weighted_sum second_moment", 200, 2**20 + 1, 2**20, 2.0, FASTER),
    ],
)
def test_reasons_to_write_gradients_out(ops, num_terms, written, stored, allowance, reason):
    plan = cost_model.Plan(frozenset(ops.split()), allowance)
    assert plan.reason_to_write_out(cost_model.Size(num_terms, written, stored)) == reason


@pytest.mark.parametrize(("written", "reason"), [(100, "no larger than its factors"), (101, "")])
def test_tables_are_written_out_only_where_that_takes_no_memory(written, reason):
    plan = cost_model.Plan(frozenset({"squared_norms", "weighted_sum"}), math.inf)
    assert plan.reason_to_write_out(cost_model.Size(7, written, 100), is_product=False) == reason


@pytest.mark.parametrize(
    ("memory", "needed", "budget"),
    [
        (None, 2**24, (math.inf, False)),
        (None, 2**28, (math.inf, True)),
        (None, 2**28 + 1, (2.0, True)),
        ("low", 0, (1.0, False)),
        (10, 10, (math.inf, False)),
        (10, 11, (1.0, False)),
    ],
)
def test_memory_bounds_what_is_written_out(memory, needed, budget):
    assert cost_model.budget(memory, needed) == cost_model.Budget(*budget)


def test_fresh_memory_costs_time():
    size, ops = cost_model.Size(50, 38 * 512 * 128, 38 * 50 * 640), frozenset({"squared_norms", "weighted_sum"})
    assert cost_model.Plan(ops, math.inf).reason_to_write_out(size) == FASTER
    plan = cost_model.Plan(ops, math.inf, in_fresh_memory=True)
    assert plan.reason_to_write_out(size) == ""
    assert plan.reason_to_write_out(size._replace(device="cuda")) == FASTER  # torch keeps the memory of GPUs
    with_patches = size._replace(operands=9 * size.stored)
    assert plan.estimate(with_patches) == cost_model.Plan(ops, math.inf).estimate(with_patches)


def test_inner_products_of_few_steps_beat_blocks():
    assert cost_model.inner_products_are_faster(cost_model.Size(2, 4096 * 4096, 2 * 8192))
    assert not cost_model.inner_products_are_faster(cost_model.Size(200, 64 * 64, 200 * 128))


def test_products_take_longer_in_float64_on_a_cpu_than_on_a_gpu():
    size = cost_model.Size(150, 107 * 477 * 681, 107 * 150 * (477 + 681))
    assert not cost_model.inner_products_are_faster(size)
    assert cost_model.inner_products_are_faster(size._replace(device="cuda"))


@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
def test_memory_changes_storage_and_not_results(engine):
    w, x = torch.randn(32, 32, dtype=torch.float64), torch.randn(B, 12, 32, dtype=torch.float64)
    found = {}
    for memory in (None, "low", 0, 2**20):
        rows = explain(lambda w, x: (x @ w).tanh().sum(), w, x, ps.ClippedMean(1.0), memory=memory).rows
        found[memory] = rows[0].choice
        assert rows[0].times.contract > rows[0].times.write_out > 0
    assert found == {None: "materialize", "low": "contract", 0: "contract", 2**20: "materialize"}
    results = [
        per_sample_grads(lambda w, x: (x @ w).tanh().sum(), w, x, ps.ClippedMean(1.0), memory=memory, engine=engine)
        for memory in (None, "low")
    ]
    assert_trees_close(*results, 1e-12)


@pytest.mark.parametrize("memory", [-1, 1.5, "high", True, [1]])
def test_memory_that_is_no_number_of_bytes(memory):
    with pytest.raises(ArgumentError, match="memory: expected bytes, 'low' or None, received"):
        per_sample_grads(loss, PARAMS, BATCH, memory=memory)


@pytest.mark.parametrize(
    "loss_fn",
    [lambda m, x: m(x).square().sum(), lambda m, x: (torch.einsum("oi,i->o", m.weight, x) + m.bias).tanh().sum()],
    ids=["layers", "vmap"],
)
def test_rows_are_what_the_engine_stores(loss_fn):
    model, x = nn.Linear(6, 5).double(), torch.randn(B, 6, dtype=torch.float64)
    factors = per_sample_grads(loss_fn, model, x, ps.Factored())
    for row, factor in zip(explain(loss_fn, model, x, ps.Factored()).rows, factors.values(), strict=True):
        assert (row.factor, row.shape, row.stored) == (type(factor).__name__, factor.shape, 8 * factor.stored)


def test_what_was_traced():
    ps.clear_cache()
    scale, w = 1.0, torch.randn(3)

    def loss(w, x):
        return (scale * w @ x).square()

    def call(size, reduce=None):
        per_sample_grads(loss, w, torch.ones(size, 3), reduce or ps.Mean(), engine="traced")

    def compiled():
        return explain(loss, w, torch.ones(4, 3), ps.Mean(), engine="traced")

    assert compiled().compilations == ()
    assert "0 programs" in str(compiled())
    for size in (4, 5, 6):
        call(size)
    call(4, (ps.Norm(), ps.Sum()))
    scale = 2.0
    call(6)
    found = compiled().compilations
    assert [(x.reductions, x.batch_size) for x in found] == [
        (("Mean",), 4),
        (("Mean",), None),
        (("Norm", "Sum"), None),
        (("Mean",), None),
    ]
    assert [x.reason for x in found[:3]] == ["", "batch size", ""]
    assert "scale" in found[3].reason
    assert all(x.seconds > 0 for x in found)
    assert "4 programs traced in" in str(compiled())
    assert "no graph breaks" in str(compiled())
    assert explain(loss, w, torch.ones(4, 3), ps.Mean()).compilations is None
    with pytest.raises(ArgumentError, match="engine: expected 'eager' or 'traced' or 'compiled', received 'loop'"):
        explain(loss, w, torch.ones(4, 3), engine="loop")
