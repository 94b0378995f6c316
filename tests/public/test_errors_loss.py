"""What a loss may not do, what it may do on the loop alone, and that an error leaves everything as it was."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample import LossError, per_sample_grads, stop_gradient

W = torch.tensor([0.5, -1.0, 2.0])
X = torch.tensor([[1.0, 2.0, -1.0], [-0.5, 1.5, 2.0], [3.0, -1.0, 0.5], [-2.0, 0.25, 1.0]])

both_engines = pytest.mark.parametrize("engine", ["eager", "loop"])


def fails(loss_fn, match, engine, params=W, batch=X, **options):
    with pytest.raises(LossError, match=match) as caught:
        per_sample_grads(loss_fn, params, batch, engine=engine, **options)
    return str(caught.value)


def plain_loop(loss_fn, params, *columns):
    """Per-sample gradients of a bare tensor by plain autograd."""
    rows = []
    for sample in zip(*columns, strict=True):
        leaf = params.clone().requires_grad_()
        rows.append(torch.autograd.grad(loss_fn(leaf, *sample), leaf)[0])
    return torch.stack(rows)


def statement(loss_fn):
    """The line of a loss that is marked as the offending one."""
    lines = [line.strip() for line in inspect.getsource(loss_fn).splitlines()]
    return next(line for line in lines if line.endswith("# here"))


# What the loss returns


class NoTensor:
    pass


RETURNS = {
    "vector": (lambda w, x: w * x, r"received shape \[3\]\. .*\.sum\(\), \.mean\(\)"),
    "[1]": (lambda w, x: (w @ x)[None], r"received shape \[1\]\. .*\.squeeze\(\)"),
    "[1,1]-and-aux": (lambda w, x: ((w @ x)[None, None], x), r"received shape \[1, 1\]"),
    "integer": (lambda w, x: (w @ x).long(), r"received dtype torch\.int64.*\.float\(\)"),
    "bool": (lambda w, x: w @ x > 0, r"received dtype torch\.bool"),
    "complex": (lambda w, x: (w @ x) * 1j, r"received dtype torch\.complex64.*\.abs\(\)"),
    "float": (lambda w, x: 1.0, r"received float\. .*no \.item\(\), no float\(\)"),
    "None": (lambda w, x: None, r"received NoneType\. Return the tensor itself"),
    "dict": (lambda w, x: {"loss": w @ x}, r"received dict\. .*exactly \(loss, aux\)"),
    "3-tuple": (lambda w, x: (w @ x, x, x), r"received a tuple of 3\. .*exactly \(loss, aux\)"),
    "1-tuple": (lambda w, x: (w @ x,), r"received a tuple of 1\."),
    "list": (lambda w, x: [w @ x, x], r"received a list of 2\. .*exactly \(loss, aux\)"),
    "other": (lambda w, x: NoTensor(), r"received NoTensor"),
}


@both_engines
@pytest.mark.parametrize("case", RETURNS)
def test_the_loss_is_one_real_scalar(case, engine):
    loss_fn, match = RETURNS[case]
    fails(loss_fn, "(?s)loss_fn: expected to return one real scalar tensor, " + match, engine)


@both_engines
@pytest.mark.parametrize("case", ["vector", "float", "list", "complex"])
def test_an_empty_batch_does_not_hide_it(case, engine):
    loss_fn, match = RETURNS[case]
    fails(loss_fn, match, engine, batch=X[:0])


@both_engines
@pytest.mark.parametrize(
    ("aux", "match"),
    [
        (3, "expected aux to be a tensor, received int.*torch.as_tensor"),
        (None, "expected aux to be a tensor, received NoneType"),
        ({"n": torch.ones(1), "name": ["cart"]}, r"expected aux\['name'\]\[0\] to be a tensor, received str"),
    ],
    ids=["number", "None", "str-inside"],
)
def test_aux_is_a_tree_of_tensors(aux, match, engine):
    fails(lambda w, x: (w @ x, aux), match, engine)


@both_engines
def test_aux_asked_of_a_loss_that_returns_none(engine):
    match = r"Aux\(\): expected loss_fn to return \(loss, aux\), received a loss alone"
    fails(lambda w, x: w @ x, match, engine, reduce={"grads": None, "aux": ps.Aux()})


# What the loss depends on


class Hidden(nn.Module):
    """Its second layer is in a plain list, where PyTorch does not find it."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.layers = [nn.Linear(3, 1)]

    def forward(self, x):
        return self.layers[0](x).sum()


