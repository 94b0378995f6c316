"""Products by oneDNN, and outer products past the caches: the same results, and really used where they should be."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oracle import assert_trees_close, oracle
from torch import nn
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import persample as ps
from persample import clear_cache, per_sample_grads
from persample.cpu import gemm, mode
from persample.cpu import onednn as library
from persample.engines.compiled import streaming
from persample.engines.compiled.cache import compilations

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
LEFT = {
    "rows": torch.randn,
    "columns": lambda m, k: torch.randn(k, m).T,
    "slice of rows": lambda m, k: torch.randn(m, k + 13)[:, 5 : 5 + k],
    "slice of columns": lambda m, k: torch.randn(k, m + 13)[:, 5 : 5 + m].T,
    "every second column": lambda m, k: torch.randn(m, 2 * k)[:, ::2],
    "every second row": lambda m, k: torch.randn(2 * m, k)[::2],
    "one row": lambda m, k: torch.randn(1, k).expand(m, k),
    "one column": lambda m, k: torch.randn(m, 1).expand(m, k),
}
BIAS = {
    "none": lambda n: None,
    "vector": torch.randn,
    "every second": lambda n: torch.randn(2 * n)[::2],
    "number": lambda n: torch.randn(1).expand(n),
}


def random_rows(size):
    return torch.randn(size, 24), torch.randn(size), torch.randn(size, 24)


@pytest.fixture
def onednn(monkeypatch):
    """Make it compute whatever it can, on any processor."""
    monkeypatch.setattr(library, "is_ahead", lambda: True)
    for module, limit in ((gemm, "_LEAST_WORK"), (gemm, "_LEAST_SIZE"), (mode, "_WORTH_LOOKING")):
        monkeypatch.setattr(module, limit, 1)
    clear_cache()
    yield
    clear_cache()


@pytest.fixture(scope="module")
def value():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 1))


def td(value, s_tm1, r_t, s_t):
    return ps.losses.td_loss(value(s_tm1), r_t[None], 0.9, value(s_t)).sum()


def counted(call):
    """Return what a call returns, and how often which operation ran."""
    with profile() as profiler:
        result = call()
    return result, {event.key: event.count for event in profiler.key_averages()}


@pytest.mark.parametrize("bias", BIAS)
@pytest.mark.parametrize("right", LEFT)
@pytest.mark.parametrize("left", LEFT)
def test_product_of_any_strides(left, right, bias):
    torch.manual_seed(0)
    a, b, c = LEFT[left](33, 20), LEFT[right](20, 47), BIAS[bias](47)
    exact = a.double() @ b.double() + (0 if c is None else c.double())
    product = gemm.product(a, b, c)
    assert product.is_contiguous()
    assert (product - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_product_keeps_what_is_no_number(special):
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    a[3, 5] = special
    torch.testing.assert_close(gemm.product(a, b), a @ b, equal_nan=True)


def test_who_computes(monkeypatch):
    def suits(left, right, bias=None):
        return gemm.suits(torch.empty(left), torch.empty(right), None if bias is None else torch.empty(bias))

    monkeypatch.setattr(library, "is_ahead", lambda: True)
    assert suits((64, 256), (256, 256))
    assert suits((64, 256), (256, 256), (256,))
    assert not suits((2, 256), (256, 256))  # little work
    assert not suits((9999, 9999), (9999, 1))
    assert not suits((64, 256), (255, 256))  # torch refuses the rest
    assert not suits((64, 256), (256, 256), (1,))
    assert not suits((256,), (256, 256))
    assert not gemm.suits(torch.empty(64, 256), torch.empty(256, 256, dtype=torch.float64))
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert not suits((64, 256), (256, 256))
    monkeypatch.setattr(library, "is_ahead", lambda: False)
    assert not suits((64, 256), (256, 256))


@pytest.mark.usefixtures("onednn")
def test_mistakes_are_reported_by_torch():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        per_sample_grads(lambda w, x: (x @ w).sum(), torch.ones(8, 8), torch.ones(3, 5, 7))


@pytest.mark.usefixtures("onednn")
def test_modes_of_the_callers_see_the_operations_of_torch(value):
    with FlopCounterMode(display=False) as counter:
        per_sample_grads(td, value, random_rows(4), ps.Mean())
    assert counter.get_total_flops() > 4 * 3 * 2 * 24 * 32


def test_a_second_import():
    lines = (
        "import sys, torch, persample, gc",
        "for name in [n for n in sys.modules if n.startswith('persample')]: del sys.modules[name]",
        "import persample; del name; gc.collect()",
        "persample.per_sample_grads(lambda w, x: w @ x, torch.ones(2), torch.ones(3, 2), engine='compiled')",
        "print(torch.ops.persample.product(torch.ones(2, 3), torch.ones(3, 4)).shape)",
    )
    printed = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert "[2, 4]" in printed.stdout


def test_processors(monkeypatch):
    def ahead(**known):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
        library.is_ahead.cache_clear()
        return library.is_ahead()

    assert ahead(avx512_f=True, cpu_name="AMD EPYC") == torch.backends.mkl.is_available()
    assert not ahead(avx512_f=False, cpu_name="AMD EPYC")
    assert not ahead(avx512_f=True, cpu_name="Intel(R) Xeon(R)")
    assert not ahead(avx512_f=True)
    library.is_ahead.cache_clear()


@pytest.mark.parametrize("wanted", [ps.Stack(), ps.ClippedMean(0.1), ps.Norm()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.usefixtures("onednn")
def test_an_engine_uses_it(value, engine, wanted):
    torch.manual_seed(1)
    batch = random_rows(6)
    exact = per_sample_grads(td, value.double(), tuple(x.double() for x in batch), wanted, engine="loop")
    value.float()
    call = [td, value, batch, wanted]
    per_sample_grads(*call, engine=engine)
    result, operations = counted(lambda: per_sample_grads(*call, engine=engine))
    assert operations["mkldnn::_linear_pointwise"] >= 6
    assert_trees_close(result, exact, 1e-5)


@pytest.mark.usefixtures("onednn")
def test_biases_are_added(value):
    """A product with a bias, of all samples' rows, is what a batched parameter-free layer leaves."""

    def loss(w, x):
        return torch.addmm(x[0], x, w).square().sum()

    w, x = torch.randn(8, 8), torch.randn(3, 5, 8)
    rows = oracle(loss, w, (x,))
    for engine in ("eager", "compiled"):
        assert_trees_close(per_sample_grads(loss, w, x, engine=engine), rows.tree(rows.grads), 1e-5)


