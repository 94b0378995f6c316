"""Every operation of every factor equals that of the gradients written out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
from compiler import lowered
from counting import Operations, operations
from grid import REDUCTIONS
from oracle import Rows, assert_trees_close
from seams import blocks_of, float32_for_few_terms
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from persample import ClippedMean, Norm, per_sample_grads
from persample.factors import Conv, Dense, Embedding, Factor, Outer, SumFactor, concatenate, cost_model, sum_factors
from persample.gradients import Gradients, ParamSpec, squared_norms_per_factor

B = 4


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def product(left, right, num_terms, shape=None):
    """l and r vary along the given axes, both of them along the groups, which come first."""
    left, right = (right, left) if left[-1] > 1 == right[-1] else (left, right)  # rows come before columns
    groups = prod(a for a, b in zip(left, right, strict=True) if a > 1 and b > 1)
    operands = (draw(B, groups, num_terms, prod(axes) // groups) for axes in (left, right))
    return Outer(*operands, shape or tuple(map(max, left, right)), torch.float64)


def conv(signals, inputs, shape, stride=1, padding=0, dilation=1, groups=1):
    spatial = len(shape) - 2
    settings = ((x,) * spatial for x in (stride, padding, dilation))
    return Conv(draw(B, *signals), draw(B, *inputs), shape, *settings, groups)


def table(num_terms=3, rows=6, columns=4):
    return Embedding(draw(B, num_terms, columns), torch.randint(rows, (B, num_terms)), (rows, columns))


def tied(num_terms, lookups=3, rows=60, columns=40):
    return sum_factors([product((rows, 1), (1, columns), num_terms), table(lookups, rows, columns)])


@dataclass(frozen=True)
class Repeated(Factor):
    """A factor that defines only what it must: every row of the matrix is the same."""

    values: torch.Tensor

    @property
    def shape(self):
        return 6, self.values.shape[1]

    def materialize(self, out=None):
        values = self.values[:, None].expand(-1, *self.shape)
        return values.clone() if out is None else out.copy_(values)


def of_outputs(factor, *fields):
    """The factor of K = 3 outputs, which differ in the given fields, and share the others."""
    names = [name for name in ("signals", "index", "inputs", "left", "right") if hasattr(factor, name)]
    changed = {name: getattr(factor, name).unsqueeze(1) for name in names}
    for name in fields:
        changed[name] = torch.cat([changed[name] * k for k in (1.0, -0.5, 2.0)], 1).cos()
    return replace(factor, **changed, outputs=(3,))


FACTORS = {
    "defaults": lambda: Repeated(draw(B, 4)),
    "dense": lambda: Dense(draw(B, 6, 4)),
    "zeros": lambda: Dense(torch.zeros(1, 6, 4, dtype=torch.float64).expand(B, 6, 4)),
    "outer": lambda: product((6, 1), (1, 4), 1),
    "outer-steps": lambda: product((6, 1), (1, 4), 3),
    "outer-many-steps": lambda: product((6, 1), (1, 4), 40),
    "outer-large-few-steps": lambda: product((60, 1), (1, 40), 2),
    "outer-transposed": lambda: product((1, 6), (4, 1), 2),
    "outer-groups": lambda: product((3, 6, 1), (3, 1, 4), 1),
    "outer-groups-steps": lambda: product((3, 6, 1), (3, 1, 4), 2),
    "outer-flattened": lambda: product((6, 1), (1, 4), 2, (24,)),
    "outer-broadcast-batch": lambda: Outer(
        draw(B, 1, 2, 6), draw(1, 1, 2, 4).expand(B, -1, -1, -1), (6, 4), torch.float64
    ),
    "conv1d": lambda: conv((1, 6, 5), (1, 4, 7), (6, 4, 3)),
    "conv1d-images": lambda: conv((2, 6, 5), (2, 4, 7), (6, 4, 3)),
    "conv2d-strided": lambda: conv((1, 6, 3, 3), (1, 4, 7, 7), (6, 4, 3, 3), stride=2),
    "conv2d-padded-dilated": lambda: conv((1, 6, 5, 5), (1, 4, 7, 7), (6, 4, 3, 3), padding=1, dilation=2),
    "conv2d-groups": lambda: conv((1, 6, 5, 5), (1, 4, 7, 7), (6, 2, 3, 3), groups=2),
    "conv2d-leftover": lambda: conv((1, 6, 3, 3), (1, 4, 8, 8), (6, 4, 3, 3), stride=2),
    "conv2d-one-place": lambda: conv((1, 6, 1, 1), (1, 4, 3, 3), (6, 4, 3, 3)),
    "conv3d": lambda: conv((1, 6, 2, 2, 2), (1, 4, 4, 4, 4), (6, 4, 3, 3, 3)),
    "embedding": table,
    "embedding-one-lookup": lambda: table(1),
    "embedding-repeated": lambda: table(20),
    "sum_factors": lambda: sum_factors([product((6, 1), (1, 4), 2), table()]),
    "tied": lambda: tied(3),
    "tied-one-term": lambda: tied(1, 1),
    "tied-repeated": lambda: tied(2, 20, 6, 4),
    "tied-many-terms": lambda: tied(40),
    "tied-transposed": lambda: sum_factors([product((1, 6), (4, 1), 2), table(3, 4, 6)]),
    "tied-groups": lambda: sum_factors(
        [product((3, 6, 1), (3, 1, 4), 1), Embedding(draw(B, 3, 24), torch.randint(3, (B, 3)), (3, 6, 4))]
    ),
    "outputs-dense": lambda: Dense(draw(B, 3, 6, 4), outputs=(3,)),
    "outputs-outer": lambda: of_outputs(product((6, 1), (1, 4), 1), "left"),
    "outputs-outer-steps": lambda: of_outputs(product((6, 1), (1, 4), 3), "left"),
    "outputs-outer-few-steps": lambda: of_outputs(product((60, 1), (1, 40), 2), "left"),
    "outputs-outer-right": lambda: of_outputs(product((6, 1), (1, 4), 1), "right"),
    "outputs-outer-right-steps": lambda: of_outputs(product((6, 1), (1, 4), 3), "right"),
    "outputs-outer-groups": lambda: of_outputs(product((3, 6, 1), (3, 1, 4), 1), "left"),
    "outputs-outer-groups-steps": lambda: of_outputs(product((3, 6, 1), (3, 1, 4), 2), "right"),
    "outputs-conv1d-images": lambda: of_outputs(conv((2, 6, 5), (2, 4, 7), (6, 4, 3)), "signals"),
    "outputs-conv2d-groups": lambda: of_outputs(conv((1, 6, 5, 5), (1, 4, 7, 7), (6, 2, 3, 3), groups=2), "signals"),
    "outputs-conv2d-one-place": lambda: of_outputs(conv((1, 6, 1, 1), (1, 4, 3, 3), (6, 4, 3, 3)), "signals"),
    "outputs-conv-transposed": lambda: of_outputs(conv((1, 6, 5, 5), (1, 4, 7, 7), (6, 2, 3, 3), groups=2), "inputs"),
    "outputs-conv-pixels": lambda: of_outputs(conv((1, 60, 2, 2), (1, 40, 3, 3), (60, 40, 2, 2)), "inputs"),
    "outputs-embedding": lambda: of_outputs(table(), "signals"),
    "outputs-tied": lambda: sum_factors(
        [of_outputs(product((60, 1), (1, 40), 2), "left"), of_outputs(table(3, 60, 40), "signals")]
    ),
    "outputs-two-sides": lambda: sum_factors(
        [of_outputs(product((6, 1), (1, 4), 2), "left"), of_outputs(product((6, 1), (1, 4), 1), "right")]
    ),
    "elements-of-tied": lambda: tied(3).times_elements(draw(60, 40).abs()),
    "total-layouts": lambda: sum_factors([product((6, 1), (1, 4), 2), product((6, 1), (6, 4), 1)]),
}
WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
EACH = WEIGHTS[:, None] * torch.tensor([1.0, 0.0, -3.0])
OPERATIONS = {
    "squared_norms": lambda f: f.squared_norms(),
    "weighted_sum": lambda f: f.weighted_sum(WEIGHTS, torch.float64),
    "weighted_sum-ones": lambda f: f.weighted_sum(None, torch.float64),
    "second_moment": lambda f: f.second_moment(WEIGHTS.abs(), torch.float64),
    "second_moment-ones": lambda f: f.second_moment(None, torch.float64),
    "second_moment-centered": lambda f: f.second_moment(
        WEIGHTS.abs(), torch.float64, torch.full(f.shape, 0.3, dtype=torch.float64)
    ),
    "gram": lambda f: f.gram(),
    "gram-other": lambda f: f.gram(f.rows(slice(1, 3))),
    "gram-dense": lambda f: f.gram(Dense(torch.ones(2, *shape_of_one(f), dtype=torch.float64))),
    "dot": lambda f: f.dot(torch.arange(3.0 * prod(shape_of_one(f))).double().sin().view(3, *shape_of_one(f))),
    "project": lambda f: f.project(*signs(shape_of_one(f))),
    "sketch": lambda f: f.sketch(*signs(shape_of_one(f), 3)),
    "zero_rows": lambda f: f.zero_rows(WEIGHTS == 0).materialize(),
    "scale_rows": lambda f: f.scale_rows(WEIGHTS).materialize(),
    "rows": lambda f: f.rows(slice(1, 3)).materialize(),
    "materialize-out": lambda f: f.materialize(torch.full((B, *f.shape), torch.nan).double()),
    "add_to": lambda f: added(f, torch.ones(B, *f.shape).double()),
    "concatenate": lambda f: concatenate([f, f.rows(slice(2))]).materialize(),
    "scale_rows-each": lambda f: f.scale_rows(EACH if f.outputs else WEIGHTS).materialize(),
    "weighted_sum-each": lambda f: f.weighted_sum(EACH if f.outputs else WEIGHTS, torch.float64),
    "by_output": lambda f: f.by_output.materialize(),
    "by_output-norms": lambda f: f.by_output.squared_norms(),
}


def added(factor, values):
    factor.add_to(values)
    return values


def shape_of_one(factor):
    return factor.shape[len(factor.outputs) :]


def signs(shape, count=5):
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return tuple(torch.arange(float(k * n)).double().cos().view(k, n) for k, n in ((5, rows), (count, columns)))


def build(name):
    torch.manual_seed(0)
    return FACTORS[name]()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", FACTORS)
def test_equals_what_is_written_out(name, operation):
    factor = build(name)
    values = factor.materialize().clone()
    assert values.shape == (B, *factor.shape)
    assert len(factor) == B
    assert factor.num_terms >= 1
    assert factor.device == values.device
    written = Dense(values, outputs=factor.outputs)
    assert_trees_close(OPERATIONS[operation](factor), OPERATIONS[operation](written), 1e-9)


PLAIN = {
    "squared_norms": lambda values: torch.stack([(g * g).sum() for g in values]),
    "weighted_sum": lambda values: sum(w * g for w, g in zip(WEIGHTS, values, strict=True)),
    "weighted_sum-ones": sum,
    "second_moment": lambda values: sum(w.abs() * g * g for w, g in zip(WEIGHTS, values, strict=True)),
    "second_moment-ones": lambda values: sum(g * g for g in values),
    "second_moment-centered": lambda values: sum(
        w.abs() * (g - 0.3) ** 2 for w, g in zip(WEIGHTS, values, strict=True)
    ),
    "gram": lambda values: torch.stack([torch.stack([(g * h).sum() for h in values]) for g in values]),
    "gram-dense": lambda values: torch.stack([g.sum().expand(2) for g in values]),
    "project": lambda values: torch.stack(
        [torch.stack([left @ g @ right for left, right in pairs(values)]) for g in values]
    ),
    "sketch": lambda values: torch.stack(
        [left @ g @ right.mT for left, right in [signs(values.shape[1:], 3)] for g in values]
    ),
    "zero_rows": lambda values: torch.stack([g * (w != 0) for w, g in zip(WEIGHTS, values, strict=True)]),
    "scale_rows": lambda values: torch.stack([w * g for w, g in zip(WEIGHTS, values, strict=True)]),
}


def pairs(values):
    return zip(*signs(values.shape[1:]), strict=True)


@pytest.mark.parametrize("operation", PLAIN)
@pytest.mark.parametrize("name", ["dense", "defaults"])
def test_what_is_written_out_equals_the_plain_loop(name, operation):
    factor = build(name)
    assert_trees_close(OPERATIONS[operation](factor), PLAIN[operation](factor.materialize()), 1e-12)


def test_rows_of_other_sizes_are_not_stacked():
    assert Repeated.concatenate([Repeated(draw(B, 4)), Repeated(draw(2, 4))]).materialize().shape == (B + 2, 6, 4)
    assert Repeated.concatenate([Repeated(draw(B, 4)), Repeated(draw(2, 5))]) is None


UNLIKE = ["defaults", "outer", "outer-steps", "outer-transposed", "embedding"]


@pytest.mark.parametrize("other", FACTORS)
@pytest.mark.parametrize("name", [*UNLIKE, "dense", "sum_factors"])
def test_cross_products_and_sums_of_unlike_kinds(name, other):
    one, two = build(name), build(other)
    if one.shape != two.shape:
        with pytest.raises(RuntimeError):
            one.materialize() + two.materialize()
        return
    assert_trees_close(one.gram(two), Dense(one.materialize()).gram(Dense(two.materialize())), 1e-9)
    both = sum_factors([one, two])
    assert_trees_close(both.materialize(), one.materialize() + two.materialize(), 1e-12)
    for operation in ("squared_norms", "gram", "weighted_sum", "dot", "project", "sketch", "concatenate"):
        expected = OPERATIONS[operation](Dense(one.materialize() + two.materialize()))
        assert_trees_close(OPERATIONS[operation](both), expected, 1e-9)


def test_equal_kinds_are_merged():
    assert isinstance(sum_factors([product((6, 1), (1, 4), 2), product((6, 1), (1, 4), 3)]), Outer)
    assert isinstance(sum_factors([product((6, 1), (1, 4), 2), product((1, 4), (6, 1), 3)]), Outer)
    assert isinstance(sum_factors([table(), table()]), Embedding)
    same, other = conv((1, 6, 5), (1, 4, 7), (6, 4, 3)), conv((1, 6, 6), (1, 4, 8), (6, 4, 3))
    assert isinstance(sum_factors([same, same]), Conv)
    assert isinstance(sum_factors([same, other]), Outer)
    assert_trees_close(sum_factors([same, other]).materialize(), same.materialize() + other.materialize(), 1e-12)
    assert isinstance(sum_factors([product((6, 1), (1, 4), 2), table()]), SumFactor)
    assert isinstance(sum_factors([Dense(draw(B, 6, 4)), Dense(draw(B, 6, 4))]), Dense)
    assert isinstance(sum_factors([Dense(draw(B, 6, 4)), table()]), Dense)


def test_tables_are_written_into_memory_of_any_order():
    factor = table()
    out = torch.ones(4, B, 6, dtype=torch.float64).permute(1, 2, 0)
    torch.testing.assert_close(factor.materialize(out), factor.materialize(), rtol=0, atol=0)
    torch.testing.assert_close(out, factor.materialize(), rtol=0, atol=0)


def test_unlike_chunks_are_written_out():
    one, two = product((6, 1), (1, 4), 2), table()
    joined = concatenate([one, two])
    assert isinstance(joined, Dense)
    assert_trees_close(joined.materialize(), torch.cat([one.materialize(), two.materialize()]), 1e-12)
    longer = concatenate([product((6, 1), (1, 4), 2), product((6, 1), (1, 4), 3)])
    assert isinstance(longer, Outer)
    assert longer.num_terms == 3


@pytest.mark.parametrize("name", FACTORS)
def test_removed_rows_hold_no_nan(name):
    factor = build(name)
    for operand in ("values", "left", "right", "signals", "inputs"):
        tensor = getattr(factor, operand, None)
        if tensor is not None and name not in {"zeros", "outer-broadcast-batch"}:
            tensor[2] = torch.nan
    if isinstance(factor, SumFactor):
        for part in factor.parts:
            (part.left if isinstance(part, Outer) else part.signals)[2] = torch.nan
    removed = factor.zero_rows(torch.arange(B) == 2)
    assert not removed.materialize()[2].any()
    assert removed.squared_norms().isfinite().all()


@pytest.fixture
def _small_in_float32(monkeypatch):
    float32_for_few_terms(monkeypatch)


@pytest.mark.usefixtures("_small_in_float32")
@pytest.mark.parametrize("block", [None, 100], ids=["whole", "blocks"])
def test_norms_read_shared_operands_once(block, monkeypatch):
    """Layers of one input share it, the weights of an LSTM share signals; chains of both are one group."""
    x, y, signals, others = (torch.randn(B, 1, 3, size) for size in (20, 24, 30, 30))
    pairs = [(signals, x), (others, x), (signals, y), (torch.randn(B, 1, 3, 12), torch.randn(B, 1, 3, 40))]
    factors = [Outer(left, right, (left.shape[3], right.shape[3]), left.dtype) for left, right in pairs]
    assert all(factor.term_operands for factor in factors)
    if block is not None:
        blocks_of(monkeypatch, block)
    with Operations() as mode:
        squares = squared_norms_per_factor(factors)
    for factor, found in zip(factors, squares, strict=True):
        assert_trees_close(found, factor.materialize().double().flatten(1).square().sum(1), 1e-6)
    rows = [left[0] for left, _ in mode.shapes["bmm"]]
    assert sum(rows) == 6 * B
    assert (max(rows) < B) == (block is not None)


@pytest.mark.usefixtures("_small_in_float32")
def test_cancelling_signals_keep_their_norm():
    """In float32 the T² terms of signals that nearly cancel lose per cents; written in float64 they do not."""
    torch.manual_seed(0)
    num_terms, rows, columns = 8, 256, 256
    size = cost_model.Size(num_terms, rows * columns, num_terms * (rows + columns))
    assert cost_model.inner_products_are_faster(size)
    signals, inputs = torch.randn(1, 1, num_terms, rows), torch.randn(1, 1, 1, columns).repeat(1, 1, num_terms, 1)
    signals[0, 0, -1] -= signals.sum((0, 1, 2)) - 1e-3 * torch.randn(rows)
    factor = Outer(signals, inputs, (rows, columns), torch.float32)
    exact = Outer(signals.double(), inputs.double(), (rows, columns), torch.float64).materialize().square().sum()
    assert_trees_close(factor.squared_norms()[0], exact, 1e-5)
    naive = ((signals @ signals.mT) * (inputs @ inputs.mT)).sum()
    assert abs(naive / exact - 1) > 0.01


def _of_any_magnitude():
    """Terms of samples that float32 cannot hold, or whose terms cancel, beside usual ones."""
    torch.manual_seed(0)
    signals, inputs = torch.randn(12, 1, 3, 64), torch.randn(12, 1, 3, 64)
    for sample, (one, other) in enumerate([(1e-30, 1e20), (1e25, 1e10), (1e15, 1e15), (1e-12, 1e-12), (0, 1), (1, 0)]):
        signals[sample] *= one
        inputs[sample] *= other
    signals[2], inputs[2] = signals[2].abs(), inputs[2].abs()  # all products overflow to +inf
    signals[6], inputs[6] = signals[6, :, :1], inputs[6, :, :1]
    signals[6, 0, 2] *= -2 + 1e-3  # the sum is a thousandth of its terms
    signals[7, 0, :2] *= 1e-21  # beside a larger term, whose input is small
    inputs[7, 0, 2] *= 1e-21
    return signals, inputs


def _norms_of_sums(signals, inputs, engine):
    def loss(w, signals, inputs):
        return ((inputs @ w.T) * signals).sum()

    width = signals.shape[-1]
    assert Outer(signals, inputs, (width, width), signals.dtype).term_operands
    batch = signals[:, 0], inputs[:, 0]
    return per_sample_grads(loss, torch.zeros(width, width), batch, Norm(), engine=engine)


@pytest.mark.usefixtures("_small_in_float32")
@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
def test_norms_of_sums_of_any_magnitude(engine):
    signals, inputs = _of_any_magnitude()
    exact = torch.einsum("bgto,bgti->boi", signals.double(), inputs.double()).square().sum((1, 2)).sqrt()
    assert exact[6] < exact[8:].min() / 100
    norms = _norms_of_sums(signals, inputs, engine).double()
    assert_trees_close(norms / exact.where(exact > 0, 1), (exact > 0).double(), 2e-6)


def _opposite(num_terms, live, difference):
    """Terms (a, r) and (−a, r'), where r' is nearly r, and terms of zero: the sum is shorter than any of them."""
    signs = torch.cat([torch.ones(live // 2), -torch.ones(live // 2), torch.zeros(num_terms - live)])[:, None]
    one, other, change = torch.randn(3, 8, 1, 1, 256)
    return signs * one, other + difference * (signs < 0) * change


@pytest.mark.usefixtures("_small_in_float32")
@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
@pytest.mark.parametrize("difference", [0.1, 0.2, 0.22, 0.3])
@pytest.mark.parametrize(("num_terms", "live"), [(2, 2), (16, 2), (16, 16), (40, 2), (40, 40)])
def test_norms_of_sums_that_cancel_a_little(num_terms, live, difference, engine):
    """Just more and just less than what float32 is sure of: with 0.2, (Σₜ ‖lₜ‖ ‖rₜ‖)² is 100 times the square."""
    torch.manual_seed(0)
    signals, inputs = _opposite(num_terms, live, difference)
    exact = torch.einsum("bgto,bgti->boi", signals.double(), inputs.double()).square().sum((1, 2)).sqrt()
    assert_trees_close(_norms_of_sums(signals, inputs, engine).double() / exact, torch.ones(8).double(), 2e-5)


@pytest.mark.usefixtures("_small_in_float32")
@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_norms_of_sums_that_are_not_finite(value, engine):
    signals, inputs = _of_any_magnitude()
    signals[8, 0, 0, 0] = value
    assert _norms_of_sums(signals, inputs, engine).isfinite().tolist() == [sample != 8 for sample in range(12)]


def test_norms_and_inner_products_of_tied_embeddings_whose_uses_cancel():
    """The squares of the parts are 1e8 times that of the sum, and have no digit of it in float32."""
    index = torch.randint(60, (B, 1))
    inputs = torch.randn(B, 1, 1, 40)
    chosen = torch.nn.functional.one_hot(index, 60).float()[:, None]
    head = Outer(-chosen * (1 - 1e-4), inputs, (60, 40), torch.float32)
    factor = sum_factors([head, Embedding(inputs[:, 0], index, (60, 40))])
    rows = factor.materialize().double().flatten(1)
    assert_trees_close(factor.squared_norms(), rows.square().sum(1), 1e-6)
    assert_trees_close(factor.gram(), rows @ rows.T, 1e-6)
    assert_trees_close(factor.gram(factor.rows(slice(2))), rows @ rows[:2].T, 1e-6)


def test_an_infinite_lookup_does_not_reach_other_rows():
    signals = torch.randn(B, 3, 40)
    signals[1, 0, 0] = torch.inf
    index = torch.tensor([[3, 5, 3]]).repeat(B, 1)
    factor = sum_factors(
        [
            Outer(torch.randn(B, 1, 2, 60), torch.randn(B, 1, 2, 40), (60, 40), torch.float32),
            Embedding(signals, index, (60, 40)),
        ]
    )
    expected = factor.materialize().double().flatten(1).square().sum(1)
    assert expected[1] == factor.squared_norms()[1] == torch.inf
    assert_trees_close(factor.squared_norms()[2:], expected[2:], 1e-6)


@pytest.mark.parametrize("lookups", [0, 1, 4])
@pytest.mark.parametrize("size", [0, 1, B])
def test_norms_of_tied_embeddings(size, lookups):
    head = Outer(torch.randn(size, 1, 2, 60), torch.randn(size, 1, 2, 40), (60, 40), torch.float32)
    factor = SumFactor((Embedding(torch.randn(size, lookups, 40), torch.randint(3, (size, lookups)), (60, 40)), head))
    expected = factor.materialize().double().flatten(1).square().sum(1)
    assert_trees_close(factor.squared_norms(), expected, 1e-6)


def test_embedding_gram_of_many_columns_is_written_out_in_pieces(monkeypatch):
    factor = table(20)
    expected = factor.gram()
    blocks_of(monkeypatch, 0)
    assert_trees_close(factor.gram(), expected, 1e-12)


@pytest.mark.parametrize("name", FACTORS)
def test_blocks_of_any_size(name, monkeypatch):
    factor = build(name)
    names = ("squared_norms", "second_moment", "gram", "project", "sketch")
    expected = {operation: OPERATIONS[operation](factor) for operation in names}
    blocks_of(monkeypatch, 30)
    for operation in names:
        assert_trees_close(OPERATIONS[operation](factor), expected[operation], 1e-9)


def test_blocks_of_other_devices_are_larger():
    sizes = [cost_model.rows_per_block(10**6, 2**10, torch.device(name), 2) for name in ("cpu", "meta")]
    assert sizes == [2**11, 2**14]


def test_blocks_of_copies(monkeypatch):
    assert [cost_model.rows_in_cache(10, 2**18, torch.device(name)) for name in ("cpu", "meta")] == [2, 10]
    assert cost_model.rows_in_cache(0, 0, torch.device("meta")) == 1
    graphs = lowered(monkeypatch)
    blocks_of(monkeypatch, 1)
    w, x = draw(60, 40), draw(9, 2, 40)
    loss = lambda w, x: torch.tanh(x @ w.T).sum()
    found = per_sample_grads(loss, w, x, Norm(), engine="compiled")
    assert_trees_close(found, per_sample_grads(loss, w, x, Norm(), engine="loop"), 1e-12)
    wide = [x for x in graphs[0].graph.nodes if x.target is torch.ops.aten.bmm.default]
    assert len(wide) == 2 * 3  # three samples in each block, of four at most


class Spy:
    """A factor that notes which operations are called, among those a reduction must announce."""

    def __init__(self, factor, calls):
        self.factor, self.calls = factor, calls

    def __getattr__(self, name):
        if name in ANNOUNCED:
            self.calls.add(ANNOUNCED[name])
        if name in {"norm_operands", "product_operands", "term_operands"}:  # norms are asked of the factor itself
            return ()
        value = getattr(self.factor, name)
        if name in {"zero_rows", "scale_rows", "rows", "rotated"}:
            return lambda *args: Spy(value(*args), self.calls)
        return value

    def __len__(self):
        return len(self.factor)


ANNOUNCED = {name: name for name in ("materialize", "squared_norms", "weighted_sum", "second_moment", "gram")}
ANNOUNCED |= {"own_gram": "gram", "trace_gram": "gram", "dot": "dot", "project": "project", "sketch": "sketch"}


@pytest.mark.parametrize("name", sorted(set(REDUCTIONS) - {"none"}))
def test_reductions_announce_what_they_ask_of_factors(name):
    rows = Rows([draw(B, 6, 4)], draw(B), torch.utils._pytree.tree_structure(0))
    reduction = REDUCTIONS[name][0](rows, torch.float64)
    calls: set[str] = set()
    spec = ParamSpec(rows.structure, ("params",), (torch.Size([6, 4]),), (torch.float64,))
    gradients = Gradients((Spy(product((6, 1), (1, 4), 2), calls),), spec, rows.losses, weights=WEIGHTS.abs())
    reduction.finish(reduction.lift(gradients))
    assert calls == reduction.uses


def share(*names):
    wanted = [REDUCTIONS[name][0](None, torch.float64) for name in names]
    per_sample_grads(lambda w, x: torch.tanh(w @ x).sum(), draw(6, 4), (draw(B, 4),), wanted)


def test_several_reductions_share_their_norms():
    names = "ClippedMean", "ClippedSum-per_param", "Norm", "Norm-per_param", "CosineSimilarity"
    assert operations(share, *names).counts["aten.linalg_vector_norm.default"] == 2  # of signals and inputs


def test_several_reductions_share_their_second_moments():
    alone, both = (operations(share, *names).counts for names in (["NoiseScale"], ["NoiseScale", "Variance"]))
    assert both["aten.mm.default"] == alone["aten.mm.default"]


@pytest.mark.parametrize("shape", [(300,), (300, 1), (1, 300), (300, 7), (7, 300)], ids=str)
def test_projections_of_written_gradients_multiply_the_longer_axis_first(shape):
    """Otherwise one number per sample, projection and entry of the longer axis is written."""
    values, count = torch.randn(4, *shape, dtype=torch.float64), 50
    left, right = (torch.randn(count, n, dtype=torch.float64) for n in (shape[0], torch.Size(shape[1:]).numel()))
    with Sizes() as sizes:
        found = Dense(values).project(left, right)
    torch.testing.assert_close(found, torch.einsum("bok,jo,jk->bj", values.reshape(4, shape[0], -1), left, right))
    assert max(sizes.seen) <= max(
        values.numel(), left.numel(), right.numel(), 4 * count * min(left.shape[1], right.shape[1])
    )


class Sizes(TorchDispatchMode):
    """Collects how many numbers the results of operations that compute something have."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out._is_view():
            self.seen.append(out.numel())
        return out


@pytest.mark.parametrize("name", FACTORS)
def test_inner_products_and_norms_of_operands_multiply(name):
    """Squared norms and Gram matrices of whole calls are computed from these operands."""
    factor = FACTORS[name]()
    if factor.outputs:
        return
    values = factor.materialize().flatten(1)
    wanted = values @ values.T
    for operands, found in ((factor.product_operands, wanted), (factor.norm_operands, wanted.diagonal())):
        products = [x.flatten(1) @ x.flatten(1).T for x in operands]
        if products:
            product = torch.stack(products).prod(0)
            torch.testing.assert_close(product if found.ndim > 1 else product.diagonal(), found)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_sizes_may_be_symbolic():
    """As those of fake tensors that the caller makes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    w, b, x = torch.randn(8, 8), torch.randn(8), torch.randn(5, 20, 8)
    with mode:
        params = {"w": mode.from_tensor(w, static_shapes=True), "b": mode.from_tensor(b, static_shapes=True)}
        batch = mode.from_tensor(x)
        loss = lambda p, x: F.linear(x, p["w"], p["b"]).square().sum()
        found = per_sample_grads(loss, params, batch, {"norm": Norm(), "update": ClippedMean(1.0)})
    assert found["norm"].shape[0] == batch.shape[0]
    assert found["update"]["w"].shape == w.shape
