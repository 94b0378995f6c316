"""``accumulate`` over many batches is ``per_sample_grads`` on one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from counting import AT_ONCE, functions_entered
from grid import REDUCTIONS
from oracle import assert_trees_close, oracle
from tensordict import TensorDict
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset
from workloads import WORKLOADS, build

import persample as ps
from persample import ArgumentError, LossError, accumulate, clear_cache, per_sample_grads
from persample.utils.measure import peak_memory

F64 = torch.float64
SPLITS = {"even": [2, 2], "ones": [1, 1, 1], "empty": [0, 3, 0], "whole": []}  # and a last batch of all that is left


def draw(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def split(batch, sizes):
    """The batch in pieces of some sizes, and what is left."""
    return list(zip(*(x.split([*sizes, len(x) - sum(sizes)]) for x in batch), strict=True))


def affine(w, x):
    return (w @ x).sin() + w.square().sum()


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("options", [{}, {"engine": "loop"}, {"chunk_size": 2}], ids=str)
@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_reduction_equals_the_loop(workload, sizes, options):
    work = build(workload)
    rows = oracle(work.loss_fn, work.params, work.batch)
    wanted = {name: make(rows, F64) for name, (make, _) in REDUCTIONS.items()}
    results = accumulate(work.loss_fn, work.params, split(work.batch, SPLITS[sizes]), wanted, **options)
    for name, (_, expected) in REDUCTIONS.items():
        assert_trees_close(results[name], expected(rows), 1e-9)


def test_the_traced_engine():
    clear_cache()
    work = build("mlp_td")
    rows = oracle(work.loss_fn, work.params, work.batch)
    wanted = {name: REDUCTIONS[name][0](rows, F64) for name in ("ClippedMean", "Variance", "Norm", "Gram")}
    for sizes in SPLITS.values():
        results = accumulate(work.loss_fn, work.params, split(work.batch, sizes), wanted, engine="traced")
        for name in wanted:
            assert_trees_close(results[name], REDUCTIONS[name][1](rows), 1e-9)


def test_batches_like_an_earlier_one_run_its_program_at_once():
    clear_cache()
    w, x, wanted = draw(3), draw(64, 3, seed=1), {"variance": ps.Variance(), "aux": ps.Aux(), "rows": None}
    loss = lambda w, x: (affine(w, x), x)

    def entered(size, batches):
        x_of = x[: size * batches]
        result, found = functions_entered(accumulate, loss, w, x_of.split(size), wanted, engine="traced")
        assert_trees_close(result, per_sample_grads(loss, w, x_of, wanted), 1e-9)
        return found.total()

    for size in (2, 1):  # a variance of one sample is that of a part
        first, few, many = (entered(size, batches) for batches in (2, 8, 24))
        assert many - few < 16 * 1.5 * AT_ONCE
        assert first > 10 * AT_ONCE
    weighted = accumulate(loss, w, x.split(2), ps.Mean(), weights=lambda x: x[:, 0].abs(), engine="traced")
    assert_trees_close(weighted, per_sample_grads(loss, w, x, ps.Mean(), weights=x[:, 0].abs()), 1e-9)


@pytest.mark.parametrize("kind", ["module", "dict"])
def test_traced_streams_use_parameters_that_are_replaced(kind):
    clear_cache()

    def result(engine):
        model, params = nn.Linear(3, 1, bias=False).double(), {"weight": torch.ones(1, 3, dtype=F64)}
        predict = (lambda p, x: p(x)) if kind == "module" else (lambda p, x: p["weight"] @ x)

        def batches():
            for number, batch in enumerate(draw(10, 3, seed=1).split(2)):
                params["weight"] = torch.full((1, 3), float(number), dtype=F64)
                model.weight = nn.Parameter(params["weight"])
                yield batch

        loss = lambda p, x: predict(p, x).square().sum()
        sums = accumulate(loss, model if kind == "module" else params, batches(), ps.Sum(), engine=engine)
        return sums["weight"]

    assert_trees_close(result("traced"), result("eager"), 1e-12)


def test_one_program_merges_all_batches():
    """A program returns with its results whether they are valid, after it has merged the batch, or not."""
    clear_cache()
    w, x = draw(3, dtype=torch.float32), draw(9, 3, dtype=torch.float32, seed=1)
    wanted = {"mean": ps.Mean(), "norms": ps.Norm(), "unit": ps.WeightedSum(torch.reciprocal)}
    wanted["clipped"] = ps.ClippedSum(1.0)
    loss = lambda w, x: (w @ x) * 10 ** x[0]
    one, other = x[:6].split(2), [x[:2], 30 - x[2:4], x[4:6], x[6:]]  # inverses of norms of 1e30: outside of programs
    first, *rest = (accumulate(loss, w, batches, wanted, engine="traced") for batches in (one, other, one))
    assert [made.batch_size for made in ps.explain(loss, w, x, ps.Mean(), engine="traced").compilations] == [2, None]
    exact = accumulate(loss, w.double(), [x.double() for x in other], wanted, engine="loop")
    assert_trees_close(rest[0], tree_map(torch.Tensor.float, exact), 1e-5)
    assert_trees_close(rest[1], first, 0)  # no call writes into the total of another


def test_traced_streams_of_losses_that_refuse_made_up_samples():

    def loss(w, x):
        assert type(x) is not FakeTensor
        return affine(w, x)

    w, x = draw(3), draw(6, 3, seed=1)
    found = accumulate(loss, w, x.split(2), ps.Mean(), engine="traced")
    assert_trees_close(found, per_sample_grads(loss, w, x, ps.Mean()), 1e-9)


@pytest.mark.parametrize("engine", ["eager", "traced"])
def test_batches_with_results_of_another_form(engine):
    loss = lambda w, x: (w[: x.shape[0]] @ x, {"a": x} if x.shape[0] == 3 else [x])
    batches = [draw(2, 3), draw(2, 2)]
    with pytest.raises(LossError, match=r"expected results like those of earlier batches.*'a'.*received"):
        accumulate(loss, draw(3), batches, ps.Aux(), engine=engine)
    rows = lambda w, x: (w[: x.shape[0]] @ x, x)
    with pytest.raises(LossError, match=r"rows like those of earlier batches, shape \[3\].*received shape \[2\]"):
        accumulate(rows, draw(3), batches, ps.Aux(), engine=engine)


class TestSources:
    w, x, y = draw(3), draw(7, 3, seed=1), draw(7, seed=2)

    @staticmethod
    def of_two(w, x, y):
        return (w @ x - y) ** 2

    @staticmethod
    def of_mapping(w, sample):
        return (w @ sample["x"] - sample["y"]) ** 2

    def check(self, loss, batches):
        expected = oracle(self.of_two, self.w, (self.x, self.y)).grads[0]
        results = accumulate(loss, self.w, batches, {"mean": ps.Mean(), "rows": None})
        assert_trees_close(results, {"mean": expected.mean(0), "rows": expected}, 1e-9)

    def test_data_loader(self):
        """Its batches are lists; the last one is short."""
        self.check(self.of_two, DataLoader(TensorDataset(self.x, self.y), batch_size=3))

    def test_generator_of_dicts(self):
        self.check(self.of_mapping, ({"x": x, "y": y} for x, y in split((self.x, self.y), [4])))

    def test_tensor_dicts(self):
        whole = TensorDict({"x": self.x, "y": self.y}, batch_size=[7])
        self.check(self.of_mapping, whole.split([3, 0, 4]))

    def test_named_tuples_of_arrays(self):
        pairs = [Pair(x.numpy(), y.numpy()) for x, y in split((self.x, self.y), [5])]
        self.check(lambda w, pair: self.of_two(w, pair.x, pair.y), pairs)

    def test_a_buffer_that_is_filled_again(self):
        """Rows that share memory with the batch are copied before the source writes into it."""

        def batches(buffer):
            for part in draw(6, 3, seed=3).split(2):
                buffer.copy_(part)
                yield buffer

        wanted = {"aux": ps.Aux(), "gram": ps.Gram(), "factors": ps.Factored()}  # nothing that writes gradients out
        loss = lambda w, x: ((w @ x).sin().sum(), x.view(3))
        w = draw(4, 3)
        results = accumulate(loss, w, batches(torch.empty(2, 3, dtype=F64)), wanted)
        expected = per_sample_grads(loss, w, draw(6, 3, seed=3), wanted)
        results["factors"], expected["factors"] = (one["factors"].materialize() for one in (results, expected))
        assert_trees_close(results, expected, 1e-9)

    @pytest.mark.parametrize("engine", ["eager", "traced"])
    def test_weights_that_are_filled_again(self, engine):
        x, weights = draw(6, 3, seed=3), draw(6, seed=5).abs()

        def refilled(buffer):
            for part in weights.split(2):
                yield buffer.copy_(part)

        wanted = {"solution": ps.NaturalGradient(0.1), "leverage": ps.Leverage(0.1), "mean": ps.Mean()}
        given = refilled(torch.empty(2, dtype=F64))
        result = accumulate(affine, draw(3), x.split(2), wanted, weights=given, engine=engine)
        assert_trees_close(result, per_sample_grads(affine, draw(3), x, wanted, weights=weights), 1e-9)

    def test_what_all_samples_share(self):
        scale = torch.tensor(2.0, dtype=F64)
        loss = lambda w, scale, x: scale * affine(w, x)
        dims = (None, (None, 0))
        result = accumulate(loss, self.w, [(scale, x) for x in self.x.split(4)], ps.Sum(), in_dims=dims)
        assert_trees_close(result, per_sample_grads(loss, self.w, (scale, self.x), ps.Sum(), in_dims=dims), 1e-9)

    def test_a_module_in_float32_keeps_its_dtype(self):
        model = nn.Linear(3, 1)
        wanted = {"mean": ps.Mean(), "norms": ps.Norm()}
        results = accumulate(lambda m, x: m(x).sum(), model, self.x.float().split(2), wanted)
        assert {x.dtype for x in [*results["mean"].values(), results["norms"]]} == {torch.float32}
        assert_trees_close(results["mean"]["weight"], self.x.mean(0, keepdim=True), 1e-6)
        assert all(p.grad is None for p in model.parameters())


class TestWeights:
    w, x, weights = draw(3), draw(7, 3, seed=1), torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0, 0.0, 1.0], dtype=F64)
    wanted = ps.Mean(), ps.Variance(), ps.Norm()

    def test_entries_for_each_batch(self):
        expected = per_sample_grads(affine, self.w, self.x, self.wanted, weights=self.weights)
        for sizes in ([7], [2, 5], [2, 0, 4, 1]):
            parts = self.weights.split(sizes)
            result = accumulate(affine, self.w, self.x.split(sizes), self.wanted, weights=iter(parts))
            assert_trees_close(result, expected, 1e-9)

    def test_a_function_of_the_batch(self):
        batches = [{"x": x, "n": n} for x, n in split((self.x, self.weights), [3])]
        loss = lambda w, sample: affine(w, sample["x"])
        result = accumulate(loss, self.w, batches, self.wanted, weights=lambda batch: batch["n"])
        assert_trees_close(result, per_sample_grads(affine, self.w, self.x, self.wanted, weights=self.weights), 1e-9)

    def test_none_counts_once(self):
        weights = [None, torch.tensor([2.0, 2.0])]
        result = accumulate(affine, self.w, self.x[:4].split(2), ps.Mean(), weights=weights)
        expected = per_sample_grads(affine, self.w, self.x[:4], ps.Mean(), weights=[1, 1, 2, 2])
        assert_trees_close(result, expected, 1e-9)

    def test_a_batch_of_weight_zero_and_nan(self):
        x = self.x.clone()
        x[3:5] = torch.nan
        weights = [torch.ones(3), torch.zeros(2), torch.ones(2)]
        result = accumulate(affine, self.w, x.split([3, 2, 2]), ps.Variance(), weights=weights)
        assert_trees_close(result, per_sample_grads(affine, self.w, x[[0, 1, 2, 5, 6]], ps.Variance()), 1e-9)

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([torch.ones(3)], "weights: expected one entry for each batch, received fewer entries"),
            ([None] * 3, "weights: expected one entry for each batch, received more entries"),
            (torch.ones(7), "weights: expected a function of a batch, or an iterable.*received Tensor"),
            (lambda x, y: y, r"weights: expected a function of a batch, received \(x, y\).* with the whole batch"),
            ([None, torch.ones(3)], r"batches\[1\]: weights: expected 4 finite real numbers, received shape \[3\]"),
        ],
        ids=["fewer", "more", "tensor", "function", "length"],
    )
    def test_that_do_not_fit(self, weights, message):
        with pytest.raises(ArgumentError, match=message):
            accumulate(affine, self.w, self.x.split([3, 4]), ps.Mean(), weights=weights)

    def test_averages_are_checked_over_all_batches(self):
        """A variance of two batches of one sample exists; negative weights have no mean, nor has nothing."""
        one_by_one = accumulate(affine, self.w, self.x[:2].split(1), ps.Variance())
        assert_trees_close(one_by_one, per_sample_grads(affine, self.w, self.x[:2], ps.Variance()), 1e-9)
        with pytest.raises(ArgumentError, match=r"Variance\(\): expected samples .* more than 1, received B = 1"):
            accumulate(affine, self.w, [self.x[:0], self.x[:1]], ps.Variance())
        with pytest.raises(ArgumentError, match=r"Mean\(\): .*received weights that sum to 3, the smallest -1"):
            accumulate(affine, self.w, self.x[:4].split(2), ps.Mean(), weights=[[3, 2], [-1, -1]])


class TestEmpty:
    def test_batches_alone_give_zeros_and_no_rows(self):
        results = accumulate(affine, draw(3), [draw(0, 3), draw(0, 3)], {"sum": ps.Sum(), "norms": ps.Norm()})
        assert_trees_close(results, {"sum": torch.zeros(3, dtype=F64), "norms": torch.zeros(0, dtype=F64)}, 0)

    @pytest.mark.parametrize("reduction", [ps.Sum(), ps.Mean()], ids=["sum", "mean"])
    def test_no_batch_at_all(self, reduction):
        with pytest.raises(ArgumentError, match=r"batches: expected at least one batch, received none.*empty batch"):
            accumulate(affine, draw(3), [], reduction)
        with pytest.raises(ArgumentError, match=r"^params: expected a floating"):
            accumulate(affine, torch.ones(3, dtype=torch.int64), [], reduction)

    def test_batches_do_not_hide_a_loss_without_parameters(self):
        with pytest.raises(LossError, match="depends on none of them"):
            accumulate(lambda w, x: x.sum(), draw(3), [draw(0, 3), draw(2, 3)], ps.Sum())


class TestErrors:
    x = draw(6, 3, seed=1)

    @pytest.mark.parametrize(
        "batches", [draw(3), {"x": draw(3)}, nn.Linear(1, 1), 3, "text"], ids=lambda x: type(x).__name__
    )
    def test_not_batches(self, batches):
        expected = rf"batches: expected an iterable of batches.*received {type(batches).__name__}.*per_sample_grads"
        with pytest.raises(ArgumentError, match=expected):
            accumulate(affine, draw(3), batches, ps.Sum())

    def test_a_loss_of_the_users(self):
        def loss(w, x):
            if len(x) == 2:
                raise KeyError("mine")
            return w[0] * x.sum()

        with pytest.raises(KeyError, match="mine") as raised:
            accumulate(loss, draw(3), [self.x, self.x[:, :2]], ps.Sum())
        assert raised.value.__notes__ == ["(raised for batches[1] of accumulate)"]

    def test_a_source_of_the_users(self):
        def batches():
            yield self.x
            raise OSError("no such file")

        with pytest.raises(OSError, match="no such file") as raised:
            accumulate(affine, draw(3), batches(), ps.Sum())
        assert raised.value.__notes__ == ["(raised for batches[1] of accumulate)"]

    def test_a_loss_that_cannot_be_batched(self):
        loss = lambda w, x: affine(w, x) if len(x) == 3 else w.sum() * x.sum().item()
        with pytest.raises(LossError, match=r"batches\[2\]: loss_fn reads values of a sample"):
            accumulate(loss, draw(3), [self.x, self.x, self.x[:, :2]], ps.Sum())

    def test_leaves_of_unlike_sizes(self):
        loss = lambda w, x, y: affine(w, x) * y
        message = r"batches\[1\]: expected leaves of one common batch size, received batches\[1\]\[0\]: 6, .*\[1\]: 5"
        with pytest.raises(ArgumentError, match=message):
            accumulate(loss, draw(3), [(self.x, self.x[:, 0]), (self.x, self.x[:5, 0])], ps.Sum())

    @pytest.mark.parametrize("engine", ["eager", "traced"])
    @pytest.mark.parametrize("params", [{}, [nn.ReLU()], torch.ones(3, dtype=torch.int64), {"w": 1.0}])
    def test_parameters_are_checked_before_a_second_batch_is_read(self, params, engine):
        def batches():
            yield self.x
            raise AssertionError("read")

        with pytest.raises(ArgumentError, match=r"^params(\['w'\])?: expected"):
            accumulate(affine, params, batches(), ps.Sum(), engine=engine)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (draw(2, 4), r"batches\[1\]: expected rows like those.*shape \[3\].*received shape \[4\].*Pad"),
            (draw(2, 3, dtype=torch.float32), r"batches\[1\]: expected rows.*float64, received.*float32"),
        ],
        ids=["shape", "dtype"],
    )
    def test_aux_of_other_formats(self, other, message):
        with pytest.raises(LossError, match=message):
            accumulate(lambda w, x: (w * x.sum().double(), x), torch.ones((), dtype=F64), [self.x, other], ps.Aux())

    def test_aux_of_another_structure(self):
        loss = lambda w, x: (w * x.sum(), {"x": x} if len(x) == 3 else x)
        with pytest.raises(LossError, match=r"batches\[1\]: expected results like those of earlier batches"):
            accumulate(loss, torch.ones((), dtype=F64), [self.x, self.x[:, :2]], ps.Aux())

    def test_a_write_into_the_batch(self):
        def loss(w, x):
            return affine(w, x.mul_(2))

        with pytest.raises(LossError, match=r"batches\[0\]: loss_fn wrote in place into batches\[0\]"):
            accumulate(loss, draw(3), [self.x.clone()], ps.Sum(), engine="loop")

    def test_options(self):
        for options, message in [
            ({"engine": "fast"}, "engine: expected"),
            ({"chunk_size": 0}, "chunk_size: expected"),
            ({"randomness": "some"}, "randomness: expected"),
            ({"order": "random"}, "order: expected 'interleaved' or 'contiguous'"),
            ({"group": "world"}, "group: expected a process group"),
        ]:
            with pytest.raises(ArgumentError, match=message):
                accumulate(affine, draw(3), [self.x], ps.Sum(), **options)

    def test_inside_of_a_transform(self):
        inside = torch.func.vmap(lambda w: accumulate(affine, w, [self.x], ps.Sum()))
        with pytest.raises(ArgumentError, match=r"accumulate: expected to be called outside.*inside torch.func.vmap"):
            inside(draw(2, 3))


class TestRandomness:
    @staticmethod
    def loss(w, x):
        return (w * torch.rand(3, dtype=F64)).sum() * x

    @pytest.mark.parametrize("engine", ["eager", "loop"])
    def test_same_numbers_for_all_batches(self, engine):
        torch.manual_seed(1)
        options = {"randomness": "same", "engine": engine}
        rows = accumulate(self.loss, torch.ones(3, dtype=F64), torch.ones(5, dtype=F64).split(2), **options)
        assert (rows == rows[0]).all()
        assert not torch.equal(accumulate(self.loss, rows[0], [torch.ones(1, dtype=F64)], **options), rows[:1])

    def test_the_source_draws_its_own(self):
        source = (torch.rand(2, dtype=F64) for _ in range(3))
        aux = lambda w, x: (self.loss(w, x), x)
        seen = accumulate(aux, torch.ones(3, dtype=F64), source, ps.Aux(), randomness="same")
        assert len(set(seen.tolist())) == 6

    def test_different_numbers(self):
        rows = accumulate(
            self.loss, torch.ones(3, dtype=F64), torch.ones(5, dtype=F64).split(2), randomness="different"
        )
        assert len({row.tobytes() for row in rows.numpy()}) == 5

    def test_none_by_default(self):
        with pytest.raises(LossError, match=r"batches\[0\]: loss_fn draws random numbers"):
            accumulate(self.loss, torch.ones(3, dtype=F64), [torch.ones(2, dtype=F64)])


class TestModules:
    def test_buffers_stay_as_they_were(self):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().eval()
        before = tree_map(torch.clone, dict(model.state_dict()))
        accumulate(lambda m, x: m(x[None]).square().sum(), model, draw(6, 3).split(2), ps.Mean())
        assert_trees_close(dict(model.state_dict()), before, 0)

    def test_the_source_may_differentiate(self):
        """Only the loss runs without a graph around it."""
        w = draw(3).requires_grad_()

        def batches():
            for x in draw(4, 3).split(2):
                yield x * torch.autograd.grad(affine(w, x[0]), w)[0].abs().detach()

        assert accumulate(affine, w, batches(), ps.Mean()).shape == (3,)


class TestNumerics:
    """float32 gradients add up in float64, moments merge by Chan's formula."""

    @staticmethod
    def loss(w, x):
        return (w * x).sum() + 0.1 * (w * x).sin().sum()

    def check_sums(self, samples, size, engine="eager"):
        x = draw(samples, 8, dtype=torch.float32) + 1
        w = draw(8, dtype=torch.float32, seed=1)
        wanted = {"sum": ps.Sum(), "mean": ps.Mean(), "second": ps.SecondMoment(), "clipped": ps.ClippedSum(2.0)}
        result = accumulate(self.loss, w, x.split(size), wanted, engine=engine)
        assert_trees_close(result, accumulate(self.loss, w.double(), x.double().split(size), wanted), 1e-6)

    def test_sums(self):
        self.check_sums(10_000, 50)

    def test_sums_of_programs(self):
        self.check_sums(20_000, 50, "traced")

    @pytest.mark.slow
    def test_sums_of_a_million(self):
        self.check_sums(1_000_000, 100)

    @pytest.mark.parametrize("size", [1, 20_000])  # programs leave large sums to us
    @pytest.mark.parametrize("engine", ["eager", "traced"])
    def test_a_sum_that_float32_would_stop_at(self, engine, size):
        """2²⁴ + 1 + 1 + … is 2²⁴ in float32."""
        x = torch.tensor([2.0**24, *[1.0] * 64])
        loss = lambda w, x: (w * x).sum()
        result = accumulate(loss, torch.ones(size), x.split(1), ps.Sum(), engine=engine)
        assert (result == 2**24 + 64).all()

    @pytest.mark.parametrize("engine", ["eager", "traced"])
    def test_sums_that_cancel_and_means_of_large_numbers(self, engine):
        loss = lambda w, x: (w * x).sum()
        for values, wanted, expected in (
            ([1e8, 1.0, -1e8, 1.0], ps.Sum(), 2.0),
            ([2e38] * 4, ps.Mean(), 2e38),
        ):
            x = torch.tensor(values)
            result = accumulate(loss, torch.ones(3), x.split(1), wanted, engine=engine)
            torch.testing.assert_close(result, torch.full((3,), expected))

    def test_sums_of_many_numbers(self):
        """They are added in blocks; those of a transposed parameter, too."""
        w, x = draw(500, 300, dtype=torch.float32).T, draw(6, 500, seed=1, dtype=torch.float32)
        wanted = {"mean": ps.Mean(), "second": ps.SecondMoment()}
        loss = lambda w, x: (w @ x).square().sum()
        whole = per_sample_grads(loss, w.double(), x.double(), wanted)
        assert_trees_close(accumulate(loss, w, x.split(2), wanted), whole, 1e-5)

    def test_half_precision_is_rounded_once(self):
        x = torch.full((4096,), 1.001, dtype=torch.float16)
        w = torch.ones((), dtype=torch.float16)
        assert accumulate(lambda w, x: w * x, w, x.split(16), ps.Mean()) == x[0]

    @pytest.mark.parametrize("engine", ["eager", "loop"])
    @pytest.mark.parametrize("ratio", [1e3, 1e5])
    def test_variance_where_the_mean_is_large(self, ratio, engine):
        """Two passes in float64 are the reference."""
        x = draw(300, 4) + ratio
        wanted = {"variance": ps.Variance(), "noise": ps.NoiseScale()}
        result = accumulate(lambda w, x: (w * x).sum(), draw(4), x.split(7), wanted, engine=engine)
        two_passes = (x - x.mean(0)).square().sum(0) / 299
        assert_trees_close(result["variance"], two_passes, 1e-9)
        assert_trees_close(result["noise"].covariance_trace, two_passes.sum(), 1e-9)

    def test_variance_of_layers_where_the_mean_is_large(self):
        """Factors of one product: one pass in each batch, in float64."""
        x = draw(300, 4) + 1e3
        result = accumulate(lambda m, x: m(x).sum(), nn.Linear(4, 1, bias=False).double(), x.split(7), ps.Variance())
        assert_trees_close(result["weight"][0], (x - x.mean(0)).square().sum(0) / 299, 1e-9)


