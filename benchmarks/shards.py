"""What shards of parameters keep, allocate and send on several processes of this machine, for docs/scaling.md.

``torchrun --standalone --nproc-per-node 4 -m benchmarks.shards`` prints a line for each kind of model: the bytes that a
process keeps (its parameters, and a clipped mean of their gradients), the peak that a call allocates beside them, and
the bytes that it gives to collectives, of the loss and its gradient, and of norms and clipped sums.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models
from persample import ClippedMean, Loss, Norm, per_sample_grads
from persample.utils.measure import peak_memory

WIDTHS = 256, 1024, 1024, 256
SAMPLES, TERMS = 64, 32
STYLES = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel()}
WANTED = {"update": ClippedMean(1.0), "norms": Norm()}


def loss(model, x):
    return model(x).square().mean()


class Given(TorchDispatchMode):
    """Adds up the bytes that a process gives to each kind of collective."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it calls the operations of its parts under this mode
        namespace, _, name = func.name().partition("::")
        if namespace == "_c10d_functional" and name not in {"wait_tensor", "_wrap_tensor_autograd"}:
            self.bytes[name] += args[0].nbytes
        return func(*args, **(kwargs or {}))


def given(call) -> str:
    with Given() as mode:
        call()
    return ", ".join(f"{name} {size:,}" for name, size in mode.bytes.items()) or "none"


def fsdp(mesh):
    model = models.mlp(*WIDTHS)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return model


KINDS = {
    "whole": (lambda mesh: models.mlp(*WIDTHS), False),
    "replicas": (lambda mesh: models.mlp(*WIDTHS), True),
    "fully_shard": (fsdp, True),
    "tensor parallel": (lambda mesh: parallelize_module(models.mlp(*WIDTHS), mesh, STYLES), False),
}


def own(tensors) -> int:
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def measured(kind: str, mesh, terms: int) -> str:
    torch.manual_seed(0)
    make, shares_out = KINDS[kind]
    model, x = make(mesh), torch.randn(SAMPLES, terms, WIDTHS[0])
    batch = distribute_tensor(x, mesh, [Shard(0)]) if shares_out else x
    call = lambda wanted=WANTED: per_sample_grads(loss, model, batch, wanted)
    found = call()
    kept = own(model.parameters()) + own(found["update"].values())
    sent = [given(lambda wanted=wanted: call(wanted)) for wanted in (Loss(), Norm(), WANTED)]
    peak = peak_memory(call)
    steps = "; ".join(f"{name}: {size}" for name, size in zip(("loss", "norms", "both"), sent, strict=True))
    return f"{mesh.size()} processes, T = {terms}, {kind}: keeps {kept:,}, peak {peak:,}; {steps}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for terms in (1, TERMS):
        for kind in KINDS:
            line = measured(kind, mesh, terms)
            if not dist.get_rank():
                print(line, flush=True)
    dist.destroy_process_group()
