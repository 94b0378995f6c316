"""What ``torchrun`` starts in tests: ``accumulate`` on processes; ``ranks.py FOLDER`` writes what each found."""

from __future__ import annotations

import datetime as dt
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass

import sharded
import torch
import torch.distributed as dist
from device_cases import moved
from grid import REDUCTIONS
from oracle import error_of, oracle
from paths import ROOT, TESTS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import Workload, build

import persample as ps
from persample import accumulate
from persample.merge import Stacked

F64 = torch.float64
SAMPLES = 7
DEVICE = torch.device(os.environ.get("RANKS_DEVICE", "cpu"))
BACKEND = os.environ.get("RANKS_BACKEND", "gloo")
# The samples that each of several ranks has.
SHARDS = {
    "interleaved": (lambda rank, world: range(rank, SAMPLES, world), "interleaved"),
    "uneven": (
        lambda rank, world: range(SAMPLES)[rank and rank - world :][: 1 if rank else SAMPLES + 1 - world],
        "contiguous",
    ),
    "empty": (lambda rank, world: range(0 if rank else SAMPLES), "contiguous"),
    "empty first": (lambda rank, world: range(SAMPLES if rank == world - 1 else 0), "contiguous"),
}
WORKLOADS = ("mlp_td", "tied_weights", "complex_params", "embedding_attention")
PER_SAMPLE = {"rows": None, "norms": ps.Norm(), "aux": ps.Aux(), "mean": ps.Mean(), "spread": ps.Variance()}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(DEVICE)


def own(batch, shard, rank, group, size=2):
    """The batches of this rank, and the order; a rank without samples has no batch at all."""
    indices, order = SHARDS[shard]
    index = torch.tensor(range(SAMPLES) if group is None else indices(rank, group.size()), dtype=torch.int64)
    return [tuple(x[part] for x in batch) for part in index.split(size) if len(part)], order


def every_reduction(workload, shard, rank, group):
    work = build(workload)
    work = Workload(work.loss_fn, work.params, tuple(torch.cat([x, x])[:SAMPLES] for x in work.batch))
    rows = oracle(work.loss_fn, work.params, work.batch)
    wanted = {name: make(rows, F64) for name, (make, _) in REDUCTIONS.items()}
    batches, order = own(moved(work.batch, DEVICE), shard, rank, group)
    return accumulate(work.loss_fn, moved(work.params, DEVICE), batches, wanted, group=group, order=order)


def affine(w, x):
    return (w @ x).sin() + w.square().sum(), {"x": x}


def weighted(shard, rank, group):
    batches, order = own((draw(SAMPLES, 3), draw(SAMPLES, seed=1).abs()), shard, rank, group)
    loss = lambda w, x, n: affine(w, x)
    return accumulate(loss, draw(3), batches, PER_SAMPLE, weights=lambda b: b[1], group=group, order=order)


def of_outputs(shard, rank, group):
    """A loss with two outputs."""
    pairs = {"gram": ps.Gram(), "cosines": ps.CosineSimilarity(), "natural": ps.NaturalGradient(0.5)}
    wanted = PER_SAMPLE | pairs | {"noise": ps.NoiseScale(), "clipped": ps.ClippedMean(0.5)}
    batches, order = own((draw(SAMPLES, 3),), shard, rank, group)

    def loss(w, x):
        return torch.stack([(w @ x).sin(), w.square() @ x]), {"x": x}

    return accumulate(loss, draw(3), batches, wanted, outputs="rows", group=group, order=order)


def to_a_folder(shard, rank, group, folder):
    batches, order = own((draw(SAMPLES, 3),), shard, rank, group)
    where = f"{folder}/sink-{shard}-{group is None}"

    def source(stops):
        yield from batches[:1]
        if stops:
            raise OSError("the source has failed")
        yield from batches[1:]

    def run(stops):
        return accumulate(affine, draw(3), source(stops), PER_SAMPLE, group=group, order=order, sink=where, resume=True)

    if group is not None:
        error_of(lambda: run(True))
    results = run(False)
    return results, torch.utils._pytree.tree_map(torch.equal, results, run(False))


