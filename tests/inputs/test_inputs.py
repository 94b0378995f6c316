"""Every form that params, batch, in_dims, weights and out may take, against a plain autograd loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import persample as ps
from persample import per_sample_grads

B = 5
both_engines = pytest.mark.parametrize("engine", ["eager", "loop"])
in_chunks = pytest.mark.parametrize("chunk_size", [None, 1, 3, 99], ids=["whole", "1", "3", "99"])


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W, X, R = draw(3, seed=1), draw(B, 3, seed=2), draw(B, seed=3)


def linear(w, x):
    """Its gradient is x."""
    return w @ x


def square(w, x, r=1.0):
    return (w @ x - r) ** 2


def loop(loss_fn, params, samples):
    """The truth: one backward pass per sample, in float64. ``samples`` lists the arguments of each call."""
    rows = []
    for sample in samples:
        leaves, spec = pytree.tree_flatten(params)
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        loss = loss_fn(pytree.tree_unflatten(leaves, spec), *sample)
        rows.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    return pytree.tree_unflatten([torch.stack(column) for column in zip(*rows, strict=True)], spec)


def assert_close(actual, expected, **tolerance):
    """Equal structure, shapes, dtypes and numbers; and no graph."""
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    for a, e in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, e, **(tolerance or {"rtol": 1e-10, "atol": 1e-12}))


def test_assert_close_can_fail():
    for wrong in ({"w": X + 1e-6}, {"w": X.float()}, {"w": X[:1]}, [X], {"w": X.clone().requires_grad_()}):
        with pytest.raises(AssertionError):
            assert_close(wrong, {"w": X})


def test_the_loop_knows_the_gradient_of_a_square():
    assert_close(loop(square, W, zip(X, R, strict=True)), 2 * (X @ W - R)[:, None] * X)


# params


class Layer(NamedTuple):
    w: Tensor
    b: Tensor


def tree_loss(params, x):
    """Weighs the leaves by their place, so that two that are swapped are noticed."""
    return sum((k + 1) * ((leaf * x[: leaf.shape[-1]] if leaf.ndim else leaf) ** 2).sum() for k, leaf in enumerate(
        pytree.tree_leaves(params)))  # fmt: skip


PARAMS = {
    "tensor": W,
    "0-d": draw(),
    "dict": {"w": W, "b": draw(2)},
    "unsorted-dict": {"z": W, "a": draw(2), "m": draw()},
    "list": [W, draw(2)],
    "tuple": (W, draw(4, 2)),
    "NamedTuple": Layer(W, draw(1)),
    "nested": {"net": [{"w": draw(4, 3), "b": draw(2)}, (W,)], "scale": draw(), "layer": Layer(draw(1), draw(3))},
    "empty-inside": {"w": W, "none": {}, "empty": [(), []]},
    "int-keys": {0: W, 1: draw(2)},
    "no-elements": [W, draw(0, 3)],
}


@both_engines
@pytest.mark.parametrize("case", PARAMS)
def test_params(case, engine):
    params = PARAMS[case]
    expected = loop(tree_loss, params, [(x,) for x in X])
    assert_close(per_sample_grads(tree_loss, params, X, engine=engine), expected)
    mean = pytree.tree_map(lambda rows: rows.mean(0), expected)
    assert_close(per_sample_grads(tree_loss, params, X, ps.Mean(), engine=engine, chunk_size=2), mean)


@both_engines
def test_params_in_a_tensordict(engine):
    params = TensorDict({"net": {"w": W}, "b": draw()}, batch_size=[])
    got = per_sample_grads(lambda p, x: p["net", "w"] @ x * p["b"], params, X, engine=engine)
    assert_close(got["net", "w"], X * params["b"])
    assert_close(got["b"], X @ W)


@both_engines
@pytest.mark.parametrize(
    "wrap", [nn.Parameter, lambda w: w.clone().requires_grad_()], ids=["Parameter", "requires_grad"]
)
def test_params_that_require_grad_are_left_alone(wrap, engine):
    w, x = wrap(W), X.clone().requires_grad_()
    w.grad = grad = torch.ones(3, dtype=torch.float64)
    reduce = {name: case for name, case in REDUCTIONS.items() if name != "Factored"}
    got = per_sample_grads(lambda w, x: ((w @ x) ** 2, w), w, x, {**reduce, "Aux": ps.Aux()}, engine=engine)
    assert not any(leaf.requires_grad or leaf.grad_fn for leaf in pytree.tree_leaves(got))
    assert w.requires_grad
    assert w.grad is grad
    assert torch.equal(grad, torch.ones_like(grad))
    assert x.grad is None
    assert torch.equal(w, W)


@both_engines
def test_params_that_are_part_of_a_graph(engine):
    root = W.clone().requires_grad_()
    assert_close(per_sample_grads(linear, root * 2, X * root, engine=engine), X * W)
    assert root.grad is None


@both_engines
def test_one_tensor_in_two_places_counts_as_two_parameters(engine):
    got = per_sample_grads(lambda p, x: p["a"] @ x + 2 * p["b"] @ x, {"a": W, "b": W}, X, engine=engine)
    assert_close(got, {"a": X, "b": 2 * X})


class Tied(nn.Module):
    """Two names for one weight, a frozen bias, a buffer that counts, a method of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def loss(self, x):
        self.calls += 1
        return self.second(torch.tanh(self.first(x))).sum() * self.calls


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_tied_and_frozen_parameters_of_a_module_in_train_mode(chunk_size, engine):
    model = Tied().double()
    weight, bias = model.first.weight.detach(), model.first.bias.detach()
    expected = loop(lambda w, x: F.linear(torch.tanh(F.linear(x, w, bias)), w).sum(), weight, [(x,) for x in X])
    got = per_sample_grads(lambda m, x: m.loss(x), model, (X,), engine=engine, chunk_size=chunk_size)
    assert_close(got, {"first.weight": expected})
    assert model.calls.item() == 0
    assert model.second.weight is model.first.weight
    assert all(p.grad is None for p in model.parameters())


