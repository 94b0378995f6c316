"""Convolutions however they are written: padding, strides, layouts and dimensions, each as in the plain loop."""

from __future__ import annotations

import pytest
import torch
from factored import kinds
from oracle import assert_trees_close, oracle, reals
from seams import inner_products_of, without_layers
from torch import nn
from torch.nn import functional as F

import persample as ps
from persample import clear_cache, per_sample_grads
from persample.factors.conv import Conv

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
F64 = torch.float64
B = 3
WANTED = {"norms": ps.Norm(), "clipped": ps.ClippedMean(0.5), "gram": ps.Gram()}
MODULES = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSES = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def plain(module, x):
    return torch.sin(module(x)).sum()


def assert_is_loop(module, x, loss=plain, engine="eager"):
    rows = oracle(loss, module, (x,))
    grads = reals(rows)
    norms = grads.norm(dim=1)
    mean = [torch.einsum("b,b...->...", (0.5 / norms).clamp_max(1), g) / len(x) for g in rows.grads]
    expected = {"norms": norms, "clipped": mean, "gram": grads @ grads.T}
    alone = [{name: reduction} for name, reduction in WANTED.items()] if engine == "eager" else []
    for reduce in (WANTED, *alone):
        results = per_sample_grads(loss, module, x, reduce, engine=engine)
        for name, result in results.items():
            assert_trees_close(list(result.values()) if name == "clipped" else result, expected[name], 1e-9)
    factors = per_sample_grads(loss, module, x, ps.Factored())
    assert_trees_close([factor.materialize() for factor in factors.values()], rows.grads, 1e-9)


def build(make, *shape):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double(), torch.randn(B, *shape, dtype=F64)


def many(dims, *options):
    return [pytest.param(dims, given, id=f"{dims}d {given}") for given in options]


SETTINGS = [
    case
    for dims in (1, 2, 3)
    for case in many(
        dims,
        {"padding": "valid"},
        {"padding": "valid", "stride": 2},
        {"padding": "valid", "stride": (2,)},
        {"padding": "valid", "dilation": 2, "groups": 2},
        {"padding": "same"},
        {"padding": "same", "dilation": 2},
        {"padding": "same", "kernel_size": 4},
        {"padding": "same", "kernel_size": 2, "dilation": 3},
        {"padding": "same", "kernel_size": 4, "groups": 2},
        {"padding": (1,), "stride": (2,), "dilation": (1,)},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": "same", "padding_mode": "circular"},
        {"padding": "same", "padding_mode": "zeros", "kernel_size": 1},
    )
    + (many(dims, {"padding": 1, "padding_mode": "reflect", "stride": 2}) if dims < 3 else [])
]


@pytest.fixture(params=["layers", "vmap"])
def way(request, monkeypatch):
    """Each of the two ways in which the eager engine computes convolutions."""
    if request.param == "vmap":
        without_layers(monkeypatch)
    return request.param


@pytest.mark.parametrize(("dims", "options"), SETTINGS)
def test_settings(way, dims, options):
    options = {"kernel_size": 3, **options}
    module, x = build(lambda: MODULES[dims](2, 4, **options), *(2, *[6, 7, 5][:dims]))
    assert_is_loop(module, x)
    is_uneven = options.get("padding") == "same" and options["kernel_size"] % 2 == 0  # one side is padded more: dense
    assert kinds(plain, module, x) == ({} if way == "vmap" or is_uneven else {"weight": "Conv"})


@pytest.mark.parametrize(("dims", "options"), SETTINGS)
def test_norms_by_inner_products(dims, options, monkeypatch):
    """All pairs of pixels are multiplied, or all pairs of patches where those are fewer products."""
    options = {"kernel_size": 3, **options}
    module, x = build(lambda: MODULES[dims](2, 4, **options), *(2, *[6, 7, 5][:dims]))
    norms = oracle(plain, module, (x,)).grads[0].flatten(1).norm(dim=1)
    factor = per_sample_grads(plain, module, x, ps.Factored())["weight"]
    for pixels in (True, False):
        inner_products_of(monkeypatch, pixels)
        assert_trees_close(factor.squared_norms().sqrt(), norms, 1e-9)


