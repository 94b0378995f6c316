"""``composite_grads`` in two gloo processes against one. The processes start once and run every case."""

from __future__ import annotations

import datetime as dt
import re

import pytest
import torch
import torch.distributed as dist
from coupled import Residual, assert_same, build, draw, encode_pair, info_nce, two_towers, uniformity
from oracle import error_of
from torch import nn

import persample as ps
from persample import ArgumentError, LossError, composite_grads

RANKS = 2


def shard(tree, sizes, rank):
    """Rank's rows of every tensor."""
    start = sum(sizes[:rank])
    return torch.utils._pytree.tree_map(lambda x: x[start : start + sizes[rank]], tree)


def contrastive(sizes, rank, group, **options):
    towers, scale = two_towers(tied=False), draw(1)[0].requires_grad_()
    inputs = shard((draw(7, 5), draw(7, 5, seed=1)), sizes, rank)
    return composite_grads(encode_pair, info_nce, towers, inputs, loss_params=scale, group=group, **options)


def several_encoders(sizes, rank, group):
    """``sizes`` are the numbers of queries; passages are split differently."""
    towers, scale = two_towers(tied=True), draw(1)[0].requires_grad_()
    encoders = {"query": lambda towers, x: towers["query"](x), "passage": lambda towers, x: towers["passage"](x)}
    passages = shard(draw(11, 5, seed=1), [11 - sum(sizes[1:]), *sizes[1:]], rank)
    inputs = {"query": shard(draw(7, 5), sizes, rank), "passage": passages}
    return composite_grads(encoders, info_nce, towers, inputs, loss_params=scale, group=group, chunk_size=2)


def reductions(sizes, rank, group):
    model = build(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)))
    wanted = {"rows": None, "mean": ps.Mean(), "norms": ps.Norm(), "gram": ps.Gram(), "variance": ps.Variance()}
    x = shard(draw(7, 5), sizes, rank)
    return composite_grads(lambda m, x: m(x), uniformity, model, x, reduce=wanted, chunk_size=2, group=group)


def batch_norm(sizes, rank, group, rule):
    model = build(Residual)
    model.drop.p = 0.0
    x = shard(draw(7, 2, 4), sizes, rank)
    options = {"batched": True, "batch_norm": rule, "chunk_size": 2 if rule == "full" else None, "group": group}
    return (*composite_grads(lambda m, x: m(x), uniformity, model, x, **options), dict(model.named_buffers()))


def other_formats(sizes, rank, group):
    """z of bool, int, complex and bfloat16 leaves, and accumulated gradients."""
    w, x = draw(5).requires_grad_(), shard(draw(7, 5), sizes, rank)

    def encode(w, x):
        z = w * x
        return {"mask": z > 0, "place": z.argmax(), "complex": torch.complex(z, z.square()), "half": z.bfloat16()}

    def loss(z):
        return uniformity(z["complex"].abs() * z["mask"] * (z["place"][:, None] + 1)) + z["half"].double().sum()

    result = composite_grads(encode, loss, w, x, accumulate=True, chunk_size=3, group=group)
    return (*result, w.grad)


CASES = {
    "contrastive": contrastive,
    "contrastive-batched": lambda *args: contrastive(*args, batched=True, chunk_size=2),
    "contrastive-loop": lambda *args: contrastive(*args, engine="loop", chunk_size=2),
    "several-encoders": several_encoders,
    "reductions": reductions,
    "batch-norm-full": lambda *args: batch_norm(*args, "full"),
    "other-formats": other_formats,
}
SIZES = {"even": [4, 3], "uneven": [6, 1], "empty": [7, 0]}


def fails_on_one_rank(where):
    def step(rank, group):
        def encode(w, x):
            if where == "encode" and rank == 1:
                raise ValueError("rank 1 cannot read its data")
            return w * x

        x = draw(3, 5) if not (where == "arguments" and rank == 1) else "not a tensor"
        size = 0 if where == "options" and rank == 1 else 1
        composite_grads(encode, uniformity, draw(5), x, group=group, engine="loop", chunk_size=size)

    return step


def other_shapes(rank, group):
    composite_grads(lambda w, x: (w * x)[: 3 + rank], uniformity, draw(5), draw(3, 5), group=group)


def a_loss_that_draws(rank, group):
    composite_grads(lambda w, x: w * x, lambda z: z.sum() * torch.rand(()), draw(5), draw(3, 5), group=group)


def other_reductions(rank, group):
    wanted = ps.ClippedSum(1.0 + rank)
    composite_grads(lambda w, x: w * x, uniformity, draw(5), draw(3, 5), reduce=wanted, group=group)


def other_parameters(convert):
    def step(rank, group):
        w = convert(draw(5)) if rank else draw(5)
        composite_grads(lambda w, x: w * x[: len(w)], uniformity, w, draw(3, 5), group=group)

    return step


def other_parameters_of_the_loss(rank, group):
    scale = draw(1)[0].to((torch.float64, torch.float32)[rank]).requires_grad_()
    loss = lambda scale, z: uniformity(z) * scale
    composite_grads(lambda w, x: w * x, loss, draw(5), draw(3, 5), loss_params=scale, group=group)


