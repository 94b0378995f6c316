"""Cross-entropy, weight norm, bilinear layers, embedding bags, indexing and Gaussian losses under vmap."""

import pytest
import torch
from agreement import assert_eager_is_loop
from oracle import assert_trees_close, oracle
from torch import nn
from torch.nn import functional as F
from vmap_rules_cases import B, check, check_module, draw

from persample import Loss, Stack, clear_cache, per_sample_grads
from persample.vmap_rules import VmapRules


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


CROSS_ENTROPY = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 2},
    "weight": {"weight": torch.linspace(0.5, 2, 6).double()},
    "smoothed": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("recorded", [False, True], ids=["once", "recorded"])
@pytest.mark.parametrize("option", CROSS_ENTROPY)
@pytest.mark.parametrize("lead", [(), (4,)], ids=str)
def test_cross_entropy(lead, option, recorded):
    def fn(gain, logits, target):
        return F.cross_entropy(gain * logits, target, **CROSS_ENTROPY[option])

    target = torch.randint(6, (B, *lead))
    target.view(B, -1)[:, :1] = 1  # not all are ignored
    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(*lead, 6), target), recorded=recorded)


def test_cross_entropy_of_class_probabilities():
    def fn(gain, logits, target):
        return F.cross_entropy(gain * logits, target.softmax(-1))

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(4, 6), draw(4, 6)))


def test_weight_norm():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    check_module(layer, draw(3))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("lead", [(), (4,), (2, 2)], ids=str)
def test_bilinear(lead, bias):
    check_module(nn.Bilinear(2, 3, 4, bias=bias), draw(*lead, 2), draw(*lead, 3))


@pytest.mark.parametrize("add", ["addbmm", "baddbmm", "baddbmm_"])
def test_what_products_are_added_to_times_0_has_a_gradient(add):
    def loss(w, x):
        return getattr((w * x)[0] if add == "addbmm" else w * x, add)(x, x, beta=0).sum()

    assert_eager_is_loop(loss, torch.ones(1, 3, 3, dtype=torch.float64), draw(1, 3, 3))


@pytest.mark.parametrize("padding", [None, 2, -1], ids=["no-padding", "padding", "padding-from-end"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode, padding):
    bag = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding)
    index = torch.randint(5, (B, 4, 3))
    index[0, 0] = 2 if padding is None else padding % 5  # nothing is left in this bag
    offsets = torch.tensor([[0, 2, 2, 5], [0, 0, 1, 2], [0, 6, 7, 7]])
    check_module(bag, index)
    check_module(bag, index.flatten(1)[:, :7], offsets)
    bag.include_last_offset = True
    check_module(bag, index.flatten(1)[:, :7], torch.cat([offsets, torch.full((B, 1), 7)], 1))
    if mode == "sum":
        check_module(bag, index, draw(4, 3), call=lambda apply, i, w: apply(i, per_sample_weights=w))


SPECIAL = [float("nan"), float("inf")]


@pytest.mark.parametrize("differentiable", [False, True], ids=["once", "recorded"])
@pytest.mark.parametrize("bags", ["rows", "offsets"])
@pytest.mark.parametrize("place", ["weights", "table", "signals", "first-of-bag"])
@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_embedding_bags_skip_what_they_do_not_hold(special, place, bags, differentiable):
    """As torch's kernels do: NaN and infinity at padding, or in another bag, reach no result and no gradient."""
    index, starts = torch.tensor([[3, 0, 4, 1], [1, 2, 0, 4], [0, 0, 4, 4]]), torch.tensor([[0, 2], [0, 1], [0, 3]])
    table, weights, scale = draw(5, 3)[0], draw(4), torch.ones(3, 2, 3, dtype=torch.float64)
    if place == "weights":
        weights[index == 0] = special
    elif place == "signals":
        scale[:, 0, 0] = special
    else:
        table[0 if place == "table" else 4] = special

    def loss(params, i, w, c, starts):
        total = 0
        for mode in ("sum", "mean", "max"):
            shape, offsets = ((2, 2), None) if bags == "rows" else ((4,), starts)
            own = (w * params["w"]).view(shape) if mode == "sum" else None
            options = {"mode": mode, "padding_idx": 0, "per_sample_weights": own}
            total = total + (F.embedding_bag(i.view(shape), params["table"], offsets, **options) * c).sum()
        return total

    params = {"table": table, "w": torch.ones(4, dtype=torch.float64)}
    rows = oracle(loss, params, (index, weights, scale, starts))
    if differentiable:
        params = {name: x.requires_grad_() for name, x in params.items()}
    found = per_sample_grads(loss, params, (index, weights, scale, starts), Stack(), differentiable=differentiable)
    torch.testing.assert_close(found, rows.tree(rows.grads), rtol=1e-9, atol=0, equal_nan=True)
    assert torch.cat([x.flatten() for x in rows.grads]).isfinite().any()