def of_units(rank, group, folder):
    """Units that reach over batches, all samples of each on one rank; and in a folder, by whole batches."""
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 4])
    units = torch.arange(5).tensor_split(1 if group is None else group.size())[rank]
    index = torch.isin(ids, units).nonzero()[:, 0]
    wanted = PER_SAMPLE | {"ids": ps.UnitIds(), "gram": ps.Gram(), "clipped": ps.ClippedMean(0.5)}
    options = {"group": group, "order": "contiguous", "unit": lambda batch: batch[1]}

    def run(size, wanted, **more):
        batches = [(draw(12, 3)[part], ids[part].to(DEVICE)) for part in index.split(size)]
        return accumulate(lambda w, x, _: affine(w, x), draw(3), batches, wanted, **options, **more)

    return run(2, wanted), run(12, PER_SAMPLE, sink=f"{folder}/units-{group is None}")


def of_ddp(rank, group):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double().to(DEVICE)
    batches, _ = own((draw(SAMPLES, 3),), "interleaved", rank, group)
    wrapped = model if group is None else DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = accumulate(lambda m, x: m(x).sum().sin(), wrapped, batches, ps.Mean(), group=group)
    return result, [str(one.message) for one in caught if "DistributedDataParallel" in str(one.message)]


@dataclass(frozen=True, eq=False)
class HalfDot(ps.Dot):
    """Scores in bfloat16."""

    def lift(self, gradients):
        return Stacked(super().lift(gradients).rows.bfloat16())


def of_curvature(shard, rank, group, folder):
    """Kronecker factors and EKFAC, and influences in a folder, in half precision."""
    work = build("mlp_td")
    batch = tuple(torch.cat([x, x])[:SAMPLES] for x in work.batch)
    batches, order = own(moved(batch, DEVICE), shard, rank, group)
    call, options = (work.loss_fn, moved(work.params, DEVICE), batches), {"group": group, "order": order}
    found = [accumulate(*call, ps.KroneckerFactors(one), **options) for one in ("expand", "reduce")]
    bases = ps.eigenbases(found[0])
    moments = accumulate(*call, ps.EigenMoment(bases), **options)
    direction = ps.Curvature(bases, moments).solve(call[1], 0.1)
    where = f"{folder}/scores-{shard}-{group is None}"
    scores = accumulate(*call, {"exact": ps.Dot(direction), "half": HalfDot(direction)}, sink=where, **options)
    return found, direction, scores


def same_numbers(rank, group):
    torch.manual_seed(5)
    noisy = lambda w, x: (w * torch.rand(3, dtype=F64, device=DEVICE)) @ x
    ones = (torch.ones(SAMPLES, 3, dtype=F64, device=DEVICE),)
    batches, _ = own(ones, "interleaved", rank, group)
    same, different = (
        accumulate(noisy, draw(3), batches, group=group, randomness=one) for one in ("same", "different")
    )
    return same, len({row.cpu().numpy().tobytes() for row in different})


def collectives(rank, group):
    """How many tensors are reduced at the end: one of float64, and one more for the deviations of moments."""
    calls, original = [], dist.all_reduce

    def counted(x, *args, **options):
        calls.append((x.dtype, x.numel()))
        return original(x, *args, **options)

    batches, _ = own((draw(SAMPLES, 3),), "interleaved", rank, group)
    dist.all_reduce = counted
    try:
        accumulate(affine, draw(3), batches, {"a": ps.Mean(), "b": ps.Sum(), "c": ps.Variance()}, group=group)
    finally:
        dist.all_reduce = original
    return [call for call in calls if call[0] != torch.int32]