def second_pass_fails(rank, group):
    calls = []

    def encode(w, x):
        calls.append(x)
        return w * x * (1 + (rank == 0 and len(calls) > 3))

    composite_grads(encode, uniformity, draw(5), draw(3, 5), group=group, engine="loop")


FAILURES = {
    "arguments": fails_on_one_rank("arguments"),
    "options": fails_on_one_rank("options"),
    "encode": fails_on_one_rank("encode"),
    "second-pass": second_pass_fails,
    "shapes": other_shapes,
    "loss": a_loss_that_draws,
    "reductions": other_reductions,
    "dtype": other_parameters(torch.Tensor.float),
    "shape": other_parameters(lambda w: w[:4]),
    "dtype of the loss": other_parameters_of_the_loss,
}


def count_reductions(rank, group):
    """Return how often gradients are reduced: all of one dtype at once, however many chunks there are."""
    calls, original = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].shape), original(*args, **kwargs))[1]
    try:
        sizes = [6, 1]
        contrastive(sizes, rank, group, batched=True, chunk_size=1)
    finally:
        dist.all_reduce = original
    return len(calls)


def run(rank, folder):
    torch.set_num_threads(1)
    timeout = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, RANKS, rank)
    group, found = dist.group.WORLD, {}
    for name, case in CASES.items():
        for kind, sizes in SIZES.items():
            found[name, kind] = case(sizes, rank, group)
    found["batch-norm-chunk"] = batch_norm([4, 3], rank, group, "chunk")
    found["reductions-of-gradients"] = count_reductions(rank, group)
    for name, step in FAILURES.items():
        found[name] = error_of(step, rank, group)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()  # gloo's threads may abort a process whose peer is still at work when it leaves
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run, (str(folder),), RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(found, name, kind):
    expected = CASES[name]([7], 0, None)
    for rank in range(RANKS):
        assert_same(found[rank][name, kind], expected)


def test_chunks_of_batch_norm_are_those_of_the_ranks(found):
    """Each rank normalizes with the statistics of its chunk; running statistics are the mean over all samples."""
    model = build(Residual)
    model.drop.p = 0.0
    z = torch.cat([model(chunk) for chunk in draw(7, 2, 4).split(4)])
    value = uniformity(z)
    grads = torch.autograd.grad(value, list(model.parameters()))
    expected = (value.detach(), dict(zip(dict(model.named_parameters()), grads, strict=True)))
    for loss, by, buffers in (rank["batch-norm-chunk"] for rank in found):
        assert_same((loss, by), expected)
        assert buffers["norm1.num_batches_tracked"] == 1
        x = draw(7, 2, 4)
        assert_same(buffers["beside.running_mean"], 0.1 * x.mean((0, 2)))


def test_gradients_are_reduced_once(found):
    assert [rank["reductions-of-gradients"] for rank in found] == [1] * RANKS


@pytest.mark.parametrize(
    ("name", "own", "others"),
    [
        (
            "arguments",
            (1, "ArgumentError: inputs: expected at least one tensor"),
            (0, "failed on other processes.*1: 'ArgumentError"),
        ),
        ("options", (1, "ArgumentError: chunk_size: expected"), (0, "failed on other processes.*1: 'ArgumentError")),
        ("encode", (1, "ValueError: rank 1 cannot read"), (0, "LossError: .*failed on other processes.*rank 1 cannot")),
        ("second-pass", (0, "LossError: encode_fn: expected the second pass"), (1, "other processes.*0: 'LossError")),
        ("shapes", (0, "LossError: encode_fn: expected z of one structure"), (1, "rank 1: .*4")),
        ("reductions", (0, "ArgumentError: reduce: expected the same on all ranks"), (1, r"rank 1: ClippedSum\(max_n")),
        ("loss", (0, "LossError: loss_fn drew random numbers"), (1, "LossError: loss_fn drew random numbers")),
        (
            "dtype",
            (0, "ArgumentError: params: expected the same"),
            (1, "torch.float64 on cpu; rank 1: .*torch.float32"),
        ),
        ("shape", (0, "ArgumentError: params: expected the same"), (1, r"0: shape \[5\], .*; rank 1: shape \[4\], ")),
        ("dtype of the loss", (0, "ArgumentError: loss_params: expected the same"), (1, "1: .*torch.float32 on cpu")),
    ],
)
def test_an_error_on_one_is_an_error_on_all(found, name, own, others):
    for rank, pattern in (own, others):
        assert re.search(pattern, found[rank][name])


class TestGroup:
    def test_that_is_none(self):
        for group in ("world", object()):
            with pytest.raises(ArgumentError, match=r"group: expected a process group or None.*init_process_group"):
                composite_grads(lambda w, x: w * x, uniformity, draw(5), draw(3, 5), group=group)

    def test_of_one_process(self, tmp_path):
        dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
        try:
            expected = contrastive([7], 0, None)
            assert_same(contrastive([7], 0, dist.group.WORLD), expected)
            with pytest.raises(ArgumentError, match="group: expected a process group or None, received 'world'"):
                contrastive([7], 0, "world")
            with pytest.raises(ArgumentError, match="received a group without this process"):
                contrastive([7], 0, dist.GroupMember.NON_GROUP_MEMBER)
        finally:
            dist.destroy_process_group()

    def test_an_error_of_ones_own_is_raised_as_it_is(self):
        with pytest.raises(LossError, match="received another z"):
            second_pass_fails(0, None)