def test_all_pairs_of_pixels_are_counted():
    signals, inputs = torch.randn(5, 1, 8, 4, 4), torch.randn(5, 1, 6, 4, 4)
    factor = Conv(signals, inputs, (8, 6, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    # 16 pixels of 6 channels, 16 places of 8; both are read, and 16² pairs for each of 3 offsets along 2 axes.
    assert factor.size.inner == (5 * (16**2 * 6 + 16**2 * 8), 5 * (16 * 6 + 16 * 8 + 6 * 16**2))
    apart = Conv(torch.randn(5, 1, 8, 2, 2), torch.randn(5, 1, 6, 8, 8), (8, 6, 1, 1), (4, 4), (0, 0), (1, 1), 1)
    assert apart.size.inner is None  # 4 patches of one of 64 pixels each


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"stride": (2,)},
        {"stride": 2, "padding": (1,), "output_padding": (1,)},
        {"stride": 3, "padding": 1, "output_padding": 2, "groups": 2},
        {"dilation": (2,), "groups": 2},
        {"dilation": 3, "output_padding": 2},  # by more than a stride: dense
        {"stride": 2, "dilation": 2, "output_padding": 1},
    ],
    ids=str,
)
def test_transposed(dims, options):
    module, x = build(lambda: TRANSPOSED[dims](2, 4, 3, **options), *(2, 3, 4, 2)[: dims + 1])
    assert_is_loop(module, x)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("functions", "options"),
    [
        pytest.param(FUNCTIONS, {"padding": "valid", "stride": (2,)}, id="valid"),
        pytest.param(FUNCTIONS, {"padding": "same", "dilation": (2,)}, id="same"),
        pytest.param(FUNCTIONS, {"stride": [2], "padding": [1], "dilation": [1]}, id="lists of one"),
        pytest.param(TRANSPOSES, {"stride": [2], "padding": [1], "output_padding": [1]}, id="transposed"),
    ],
)
@pytest.mark.parametrize("is_batched", [False, True], ids=["unbatched", "batched"])
def test_functions(dims, functions, options, is_batched):
    kernel, x = torch.randn(4, 4, *[3] * dims, dtype=F64), torch.randn(B, 4, *[5, 6, 4][:dims], dtype=F64)

    def loss(p, x):
        return torch.sin(functions[dims](x[None] if is_batched else x, p["w"], p["b"], **options)).sum()

    params = {"w": kernel, "b": torch.randn(4, dtype=F64)}
    assert_is_loop(params, x, loss)


LAYOUTS = {
    "non-contiguous": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:, :1].expand_as(x),
    "channels last": lambda x: x.to(memory_format=LAST[x.ndim - 2]),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_batched", [False, True], ids=["unbatched", "batched"])
def test_layouts(dims, layout, is_batched):
    if layout == "channels last" and dims == 1:
        pytest.skip("of images alone")
    module, x = build(lambda: MODULES[dims](2, 4, 3, padding="valid", stride=2), *(2, 5, 7, 6)[: dims + 1])
    if layout == "channels last":
        module = module.to(memory_format=LAST[dims])

    def loss(module, x):
        return plain(module, x[None] if is_batched else x)

    assert_is_loop(module, LAYOUTS[layout](x), loss)


COMPILED = {
    "valid": lambda: nn.Conv2d(2, 4, 3, padding="valid", stride=2),
    "same, even": lambda: nn.Conv2d(2, 4, 4, padding="same", dilation=2),
    "transposed": lambda: nn.ConvTranspose2d(2, 4, 3, stride=(2,), padding=(1,), output_padding=(1,), groups=2),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "valid")) for x in COMPILED])
def test_compiled(name):
    module, x = build(COMPILED[name], 2, 6, 7)
    assert_is_loop(module, x, engine="compiled")


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "options"), SETTINGS)
def test_settings_when_compiled(dims, options):
    options = {"kernel_size": 3, **options}
    module, x = build(lambda: MODULES[dims](2, 4, **options), *(2, *[6, 7, 5][:dims]))
    clear_cache()  # or a warning would tell how often one loss is compiled
    assert_is_loop(module, x, engine="compiled")


def test_explained():
    module, x = build(lambda: nn.Conv2d(8, 8, 4, padding="valid", stride=2), 8, 6, 6)
    kinds = [row.factor for row in ps.explain(plain, module, x, ps.Norm()).rows]
    assert kinds == ["Conv", "Dense"]


@pytest.mark.parametrize("of_loss", [False, True], ids=["plain", "vmapped"])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_an_image_of_one_pixel_in_any_layout(dimensions, of_loss):
    """torch's kernel refuses such a view of what samples fold into one image."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, *[1] * dimensions, 4, generator=generator, dtype=F64).movedim(-1, 1)
    kernel = torch.randn(6, 2, *[3, 1][:dimensions], generator=generator, dtype=F64)

    def loss(w, x):
        def convolved(image):
            return FUNCTIONS[dimensions](image[None], w, padding=1, groups=2)[0]

        return (torch.func.vmap(convolved)(x[None])[0] if of_loss else convolved(x)).sin().sum()

    for reduction in (ps.Norm(), ps.ClippedSum(0.5), *[ps.Stack()] * (not of_loss)):
        found, expected = (per_sample_grads(loss, kernel, x, reduction, engine=e) for e in ("eager", "loop"))
        assert_trees_close(found, expected, 1e-9)


def test_an_image_of_one_pixel_that_torch_refuses_is_explained(monkeypatch):
    without_layers(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 1, 1, 4, generator=generator, dtype=F64).movedim(-1, 1)
    kernel = torch.randn(6, 2, 3, 1, generator=generator, dtype=F64)

    def loss(w, x):
        return torch.func.vmap(lambda image: F.conv2d(image[None], w, padding=1, groups=2)[0])(x[None]).sin().sum()

    with pytest.raises(ps.LossError, match="uses an operation that vmap cannot batch"):
        per_sample_grads(loss, kernel, x)
    with pytest.warns(ps.FallbackWarning):
        found = per_sample_grads(loss, kernel, x, engine="auto")
    assert_trees_close(found, per_sample_grads(loss, kernel, x, engine="loop"), 1e-9)
