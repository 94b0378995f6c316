"""On a GPU: every reduction on every engine against the loop in float64 on the CPU. ``make cuda`` runs these tests."""

from __future__ import annotations

import functools

import pytest
import ranks
import torch
import torch.distributed as dist
from device_cases import REDUCTIONS, Case, cases, moved, written_out
from grid import REDUCTIONS as GRID
from grid import RTOL
from oracle import assert_trees_close, oracle
from ranks import launched
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from workloads import WORKLOADS, build

import persample as ps

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
ENGINES = {
    "eager": {"engine": "eager"},
    "chunks": {"engine": "eager", "chunk_size": 2},
    "traced": {"engine": "traced"},
    "compiled": {"engine": "compiled"},
    "compiled-chunks": {"engine": "compiled", "chunk_size": 2},
    "loop": {"engine": "loop"},
}


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """cuDNN's recurrent layers and convolutions compute in TF32 otherwise, with three digits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def fetched(tree):
    """The same on the CPU; every tensor was on the GPU."""

    def fetch(x):
        assert x.device == DEVICE, x.device
        return x.cpu()

    return pytree.tree_map_only(torch.Tensor, fetch, tree)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_equals_the_loop(workload, engine, dtype):
    work = build(workload, dtype)
    rows = oracle(work.loss_fn, work.params, work.batch)
    wanted = {name: make(rows, dtype) for name, (make, _) in GRID.items()}
    params, batch = moved(work.params, DEVICE), moved(work.batch, DEVICE)
    for _ in range(2):  # the second time a compiled call is recalled
        results = fetched(ps.per_sample_grads(work.loss_fn, params, batch, wanted, **ENGINES[engine]))
        for name, (_, expected) in GRID.items():
            solves = dtype == torch.float32 and name.startswith(("Natural", "Leverage"))
            assert_trees_close(results[name], expected(rows), 1e-3 if solves else RTOL[dtype])


@pytest.fixture(scope="module")
def known():
    return cases()


@pytest.mark.parametrize("engine", ["eager", "traced", "compiled", "loop"])
@pytest.mark.parametrize("name", ["linear layers", "convolutions", "attention", "recurrent", "tensors"])
def test_models(known, name, engine):
    loss, params, batch = known[name]
    far = Case(loss, moved(params, DEVICE), moved(batch, DEVICE))
    direction, other = ps.per_sample_grads(loss, params, batch, (ps.Sum(), ps.Factored()))
    chosen = {asked: make for asked, make in REDUCTIONS.items() if engine == "eager" or asked != "Factored()"}
    expected = ps.per_sample_grads(*known[name], {asked: make(direction, other) for asked, make in chosen.items()})
    wanted = {asked: make(moved(direction, DEVICE), moved(other, DEVICE)) for asked, make in chosen.items()}
    found = ps.per_sample_grads(*far, wanted, engine=engine)
    for x, y in zip(written_out(found), written_out(expected), strict=True):
        assert x.device == DEVICE
        torch.testing.assert_close(x.cpu(), y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "loop"])  # torch.compile does not capture functional_call of these on GPUs
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_by_functional_call(kind, engine):
    torch.manual_seed(0)
    model, x = kind(3, 4, num_layers=2, batch_first=True), torch.randn(6, 5, 3)
    far = moved(model, DEVICE)
    places = [p.data_ptr() for p in far.parameters()]
    loss = lambda layer: lambda params, x: functional_call(layer, params, (x,))[0].square().sum()
    expected = ps.per_sample_grads(loss(model), dict(model.named_parameters()), x)
    found = ps.per_sample_grads(loss(far), dict(far.named_parameters()), x.to(DEVICE), engine=engine)
    assert_trees_close(fetched(found), expected, 1e-4)
    of_module = ps.per_sample_grads(lambda m, x: m(x)[0].square().sum(), far, x.to(DEVICE), engine=engine)
    assert_trees_close(fetched(of_module), expected, 1e-4)
    assert [p.data_ptr() for p in far.parameters()] == places


@pytest.mark.filterwarnings("ignore:RNN module weights")  # torch does not join weights in bfloat16, and says so
@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["linear layers", "convolutions", "recurrent"])
def test_half_precision(known, name, dtype, engine):
    loss, params, batch = known[name]
    halves = Case(lambda model, x: loss(model, x)[0], moved(params, DEVICE).to(dtype), batch.to(DEVICE, dtype))
    wanted = {"mean": ps.Mean(), "norms": ps.Norm(), "clipped": ps.ClippedMean(0.5), "gram": ps.Gram()}
    found = fetched(ps.per_sample_grads(*halves, wanted, engine=engine))
    expected = fetched(ps.per_sample_grads(*halves, wanted, engine="loop"))
    eps = torch.finfo(dtype).eps
    for x, y in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=8 * eps, atol=8 * eps * y.abs().max().item())


@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
def test_autocast(known, engine):
    _, params, batch = known["linear layers"]
    loss = lambda model, x: model(x).float().square().sum()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = ps.per_sample_grads(loss, moved(params, DEVICE), batch.to(DEVICE), ps.Norm(), engine=engine)
    expected = ps.per_sample_grads(loss, params, batch, ps.Norm())
    torch.testing.assert_close(found.cpu(), expected, rtol=0.05, atol=0.0)
    assert not torch.equal(found.cpu(), expected)


def test_random_numbers_are_the_gpus_own(known):
    _, params, batch = known["linear layers"]
    model, x = moved(params, DEVICE), batch.to(DEVICE)
    noisy = lambda model, x: model(F.dropout(x, 0.5)).square().sum()

    def drawn(seed, randomness, **options):
        torch.cuda.manual_seed(seed)
        return ps.per_sample_grads(noisy, model, x, ps.Norm(), randomness=randomness, **options)

    before = torch.get_rng_state()
    assert torch.equal(drawn(0, "different"), drawn(0, "different"))
    assert not torch.equal(drawn(0, "different"), drawn(1, "different"))
    torch.testing.assert_close(drawn(0, "same", chunk_size=2), drawn(0, "same"))
    assert torch.equal(before, torch.get_rng_state())


def test_options(known):
    loss, params, batch = known["linear layers"]
    scalar = lambda model, x: loss(model, x)[0]
    model, x = moved(params, DEVICE), batch.to(DEVICE)
    call = functools.partial(ps.per_sample_grads, scalar)
    mean, grads = call(params, batch, (ps.Mean(), ps.Stack()))
    weights = [1.0, 0.0, 2.0, 1.0, 1.0]
    weighted = call(params, batch, ps.Mean(), weights=weights)
    out = moved(mean, DEVICE)
    assert call(model, x, ps.Mean(), out=out) is out
    assert_trees_close(fetched(out), mean, 1e-4)
    assert_trees_close(fetched(call(model, x, out=moved(grads, DEVICE))), grads, 1e-4)
    assert_trees_close(fetched(call(model, x, ps.Mean(), weights=weights)), weighted, 1e-4)
    assert_trees_close(fetched(call(model, batch.numpy(), ps.Mean())), mean, 1e-4)
    assert_trees_close(fetched(call(model, x[:0], ps.Sum())), call(params, batch[:0], ps.Sum()), 0.0)
    product = ps.fisher_vector_product(scalar, params, batch, mean)
    assert_trees_close(fetched(ps.fisher_vector_product(scalar, model, x, moved(mean, DEVICE))), product, 1e-4)


def test_devices_do_not_mix(known):
    loss, params, batch = known["linear layers"]
    model, x = moved(params, DEVICE), batch.to(DEVICE)
    for engine in ("eager", "traced", "compiled", "loop"):
        with pytest.raises(ps.LossError, match=r"mixes devices in one operation"):
            ps.per_sample_grads(loss, model, batch, ps.Mean(), engine=engine)
        with pytest.raises(ps.LossError, match=r"mixes devices in one operation"):
            ps.per_sample_grads(loss, params, x, ps.Mean(), engine=engine)


def composite(params, inputs, **options):
    encode = lambda model, x: F.dropout(torch.tanh(model(x)), 0.5)
    coupled = lambda scale, z: F.cross_entropy(z @ z.T * scale, torch.arange(len(z), device=z.device))
    scale = torch.tensor(2.0, device=inputs.device)
    torch.manual_seed(3)
    return ps.composite_grads(encode, coupled, params, inputs, loss_params=scale, **options)


def test_composite_losses(known):
    """With dropout: the second pass replays the GPU's random numbers."""
    _, params, batch = known["linear layers"]
    model, x = moved(params, DEVICE), batch.to(DEVICE)
    whole = composite(model, x, chunk_size=None)
    assert len(pytree.tree_leaves(whole)) == 6
    params.eval()
    near = lambda inputs, p: ps.composite_grads(lambda m, x: m(x), lambda z: z.sum(0).square().sum(), p, inputs)
    assert_trees_close(fetched(near(x, model)), near(batch, params), 1e-4)


