"""``accumulate`` on two and four processes against one: one launch of ``torchrun`` each for everything."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from oracle import assert_trees_close
from ranks import ENVIRONMENT, launched
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import persample as ps
from persample import accumulate


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("four"), 4)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.slow)])
def found(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return ranks.everything(0, None, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("shard", ranks.SHARDS)
@pytest.mark.parametrize("workload", ranks.WORKLOADS)
def test_every_reduction_is_that_of_one_process(found, alone, workload, shard):
    for rank in found:
        assert_trees_close(rank[workload, shard], alone[workload, shard], 1e-9)


@pytest.mark.parametrize("shard", ranks.SHARDS)
def test_several_outputs(found, alone, shard):
    for rank in found:
        assert_trees_close(rank["outputs", shard], alone["outputs", shard], 1e-9)


@pytest.mark.parametrize("shard", ranks.SHARDS)
def test_weights(found, alone, shard):
    for rank in found:
        assert_trees_close(rank["weighted", shard], alone["weighted", shard], 1e-9)


@pytest.mark.parametrize("shard", ranks.SHARDS)
def test_folders(found, alone, shard):
    """Runs of both were interrupted by an error, resumed, and read again when they were finished."""
    for rank in found:
        results, again = rank["sink", shard]
        assert_trees_close(results, alone["sink", shard][0], 1e-9)
        assert all(torch.utils._pytree.tree_leaves(again))


@pytest.mark.parametrize("shard", ranks.SHARDS)
def test_kronecker_factors_and_influences_in_half_precision(found, alone, shard):
    for rank in found:
        factors, direction, scores = rank["curvature", shard]
        assert_trees_close((factors, direction), alone["curvature", shard][:2], 1e-9)
        assert_trees_close(scores["exact"], alone["curvature", shard][2]["exact"], 1e-9)
        assert torch.equal(scores["half"], scores["exact"].bfloat16())


def test_units(found, alone):
    for rank in found:
        assert_trees_close(rank["units"], alone["units"], 1e-9)


def test_a_ddp_module_is_unwrapped_with_a_note(found, alone):
    for result, notes in (rank["ddp"] for rank in found):
        assert_trees_close(result, alone["ddp"][0], 1e-9)
        assert len(notes) == 1
        assert "accumulate uses the module inside" in notes[0]
    assert alone["ddp"][1] == []


def test_the_same_numbers_on_all_ranks_or_different_ones(found, alone):
    for same, different in (rank["same"] for rank in found):
        assert torch.equal(same, alone["same"][0])
        assert different == ranks.SAMPLES


def test_sums_take_one_collective_for_each_dtype(found):
    first = 3 + 1 + 3 + 1 + 3  # the sums and the weight of a mean, a sum, n and n·mean of moments
    for rank in found:
        assert rank["collectives"] == [(torch.float64, first), (torch.float64, 3)]


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("loss", (r"LossError: accumulate failed on other processes.*1: \"KeyError: 'mine'", "KeyError: 'mine'")),
        ("source", ("OSError: cannot read", "LossError: accumulate failed on other.*0: 'OSError: cannot read'")),
        (
            "params",
            ("LossError: accumulate failed on other.*1: 'ArgumentError: params", "ArgumentError: params: expect"),
        ),
        (
            "chunk_size",
            ("LossError: accumulate failed on other.*1: 'ArgumentError: chunk_s", "ArgumentError: chunk_size: expect"),
        ),
        ("forms", ("LossError: accumulate: expected results of one form on all ranks.*rank 1",) * 2),
        ("order", (r"ArgumentError: order: expected \[8, 7\] for 'interleaved', received \[6, 9\] samples",) * 2),
        ("average", (r"ArgumentError: Variance\(\): expected samples .*received B = 1",) * 2),
        (
            "shared unit",
            ("ArgumentError: unit: expected units of one process each, received id 2 on ranks 0 and 1",) * 2,
        ),
        ("units and aux", (r"ArgumentError: order: expected 'contiguous' for rows of samples \(Aux\)",) * 2),
        ("reductions", (r"ArgumentError: reduce: expected the same on all ranks, .*0: Norm.*; rank 1: Variance",) * 2),
        (
            "option",
            (r"ArgumentError: reduce: .*rank 0: ClippedSum\(max_norm=1.0, .*rank 1: ClippedSum\(max_norm=2.0",) * 2,
        ),
        ("tensor", (r"ArgumentError: reduce: expected the same on all ranks, received rank 0: Dot\(direction=",) * 2),
        ("randomness", (r"ArgumentError: randomness: expected the same .*rank 0: error; rank 1: same",) * 2),
        ("dtype", (r"ArgumentError: params: expected the same .*0: shape \[3\], torch.float64.*torch.float32",) * 2),
        ("half", (r"ArgumentError: params: expected the same .*torch.bfloat16 on cpu; .*torch.float16",) * 2),
        ("shape", (r"ArgumentError: params: expected the same .*0: shape \[3\], .*1: shape \[4\], torch.float64",) * 2),
        ("device", (r"ArgumentError: params: expected the same .*torch.float64 on cpu; .*torch.float64 on meta",) * 2),
        ("names", (r"ArgumentError: params\['a'\]: expected the same .*rank 0: shape .*; rank 1: None",) * 2),
        ("module dtype", (r"ArgumentError: params\['weight'\]: expected the same .*torch.float64.*torch.float32",) * 2),
    ],
)
def test_an_error_on_one_is_an_error_on_all(two, name, messages):
    for rank, message in zip(two, messages, strict=True):
        assert re.match(message, rank[name]), rank[name]


def test_a_killed_rank_is_an_error_on_the_others(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, ranks.__file__, str(tmp_path), str(rank)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    text = processes[0].communicate(timeout=120)[0]
    processes[1].communicate(timeout=120)
    assert processes[1].returncode == -9
    seconds, message = text.split(" ", 1)
    assert message.startswith("LossError: accumulate: another process of the group has ended, or did not answer")
    assert float(seconds) < 30


@pytest.fixture(scope="module")
def whole():
    return sharded.expected()


class TestShards:
    @pytest.mark.parametrize("kind", sharded.MODELS)
    def test_results_and_a_step_are_those_of_whole_parameters(self, found, whole, kind):
        for rank in found:
            results, held = rank["sharded"]["found"][kind]
            assert_trees_close(results, whole, 1e-9)
            assert all(held.values()), held

    def test_norms_send_one_number_per_sample_and_sharded_parameter(self, found):
        parts = 9  # weights and biases of q, v and up, weights of k, o and down; lookups are whole on each process
        for rank in found:
            for collectives in rank["sharded"]["collectives"]:  # clipped sums stay where they are
                assert collectives == [("all_reduce", 8 * sharded.SAMPLES * parts)]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("engine", "engine: expected 'eager' for DTensors, received 'traced'. Pass .*full_tensor"),
            ("reduce", r"reduce: expected Sum, Mean, .* Aux \(without metric\) for DTensors, received Gram"),
            ("metric", r"reduce: expected .*\(without metric\) for DTensors, received Norm"),
            ("randomness", "randomness: expected 'error' for DTensors, received 'same'"),
            ("outputs", "outputs: expected 'scalar' for DTensors, received 'rows'"),
            ("chunk_size", "chunk_size: expected None for a batch whose rows are on several processes, received 2"),
            ("unit", "unit: expected None or a number of consecutive samples for DTensors, received ids"),
            ("unequal", r"batch: expected rows \(with unit, whole units\) that 2 processes share.*received 7 rows"),
            ("unequal units", r"batch: expected rows .* that 2 processes share equally, received 8 rows"),
            ("other rows", r"batch: expected the same rows on every process, .*DTensor.from_local\(x, mesh, \[Shard"),
            ("mesh", r"batch: expected shards of DeviceMesh.*\(2, 1\), .*received one of DeviceMesh.*Distribute all"),
            ("group", "group: expected None for DTensors, whose batches are those of all processes"),
            ("composite", r"params\['embed.weight'\]: expected a tensor that this process holds whole.*full_tensor"),
        ],
    )
    def test_what_is_not_supported(self, two, name, message):
        for rank in two:
            assert re.match(f"ArgumentError: {message}", rank["sharded"]["messages"][name])


class TestOneProcess:
    @pytest.fixture(autouse=True)
    def group(self, tmp_path):
        dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
        yield
        dist.destroy_process_group()

    def test_shards_are_gathered_for_other_calls(self):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2), torch.randn(4, 3)
        loss = lambda params, x: torch.func.functional_call(model, params, x).sum().sin()
        shards = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
        whole = {name: p.full_tensor().detach() for name, p in shards.named_parameters()}
        mean = accumulate(loss, whole, x.split(2), ps.Mean(), group=dist.group.WORLD)
        assert_trees_close(mean, ps.per_sample_grads(loss, whole, x, ps.Mean()), 1e-5)

    def test_is_itself(self):
        x = ranks.draw(5, 3)
        result = accumulate(ranks.affine, ranks.draw(3), x.split(2), ranks.PER_SAMPLE, group=dist.group.WORLD)
        assert_trees_close(result, ps.per_sample_grads(ranks.affine, ranks.draw(3), x, ranks.PER_SAMPLE), 1e-9)
