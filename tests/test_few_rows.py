"""Products of few rows with a large matrix, which compiled code computes in parts."""

from __future__ import annotations

import functools

import pytest
import torch
from traced import lowered

from persample import Norm, clear_cache, per_sample_grads
from persample._torch import decompositions
from persample.engines.compiled.few_rows import with_parts

aten = torch.ops.aten


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.fixture
def table():
    return with_parts({aten.mm.default: lambda *_: "whole", aten.addmm.default: lambda *_, **__: "whole"})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_parts_equal_the_whole(rows, transposed, table, two_threads):
    x, bias, drawn = torch.randn(rows, 400), torch.randn(600), torch.randn(600, 400)
    matrix = drawn.t() if transposed else drawn.t().contiguous()
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(table[aten.mm.default](x, matrix), x @ matrix)
    close(table[aten.mm.default](matrix.t(), x.t()), matrix.t() @ x.t())
    close(table[aten.addmm.default](bias, x, matrix), x @ matrix + bias)
    close(table[aten.addmm.default](torch.ones(rows, 600), x, matrix), x @ matrix + 1)


def test_parts_are_laid_out_as_the_whole(table, two_threads):
    """Columns in place of rows made Inductor share one row of memory among sixteen samples (torch 2.13)."""
    tokens, weight = torch.randn(2000, 128), torch.randn(128, 32)
    for w in (weight, weight.t().contiguous().t()):
        parts = table[aten.mm.default](tokens, w)
        torch.testing.assert_close(parts, tokens @ w)
        assert parts.stride() == (tokens @ w).stride()


SHAPES = {
    "rows": (33, 400, 600),
    "small": (4, 128, 256),
    "odd": (4, 400, 601),
    "flat": (4, 32, 8192),
    "narrow": (4, 8192, 64),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_others_stay_whole(shape, table, two_threads):
    rows, inner, columns = SHAPES[shape]
    x, matrix = torch.randn(rows, inner), torch.randn(inner, columns)
    assert table[aten.mm.default](x, matrix) == "whole"
    assert table[aten.addmm.default](torch.zeros(columns), x, matrix) == "whole"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_other_dtypes_stay_whole(dtype, table, two_threads):
    assert table[aten.mm.default](torch.ones(4, 400, dtype=dtype), torch.ones(400, 600, dtype=dtype)) == "whole"


def test_scaled_sums_and_one_thread_stay_whole(table, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x, matrix = torch.randn(4, 400), torch.randn(400, 600)
    assert table[aten.mm.default](x, matrix) == "whole"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert table[aten.addmm.default](torch.zeros(600), x, matrix, beta=2) == "whole"


def test_the_table_is_inductors_with_two_rules():
    given = decompositions()
    found = with_parts(given)
    assert found.keys() == given.keys()
    assert {key for key in given if found[key] is not given[key]} == {aten.mm.default, aten.addmm.default}


@pytest.mark.parametrize("threads", [1, 2])
def test_programs_have_parts(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    graphs = lowered(monkeypatch)
    w, x = torch.randn(600, 400), torch.randn(3, 400)
    loss = lambda w, x: torch.tanh(w @ x).square().sum()
    found = per_sample_grads(loss, w, x, Norm(), engine="compiled")
    torch.testing.assert_close(found, per_sample_grads(loss, w, x, Norm(), engine="eager"))
    assert any(node.target is aten.bmm.default for node in graphs[0].graph.nodes) == (threads == 2)
    clear_cache()