closed_over = nn.Linear(3, 1)
UNCONNECTED = {
    "closed-over-module": (lambda m, x: closed_over(x).sum(), nn.Linear(3, 1)),
    "closed-over-in-functional": (lambda p, x: closed_over(x).sum(), dict(closed_over.named_parameters())),
    "plain-list": (lambda m, x: m(x), Hidden()),
    "constant": (lambda w, x: x.sum(), W),
    "stop_gradient": (lambda w, x: stop_gradient(w) @ x, W),
    "detached-params": (lambda w, x: (w @ x).detach(), W),
    "no_grad": (torch.no_grad()(lambda w, x: w @ x), W),
    "requires-grad-elsewhere": (lambda w, x: closed_over.weight[0] @ x, W),
}


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 1], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", UNCONNECTED)
def test_a_loss_that_depends_on_no_parameter(case, chunk_size, engine):
    loss_fn, params = UNCONNECTED[case]
    match = "received one that depends on none of them.*closed over.*stop_gradient.*plain Python list.*ModuleList"
    fails(loss_fn, match, engine, params=params, batch=(X,), reduce=ps.Norm(), chunk_size=chunk_size)


@both_engines
def test_an_ignored_parameter_has_zero_gradients(engine):
    def loss(params, x):
        return params["used"] @ x + stop_gradient(params["stopped"]) @ x

    params = {name: W.clone() for name in ("used", "stopped", "ignored")}
    params["complex"] = torch.ones(2, dtype=torch.complex64)
    got = per_sample_grads(loss, params, X, {"rows": None, "norms": ps.Norm(per_param=True)}, engine=engine)
    torch.testing.assert_close(got["rows"]["used"], X)
    for name in ("stopped", "ignored", "complex"):
        assert torch.equal(got["rows"][name], torch.zeros(4, *params[name].shape, dtype=params[name].dtype))
        assert torch.equal(got["norms"][name], torch.zeros(4))


@both_engines
def test_a_module_that_ignores_a_part_of_itself(engine):
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "ignored": nn.Linear(3, 1)})
    got = per_sample_grads(lambda m, x: m["used"](x).sum(), model, (X,), engine=engine)
    torch.testing.assert_close(got["used.weight"], X[:, None])
    assert torch.equal(got["ignored.weight"], torch.zeros(4, 1, 3))


def test_a_loss_that_ignores_its_parameters_for_some_samples_only():
    def loss(w, x):
        return w @ x if x[0] > 0 else x.sum()

    got = per_sample_grads(loss, W, X, engine="loop")
    assert torch.equal(got, torch.where(X[:, :1] > 0, X, 0))
    assert torch.equal(per_sample_grads(loss, W, X, engine="loop", chunk_size=1), got)


# Random numbers


def noisy(w, x):
    return w @ (x + torch.randn(3))  # here


RANDOM = {
    "randn": noisy,
    "rand_like": lambda w, x: w @ torch.rand_like(x),
    "dropout": lambda w, x: F.dropout(w * x).sum(),
    "randperm": lambda w, x: w[torch.randperm(3)] @ x,
    "bernoulli": lambda w, x: w @ torch.bernoulli(torch.sigmoid(x)),
    "multinomial": lambda w, x: w[torch.multinomial(x.softmax(0), 1)].sum(),
}


def drawn(**options):
    """What ``noisy`` draws for each sample: its gradient less x."""
    return per_sample_grads(noisy, W, X, **options) - X


@both_engines
@pytest.mark.parametrize("case", RANDOM)
def test_random_operations_are_refused(case, engine):
    fails(RANDOM[case], "random numbers.*randomness='error'.*randomness='different'.*'same'.*eval mode", engine)


@both_engines
def test_a_dropout_layer_in_train_mode_is_refused_and_works_in_eval_mode(engine):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
    fails(lambda m, x: m(x).sum(), "random numbers.*eval mode", engine, params=model, batch=(X,))
    got = per_sample_grads(lambda m, x: m(x).sum(), model.eval(), (X,), engine=engine)
    torch.testing.assert_close(got["1.weight"], X[:, None])