def fails(where):
    def step(rank, group):
        def loss(w, x):
            if where == "loss" and rank == 1:
                raise KeyError("mine")
            if where in {"module dtype", "names"}:
                return sum(p.sum() for p in (w.parameters() if where == "module dtype" else w.values())) * x.sum()
            return (w[:3] @ x[:3], x) if where == "forms" else w @ x.to(w.dtype)

        def batches():
            for number in range(6):
                if where == "source" and rank == 0 and number == 3:
                    raise OSError("cannot read")
                yield draw(2, 3)

        width = 3 + rank * (where == "forms")
        params = {} if where == "params" and rank else draw(3 if where == "forms" else width)
        if where in PARAMETERS:
            params = PARAMETERS[where](rank)
        others = {
            "forms": ps.Aux(),
            "reductions": ps.Norm(),
            "option": ps.ClippedSum(1.0 + rank),
            "tensor": ps.Dot(draw(3, seed=rank)),
        }
        wanted = ps.Variance() if where == "reductions" and rank else others.get(where, ps.Variance())
        order = "interleaved" if where == "order" else "contiguous"
        many = [draw(2 + rank * (where == "order"), width)] * 3
        source = {"loss": many, "source": batches(), "order": many, "average": [draw(1 - rank, 3)]}.get(where, many)
        randomness = "same" if where == "randomness" and rank else "error"
        wanted = ps.Norm() if where == "order" else wanted
        options = {"chunk_size": -1 if where == "chunk_size" and rank else None, "randomness": randomness}
        if where in {"shared unit", "units and aux"}:
            first = 2 * rank if where == "shared unit" else 0  # the last unit of rank 0 is the first of rank 1
            options["unit"] = [torch.tensor([number, number]) for number in range(first, first + 3)]
            wanted = ps.Aux() if where == "units and aux" else wanted
            order = "interleaved" if where == "units and aux" else order
        return accumulate(loss, params, source, wanted, group=group, order=order, **options)

    return step


DIFFERENT = ("reductions", "option", "tensor", "randomness")
PARAMETERS = {  # that differ between two ranks
    "dtype": lambda rank: draw(3).to((F64, torch.float32)[rank]),
    "half": lambda rank: draw(3).to((torch.bfloat16, torch.float16)[rank]),
    "shape": lambda rank: draw(3 + rank),
    "device": lambda rank: draw(3).to(("cpu", "meta")[rank]),
    "names": lambda rank: {"ab"[rank]: draw(3)},
    "module dtype": lambda rank: nn.Linear(3, 1, dtype=(F64, torch.float32)[rank]),
}
FAILURES = {
    name: fails(name)
    for name in (
        "loss",
        "source",
        "params",
        "chunk_size",
        "forms",
        "order",
        "average",
        "shared unit",
        "units and aux",
        *DIFFERENT,
        *PARAMETERS,
    )
}


def everything(rank, group, folder):
    found = {(name, shard): every_reduction(name, shard, rank, group) for name in WORKLOADS for shard in SHARDS}
    for shard in SHARDS:
        found["weighted", shard] = weighted(shard, rank, group)
        found["outputs", shard] = of_outputs(shard, rank, group)
        found["sink", shard] = to_a_folder(shard, rank, group, folder)
        found["curvature", shard] = of_curvature(shard, rank, group, folder)
    found["units"] = of_units(rank, group, folder)
    found["ddp"], found["same"] = of_ddp(rank, group), same_numbers(rank, group)
    return found


def torchrun(folder):
    dist.init_process_group(BACKEND, timeout=dt.timedelta(seconds=60))
    rank, group = dist.get_rank(), dist.group.WORLD
    found = everything(rank, group, folder)
    found["collectives"] = collectives(rank, group)
    found["sharded"] = sharded.everything(group.size()) if BACKEND == "gloo" else None
    for name, step in FAILURES.items() if group.size() == 2 else ():
        found[name] = error_of(step, rank, group)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def with_a_killed_rank(folder, rank):
    """Rank 1 kills itself in its third batch; print how long rank 0 took to notice, and its error."""
    dist.init_process_group("gloo", f"file://{folder}/store", dt.timedelta(seconds=30), 2, rank)

    def batches():
        for number in range(100):
            if rank and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)
            yield draw(2, 3)

    start = time.monotonic()
    message = error_of(lambda: accumulate(affine, draw(3), batches(), ps.Mean(), group=dist.group.WORLD))
    print(f"{time.monotonic() - start:.1f} {message}", flush=True)
    os._exit(0)  # nobody answers any more


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}", "OMP_NUM_THREADS": "1"}


def launched(folder, world, **where):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*command, __file__, str(folder)],
        env=ENVIRONMENT | where,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(world)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        torchrun(sys.argv[1])
    else:
        with_a_killed_rank(sys.argv[1], int(sys.argv[2]))