def test_streams_and_folders(known, tmp_path):
    loss, params, batch = known["linear layers"]
    scalar = lambda model, x: loss(model, x)[0]
    model, x = moved(params, DEVICE), batch.to(DEVICE)
    wanted = {"rows": None, "norms": ps.Norm(), "mean": ps.Mean(), "spread": ps.Variance(), "gram": ps.Gram()}
    expected = ps.per_sample_grads(scalar, params, batch, wanted)
    for engine in ("eager", "traced", "compiled"):
        assert_trees_close(
            fetched(ps.accumulate(scalar, model, list(x.split(2)), wanted, engine=engine)), expected, 1e-4
        )
    wanted.pop("gram")
    found = ps.accumulate(scalar, model, list(x.split(2)), wanted, sink=tmp_path / "run")
    expected.pop("gram")
    assert_trees_close(pytree.tree_map(lambda x: torch.as_tensor(x).cpu(), found), expected, 1e-4)


@pytest.mark.parametrize(("world", "backend"), [(1, "nccl"), (2, "gloo")])
def test_processes(world, backend, tmp_path):
    """nccl allows one process per GPU; gloo has two on one."""
    alone = ranks.everything(0, None, tmp_path / "alone")
    for rank in launched(tmp_path, world, RANKS_DEVICE="cuda", RANKS_BACKEND=backend):
        for key, expected in alone.items():
            if key == "ddp":
                assert_trees_close(rank[key][0], expected[0], 1e-9)
                assert len(rank[key][1]) == 1
            elif key[0] == "sink":
                assert_trees_close(rank[key][0], expected[0], 1e-9)
                assert all(pytree.tree_leaves(rank[key][1]))
            elif key == "same":
                assert rank[key][1] == ranks.SAMPLES
            else:
                assert_trees_close(rank[key], expected, 1e-9)
        assert rank["loss"].count("mine") if world == 2 else "loss" not in rank


def test_composite_losses_on_nccl(known, tmp_path):
    _, params, batch = known["linear layers"]
    model, x = moved(params, DEVICE), batch.to(DEVICE)
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        found = composite(model, x, group=dist.group.WORLD, chunk_size=2)
        assert_trees_close(fetched(found), fetched(composite(model, x, chunk_size=2)), 1e-5)
    finally:
        dist.destroy_process_group()