def test_the_random_line_is_shown():
    assert statement(noisy) in fails(noisy, "in noisy", "eager")


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the loop notices after the call, without a line")
def test_the_random_line_is_shown_on_the_loop():
    assert "return w @ (x + torch.randn(3))" in fails(noisy, "random", "loop")


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 1, 3], ids=["whole", "1", "3"])
def test_same_draws_are_equal_for_all_samples_and_chunks(chunk_size, engine):
    rows = drawn(randomness="same", chunk_size=chunk_size, engine=engine)
    assert rows[0].abs().max() > 0
    torch.testing.assert_close(rows, rows[:1].expand(4, 3))


@both_engines
@pytest.mark.parametrize("chunk_size", [None, 1, 3], ids=["whole", "1", "3"])
def test_different_draws_differ_between_all_samples(chunk_size, engine):
    rows = drawn(randomness="different", chunk_size=chunk_size, engine=engine)
    assert (torch.cdist(rows, rows) + torch.eye(4) > 1e-3).all()


@both_engines
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_the_global_seed_decides_and_the_stream_moves_on(randomness, engine):
    def seeded(seed):
        torch.manual_seed(seed)
        return drawn(randomness=randomness, engine=engine, chunk_size=2)

    first = seeded(0)
    assert torch.equal(seeded(0), first)
    assert not torch.allclose(seeded(1), first)
    torch.manual_seed(0)
    drawn(randomness=randomness, engine=engine, chunk_size=2)
    assert not torch.allclose(drawn(randomness=randomness, engine=engine, chunk_size=2), first)


@both_engines
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_a_loss_without_random_operations_does_not_care(randomness, engine):
    stream = torch.get_rng_state()
    got = per_sample_grads(lambda w, x: w @ x, W, X, randomness=randomness, engine=engine, chunk_size=2)
    assert torch.equal(got, X)
    assert torch.equal(torch.get_rng_state(), stream)


# What vmap cannot batch, and the loop can


def item(w, x):
    return (w @ x) * x[0].item()  # here


def branch(w, x):
    if x[0] > 0:  # here
        return w @ x
    return (w @ x) ** 2


def while_loop(w, x):
    loss = w @ x
    while x.sum() < 4:  # here
        x = x + 1.0
    return loss * x.sum()


def to_numpy(w, x):
    scale = float(x.numpy()[0])  # here
    return (w @ x) * scale


def to_list(w, x):
    return sum(w[j] * value for j, value in enumerate(x.tolist()))  # here


def to_tensor(w, x):
    return w @ torch.tensor([x[0], x[1], 1.0])  # here


def to_int(w, x):
    return (w @ x) ** int(1 + (x[0] > 0))  # here


def boolean_mask(w, x):
    return (w * x)[x > 0].sum()  # here


def nonzero(w, x):
    kept = torch.nonzero(x > 0)[:, 0]  # here
    return (w[kept] ** 2).sum()


def write_augmented(w, x):
    total = torch.linspace(0, 1, 3)
    total += x  # here
    return (w**2) @ total


def write_item(w, x):
    buffer = torch.linspace(0, 1, 3)
    buffer[1] = x[1]  # here
    return w @ buffer


def checkpointed(w, x):
    return checkpoint(lambda v: (v @ x) ** 2, w, use_reentrant=False)  # here


def in_a_helper(w, x):
    return w @ x * _scale(x)


def _scale(x):
    return x[2].item()  # here


READS, WRITES = "reads values of a sample", "writes per-sample values in place"
CHECKPOINTS = "uses checkpointing.*chunk_size=.*engine='traced'"
UNBATCHABLE = {
    item: READS,
    branch: READS,
    while_loop: READS,
    to_numpy: READS,
    to_list: READS,
    to_tensor: READS,
    to_int: READS,
    boolean_mask: READS,
    nonzero: READS,
    write_augmented: WRITES,
    write_item: WRITES,
    checkpointed: CHECKPOINTS,
}


