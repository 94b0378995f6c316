"""Operations of which compiled code calls torch's kernels: Inductor's are wrong."""

from __future__ import annotations

import pytest
import torch
from compiler import lowered
from oracle import assert_trees_close
from torch.nn import functional as F

from persample import Aux, ClippedSum, Stack, clear_cache, per_sample_grads
from persample.engines.compiled import compilations_of

EXPONENTS = torch.tensor([2, 3, 0])


def pooled(dimensions, *args, **kwargs):
    return lambda x: getattr(F, f"avg_pool{dimensions}d")(x[None], *args, **kwargs)


def scaled(mode="nearest", **kwargs):
    return lambda x: F.interpolate(x[None], mode=mode, **kwargs)


# Integers that depend on no parameter, beside powers of floats, which Inductor computes itself.
POWERS = {
    "ldexp": lambda x: torch.ldexp(x, EXPONENTS),
    "ldexp by negative numbers": lambda x: torch.ldexp(x, -EXPONENTS),
    "ldexp by one number": lambda x: torch.ldexp(x, torch.tensor(2)),
    "ldexp by short integers": lambda x: torch.ldexp(x, EXPONENTS.to(torch.int16)),
    "2 ** integers": lambda x: x * 2**EXPONENTS,
    "negative ** integers": lambda x: x * (-3) ** EXPONENTS,
    "0 ** integers": lambda x: x * 0**EXPONENTS,
    "2 ** one integer": lambda x: x * 2 ** torch.tensor(5),
    "3 ** one int32": lambda x: x * torch.pow(3, torch.tensor(4, dtype=torch.int32)),
    "2 ** bytes": lambda x: x * 2 ** EXPONENTS.to(torch.uint8),
    "2 ** int32": lambda x: x * 2 ** EXPONENTS.int(),
    "2 ** booleans": lambda x: x * torch.pow(2, EXPONENTS > 1),
    "float ** integers": lambda x: x * 2.0**EXPONENTS,
    "2 ** floats": lambda x: 2**x,
    "integers ** integers": lambda x: x * EXPONENTS**EXPONENTS,
}
MARGINS = {
    f"margins of {target}": lambda x, target=target: F.multilabel_margin_loss(x, torch.tensor(target), reduction="sum")
    for target in ([2, -1, 0], [-1, 0, 1], [0, 2, 1], [1, 0, -1])
}
MEANS = {
    "1-d": ((2, 7), pooled(1, 3, 2, 1, ceil_mode=True)),
    "2-d": ((2, 5, 7), pooled(2, 2, ceil_mode=True)),
    "2-d, padded": ((2, 6, 7), pooled(2, (3, 2), (2, 3), (1, 0), ceil_mode=True)),
    "2-d, padding not counted": ((2, 6, 7), pooled(2, 2, 2, 1, ceil_mode=True, count_include_pad=False)),
    "2-d, floor": ((2, 6, 7), pooled(2, 2, 2, 1)),
    "3-d": ((1, 3, 3, 3), pooled(3, 2, ceil_mode=True)),
}
IMAGES = {
    "by 1.3": ((1, 5, 7), scaled(scale_factor=1.3)),
    "by 2.1, to twice the size": ((1, 5, 7), scaled(scale_factor=2.1)),
    "by 1.2, to the same size": ((1, 2, 4), scaled(scale_factor=1.2)),
    "by 0.6": ((1, 5, 7), scaled(scale_factor=0.6)),
    "by 2": ((1, 3, 2), scaled(scale_factor=2)),
    "by 3": ((1, 3, 2), scaled(scale_factor=3)),
    "by 2 and 1.5": ((1, 3, 4), scaled(scale_factor=(2, 1.5))),
    "sizes": ((1, 5, 7), scaled(size=(7, 3))),
    "sizes of multiples": ((1, 3, 2), scaled(size=(6, 14))),
    "exact, by 1.3": ((1, 5, 7), scaled("nearest-exact", scale_factor=1.3)),
    "exact, by 2": ((1, 3, 2), scaled("nearest-exact", scale_factor=2)),
    "1-d, by 1.3": ((2, 7), scaled(scale_factor=1.3)),
    "1-d, exact, by 0.7": ((2, 7), scaled("nearest-exact", scale_factor=0.7)),
    "3-d, by 1.3": ((1, 4, 3, 2), scaled(scale_factor=1.3)),
    "3-d, exact, by 1.6": ((1, 4, 3, 2), scaled("nearest-exact", scale_factor=1.6)),
}
VECTORS = {name: ((3,), each) for name, each in {**POWERS, **MARGINS}.items()}
PROGRAMS = {"vectors": VECTORS, "means": MEANS, "images": IMAGES}


def weighted(x):
    return (x * torch.arange(1, x.numel() + 1).view(x.shape)).sum()


