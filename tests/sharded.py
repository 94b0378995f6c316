"""Sharded parameters, for what ``torchrun`` starts in tests: results of shards, and those of whole tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from oracle import error_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import persample as ps
from persample import accumulate, per_sample_grads, set_grads

WORDS, SAMPLES = 12, 8
WANTED = {
    "update": ps.ClippedMean(0.5),
    "sum": ps.ClippedSum({"head": 0.1, "": 0.4}),
    "mean": ps.Mean(),
    "norms": ps.Norm(),
    "of each": ps.Norm(per_param=True),
    "losses": ps.Loss(),
    "aux": ps.Aux(),
}
STYLES = {
    **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()),
    **dict.fromkeys(("o", "down"), RowwiseParallel()),
    "embed": RowwiseParallel(input_layouts=Replicate()),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.q, self.v, self.o = (nn.Linear(8, 8) for _ in range(3))
        self.k = nn.Linear(8, 8, bias=False)  # a bias would have a gradient of 0
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (part(self.norms[0](x)).unflatten(-1, (4, 2)).transpose(-2, -3) for part in (self.q, self.k, self.v))
        future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        weights = (q @ k.mT * self.scale).masked_fill(future, -torch.inf).softmax(-1)
        x = x + self.o((weights @ v).transpose(-2, -3).flatten(-2))
        return self.head(x + self.down(F.gelu(self.up(self.norms[1](x)))))


def block():
    torch.manual_seed(0)
    return Block().double()


def tokens():
    return torch.randint(WORDS, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))


def loss(model, tokens):
    return F.cross_entropy(model(tokens[:-1]), tokens[1:]), tokens.sum()


def calls(model, batch, parts):
    """What is computed of a model; ``parts`` is the batch in two."""
    of_units = {name: reduction for name, reduction in WANTED.items() if name != "aux"}
    return {
        "eager": per_sample_grads(loss, model, batch, WANTED),
        "weights": per_sample_grads(loss, model, batch, WANTED, weights=torch.arange(SAMPLES) % 3),
        "units": per_sample_grads(loss, model, batch, of_units, unit=2),
        "stream": accumulate(loss, model, parts, WANTED),
    }


def stepped(model, update):
    """The parameters after a step of an optimizer."""
    set_grads(model, update)
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step()
    return {name: p.detach() for name, p in model.named_parameters()}


def expected():
    model, batch = block(), tokens()
    found = calls(model, batch, batch.split(SAMPLES // 2))
    return found | {"step": stepped(model, found["eager"]["update"])}


def whole(tree):
    return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def fsdp(mesh):
    model = block()
    for part in (*model.norms, model.q, model.k, model.v, model.o, model.up, model.down, model.head):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


MODELS = {
    "fsdp": fsdp,
    "fsdp, one batch": fsdp,
    "tensor parallel": lambda mesh: parallelize_module(block(), mesh, STYLES),
    "replicas": lambda mesh: block(),
}


def found_on(mesh, kind):
    """The results of one kind of model, gathered; and what must hold of the model and of the shards."""
    model, batch = MODELS[kind](mesh), tokens()
    shares_out = kind not in {"fsdp, one batch", "tensor parallel"}
    given = (lambda x: distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim)) if shares_out else lambda x: x
    hooks = [[*part._forward_pre_hooks.items(), *part._forward_hooks.items()] for part in model.modules()]
    before = {name: (type(p), p) for name, p in model.named_parameters()}
    found = calls(model, given(batch), map(given, batch.split(SAMPLES // 2)))
    held = {
        "hooks": hooks == [[*x._forward_pre_hooks.items(), *x._forward_hooks.items()] for x in model.modules()],
        "parameters": all(before[name] == (type(p), p) for name, p in model.named_parameters()),
        "placements": all(
            getattr(found[call]["update"][name], "placements", None) == getattr(p, "placements", None)
            for name, p in model.named_parameters()
            for call in ("eager", "weights", "units", "stream")
        ),
        "rows": all(type(found[call]["norms"]) is torch.Tensor for call in found),
    }
    return whole(found | {"step": stepped(model, found["eager"]["update"])}), held


class Collectives(TorchDispatchMode):
    """Notes the names of collectives, and the bytes that a process gives each."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it calls the operations of its parts under this mode
        namespace, _, name = func.name().partition("::")
        if namespace == "_c10d_functional" and name not in {"wait_tensor", "_wrap_tensor_autograd"}:
            self.found.append((name, args[0].nbytes))
        return func(*args, **(kwargs or {}))


def collectives(mesh, kind, *reductions):
    """The collectives of reductions of one kind of model, beside those of the loss and of its gradient."""

    def noted(*wanted):
        model = MODELS[kind](mesh)
        with Collectives() as mode:
            per_sample_grads(loss, model, tokens(), list(wanted))
        return mode.found

    return noted(ps.Loss(), *reductions)[len(noted(ps.Loss())) :]


def messages(mesh):
    """The errors of what DTensors do not support."""
    model, batch, rank = fsdp(mesh), tokens(), dist.get_rank()
    shared_out = distribute_tensor(batch, mesh, [Shard(0)])
    other = distribute_tensor(torch.ones(8, WORDS).double(), init_device_mesh("cpu", (dist.get_world_size(), 1)))

    def of(given=shared_out, reduce=None, **options):
        return error_of(lambda: per_sample_grads(loss, model, given, reduce or ps.Mean(), **options))

    return {
        "engine": of(engine="traced"),
        "reduce": of(reduce={"a": ps.Gram()}),
        "metric": of(reduce=ps.Norm(metric={name: torch.ones(1) for name, _ in model.named_parameters()})),
        "randomness": of(randomness="same"),
        "outputs": of(outputs="rows"),
        "chunk_size": of(chunk_size=2),
        "unit": of(unit=torch.arange(SAMPLES)),
        "unequal": of(distribute_tensor(batch[:7], mesh, [Shard(0)])),
        "unequal units": of(unit=SAMPLES // 2 * 2),
        "other rows": of(batch.roll(rank, 0) + rank),
        "mesh": error_of(lambda: per_sample_grads(lambda p, x: (p @ x.double()).sum(), other, shared_out)),
        "group": error_of(lambda: accumulate(loss, model, [shared_out], ps.Mean(), group=dist.group.WORLD)),
        "composite": error_of(lambda: ps.explain(loss, model, shared_out, ps.Mean())),
    }


def everything(world):
    meshes = {kind: init_device_mesh("cpu", (world,)) for kind in MODELS}
    if world == 4:
        meshes["fsdp"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    found = {kind: found_on(mesh, kind) for kind, mesh in meshes.items()}
    mesh = meshes["tensor parallel"]
    counts = [collectives(mesh, "tensor parallel", *some) for some in ((ps.Norm(),), (ps.Norm(), ps.ClippedMean(0.5)))]
    return {"found": found, "collectives": counts, "messages": messages(mesh)}