@pytest.mark.parametrize("loss_fn", UNBATCHABLE, ids=lambda fn: fn.__name__)
def test_the_line_is_shown_and_the_loop_suggested(loss_fn):
    message = fails(loss_fn, f"^loss_fn {UNBATCHABLE[loss_fn]}.*engine='loop'", "eager")
    assert f"in {loss_fn.__name__} ({__file__}:" in message
    assert f"`{statement(loss_fn)}`" in message
    assert "torch said: " in message


def test_the_line_may_be_in_a_function_that_the_loss_calls():
    assert f"in _scale ({__file__}:" in (message := fails(in_a_helper, READS, "eager"))
    assert f"`{statement(_scale)}`" in message


@pytest.mark.parametrize("chunk_size", [None, 3], ids=["whole", "chunks"])
@pytest.mark.parametrize("loss_fn", [*UNBATCHABLE, in_a_helper], ids=lambda fn: fn.__name__)
def test_the_loop_takes_them(loss_fn, chunk_size):
    w, x = W.double(), X.double()
    if loss_fn in {write_augmented, write_item, to_tensor}:  # these make float32 tensors of their own
        w, x = W, X
    expected = plain_loop(loss_fn, w, x)
    got = per_sample_grads(loss_fn, w, x, {"rows": None, "sum": ps.Sum()}, engine="loop", chunk_size=chunk_size)
    torch.testing.assert_close(got["rows"], expected)
    torch.testing.assert_close(got["sum"], expected.sum(0))
    assert expected.abs().max() > 0


