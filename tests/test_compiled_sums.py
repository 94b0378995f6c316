"""Sums of matrix products and other tensors, which compiled code computes without a copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from persample import Mean, clear_cache, per_sample_grads
from persample.engines.compiled.sums import part_sums

aten = torch.ops.aten


def parted(function, *args):
    """Return what a function computes after the pass, and its operations."""
    graph = make_fx(function, tracing_mode="fake")(*args)
    part_sums(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph(*args), [node.target for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5,), (1,), (4, 5), (4, 1), ()])
def test_sums_are_parted(shape, dtype):
    other, left, right = (torch.randn(size, dtype=dtype) for size in (shape, (4, 3), (3, 5)))
    result, operations = parted(torch.addmm, other, left, right)
    assert operations == [aten.mm.default, aten.add.Tensor]
    torch.testing.assert_close(result, other + left @ right)


@pytest.mark.parametrize("factors", [{"beta": 2}, {"alpha": 3}])
def test_sums_with_factors_stay(factors):
    args = torch.randn(5), torch.randn(4, 3), torch.randn(3, 5)
    _, operations = parted(lambda *args: torch.addmm(*args, **factors), *args)
    assert operations == [aten.addmm.default]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_sums_of_other_dtypes_stay(dtype):
    _, operations = parted(torch.addmm, *(torch.ones(size, dtype=dtype) for size in ((5,), (4, 3), (3, 5))))
    assert operations == [aten.addmm.default]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_recurrent_layers_copy_nothing_to_add_products():
    model = nn.RNN(8, 8, batch_first=True)
    loss = lambda model, x: model(x[None])[0].sum()
    sequences = torch.randn(16, 2, 8)
    expected = per_sample_grads(loss, model, sequences, Mean(), engine="loop")
    clear_cache()
    with torch._inductor.config.patch(force_disable_caches=True):  # cached code has no source
        compiled = lambda: per_sample_grads(loss, model, sequences, Mean(), engine="compiled")
        mean, (source,) = run_and_get_code(compiled)
    assert "mm_out" in source
    assert "addmm" not in source
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-5)