@both_engines
def test_modules_inside_a_tree(engine):
    actor, critic = nn.Linear(3, 2).double(), nn.Linear(3, 1).double()
    params = {"actor": actor, "critic": [critic], "log_std": draw(2)}

    def loss(p, x):
        return (p["actor"](x).tanh() * p["log_std"].exp()).sum() * p["critic"][0](x).sum()

    tensors = {name: dict(m.named_parameters()) for name, m in (("actor", actor), ("critic", critic))}

    def functional(p, x):
        mean, value = F.linear(x, *p["actor"].values()), F.linear(x, *p["critic"][0].values())
        return (mean.tanh() * p["log_std"].exp()).sum() * value.sum()

    plain = {"actor": tensors["actor"], "critic": [tensors["critic"]], "log_std": params["log_std"]}
    expected = loop(functional, plain, [(x,) for x in X])
    assert_close(per_sample_grads(loss, params, (X,), engine=engine), expected)


# batch


class Transition(NamedTuple):
    s: Tensor
    r: Tensor


@dataclass
class Sample:
    s: Tensor
    r: Tensor
    name: str


pytree.register_dataclass(Sample)


def transition_loss(w, transition):
    return (w @ transition.s - transition.r) ** 2


def mapping_loss(w, batch):
    return (w @ batch["s"] - batch["next"]["r"]) ** 2


BATCHES = {
    "tensor": (linear, X),
    "tuple": (square, (X, R)),
    "list": (square, [X, R]),
    "tuple-of-one": (linear, (X,)),
    "dict": (mapping_loss, {"s": X, "next": {"r": R}}),
    "dict-in-tuple": (lambda w, b, x: mapping_loss(w, b) * x[0], ({"s": X, "next": {"r": R}}, X)),
    "NamedTuple": (transition_loss, Transition(X, R)),
    "NamedTuple-in-tuple": (lambda w, t, x: transition_loss(w, t) * x[0], (Transition(X, R), X)),
    "dataclass": (transition_loss, Sample(X, R, "cart")),
    "TensorDict": (mapping_loss, TensorDict({"s": X, "next": {"r": R}}, batch_size=[B])),
    "TensorDict-in-tuple": (
        lambda w, b, r: mapping_loss(w, b) * r,
        (TensorDict({"s": X, "next": {"r": R}}, batch_size=[B]), R),
    ),
    "nested-tuple": (lambda w, pair: square(w, *pair), ((X, R),)),
}


def sliced(batch, i):
    """The arguments of sample i, the simple way."""
    sample = pytree.tree_map(lambda leaf: leaf[i] if isinstance(leaf, Tensor) else leaf, batch)
    return sample if type(batch) in {tuple, list} else (sample,)


@both_engines
@in_chunks
@pytest.mark.parametrize("case", BATCHES)
def test_batch(case, chunk_size, engine):
    loss_fn, batch = BATCHES[case]
    expected = loop(loss_fn, W, [sliced(batch, i) for i in range(B)])
    assert_close(per_sample_grads(loss_fn, W, batch, engine=engine, chunk_size=chunk_size), expected)


@both_engines
@pytest.mark.parametrize("size", [0, 1], ids=["B=0", "B=1"])
@pytest.mark.parametrize("case", BATCHES)
def test_small_batches_of_every_kind(case, size, engine):
    loss_fn, batch = BATCHES[case]
    whole = per_sample_grads(loss_fn, W, batch)
    if isinstance(batch, TensorDict):
        small = batch[:size]
    else:
        small = pytree.tree_map(lambda leaf: leaf[:size] if isinstance(leaf, (Tensor, TensorDict)) else leaf, batch)
    assert_close(per_sample_grads(loss_fn, W, small, engine=engine), whole[:size])


@both_engines
def test_the_loss_sees_the_type_that_was_passed(engine):
    seen = []

    def loss(w, *sample):
        seen.append([type(part) for part in sample])
        return w.sum()

    for batch in (Transition(X, R), Sample(X, R, "cart"), TensorDict({"s": X}, batch_size=[B]), {"s": X}):
        per_sample_grads(loss, W, batch, engine=engine)
        per_sample_grads(loss, W, (batch, [X]), engine=engine)
        assert seen[0] == [type(batch)]
        assert seen[-1] == [type(batch), list]
        seen.clear()


@both_engines
@pytest.mark.parametrize("size", [0, B], ids=["B=0", "B=5"])
def test_constants_pass_through_unsliced(size, engine):
    constants = {"none": None, "str": "cart", "bytes": b"x", "int": 3, "float": 0.5, "bool": True, "complex": 1j}
    constants["numpy"] = np.float32(2.0)

    def loss(w, x, given):
        assert given == constants
        return linear(w, x) * given["float"]

    for in_dims in ((None, 0), (None, (0, None))):
        got = per_sample_grads(loss, W, (X[:size], constants), engine=engine, in_dims=in_dims, chunk_size=2)
        assert_close(got, X[:size] * 0.5)