class Scaled(torch.autograd.Function):
    """2·a·b in the old style, which torch.func cannot transform."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return 2 * (a @ b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return 2 * grad * b, 2 * grad * a


class ScaledWithoutRule(torch.autograd.Function):
    """The same in the new style, without a rule for vmap."""

    @staticmethod
    def forward(a, b):
        return 2 * (a @ b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Scaled.backward


class ScaledWithRule(ScaledWithoutRule):
    generate_vmap_rule = True


@pytest.mark.parametrize(
    "function",
    [
        Scaled,
        pytest.param(ScaledWithoutRule),
    ],
    ids=["old-style", "no-rule"],
)
def test_custom_functions_are_told_what_they_lack(function):
    def loss(w, x):
        return function.apply(w, x)

    with pytest.raises(LossError, match=r"custom autograd\.Function.*setup_context and a vmap rule.*engine='loop'"):
        per_sample_grads(loss, W, X)


@pytest.mark.parametrize("function", [Scaled, ScaledWithoutRule, ScaledWithRule], ids=["old", "no-rule", "rule"])
def test_custom_functions_work_on_the_loop(function):
    torch.testing.assert_close(per_sample_grads(function.apply, W, X, engine="loop"), 2 * X)


def test_custom_functions_with_a_rule_work_everywhere():
    torch.testing.assert_close(per_sample_grads(ScaledWithRule.apply, W, X), 2 * X)


def scattered(w, x):
    return w @ torch.linspace(0, 1, 3).scatter_(0, x.argmax()[None], x[:1])  # here


def put(w, x):
    return w @ torch.linspace(0, 1, 3).index_put_((x.argmax(),), x[0])  # here


def equals(w, x):
    return (w @ x) * (2.0 if torch.equal(x, X[0]) else 1.0)  # here


def all_close(w, x):
    return (w @ x) * (2.0 if torch.allclose(x, X[0]) else 1.0)  # here


def own_backward(w, x):
    (w @ x).backward()  # here
    return w @ x


UNDIAGNOSED = [scattered, put, equals, all_close, own_backward]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("loss_fn", UNDIAGNOSED, ids=lambda fn: fn.__name__)
def test_further_operations_that_only_the_loop_takes_are_explained(loss_fn):
    assert f"`{statement(loss_fn)}`" in fails(loss_fn, "engine='loop'", "eager")


@pytest.mark.parametrize("loss_fn", UNDIAGNOSED, ids=lambda fn: fn.__name__)
def test_further_operations_that_only_the_loop_takes(loss_fn):
    torch.testing.assert_close(per_sample_grads(loss_fn, W, X, engine="loop"), plain_loop(loss_fn, W, X))


def reentrant(w, x):
    return checkpoint(lambda v: (v @ x) ** 2, w, use_reentrant=True)


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="torch.autograd.grad refuses reentrant checkpoints")
def test_reentrant_checkpoints_work_on_the_loop_as_the_eager_message_promises():
    fails(reentrant, "uses checkpointing.*engine='loop'", "eager")
    got = per_sample_grads(reentrant, W, X, engine="loop")
    torch.testing.assert_close(got, 2 * (X @ W)[:, None] * X)


# Normalization that looks at other samples


def functional_batch_norm():
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))})

    def loss(params, x):
        return functional_call(model["body"], params, (torch.stack([x, -x]),)).square().sum()

    return model, loss


def test_batch_norm_inside_a_functional_loss_is_named():
    model, loss = functional_batch_norm()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    match = r"running statistics of '1' \(BatchNorm1d\) in train mode.*\.eval\(\).*GroupNorm.*track_running_stats=False"
    fails(loss, match, "eager", params=dict(model["body"].named_parameters()))
    torch.testing.assert_close(dict(model.named_buffers()), before)
    got = per_sample_grads(loss, dict(model.eval()["body"].named_parameters()), X)
    assert got["1.weight"].shape == (4, 4)


def test_instance_statistics_inside_a_functional_loss_are_named():
    norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)

    def loss(params, x):
        return functional_call(norm, params, (x[None, None],)).square().sum()

    fails(loss, r"running statistics of InstanceNorm1d in train mode", "eager", params=dict(norm.named_parameters()))


# Dtypes


def matmul(w, x):
    return w @ x


def linear_layer(w, x):
    return F.linear(x, w[None]).sum()


def convolution(w, x):
    return F.conv1d(x[None, None], w[None, None]).sum()


def stacked_matmul(w, x):
    return (torch.outer(w, w) @ torch.outer(x, x)).sum()


@both_engines
@pytest.mark.parametrize("other", [torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize(
    "loss_fn", [matmul, linear_layer, convolution, stacked_matmul], ids=["matmul", "linear", "conv", "mm"]
)
def test_mixed_dtypes_are_listed(loss_fn, other, engine):
    def loss(params, sample):
        return loss_fn(params["w"], sample["s"]["x"]) + params["b"] * sample["r"]

    batch = {"s": {"x": X.to(other)}, "r": X[:, 0]}
    message = fails(loss, "mixes dtypes in one operation", engine, params={"w": W, "b": W[0]}, batch=batch)
    assert "torch.float32: params['w'], params['b'], batch['r']" in message
    assert f"{other}: batch['s']['x']" in message
    assert f"in {loss_fn.__name__} ({__file__}" in message
    assert "x.to(torch.float32)" in message


@both_engines
@pytest.mark.parametrize(
    ("layer", "x"),
    [(nn.Linear(3, 1), X), (nn.Conv1d(2, 1, 2), X.view(2, 2, 3)), (nn.Conv1d(2, 1, 2, bias=False), X.view(2, 2, 3))],
    ids=["linear", "convolution", "convolution without bias"],
)
def test_a_module_says_so_too(layer, x, engine):
    message = fails(lambda m, x: m(x).sum(), "mixes dtypes", engine, params=layer, batch=(x.double(),))
    assert "torch.float64: batch[0]" in message  # a plain tuple: the leaf has an index
    assert "torch.float32: params['weight']" in message


@both_engines
def test_wider_numbers_may_be_added_and_multiplied(engine):
    def loss(w, x, r, k):
        return ((w @ x) * r + r - k) ** 2

    r, k = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64), torch.tensor([1, 2, 3, 4])
    got = per_sample_grads(loss, W, (X, r, k), {"rows": None, "loss": ps.Loss()}, engine=engine)
    assert got["rows"].dtype == torch.float32
    assert got["loss"].dtype == torch.float64
    torch.testing.assert_close(got["rows"], plain_loop(loss, W, X, r, k))


@both_engines
def test_a_loss_without_source_has_no_line_to_show(engine):
    message = fails(torch.dot, r"\(torch\.float32: params; torch\.float64: batch\)\. ", engine, batch=X.double())
    assert "`" not in message


# Devices


@both_engines
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
        pytest.param("meta"),
    ],
)
def test_mixed_devices_are_listed(device, engine):
    message = fails(matmul, "mixes devices in one operation", engine, batch=X.to(device))
    assert re.search(rf"cpu: params; {device}(:0)?: batch\)", message)


# The user's own errors


class OwnError(Exception):
    pass


@both_engines
@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        KeyError("mine"),
        AssertionError("mine"),
        ZeroDivisionError(),
        OwnError(),
        RuntimeError("mine"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_own_errors_pass_unchanged(error, engine):
    def loss(w, x):
        raise error

    with pytest.raises(type(error)) as caught:
        per_sample_grads(loss, W, X, engine=engine)
    assert caught.value is error


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_own_errors_pass_unchanged_whatever_they_say(engine):
    error = RuntimeError("call numpy() on the replay buffer first")

    def loss(w, x):
        raise error

    with pytest.raises(RuntimeError) as caught:
        per_sample_grads(loss, W, X, engine=engine)
    assert caught.value is error


@both_engines
@pytest.mark.parametrize(
    ("loss_fn", "error", "match"),
    [
        (lambda w, x: w @ x[:2], RuntimeError, "size|shape"),
        (lambda w, x: w.reshape(2, 2).sum(), RuntimeError, r"shape '\[2, 2\]' is invalid"),
        (lambda w, x: w @ x * x[5], IndexError, "out of bounds"),
        (lambda w, x: w.nope @ x, AttributeError, "nope"),
    ],
    ids=["matmul", "reshape", "index", "attribute"],
)
def test_ordinary_mistakes_pass_unchanged(loss_fn, error, match, engine):
    with pytest.raises(error, match=match) as caught:
        per_sample_grads(loss_fn, W, X, engine=engine)
    assert not isinstance(caught.value, LossError)


# After an error


def raise_own(m, x):
    m(x)
    raise OwnError


AFTER = {
    "own-error": raise_own,
    "vector": lambda m, x: m(x),
    "item": lambda m, x: [m(x).sum(), x.sum().item()],
    "random": lambda m, x: m(x).sum() * torch.rand(()),
    "unconnected": lambda m, x: x.sum(),
    "dtype": lambda m, x: m(x.double()).sum(),
    "reassigned": lambda m, x: [setattr(m, "bias", nn.Parameter(torch.zeros(2))), m(x).sum()],
}


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.tied = self.weight

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@both_engines
@pytest.mark.parametrize("case", AFTER)
def test_the_module_is_as_it_was(case, engine):
    model = Counting()
    model.weight.grad = grad = torch.ones(2, 3)
    before = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in before.items()}
    with pytest.raises((LossError, OwnError)):
        per_sample_grads(AFTER[case], model, (X,), engine=engine, chunk_size=3)
    after = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor is before[name]
        assert torch.equal(tensor, values[name])
        assert tensor.requires_grad == isinstance(tensor, nn.Parameter)
    assert model.weight.grad is grad
    assert torch.equal(grad, torch.ones(2, 3))
    assert model.bias.grad is None
    assert torch.is_grad_enabled()


@both_engines
def test_a_module_can_be_used_again_after_an_error(engine):
    model = nn.Linear(3, 1)
    with pytest.raises(OwnError):
        per_sample_grads(raise_own, model, (X,), engine=engine)
    got = per_sample_grads(lambda m, x: m(x).sum(), model, (X,), engine=engine)
    torch.testing.assert_close(got["weight"], X[:, None])


# A loss is a function of its arguments, but Python does not enforce it


@both_engines
@pytest.mark.parametrize("what", ["batch", "module"])
def test_writing_into_the_arguments_is_not_silent(what, engine):
    def loss(m, x):
        with torch.no_grad():
            (x if what == "batch" else m.weight).mul_(2)
        return m(x).sum()

    model, x = nn.Linear(3, 1), X.clone()
    name = r"batch\[0\]" if what == "batch" else r"params\['weight'\]"
    message = f"wrote in place into {name}"
    if (what, engine) == ("batch", "eager"):  # torch.func refuses before anything is written
        message = r"writes in place into its arguments.*`\(x if"
    with pytest.raises(LossError, match=f"{message}.*Compute a new tensor"):
        per_sample_grads(loss, model, (x,), engine=engine)