@pytest.mark.parametrize(
    "options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True, "mode": "sum"}], ids=["norm", "frequency"]
)
def test_embedding_bags_left_alone(options):
    bag = nn.EmbeddingBag(5, 3, **options)
    index = torch.tensor([[1, 1, 4]])
    expected = bag(index)
    with VmapRules():
        assert torch.equal(bag(index), expected)


GETS = {
    "scalar": lambda x, i: x[i],
    "second": lambda x, i: x[:, i],
    "last": lambda x, i: x[..., i],
    "new-axis": lambda x, i: x[None, 1:, i],
    "two": lambda x, i: x[i, ..., i],
    "all": lambda x, i: x[i, i, i],
    "int": lambda x, i: x[0, i],
    "beside-tensor": lambda x, i: x[i, :, torch.tensor([0, 2])],
    "negative": lambda x, i: x[i - 3],
    "tensor": lambda x, i: x[i[None]],
    "one-hot": lambda x, i: x @ F.one_hot(i, 3).double(),
    "index-select-rows": lambda x, i: x[0].index_select(0, i[None]),
    "index-select-columns": lambda x, i: torch.index_select(x, dim=-1, index=i),
}


@pytest.mark.parametrize("get", GETS.values(), ids=GETS)
def test_lookups(get):
    def fn(params, x, i):
        return get(params * x, i), get(params, i)

    check(fn, draw(3, 3), (draw(3, 3, 3), torch.tensor([0, 2, 1])))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_index_add(dtype):
    def fn(params, x, y, i):
        i = i.to(dtype)
        rows = (params * x).index_add(0, i, y), torch.index_add(x, 0, i, params * y, alpha=0.5)
        columns = x.index_add(-1, i, (params * y).T)
        written = (2 * x).index_add_(dim=0, index=i, source=params * y)
        return rows, columns, written, x.index_add(0, torch.tensor([2, 2]), y)

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(3, 3), draw(2, 3), torch.tensor([[0, 2], [1, 1], [2, 0]])))


def test_index_add_rejects_what_torch_rejects():
    x, i = torch.zeros(B, 3, 2), torch.zeros(B, 2, dtype=torch.long)
    sources = torch.ones(1, 2), torch.ones(2, 1), torch.ones(2, 2, dtype=torch.float64)
    for index, source in [*((i, source) for source in sources), (i.float(), torch.ones(2, 2))]:

        def fn(x, i, source=source):
            with VmapRules():
                return x.index_add(0, i, source)

        with pytest.raises(RuntimeError, match=r"index_add|must match self"):
            torch.vmap(fn)(x, index)

    def onto_itself(x, i):
        with VmapRules():
            return x.index_add_(0, i, x)

    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.vmap(onto_itself)(x[:, :2].clone(), i)


@pytest.mark.parametrize("zeros", [[], [0], [2], [1, 3]], ids=str)
@pytest.mark.parametrize("length", [1, 5])
def test_cumprod(length, zeros):
    is_zero = torch.tensor([k in zeros for k in range(length)])[:, None]

    def fn(params, x):
        x = params * x
        x = x - x.detach() * is_zero  # zeros that depend on the parameters
        return x.cumprod(0), torch.cumprod(x, dim=-1), x[0, 0].cumprod(0), x.cumprod(0, dtype=x.dtype)

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(length, 3),))
    check(lambda params, x: params.cumprod(0) * x, torch.randn(length, dtype=torch.float64), (draw(length),))