@both_engines
def test_any_object_passes_through_under_none(engine):
    thing = {1, 2}

    def loss(w, x, other):
        assert other is thing
        return linear(w, x)

    assert_close(per_sample_grads(loss, W, (X, thing), engine=engine, in_dims=(None, (0, None))), X)


# NumPy


def read_only(array):
    array = array.copy()
    array.setflags(write=False)
    return array


x64 = X.numpy()
NUMPY = {
    "float64": x64,
    "float32": x64.astype(np.float32),
    "float16": x64.astype(np.float16),
    "int64": np.arange(15).reshape(B, 3),
    "int32": np.arange(15, dtype=np.int32).reshape(B, 3),
    "uint8": np.arange(15, dtype=np.uint8).reshape(B, 3),
    "bool": x64 > 0,
    "Fortran": np.asfortranarray(x64),
    "transposed": np.ascontiguousarray(x64.T).T,
    "strided": np.repeat(np.repeat(x64, 2, 0), 3, 1)[::2, ::3],
    "negative-strides": x64[::-1, ::-1],
    "negative-strides-int": np.arange(15).reshape(B, 3)[::-1],
    "big-endian": x64.astype(">f4"),
    "big-endian-int": np.arange(15, dtype=">i4").reshape(B, 3),
    "read-only": read_only(x64),
    "read-only-int": read_only(np.arange(15).reshape(B, 3)),
    "broadcast": np.broadcast_to(x64[0], (B, 3)),
}