class TestMemory:
    P = 50_000

    def peak(self, reduction, batches):
        x = torch.ones(2, 1)
        loss = lambda w, x: (w * x).sum()
        return peak_memory(lambda: accumulate(loss, torch.zeros(self.P), (x for _ in range(batches)), reduction))

    @pytest.mark.parametrize(
        "reduction",
        [ps.Mean(), ps.ClippedSum(1.0), ps.SecondMoment(), ps.Variance(), ps.NoiseScale()],
        ids=lambda one: type(one).__name__,
    )
    def test_is_flat_in_the_number_of_batches(self, reduction):
        assert self.peak(reduction, 12) < self.peak(reduction, 3) + 4 * self.P

    def test_of_rows_is_theirs(self):
        assert self.peak(ps.Norm(), 12) < self.peak(ps.Norm(), 3) + 4 * self.P

    @pytest.mark.slow
    def test_of_a_million_samples(self):
        """The process does not grow by more than a tenth of what the data takes."""
        wanted = {"mean": ps.ClippedMean(1.0), "variance": ps.Variance()}
        model = nn.Linear(64, 1)

        def grown(batches):
            source = (torch.randn(1000, 64) for _ in range(batches))
            accumulate(lambda m, x: m(x).square().sum(), model, source, wanted)
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096  # pages in memory

        assert grown(1000) - grown(50) < 1_000_000 * 64 * 4 / 10


def test_arrays_of_numpy_take_the_dtype_of_the_parameters():
    x = np.ones((4, 3), dtype=np.float64)
    assert accumulate(affine, draw(3, dtype=torch.float32), [x[:2], x[2:]], ps.Norm()).dtype == torch.float32