@pytest.mark.parametrize(
    "factors", [[0, 1e20, 1e20, 1e20], [1e-30, 1e-30, 1e30, 1e30], [*[0.5] * 150, *[2.0] * 150]], ids=["0", "1", "300"]
)
def test_cumprod_of_factors_whose_later_products_overflow(factors):
    def loss(params, x):
        return (params * x).cumprod(0).sum()

    x = torch.tensor([factors])
    with VmapRules():
        value = torch.vmap(loss, (None, 0))(torch.tensor(1.0), x)
    assert_trees_close(value, x.double().cumprod(1).sum(1).float(), 1e-6)
    wanted = {"grads": Stack(), "losses": Loss()}
    expected = per_sample_grads(loss, torch.tensor(1.0), x, wanted, engine="loop")
    actual = per_sample_grads(loss, torch.tensor(1.0), x, wanted)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid behavior has changed")
@pytest.mark.parametrize("align", [True, False], ids=["corners", "centers"])
@pytest.mark.parametrize("size", [(2, 1, 3, 4), (2, 1, 1, 3), (2, 1, 2, 1, 3)], ids=str)
def test_affine_grid(size, align):
    axes = len(size) - 2

    def fn(params, x):
        return F.affine_grid(params * x, size, align_corners=align)

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(2, axes, axes + 1),))


def test_affine_grid_rejects_what_torch_rejects():
    def fn(theta, size):
        with VmapRules():
            return F.affine_grid(theta, size, align_corners=False)

    theta = torch.ones(B, 1, 2, 3)
    for wrong in (theta.long(), theta[..., :2]):
        with pytest.raises(ValueError, match=r"Expected theta|Expected a batch"):
            torch.vmap(lambda theta: fn(theta, (1, 1, 2, 2)))(wrong)
    with pytest.raises(TypeError, match="must be tuple of ints"):
        torch.vmap(lambda theta: fn(theta, torch.tensor([1, 1, 2, 2])))(theta)


def test_items_of_constants_stay_views():
    x = torch.zeros(2, 2)
    with VmapRules():
        x[torch.tensor(1)].add_(1)
        assert x.tolist() == [[0, 0], [1, 1]]
        assert F.one_hot(torch.tensor([0, 2])).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "proportional"])
def test_gaussian_nll_loss(full, reduction):
    def fn(gain, x, y, log_var):
        each = F.gaussian_nll_loss(gain * x, y, log_var.exp(), full=full, reduction=reduction, eps=0.5)
        one = F.gaussian_nll_loss(gain * x, y, log_var[:, 0].exp(), full, reduction=reduction)
        return each, one, F.gaussian_nll_loss(gain * x, y, 0.7, reduction=reduction)

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(4, 2), draw(4, 2), draw(4, 2)))


@pytest.mark.parametrize(
    "loss",
    [lambda w, x: (w @ x.T).view(-1), lambda w, x: torch.matmul(w, x.T).sin().view(2, -1)],
    ids=["flat", "after-sin"],
)
def test_product_with_a_transpose_is_contiguous(loss):
    check(loss, torch.randn(4, 3, dtype=torch.float64), (draw(5, 3),))


@pytest.mark.parametrize("engine", ["eager", "traced"])
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_running_statistics_of_any_magnitude(norm, dtype, engine):
    """Computed in float32 at least: half of a float has neither so small an epsilon nor so large a difference."""
    clear_cache()
    params = {"w": torch.ones(3, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}
    x = torch.tensor([[30000.0, 1.0, -2.0], [-30000.0, 0.5, 1.0]], dtype=dtype)
    mean, var = (torch.tensor(numbers, dtype=dtype) for numbers in ([-40000.0, 1.0, 0.0], [60000.0, 1e-4, 1.0]))

    def loss(p, x):
        out = norm(x[None, :, None], mean, var, p["w"], p["b"], False, 0.1, 1e-8)
        return (out.float() / 100).tanh().sum()

    found, expected = (per_sample_grads(loss, params, x, engine=name) for name in (engine, "loop"))
    for name in params:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-2, atol=1e-5)