@pytest.fixture
def warn_always():
    """Torch warns of read-only memory once per process; the tests should not depend on their order."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@both_engines
@pytest.mark.usefixtures("warn_always")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", NUMPY)
def test_numpy_batches(case, dtype, engine):
    """Warnings are errors, here as everywhere."""
    array, seen = NUMPY[case], []

    def loss(w, x):
        seen.append(x.dtype)
        return (w * x).sum()

    got = per_sample_grads(loss, W.to(dtype), array, engine=engine)
    assert_close(got, torch.tensor(array.astype(array.dtype.newbyteorder("="))).to(dtype))
    native = array[:1].astype(array.dtype.newbyteorder("="))
    assert seen[-1] == (dtype if array.dtype.kind == "f" else torch.tensor(native).dtype)


@both_engines
def test_complex_arrays_take_the_complex_dtype(engine):
    seen = []

    def loss(w, z):
        seen.append(z.dtype)
        return (w * z).abs().square().sum()

    z = (x64 + 1j * x64[::-1]).astype(np.complex128)
    got = per_sample_grads(loss, W.float(), z, engine=engine)
    assert set(seen) == {torch.complex64}
    torch.testing.assert_close(got, torch.tensor(2 * W.numpy() * np.abs(z) ** 2).float())


@both_engines
def test_numpy_axes_and_shared_arrays(engine):
    got = per_sample_grads(
        lambda w, b: w @ b["x"] * b["scale"][1],
        W,
        {"x": x64.T, "scale": np.array([1.0, 3.0])},
        in_dims=(None, {"x": 1, "scale": None}),
        engine=engine,
    )
    assert_close(got, 3 * X)


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble], ids=["longdouble", "clongdouble"])
def test_long_doubles_take_the_dtype_of_the_params_as_all_floating_arrays_do(dtype):
    assert_close(per_sample_grads(lambda w, x: (w * x).real.sum(), W, x64.astype(dtype)), X)


# in_dims


def moved(x, dim):
    return x.movedim(0, dim).contiguous()


TARGET = {"w": draw(3, seed=9), "b": draw(seed=8)}


def target_loss(params, s, r, target):
    return (params @ s - r - target["w"] @ s * target["b"]) ** 2


def dict_loss(w, b):
    return square(w, b["s"], b["r"]) * b["scale"].sum()


IN_DIMS = {
    "1": (linear, moved(X, 1), (None, 1), lambda i: (X[i],)),
    "-1": (linear, moved(X, -1), (None, -1), lambda i: (X[i],)),
    "-2": (linear, X, (None, -2), lambda i: (X[i],)),
    "list-pair": (linear, X, [None, 0], lambda i: (X[i],)),
    "one-for-all": (lambda w, a, b: (a @ w * b).sum(), (moved(draw(B, 2, 3), 1), moved(draw(B, 2), 1)), (None, 1),
                    lambda i: (draw(B, 2, 3)[i], draw(B, 2)[i])),
    "target-params": (target_loss, (X, R, TARGET), (None, (0, 0, None)), lambda i: (X[i], R[i], TARGET)),
    "target-leaf": (target_loss, (X, R, {"w": X, "b": TARGET["b"]}), (None, (0, 0, {"w": 0, "b": None})),
                    lambda i: (X[i], R[i], {"w": X[i], "b": TARGET["b"]})),
    "list-for-tuple": (square, (X, R), (None, [0, 0]), lambda i: (X[i], R[i])),
    "tuple-for-list": (square, [moved(X, 1), R], (None, (1, 0)), lambda i: (X[i], R[i])),
    "dict": (dict_loss, {"s": moved(X, 1), "r": R, "scale": draw(2)}, (None, {"s": 1, "r": -1, "scale": None}),
             lambda i: ({"s": X[i], "r": R[i], "scale": draw(2)},)),
    "NamedTuple": (transition_loss, Transition(moved(X, 1), R), (None, Transition(1, 0)),
                   lambda i: (Transition(X[i], R[i]),)),
    "None-leaf": (lambda w, x, none: linear(w, x), (X, None), (None, (0, 0)), lambda i: (X[i], None)),
    "all-of-a-subtree": (lambda w, b, r: dict_loss(w, b) * r, ({"s": X, "r": R, "scale": draw(B, 1)}, R),
                         (None, (0, 0)), lambda i: ({"s": X[i], "r": R[i], "scale": draw(B, 1)[i]}, R[i])),
}  # fmt: skip


@both_engines
@in_chunks
@pytest.mark.parametrize("case", IN_DIMS)
def test_in_dims(case, chunk_size, engine):
    loss_fn, batch, in_dims, sample = IN_DIMS[case]
    expected = loop(loss_fn, W, [sample(i) for i in range(B)])
    assert_close(per_sample_grads(loss_fn, W, batch, in_dims=in_dims, engine=engine, chunk_size=chunk_size), expected)


@both_engines
@pytest.mark.parametrize("which", ["batch", "params"])
def test_in_dims_go_by_the_keys_of_a_dict_whatever_their_order(which, engine):
    """Both leaves are square, so that dims that are mixed up are silently wrong."""

    def loss(w, b):
        return w @ (b["a"] - 2 * b["b"]).flatten()[:3]

    def own(p, x):
        return (p["a"] - 2 * p["b"]).flatten()[:3] @ x

    tree, dims = {"a": draw(3, 3, seed=20), "b": draw(3, 3, seed=21)}, {"b": None, "a": 0}
    if which == "batch":
        expected = per_sample_grads(loss, W, tree, in_dims=(None, {"a": 0, "b": None}), engine=engine)
        got = per_sample_grads(loss, W, tree, in_dims=(None, dims), engine=engine)
    else:
        expected = per_sample_grads(own, tree, X[:3], in_dims=({"a": 0, "b": None}, 0), engine=engine)
        got = per_sample_grads(own, tree, X[:3], in_dims=(dims, 0), engine=engine)
    assert_close(got, expected)


OWN = {"w": draw(B, 3, seed=5), "b": draw(seed=6)}


def own_loss(params, x):
    return (params["w"] @ x - params["b"]) ** 2


@both_engines
@in_chunks
@pytest.mark.parametrize(
    ("params", "dims"),
    [
        ({"w": OWN["w"], "b": OWN["b"]}, {"w": 0, "b": None}),
        ({"w": moved(OWN["w"], 1), "b": OWN["b"]}, {"w": -1, "b": None}),
        ({"w": OWN["w"], "b": OWN["b"].expand(B)}, 0),
    ],
    ids=["some", "axis -1", "all"],
)
def test_own_parameters_of_each_sample(params, dims, chunk_size, engine):
    rows = [loop(own_loss, {"w": OWN["w"][i], "b": OWN["b"]}, [(X[i],)]) for i in range(B)]
    expected = {name: torch.cat([row[name] for row in rows]) for name in OWN}
    got = per_sample_grads(
        own_loss, params, X, {"rows": None, "sum": ps.Sum()}, in_dims=(dims, 0), engine=engine, chunk_size=chunk_size
    )
    assert_close(got["rows"], expected)
    assert_close(got["sum"], {name: rows.sum(0) for name, rows in expected.items()})


@both_engines
def test_samples_that_are_told_apart_by_their_parameters_alone(engine):
    got = per_sample_grads(linear, OWN["w"], X[0], in_dims=(0, None), engine=engine)
    assert_close(got, X[:1].expand(B, 3))


# keep_batch_dim


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_keep_batch_dim_is_axis_0_whatever_in_dims_says(dim, chunk_size, engine):
    shapes = set()

    def loss(w, x, r, shared, name):
        shapes.add((x.shape, r.shape, shared.shape))
        assert name == "cart"
        return ((x @ w - r) ** 2).sum() * shared.sum()

    batch, in_dims = (moved(X, dim), R, draw(2), "cart"), (None, (dim, 0, None, 0))
    options = {"keep_batch_dim": True, "in_dims": in_dims, "engine": engine, "chunk_size": chunk_size}
    got = per_sample_grads(loss, W, batch, **options)
    assert shapes == {((1, 3), (1,), (2,))}
    assert_close(got, loop(square, W, zip(X, R, strict=True)) * draw(2).sum())
    assert per_sample_grads(loss, W, (moved(X, dim).narrow(dim, 0, 0), R[:0], *batch[2:]), **options).shape == (0, 3)


@both_engines
def test_keep_batch_dim_of_a_tensordict(engine):
    batch = TensorDict({"s": X, "next": {"r": R}}, batch_size=[B])

    def loss(w, td):
        assert td.batch_size == (1,)
        return ((td["s"] @ w - td["next", "r"]) ** 2).sum()

    got = per_sample_grads(loss, W, batch, keep_batch_dim=True, engine=engine)
    assert_close(got, loop(square, W, zip(X, R, strict=True)))


# memory layouts


LAYOUTS = {
    "transposed": X.T.contiguous().T,
    "strided": X.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3],
    "offset": torch.cat([draw(2, 3), X])[2:],
    "expanded": X[:1].expand(B, 3),
    "expanded-both": draw().expand(B, 3),
    "conjugate": (X + 0j).conj().real,
    "negated": torch.complex(X, X).conj().imag,
    "zero-strides-inside": X[:, :1].expand(B, 3),
}


@both_engines
@in_chunks
@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case, chunk_size, engine):
    x = LAYOUTS[case]
    before = x.clone()
    assert_close(per_sample_grads(linear, W, x, engine=engine, chunk_size=chunk_size), before)
    assert_close(per_sample_grads(linear, x[0], X, engine=engine, chunk_size=chunk_size), X)
    assert_close(per_sample_grads(linear, x, X, in_dims=(0, 0), engine=engine, chunk_size=chunk_size), X)
    assert torch.equal(x, before)


@both_engines
def test_a_transposed_parameter_has_gradients_of_its_shape(engine):
    w = draw(4, 3).T
    got = per_sample_grads(lambda w, x: (x @ w).sum(), w, X, engine=engine)
    assert_close(got, X[:, :, None].expand(B, 3, 4).contiguous())


@both_engines
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16], ids=str)
def test_batches_of_other_dtypes_keep_them(dtype, engine):
    x, seen = (X > 0).to(dtype), set()

    def loss(w, x):
        seen.add(x.dtype)
        return (w * x).sum()

    assert_close(per_sample_grads(loss, W, x, engine=engine), x.double())
    assert seen == {dtype}


# grad modes


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
}


@both_engines
@pytest.mark.parametrize("module", [False, True], ids=["tensor", "module"])
@pytest.mark.parametrize("case", MODES)
def test_grad_modes(case, module, engine):
    layer = nn.Linear(3, 1, bias=False).double()
    with MODES[case]():
        enabled, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if module:
            got = per_sample_grads(lambda m, x: m(x).sum(), layer, (X,), engine=engine)["weight"][:, 0]
        else:
            got = per_sample_grads(linear, W, X, engine=engine)
        assert torch.is_grad_enabled() == enabled
        assert torch.is_inference_mode_enabled() == inference
    assert_close(got, X)
    assert not got.is_inference()
    assert torch.is_grad_enabled()


@both_engines
def test_results_of_inference_mode_can_be_trained_on(engine):
    with torch.inference_mode():
        got = per_sample_grads(linear, W, X, ps.Sum(), engine=engine)
    w = W.clone().requires_grad_()
    (w @ got).backward()
    assert torch.equal(w.grad, got)


@pytest.mark.parametrize(
    "engine",
    [
        "eager",
        pytest.param("loop"),
    ],
)
@pytest.mark.parametrize("size", [1, B])
def test_tensors_made_in_inference_mode(size, engine):
    with torch.inference_mode():
        w, x = W.clone(), X[:size].clone()
    assert_close(per_sample_grads(linear, w, x, engine=engine), X[:size])


@both_engines
@pytest.mark.parametrize("size", [B, pytest.param(0)])  # fmt: skip
def test_a_gradient_penalty_differentiates_inside_the_loss(size, engine):
    def loss(w, x):
        (slope,) = torch.autograd.grad((w @ x) ** 2, w, create_graph=True)
        return slope.square().sum()

    expected = 8 * (X @ W * X.square().sum(1))[:, None] * X
    got = per_sample_grads(loss, W, X[:size], engine=engine)
    assert_close(got, expected[:size])


@both_engines
@pytest.mark.parametrize("size", [0, B], ids=["B=0", "B=5"])
def test_functional_transforms_inside_the_loss(size, engine):
    def loss(w, x):
        return torch.func.grad(lambda v: (v @ x) ** 2)(w).sum() + torch.vmap(lambda v: v * 2)(w).sum()

    expected = loop(lambda w, x: 2 * (w @ x) * x.sum() + 2 * w.sum(), W, [(x,) for x in X])
    assert_close(per_sample_grads(loss, W, X[:size], engine=engine), expected[:size])


# every reduction: small batches, chunks, weights, out


D, DS = draw(3, seed=11), draw(2, 3, seed=12)
PROJECT = ps.Project(4, seed=0)
REDUCTIONS = {
    "Stack": ps.Stack(),
    "None": None,
    "Factored": ps.Factored(),
    "Loss": ps.Loss(),
    "Norm": ps.Norm(),
    "Norm-per_param": ps.Norm(per_param=True),
    "Dot": ps.Dot(D),
    "Dot-stacked": ps.Dot(DS, stacked=True),
    "Project": PROJECT,
    "Gram": ps.Gram(),
    "CosineSimilarity": ps.CosineSimilarity(),
    "Sum": ps.Sum(),
    "ClippedSum": ps.ClippedSum(0.7),
    "ClippedSum-per_param": ps.ClippedSum(0.7, per_param=True),
    "WeightedSum": ps.WeightedSum(lambda norm: 1 / (1 + norm)),
    "Mean": ps.Mean(),
    "ClippedMean": ps.ClippedMean(0.7),
    "SecondMoment": ps.SecondMoment(),
    "Variance-0": ps.Variance(correction=0),
    "Variance": ps.Variance(),
    "NoiseScale": ps.NoiseScale(),
}
ROWS = ["Stack", "None", "Loss", "Norm", "Norm-per_param", "Dot", "Dot-stacked", "Project"]
PAIRS = ["Gram", "CosineSimilarity"]
SUMS = ["Sum", "ClippedSum", "ClippedSum-per_param", "WeightedSum"]
AVERAGES = ["Mean", "ClippedMean", "SecondMoment", "Variance-0"]
SPREADS = ["Variance", "NoiseScale"]
TENSORS = [name for name in REDUCTIONS if name != "Factored"]


def signs():
    """What is projected onto: rows of the identity have gradients e₁, e₂, e₃."""
    return per_sample_grads(linear, W, torch.eye(3, dtype=torch.float64), PROJECT)


def answer(name, g, losses, weights=None):
    """The result of a reduction, from the matrix of all gradients."""
    k = torch.ones(len(g), dtype=g.dtype) if weights is None else weights
    norms, n = g.norm(dim=1), k.sum()
    clip = (0.7 / norms).clamp(max=1)
    variance = k @ (g - k @ g / n) ** 2
    trace = variance.sum() / (n - 1)
    squared_mean = (k @ g / n).square().sum() - trace / n
    unit = torch.nn.functional.normalize(g)
    return {
        "Stack": g, "None": g, "Loss": losses, "Norm": norms, "Norm-per_param": norms,
        "Dot": g @ D, "Dot-stacked": g @ DS.T, "Project": g @ signs(),
        "Gram": g @ g.T, "CosineSimilarity": unit @ unit.T,
        "Sum": k @ g, "ClippedSum": (k * clip) @ g, "ClippedSum-per_param": (k * clip) @ g,
        "WeightedSum": (k / (1 + norms)) @ g,
        "Mean": k @ g / n, "ClippedMean": (k * clip) @ g / n, "SecondMoment": k @ g**2 / n,
        "Variance-0": variance / n, "Variance": variance / (n - 1),
        "NoiseScale": ps.reductions.NoiseScaleEstimate(trace, squared_mean, trace / squared_mean),
    }[name]  # fmt: skip


G = loop(square, W, zip(X, R, strict=True))
LOSSES = (X @ W - R) ** 2


@both_engines
@in_chunks
@pytest.mark.parametrize("name", TENSORS)
def test_every_reduction_in_chunks(name, chunk_size, engine):
    got = per_sample_grads(square, W, (X, R), REDUCTIONS[name], engine=engine, chunk_size=chunk_size)
    assert_close(got, answer(name, G, LOSSES))


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 1, 99])
@pytest.mark.parametrize("name", [name for name in TENSORS if name not in SPREADS])
def test_every_reduction_of_one_sample(name, chunk_size, engine):
    got = per_sample_grads(square, W, (X[:1], R[:1]), REDUCTIONS[name], engine=engine, chunk_size=chunk_size)
    assert_close(got, answer(name, G[:1], LOSSES[:1]))


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize("weights", [None, []], ids=["unweighted", "weights"])
@pytest.mark.parametrize("name", [*ROWS, *PAIRS, *SUMS])
def test_every_reduction_of_no_samples(name, weights, chunk_size, engine):
    options = {"weights": weights, "engine": engine, "chunk_size": chunk_size}
    got = per_sample_grads(square, W, (X[:0], R[:0]), REDUCTIONS[name], **options)
    assert_close(got, answer(name, G[:0], LOSSES[:0]))


@both_engines
@pytest.mark.parametrize("size", [0, 1, B])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_factors_of_any_number_of_samples(size, chunk_size, engine):
    factor = per_sample_grads(square, W, (X[:size], R[:size]), ps.Factored(), engine=engine, chunk_size=chunk_size)
    assert_close(factor.materialize(), G[:size])


def gather_loss(w, x, a):
    return -torch.log_softmax(w @ x, dim=0).gather(0, a[None])[0]


def index_loss(w, x, a):
    return -torch.log_softmax(w @ x, dim=0).index_select(0, a[None]).sum()


def cross_entropy_loss(w, x, a):
    return F.cross_entropy(w @ x, a)


def embedding_loss(w, x, a):
    return F.embedding(a, w) @ x


def cholesky_loss(w, x, a):
    return torch.linalg.cholesky(w @ w.T + torch.eye(4) + torch.outer(x, x).sum()).sum() * a


def solve_loss(w, x, a):
    return torch.linalg.solve(torch.outer(x, x) + torch.eye(3), w.T).sum() * a


def cholesky_of_the_sample_loss(w, x, a):
    """Of zeros it would fail: shapes may not come from a call on made-up numbers."""
    return torch.linalg.cholesky(torch.outer(x, x) + a * torch.diag(x * 0 + 1)).sum() * w.sum()


def item_loss(w, x, a):
    return (w @ x).sum() * a.item() if x[0] > 0 else w.sum()


def max_loss(w, x, a):
    return (w @ x).max() + w.sort(0).values[0].sum() + a


EMPTY = [gather_loss, index_loss, cross_entropy_loss, embedding_loss, cholesky_loss, solve_loss, max_loss]


@both_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "loss_fn", [*EMPTY, cholesky_of_the_sample_loss, item_loss], ids=lambda fn: fn.__name__.removesuffix("_loss")
)
def test_losses_that_vmap_refuses_on_an_empty_batch(loss_fn, dtype, engine):
    def with_aux(w, x, a):
        return loss_fn(w, x, a), {"x": x, "best": (x.argmax(), x > 0)}

    w, x, a = draw(4, 3).to(dtype), X[:0].to(dtype), torch.zeros(0, dtype=torch.long)
    torch.set_default_dtype(dtype)  # for the eyes in the losses
    try:
        reduce = {"rows": None, "sum": ps.Sum(), "aux": ps.Aux(), "gram": ps.Gram(), "loss": ps.Loss()}
        got = per_sample_grads(with_aux, w, (x, a), reduce, engine=engine)
    finally:
        torch.set_default_dtype(torch.float32)
    index, flags = torch.zeros(0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.bool)
    expected = {"rows": w.new_zeros(0, 4, 3), "sum": torch.zeros_like(w), "aux": {"x": x, "best": (index, flags)}}
    assert_close(got, {**expected, "gram": w.new_zeros(0, 0), "loss": w.new_zeros(0)})


@both_engines
@pytest.mark.parametrize("loss_fn", EMPTY, ids=lambda fn: fn.__name__.removesuffix("_loss"))
def test_the_same_losses_on_samples(loss_fn, engine):
    w, a = draw(4, 3), torch.tensor([0, 3, 1, 2, 0])
    torch.set_default_dtype(torch.float64)
    try:
        expected = loop(loss_fn, w, zip(X, a, strict=True))
        assert_close(per_sample_grads(loss_fn, w, (X, a), engine=engine), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@both_engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_dtypes_of_results_do_not_depend_on_the_number_of_samples(dtype, engine):
    w, x, d = W.to(dtype), X.to(dtype), D.to(dtype)
    reduce = {name: REDUCTIONS[name] for name in (*ROWS, *PAIRS, *SUMS) if "Dot" not in name} | {"Dot": ps.Dot(d)}
    full = per_sample_grads(lambda w, x: (w * x).sum().abs(), w, x, reduce, engine=engine)
    none = per_sample_grads(lambda w, x: (w * x).sum().abs(), w, x[:0], reduce, engine=engine)
    for name, result in none.items():
        assert result.dtype == full[name].dtype, name
        assert result.ndim == full[name].ndim, name
        assert result.device == full[name].device, name


@both_engines
def test_a_module_and_no_samples(engine):
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.GroupNorm(2, 4)).double()
    stream = torch.get_rng_state()
    got = per_sample_grads(
        lambda m, x: m(x).sum(), model, (X[:0],), [None, ps.Sum()], keep_batch_dim=True, engine=engine
    )
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: rows.shape for name, rows in got[0].items()} == {name: (0, *shape) for name, shape in shapes.items()}
    assert_close(got[1], {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()})
    assert torch.equal(torch.get_rng_state(), stream)


# weights


K = torch.tensor([1.0, 0.0, 3.0, 2.0, 1.0], dtype=torch.float64)
WEIGHTS = {
    "tensor": K,
    "float32": K.float(),
    "int": K.long(),
    "int8": K.to(torch.int8),
    "list": K.tolist(),
    "list-of-int": [1, 0, 3, 2, 1],
    "tuple": tuple(K.tolist()),
    "numpy": K.numpy(),
    "numpy-int": np.array([1, 0, 3, 2, 1]),
    "requires-grad": K.clone().requires_grad_(),
    "strided": K.repeat_interleave(2)[::2],
}


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(case, chunk_size, engine):
    reduce = {name: REDUCTIONS[name] for name in TENSORS}
    options = {"weights": WEIGHTS[case], "engine": engine, "chunk_size": chunk_size}
    got = per_sample_grads(square, W, (X, R), reduce, **options)
    for name in TENSORS:
        assert_close(got[name], answer(name, G, LOSSES, K))


@both_engines
@pytest.mark.parametrize("wrap", [torch.tensor, np.array, list], ids=["tensor", "numpy", "list"])
def test_weights_of_bool(wrap, engine):
    keep = [True, False, True, True, False]
    reduce = {name: REDUCTIONS[name] for name in (*SUMS, *AVERAGES, *SPREADS)}
    got = per_sample_grads(square, W, (X, R), reduce, weights=wrap(keep), engine=engine)
    for name in reduce:
        assert_close(got[name], answer(name, G[keep], LOSSES[keep]))


@pytest.mark.usefixtures("warn_always")
@pytest.mark.parametrize(
    "weights",
    [K.numpy()[::-1], K.numpy().astype(">f8"), read_only(K.numpy())],
    ids=["negative-strides", "big-endian", "read-only"],
)
def test_weights_in_arrays_that_a_batch_may_hold(weights):
    got = per_sample_grads(linear, W, X, ps.Sum(), weights=weights)
    assert_close(got, torch.tensor(weights.astype(float)) @ X)


# out


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", TENSORS)
def test_out_is_written_again(name, chunk_size, engine):
    options = {"engine": engine, "chunk_size": chunk_size}
    previous = per_sample_grads(square, -W, (X + 1, R), REDUCTIONS[name], **options)
    leaves = pytree.tree_leaves(previous)
    places = [leaf.data_ptr() for leaf in leaves]
    got = per_sample_grads(square, W, (X, R), REDUCTIONS[name], out=previous, **options)
    assert got is previous
    assert all(a is b for a, b in zip(pytree.tree_leaves(got), leaves, strict=True))
    assert [leaf.data_ptr() for leaf in leaves] == places
    assert_close(got, answer(name, G, LOSSES))


def sum_loss(m, x):
    return m(x).sum()


def square_loss(m, x):
    return m(x).square().sum()


@both_engines
def test_out_of_a_whole_container_and_of_a_module(engine):
    def call(x, out=None):
        reduce = {"a": [ps.Sum(), (ps.Norm(), None)], "aux": ps.Aux()}
        return per_sample_grads(lambda m, x: (square_loss(m, x), x * 2), model, (x,), reduce, engine=engine, out=out)

    model = nn.Linear(3, 2).double()
    out = call(X + 1)
    expected, leaves = call(X), pytree.tree_leaves(out)
    assert call(X, out) is out
    assert all(a is b for a, b in zip(pytree.tree_leaves(out), leaves, strict=True))
    assert_close(out, expected)


def test_out_takes_any_previous_result():
    """A linear layer followed by sum() is enough."""
    model = nn.Linear(3, 2).double()
    out = per_sample_grads(sum_loss, model, (X,))
    assert_close(per_sample_grads(sum_loss, model, (X + 1,), out=out)["weight"][:, 0], X + 1)


def test_results_can_be_changed_in_place():
    got = per_sample_grads(sum_loss, nn.Linear(3, 2).double(), (X,))
    got["bias"].mul_(torch.arange(2))
    assert_close(got["bias"], torch.tensor([0.0, 1.0], dtype=torch.float64).expand(B, 2))


def test_out_may_be_a_view_and_of_no_rows():
    storage = torch.zeros(3, B, dtype=torch.float64)
    assert_close(per_sample_grads(linear, W, X, out=storage.T), X)
    assert torch.equal(storage, X.T)
    empty = torch.zeros(0, 3, dtype=torch.float64)
    assert per_sample_grads(linear, W, X[:0], out=empty) is empty


@pytest.mark.parametrize(
    ("engine", "aux"),
    [
        *(("eager", part) for part in ("params", "batch")),
        *(("loop", part) for part in ("params", "batch")),
        *((engine, "none") for engine in ("eager", "loop")),
    ],
)
def test_results_share_no_memory_with_the_inputs(engine, aux):
    """Or ``out=`` and updates in place would write into the parameters, or into the replay buffer."""

    def loss(w, x):
        return w @ x, {"params": w, "batch": x, "none": torch.zeros(())}[aux]

    w, x = W.clone(), X.clone()
    got = per_sample_grads(loss, w, x, {"rows": None, "sum": ps.Sum(), "aux": ps.Aux()}, engine=engine)
    for leaf in pytree.tree_leaves(got):
        leaf.fill_(7.0)
    assert torch.equal(w, W)
    assert torch.equal(x, X)


# containers of reductions


class Wanted(NamedTuple):
    update: object
    norms: object


CONTAINERS = {
    "dict": {"sum": "Sum", "norms": "Norm"},
    "tuple": ("Sum", "Norm"),
    "list": ["Sum", "Norm", "Stack"],
    "one": ["Sum"],
    "nested": {"a": ["Sum", ("Norm", "None")], "b": {"c": "Gram"}, "d": "None"},
    "twice": ("Sum", "Sum"),
    "NamedTuple": Wanted("Sum", {"all": "Norm", "each": "Norm-per_param"}),
    "empty-inside": {"a": "Sum", "b": [], "c": {}},
}


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("case", CONTAINERS)
def test_containers(case, chunk_size, engine):
    names = CONTAINERS[case]
    reduce = pytree.tree_map(lambda name: REDUCTIONS[name], names)
    calls = []

    def loss(w, x, r):
        calls.append(1)
        return square(w, x, r)

    got = per_sample_grads(loss, W, (X, R), reduce, engine=engine, chunk_size=chunk_size)
    assert_close(got, pytree.tree_map(lambda name: answer(name, G, LOSSES), names))
    assert type(got) is type(names)
    assert len(calls) == (B if engine == "loop" else 1 if chunk_size is None else 3), "one pass for all"


@pytest.mark.parametrize("engine", ["eager", "traced", "loop"])
def test_leaves_of_each_sample_beside_a_module(engine):
    """The gradient by features, and of the model, in one call."""
    torch.manual_seed(0)
    model, x, y = (
        nn.Linear(3, 2).double(),
        torch.randn(5, 3, dtype=torch.float64),
        torch.randn(5, 2, dtype=torch.float64),
    )

    def loss(params, y):
        return (params["model"](params["x"]) - y).square().sum()

    found = per_sample_grads(loss, {"model": model, "x": x}, y, in_dims=({"model": None, "x": 0}, 0), engine=engine)
    for i in range(5):
        leaf = x[i].clone().requires_grad_()
        of_x, of_weight = torch.autograd.grad((model(leaf) - y[i]).square().sum(), [leaf, model.weight])
        torch.testing.assert_close(found["x"][i], of_x)
        torch.testing.assert_close(found["model"]["weight"][i], of_weight)
    with pytest.raises(
        ps.ArgumentError, match=r"in_dims\[0\]: expected None for modules, received \{'model': 0, 'x': 0\}"
    ):
        per_sample_grads(loss, {"model": model, "x": x}, y, in_dims=({"model": 0, "x": 0}, 0))


@pytest.mark.parametrize("engine", ["eager", "traced", "loop"])
def test_aux_has_no_axis_of_1_of_keep_batch_dim(engine):
    model, x = nn.Linear(3, 2), torch.randn(5, 3)

    def loss(model, x):
        z = model(x)
        return z.sum(), {"z": z, "mean": z.mean(), "two": z.T}

    aux = per_sample_grads(loss, model, x, ps.Aux(), keep_batch_dim=True, engine=engine)
    torch.testing.assert_close(aux["z"], model(x).detach())
    assert (aux["mean"].shape, aux["two"].shape) == ((5,), (5, 2, 1))