@pytest.mark.filterwarnings("ignore:The default behavior for interpolate:UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_equals_the_loop(name):
    """One program for all: compiling takes seconds."""
    operations = PROGRAMS[name]
    torch.manual_seed(0)
    params = {key: torch.randn(shape, dtype=torch.float64) for key, (shape, _) in operations.items()}
    batch = {key: torch.randn(2, *shape, dtype=torch.float64) for key, (shape, _) in operations.items()}

    def loss(params, batch):
        losses = {key: weighted(operation(params[key] * batch[key])) for key, (_, operation) in operations.items()}
        return sum(losses.values()), losses

    wanted = {"grads": Stack(), "losses": Aux()}
    actual, expected = (
        per_sample_grads(loss, params, (batch,), wanted, engine=engine) for engine in ("compiled", "loop")
    )
    for key in operations:  # one by one: a failure names the operation
        assert_trees_close(*({of: each[of][key] for of in wanted} for each in (actual, expected)), 1e-12)


def test_programs_for_all_batch_sizes():
    chosen = [POWERS["2 ** integers"], MEANS["2-d"][1], IMAGES["by 1.3"][1]]
    params = [torch.rand(3).double(), torch.rand(2, 5, 7).double(), torch.rand(1, 5, 7).double()]
    loss = lambda params, *batch: sum(weighted(op(p * x)) for op, p, x in zip(chosen, params, batch, strict=True))
    for size in (2, 3, 7):
        batch = [torch.rand(size, *x.shape).double() for x in params]
        actual, expected = (per_sample_grads(loss, params, batch, engine=engine) for engine in ("compiled", "loop"))
        assert_trees_close(actual, expected, 1e-12)
    assert [x.batch_size for x in compilations_of(loss)] == [2, None]


# Whether compiled code calls torch's kernels: only where it must, because what is called cannot be fused.
CALLS = {
    "2-d": True,
    "2-d, padding not counted": False,
    "2-d, floor": False,
    "by 1.3": True,
    "by 2.1, to twice the size": True,
    "by 2": False,
    "sizes": True,
}


@pytest.mark.parametrize("name", CALLS)
def test_what_inductor_computes_as_torch_does_is_left_to_it(name, monkeypatch):
    clear_cache()
    graphs = lowered(monkeypatch)
    shape, operation = next(each[name] for each in (MEANS, IMAGES) if name in each)
    loss = lambda params, x: operation(params * x).square().sum()
    per_sample_grads(loss, torch.rand(shape), torch.rand(2, *shape), engine="compiled")
    assert any(str(node.target).startswith("persample.") for node in graphs[0].graph.nodes) == CALLS[name]


# Their gradients are added up in zeros. The kernel's bias reads the sums beside the weights of samples.
SCATTERED = {
    "unfold": lambda x: F.unfold(x, 2),
    "Tensor.unfold": lambda x: x.unfold(2, 2, 1),
    "gather": lambda x: x.gather(2, torch.zeros(2, 2, 2, dtype=torch.long)),
    "sort": lambda x: x.sort(2).values,
    "topk": lambda x: x.topk(2, 2).values,
    "cummax": lambda x: x.cummax(2).values,
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in {"unfold", "gather", "sort"} else [pytest.mark.slow]) for x in SCATTERED]
)
def test_sums_are_read_after_they_are_written(name):
    """torch 2.13 alone reads the zeros: the bias has no gradient, and clipping scales are wrong."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"kernel": (2, 1, 4, 1), "bias": (2,), "x": (7, 1, 6, 5), "weights": (7,)}
    made = {key: torch.rand(*size, generator=generator, dtype=torch.float64) + 0.1 for key, size in sizes.items()}

    def layer(params, x):
        return SCATTERED[name](F.conv2d(x[None], params["kernel"], params["bias"], (2, 3), (0, 2), (1, 2))[0]).flatten()

    params = {key: made[key] for key in ("kernel", "bias")}
    params["head"] = torch.linspace(-1, 1, 2 * len(layer(params, made["x"][0])), dtype=torch.float64).reshape(2, -1)

    def loss(params, x):
        return F.softplus(params["head"] @ layer(params, x)).sum()

    def sums(engine):
        return per_sample_grads(loss, params, made["x"], ClippedSum(0.5), weights=made["weights"], engine=engine)

    assert_trees_close(sums("compiled"), sums("loop"), 1e-9)


def overwritten(part):
    """Return a function that overwrites a part of a copy of a complex matrix by ones."""

    def function(z):
        z = z.clone()
        part(z).copy_(torch.ones_like(part(z)))
        return z

    return function


# Parts of complex matrices that are written into copies, where the matrix has zeros.
COMPLEX = {
    "diagonal_scatter": lambda z: torch.diagonal_scatter(z, torch.ones_like(z[0])),
    "diagonal": overwritten(torch.diagonal),
    "other diagonal": overwritten(lambda z: z.diagonal(-1)),
    "row": overwritten(lambda z: z[1]),
    "column": overwritten(lambda z: z[:, 2]),
    "block": overwritten(lambda z: z[1:, :2]),
    "fill_diagonal_": lambda z: z.clone().fill_diagonal_(1.0),
    "index_fill": lambda z: torch.index_fill(z, 0, torch.tensor([1]), 1),
    "masked_fill": lambda z: torch.masked_fill(z, torch.eye(5, dtype=torch.bool), 1),
    "real part": overwritten(torch.real),
}


def test_complex_matrices_are_read_after_they_are_written():
    """Inductor alone divides by the zeros that were there before."""
    params = {name: torch.tensor(1.5, dtype=torch.float64) for name in COMPLEX}
    batch = torch.rand(3, 5, 5, dtype=torch.float64)

    def loss(params, x):
        losses = {}
        for name, write in COMPLEX.items():
            numbers = torch.complex(params[name] * x[0], x[1])
            losses[name] = (torch.complex(x, x.mT) / (1 + write(numbers - numbers[:, None]))).abs().sum()
        return sum(losses.values()), losses

    wanted = {"grads": Stack(), "losses": Aux()}
    actual, expected = (per_sample_grads(loss, params, (batch,), wanted, engine=each) for each in ("compiled", "loop"))
    for name in COMPLEX:
        assert_trees_close(*({of: each[of][name] for of in wanted} for each in (actual, expected)), 1e-12)
