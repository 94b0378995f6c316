"""Memory layout under vmap: strides, formats, sizes; convolution settings; and operations that vmap cannot batch."""

import pytest
import torch
from agreement import WANTED, assert_eager_is_loop
from torch import nn
from torch.nn import functional as F

from persample import ClippedSum, Gram, Norm, Stack, Sum, per_sample_grads
from persample.errors import LossError


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


STRIDED = {
    "places": lambda x: x.as_strided((2, 2), (1, 3), 0),
    "columns": lambda x: x.mT.as_strided((2, 2), (1, 3)),
    "copied": lambda x: torch.as_strided_copy(x, (2, 2), (1, 3), 1),
    "scattered": lambda x: x.as_strided_scatter(x[:2, :2], (2, 2), (1, 3)),
    "in place": lambda x: x.clone().as_strided_((2, 2), (1, 3)),
    "sizes": lambda x: x.clone().mT.resize_(2, 2),
    "resizing sum": lambda x: x.sum().clone().addbmm_(x[None], x[None]),
}


@pytest.mark.parametrize("case", STRIDED)
def test_what_reads_memory_by_its_place_is_refused(case):
    x = draw(4, 3, 3)
    with pytest.raises(LossError, match=r"(as_strided\w*|resize_|addbmm_) (reads memory|expected a tensor)"):
        per_sample_grads(lambda w, x: w * STRIDED[case](x).sum(), draw(()), x)
    per_sample_grads(lambda w, x: w * STRIDED[case](x.clone()).sum(), draw(()), x, engine="loop")


def test_contiguous_samples_may_be_seen_by_other_strides():
    windows = (4, 3), (1, 1)
    assert_eager_is_loop(lambda w, x: (w * (w * x).as_strided(*windows)).sum(), draw(()), draw(4, 6), WANTED)


def test_sums_of_products_in_place():
    def loss(w, x):
        return (w * x).addbmm_(x[None], w[None], beta=0.5, alpha=2.0).sin().sum()

    assert_eager_is_loop(loss, draw(3, 3), draw(4, 3, 3), WANTED)


FORMATS = {
    "contiguous": lambda x: x.contiguous(memory_format=torch.channels_last),
    "to": lambda x: x.to(torch.float32, memory_format=torch.channels_last),
    "clone": lambda x: torch.clone(x, memory_format=torch.channels_last),
    "double": lambda x: x.double(memory_format=torch.channels_last),
    "like": lambda x: x + torch.ones_like(x, memory_format=torch.channels_last),
    "solid": lambda x: x[None].contiguous(memory_format=torch.channels_last_3d),
}


@pytest.mark.parametrize("case", FORMATS)
def test_memory_formats(case):
    x, kernel = draw(4, 1, 2, 5, 5).float(), torch.randn(3, 2, 3, 3)

    def loss(w, x):
        return FORMATS[case](F.conv2d(x, w)).sin().sum()

    assert_eager_is_loop(loss, kernel, x, rtol=1e-4)


def test_pairs_whose_samples_lie_in_between():
    def loss(w, x):
        return torch.view_as_complex(w * x).abs().sum()

    assert_eager_is_loop(loss, draw(()), draw(5, 2, 4), WANTED, in_dims=(None, 2))


CONVOLUTIONS = {
    "valid": lambda w, x: F.conv2d(x, w, padding="valid", stride=2),
    "same": lambda w, x: F.conv2d(x, w, padding="same"),
    "one number for both": lambda w, x: torch.conv2d(x, w, stride=[2], padding=[1], dilation=[2]),
    "one, transposed": lambda w, x: torch.conv_transpose2d(x[:1], w, stride=[2], padding=[1]),
    "kernels of samples": lambda w, x: F.conv2d(x, w * x[:1, :3, :3], padding="valid"),
}


@pytest.mark.parametrize("reduce", [Norm(), Sum(), Gram(), ClippedSum(1.0)], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_settings_of_convolutions_for_all_axes_at_once(case, reduce):
    w = draw(1, 2, 3, 3) if "transposed" in case else draw(4, 2, 3, 3)
    assert_eager_is_loop(lambda w, x: CONVOLUTIONS[case](w, x).square().sum(), w, draw(3, 2, 7, 7), reduce)


def test_a_convolution_layer_that_is_not_padded():
    layer = nn.Conv2d(2, 4, 3, padding="valid").double()
    assert_eager_is_loop(lambda layer, x: layer(x).square().sum(), layer, draw(3, 2, 7, 7), {"n": Norm(), "s": Sum()})


@pytest.mark.parametrize("reduce", [None, Norm(), Sum(), Gram(), {"g": Stack(), "n": Norm()}], ids=str)
def test_gradients_that_torch_keeps_as_zeros_without_memory(reduce):
    def loss(params, x):
        return torch.sgn(params["w"]).sum() + x * params["scale"]

    assert_eager_is_loop(loss, {"w": draw(4, 3), "scale": draw(())}, draw(5), reduce)


@pytest.mark.parametrize("case", ["sparse", "selected", "drawn", "viewed"])
def test_what_cannot_be_batched_is_named(case):
    loss, match, options = {
        "sparse": (lambda w, x: (w * x).to_sparse().to_dense().sum(), "uses a sparse tensor", {}),
        "selected": (lambda w, x: (w * x).masked_select(x > 0).sum(), "reads values of a sample", {}),
        "viewed": (lambda w, x: (w * x).expand(2, 3).mT.view(6).sum(), "views in another shape", {}),
        "drawn": (lambda w, x: (w * torch.normal(x)).sum(), "that vmap cannot batch", {"randomness": "same"}),
    }[case]
    with pytest.raises(LossError, match=match):
        per_sample_grads(loss, draw(3), draw(4, 3), **options)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_tensors_have_the_memory_of_the_batch(engine):
    asked = []

    def loss(w, x):
        asked.append((w.data_ptr(), x.data_ptr()))
        return (w @ x).sin().sum()

    w, x = draw(2, 3), draw(4, 3)
    for reduce in (Norm(), Stack()):
        per_sample_grads(loss, w, x, reduce, engine=engine)
    assert asked[0][1] == x.data_ptr()
    assert all(len(set(places)) == 2 for places in asked)


def test_questions_of_another_format_are_not_answered_for_this_one():
    def loss(w, x):
        return w * (x.sum() if x.is_contiguous(memory_format=torch.channels_last) else x.square().sum())

    x = draw(3, 1, 2, 4, 4)
    with pytest.raises(RuntimeError, match="is_contiguous"):
        per_sample_grads(loss, draw(()), x)
    per_sample_grads(loss, draw(()), x, engine="loop")
