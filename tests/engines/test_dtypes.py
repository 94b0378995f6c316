"""Half precision is accumulated in float32, and each result has the dtype it is documented to have."""

from __future__ import annotations

import pytest
import torch

import persample as ps
from persample import per_sample_grads

HALF = [torch.bfloat16, torch.float16]
ids = [str(dtype)[6:] for dtype in HALF]


def linear(w, x):
    return (w * x).sum()


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("chunk_size", [None, 100])
@pytest.mark.parametrize("dtype", HALF, ids=ids)
def test_sums_of_half_precision_do_not_stall(dtype, chunk_size, engine):
    """1 + 1 + … stalls at 256 in bfloat16 and at 2048 in float16."""
    x = torch.ones(3000, 2, dtype=dtype)
    got = per_sample_grads(
        linear,
        torch.zeros(2, dtype=dtype),
        x,
        {"sum": ps.Sum(), "clipped": ps.ClippedSum(10.0), "mean": ps.Mean(), "second": ps.SecondMoment()},
        chunk_size=chunk_size,
        engine=engine,
    )
    expected = torch.full((2,), 3000.0).to(dtype)
    assert torch.equal(got["sum"], expected)
    assert torch.equal(got["clipped"], expected)
    assert torch.equal(got["mean"], torch.ones(2, dtype=dtype))
    assert torch.equal(got["second"], torch.ones(2, dtype=dtype))


def test_a_mean_may_exist_where_the_sum_overflows():
    x = torch.full((2000, 1), 100.0, dtype=torch.float16)
    assert per_sample_grads(linear, torch.zeros(1, dtype=torch.float16), x, ps.Mean()).item() == 100.0


@pytest.mark.parametrize("dtype", HALF, ids=ids)
def test_norms_of_half_precision_are_float32(dtype):
    x = torch.full((2, 70_000), 1.0, dtype=dtype)
    wanted = {"norm": ps.Norm(), "gram": ps.Gram(), "dot": ps.Dot(torch.ones(70_000, dtype=dtype))}
    got = per_sample_grads(linear, torch.zeros(70_000, dtype=dtype), x, wanted)
    assert {name: result.dtype for name, result in got.items()} == dict.fromkeys(wanted, torch.float32)
    torch.testing.assert_close(got["norm"], torch.full((2,), 70_000.0).sqrt())
    torch.testing.assert_close(got["gram"], torch.full((2, 2), 70_000.0))  # float16 ends at 65504
    torch.testing.assert_close(got["dot"], torch.full((2,), 70_000.0))


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (ps.Stack(), {"a": torch.float16, "b": torch.float64, "c": torch.complex64}),
        (ps.Mean(), {"a": torch.float16, "b": torch.float64, "c": torch.complex64}),
        (ps.ClippedMean(1.0), {"a": torch.float16, "b": torch.float64, "c": torch.complex64}),
        (ps.Variance(), {"a": torch.float16, "b": torch.float64, "c": torch.complex64}),
        (ps.SecondMoment(), {"a": torch.float16, "b": torch.float64, "c": torch.complex64}),
        (ps.Norm(per_param=True), {"a": torch.float32, "b": torch.float64, "c": torch.float32}),
        (ps.Norm(), torch.float64),
        (ps.Gram(), torch.float64),
        (ps.CosineSimilarity(), torch.float64),
        (ps.Project(3, seed=0), torch.float64),
    ],
    ids=lambda value: repr(value) if isinstance(value, ps.reductions.Reduction) else "",
)
def test_result_dtypes_of_mixed_parameters(reduction, expected):
    params = {
        "a": torch.ones(2, dtype=torch.float16),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.ones(2, dtype=torch.complex64),
    }

    def loss(p, x):
        return (p["a"].float() * x + p["b"] * x + (p["c"] * x).abs()).sum()

    got = per_sample_grads(loss, params, torch.randn(4, 2), reduction)
    assert (({k: v.dtype for k, v in got.items()}) if isinstance(got, dict) else got.dtype) == expected


def test_complex_gradients_follow_torch():
    """The gradient of a real loss by a complex parameter is torch's: ∂ℓ/∂re + i ∂ℓ/∂im."""
    w = torch.tensor([1 + 2j], dtype=torch.complex128)
    got = per_sample_grads(lambda w, x: (w * x).abs().square().sum(), w, torch.tensor([1.0, 2.0]).double(), None)
    torch.testing.assert_close(got, torch.tensor([[2 + 4j], [8 + 16j]], dtype=torch.complex128))


def test_autocast():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        got = per_sample_grads(lambda m, x: m(x).float().square().sum(), model, (x,))
        loop = per_sample_grads(lambda m, x: m(x).float().square().sum(), model, (x,), engine="loop")
    assert got["weight"].dtype == torch.float32
    torch.testing.assert_close(got, loop, rtol=2e-2, atol=1e-3)