@pytest.mark.usefixtures("onednn")
def test_sizes_that_vary_still_share_a_program(value):
    for size in (2, 3, 5, 8, 13, 21, 34):
        batch = random_rows(size)
        compiled, eager = (per_sample_grads(td, value, batch, ps.Mean(), engine=e) for e in ("compiled", "eager"))
        assert_trees_close(compiled, eager, 1e-4)
    assert compilations() <= 2


@pytest.mark.usefixtures("onednn")
def test_under_a_vmap_of_the_callers(value):
    params, batch = dict(value.named_parameters()), random_rows(4)

    def sizes(scale):
        scaled = {name: scale * x.detach() for name, x in params.items()}
        return per_sample_grads(lambda p, x: torch.func.functional_call(value, p, x).sum(), scaled, batch[0], ps.Norm())

    scales = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(torch.vmap(sizes)(scales), torch.stack([sizes(scale) for scale in scales]))


@pytest.mark.parametrize("columns", [16, 15, 1])
@pytest.mark.parametrize("offset", [0, 3])
def test_outer_products_are_written_where_they_should_be(columns, offset):
    memory = torch.full((5 * 7 * columns + 16,), 9.0)
    out = memory[offset : offset + 5 * 7 * columns].view(5, 7, columns)
    left, right = torch.randn(7, 5, 1).transpose(0, 1), torch.randn(5, 2 * columns)[:, None, ::2]
    streaming.write_outer(left, right, out)
    assert torch.equal(out, left * right)
    assert memory[:offset].eq(9).all()
    assert memory[offset + out.numel() :].eq(9).all()


@pytest.mark.parametrize("size", [1, 6])
def test_stacks_are_streamed(value, size, monkeypatch):
    monkeypatch.setattr(streaming, "_LARGE", 1)
    clear_cache()
    batch, wanted = random_rows(size), {"rows": ps.Stack(), "mean": ps.Mean()}
    out = per_sample_grads(td, value, batch, wanted, engine="compiled")
    per_sample_grads(td, value, batch, wanted, engine="compiled", out=out)
    batch = random_rows(size)
    result, operations = counted(lambda: per_sample_grads(td, value, batch, wanted, engine="compiled", out=out))
    assert operations["persample::write_outer"] >= 2
    assert_trees_close(result, per_sample_grads(td, value, batch, wanted), 1e-5)
    clear_cache()


def test_outputs_of_another_layout_are_written_as_ever(value, monkeypatch):
    monkeypatch.setattr(streaming, "_LARGE", 1)
    clear_cache()
    batch = random_rows(6)
    rows = per_sample_grads(td, value, batch, engine="compiled")
    out = {name: torch.empty(x.shape[::-1]).permute(*range(x.ndim)[::-1]) for name, x in rows.items()}
    assert_trees_close(per_sample_grads(td, value, batch, engine="compiled", out=out), rows, 1e-6)
    clear_cache()
