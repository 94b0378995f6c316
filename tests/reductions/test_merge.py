"""Merge laws: partial results of any split, merged in any grouping, are the result of one pass."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persample.errors import LossError
from persample.factors import Dense
from persample.merge import AnyOf, Moments, Stacked, Summed, merge

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def groupings(parts):
    """The parts merged from the left, from the right, and in halves."""

    def halves(parts):
        if len(parts) == 1:
            return parts[0]
        middle = (len(parts) + 1) // 2
        return halves(parts[:middle]).merge(halves(parts[middle:]))

    left = reduce(lambda a, b: a.merge(b), parts)
    right = reduce(lambda a, b: b.merge(a), parts[::-1])
    return {"left": left, "right": right, "halves": halves(parts)}


GROUPINGS = ["left", "right", "halves"]
SIZES = [[5], [2, 3], [0, 5], [5, 0], [1, 1, 1, 1, 1], [3, 0, 0, 2], [0, 0, 5, 0]]
split_ids = {"argvalues": SIZES, "ids": lambda sizes: "+".join(map(str, sizes))}


def moments(rows, weights, *, elementwise=True):
    """One pass over the rows ``[n, *]``: the definition. No rows, or no weight, is mean 0 and m2 0."""
    n = weights.sum()
    column = weights.view(-1, *[1] * (rows.ndim - 1))
    mean = (column * rows).sum(0) / n if n > 0 else torch.zeros(rows.shape[1:], dtype=F64)
    m2 = (column * (rows - mean) ** 2).sum(0)
    return Moments(n, mean, m2 if elementwise else m2.sum())


def assert_moments(actual, expected, tolerance=1e-12):
    close(actual.n, expected.n)
    close(actual.mean, expected.mean, tolerance)
    close(actual.m2, expected.m2, tolerance)
    assert actual.m2.shape == expected.m2.shape


class TestSummed:
    @pytest.mark.parametrize("grouping", GROUPINGS)
    @pytest.mark.parametrize("sizes", **split_ids)
    def test_any_split_and_grouping_is_the_sum(self, sizes, grouping):
        rows = draw(5, 2, 3)
        parts = [Summed(part.sum(0)) for part in rows.split(sizes)]
        close(groupings(parts)[grouping].finish(), rows.sum(0))

    def test_divided_before_it_is_rounded(self):
        """In float16 the sum 120 000 is infinite; the mean is not."""
        parts = [Summed(torch.tensor(60_000.0), torch.float16)] * 2
        mean = parts[0].merge(parts[1]).finish(torch.tensor(4.0, dtype=F64))
        assert mean.dtype == torch.float16
        assert mean == 30_000

    def test_a_double_divisor_does_not_promote_a_0d_sum(self):
        assert Summed(torch.tensor(3.0)).finish(torch.tensor(2.0, dtype=F64)).dtype == torch.float32

    def test_pairs_become_complex_again_and_the_dtype_survives_merging(self):
        part = Summed(torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=F64), torch.complex64)
        expected = torch.tensor([2 + 4j, 6 - 8j], dtype=torch.complex64)
        actual = part.merge(part).finish()
        assert actual.dtype == torch.complex64
        assert torch.equal(actual, expected)


class TestMoments:
    @pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "summed"])
    @pytest.mark.parametrize("grouping", GROUPINGS)
    @pytest.mark.parametrize("sizes", **split_ids)
    def test_any_split_and_grouping_is_one_pass(self, sizes, grouping, elementwise):
        rows, weights = draw(5, 2, 3), draw(5, seed=1).abs()
        pieces = zip(rows.split(sizes), weights.split(sizes), strict=True)
        parts = [moments(*piece, elementwise=elementwise) for piece in pieces]
        assert_moments(groupings(parts)[grouping], moments(rows, weights, elementwise=elementwise))

    @settings(max_examples=40, deadline=None)
    @given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6), shift=st.sampled_from([0.0, 1e6]))
    def test_random_splits(self, sizes, shift):
        """One pass of torch.var is the reference; a mean of 10⁶ standard deviations costs 1e-16 · 10⁶ at most."""
        rows = draw(sum(sizes), 4) + shift
        parts = [moments(part, torch.ones(len(part), dtype=F64)) for part in rows.split(sizes)]
        for merged in groupings(parts).values():
            assert merged.n == len(rows)
            if len(rows):
                close(merged.mean, rows.mean(0))
                close(merged.m2, rows.var(0, correction=0) * len(rows), 1e-9)

    @pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "summed"])
    def test_many_numbers_are_absorbed_in_blocks(self, elementwise):
        def part(rows):
            found = moments(rows, torch.ones(len(rows), dtype=F64), elementwise=elementwise)
            return replace(found, mean=found.mean.t(), m2=found.m2.t())  # of another memory order than the blocks

        rows = draw(5, 300, 320)
        parts = list(map(part, rows.split(2)))
        total = parts[0].widened()
        for other in parts[1:]:
            total.absorb(other)
        assert_moments(total, part(rows))
        assert_moments(parts[0], part(rows[:2]))

    @pytest.mark.parametrize("shape", [(), (3,)], ids=["summed", "elementwise"])
    def test_two_empty_halves_are_empty_not_nan(self, shape):
        empty = Moments(torch.tensor(0.0, dtype=F64), torch.zeros(3, dtype=F64), torch.zeros(shape, dtype=F64))
        assert_moments(empty.merge(empty), empty)

    def test_samples_of_weight_zero_are_not_there(self):
        rows, weights = draw(6, 2), torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0, 3.0], dtype=F64)
        parts = [moments(*piece) for piece in zip(rows.split(2), weights.split(2), strict=True)]
        kept = weights > 0
        assert_moments(groupings(parts)["left"], moments(rows[kept], weights[kept]))

    def test_a_weight_of_k_is_k_samples(self):
        rows = draw(3, 2)
        repeated = moments(rows.repeat_interleave(torch.tensor([2, 1, 4]), 0), torch.ones(7, dtype=F64))
        parts = [moments(row[None], torch.tensor([k], dtype=F64)) for row, k in zip(rows, (2.0, 1.0, 4.0), strict=True)]
        assert_moments(groupings(parts)["left"], repeated)

    def test_the_dtype_survives(self):
        part = Moments(torch.tensor(1.0), torch.zeros(2), torch.zeros(2), torch.complex64)
        assert part.merge(part).dtype == torch.complex64


class TestStacked:
    @pytest.mark.parametrize("kind", [lambda x: x, Dense], ids=["tensor", "factor"])
    @pytest.mark.parametrize("grouping", GROUPINGS)
    @pytest.mark.parametrize("sizes", **split_ids)
    def test_rows_keep_their_order(self, sizes, grouping, kind):
        rows = torch.arange(15.0).view(5, 3)
        merged = groupings([Stacked(kind(part)) for part in rows.split(sizes)])[grouping]
        assert torch.equal(merged.finish(), rows)

    def test_order_is_not_symmetric(self):
        first, second = Stacked(torch.zeros(1)), Stacked(torch.ones(2))
        assert first.merge(second).finish().tolist() == [0, 1, 1]
        assert second.merge(first).finish().tolist() == [1, 1, 0]

    @pytest.mark.parametrize("sizes", [[4], [1, 3]], ids=["alone", "merged"])
    def test_factors_stay_factors_until_they_are_finished(self, sizes):
        rows = draw(4, 2)
        merged = groupings([Stacked(Dense(part)) for part in rows.split(sizes)])["left"]
        assert isinstance(merged.concatenated(), Dense)
        assert torch.equal(merged.concatenated().materialize(), rows)

    @pytest.mark.parametrize("kind", [lambda x: x, Dense], ids=["tensor", "factor"])
    def test_pairs_become_complex_again(self, kind):
        pairs = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
        merged = Stacked(kind(pairs), torch.complex64).merge(Stacked(kind(pairs[:1]), torch.complex64))
        assert torch.equal(merged.finish(), torch.tensor([1 + 2j, 3 - 4j, 1 + 2j]))


class TestAnyOf:
    @pytest.mark.parametrize("left", [False, True], ids="left={}".format)
    @pytest.mark.parametrize("right", [False, True], ids="right={}".format)
    def test_is_or(self, left, right):
        assert AnyOf(left).merge(AnyOf(right)).value is (left or right)

    @pytest.mark.parametrize("position", [None, 0, 1, 2, 3])
    def test_one_is_enough_in_any_grouping(self, position):
        parts = [AnyOf(i == position) for i in range(4)]
        assert {merged.value for merged in groupings(parts).values()} == {position is not None}


class TestTrees:
    def test_every_leaf_by_its_own_rule(self):
        def part(x):
            weights = torch.ones(len(x), dtype=F64)
            return [{"sum": Summed(x.sum(0)), "spread": (moments(x, weights),)}, [Stacked(x), AnyOf(len(x) == 1)]]

        rows = draw(6, 2)
        merged = reduce(merge, map(part, rows.split([3, 1, 2])))
        close(merged[0]["sum"].finish(), rows.sum(0))
        assert_moments(merged[0]["spread"][0], moments(rows, torch.ones(6, dtype=F64)))
        assert torch.equal(merged[1][0].finish(), rows)
        assert merged[1][1].value is True

    def test_different_structures_are_refused(self):
        leaf = AnyOf(False)
        with pytest.raises(LossError, match=r"earlier batches.*'a'.*'b'"):
            merge({"a": leaf}, {"b": leaf})
