"""Products of few rows with a large matrix, which compiled code computes in parts."""

from __future__ import annotations

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


def large(rows, columns, transposed):
    x = (
        torch.randn(columns, rows, dtype=torch.float64)
        if transposed
        else torch.randn(rows, columns, dtype=torch.float64)
    )
    return x.t() if transposed else x


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_parts_equal_the_whole(rows, transposed, table, two_threads):
    x, matrix, bias = (
        torch.randn(rows, 200, dtype=torch.float64),
        large(200, 400, transposed),
        torch.randn(400).double(),
    )
    close = torch.testing.assert_close
    close(table[aten.mm.default](x, matrix), x @ matrix)
    close(table[aten.mm.default](matrix.t(), x.t()), matrix.t() @ x.t())
    close(table[aten.addmm.default](bias, x, matrix), x @ matrix + bias)
    close(table[aten.addmm.default](torch.ones(rows, 400).double(), x, matrix), x @ matrix + 1)


@pytest.mark.parametrize("shape", [(33, 200, 400), (4, 20, 40), (4, 200, 401)], ids=["rows", "small", "odd"])
def test_others_stay_whole(shape, table, two_threads):
    rows, inner, columns = shape
    x, matrix = torch.randn(rows, inner), torch.randn(inner, columns)
    assert table[aten.mm.default](x, matrix) == "whole"
    assert table[aten.addmm.default](torch.zeros(columns), x, matrix) == "whole"


def test_scaled_sums_and_one_thread_stay_whole(table, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x, matrix = torch.randn(4, 200), torch.randn(200, 400)
    assert table[aten.mm.default](x, matrix) == "whole"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert table[aten.addmm.default](torch.zeros(400), x, matrix, beta=2) == "whole"


def test_the_table_is_inductors_with_two_rules():
    given = decompositions()
    found = with_parts(given)
    assert found.keys() == given.keys()
    assert {key for key in given if found[key] is not given[key]} == {aten.mm.default, aten.addmm.default}


@pytest.mark.parametrize("threads", [1, 2])
def test_programs_have_parts(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    graphs = lowered(monkeypatch)
    w, x = torch.randn(300, 250), torch.randn(3, 250)
    loss = lambda w, x: torch.tanh(w @ x).square().sum()
    found = per_sample_grads(loss, w, x, Norm(), engine="compiled")
    torch.testing.assert_close(found, per_sample_grads(loss, w, x, Norm(), engine="eager"))
    assert any(node.target is aten.bmm.default for node in graphs[0].graph.nodes) == (threads == 2)
    clear_cache()
