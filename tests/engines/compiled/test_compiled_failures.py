"""What cannot be compiled, where it cannot be compiled, and numbers at the edges of a dtype."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from oracle import assert_trees_close, oracle
from torch import nn

import persample as ps
from persample import per_sample_grads
from persample.engines.compiled import clear_cache

F64 = torch.float64
W, HALF = torch.randn(3, dtype=F64), torch.randn(2, 3, dtype=F64)
X = torch.cat([HALF, -HALF])  # samples of which some are positive
CLOSED = torch.ones(3, dtype=F64)
ROOT = Path(ps.__file__).parents[1]


def branches_on_a_value_of_the_batch(w, x):
    return w @ x if x.sum() > 0 else 2 * (w @ x)


def selects_by_a_mask(w, x):
    return (w * x)[x > 0].sum()


def branches_on_what_is_computed_from_a_closed_over_tensor(w, x):
    return w @ x if CLOSED.sum() > 2 else 2 * (w @ x)


def selects_by_a_closed_over_mask(w, x):
    return (w * x)[CLOSED > 0].sum()


def writes_into_a_closed_over_tensor(w, x):
    CLOSED.add_(1)
    return (w * CLOSED) @ x


def writes_into_its_argument(w, x):
    return w @ x.mul_(2)


def fills_with_a_value_of_the_batch(w, x):
    return torch.full((3,), x[1].item(), dtype=F64) @ w.sin()


def depends_on_nothing(w, x):
    return x.sum()


def returns_a_vector(w, x):
    return w * x


def asks_for_an_order_before_it_reads(w, x):
    if not (CLOSED[1:] >= CLOSED[:-1]).all():
        raise ValueError
    return (w * x[1].item()).square().sum()


def test_the_reason_is_that_of_this_engine():
    with pytest.raises(ps.LossError, match="reads values of a sample"):
        per_sample_grads(asks_for_an_order_before_it_reads, W, X)
    with pytest.raises(ps.LossError, match=r"cannot be compiled: .*branch.*any loss\.$") as caught:
        per_sample_grads(asks_for_an_order_before_it_reads, W, X, engine="compiled")
    assert "reads values" not in str(caught.value)
    assert "engine='eager'" not in str(caught.value)


REFUSED = {
    branches_on_a_value_of_the_batch: r"reads values of a sample .* torch\.where .*engine='loop'",
    fills_with_a_value_of_the_batch: r"reads values of a sample",
    selects_by_a_mask: r"reads values of a sample",
    branches_on_what_is_computed_from_a_closed_over_tensor: r"cannot be compiled: .*pass engine='eager'",
    selects_by_a_closed_over_mask: r"cannot be compiled: .*engine='eager'.*engine='loop'",
    writes_into_a_closed_over_tensor: r"writes in place into its arguments, or into a tensor it closed over",
    writes_into_its_argument: r"wrote in place into batch\[0\]|writes in place|wrote in place into batch",
    depends_on_nothing: r"depends on none of them",
    returns_a_vector: r"expected to return one real scalar tensor, received shape \[3\]",
}


@pytest.mark.parametrize(("loss", "message"), REFUSED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_refused(loss, message, capfd, caplog):
    for _ in range(2):  # the second time the failure is remembered
        x, closed = X.clone(), CLOSED.clone()
        with pytest.raises(ps.LossError, match=message) as raised:
            per_sample_grads(loss, W, (x,), ps.Mean(), engine="compiled")
        assert torch.equal(CLOSED, closed)
        assert len(str(raised.value).splitlines()) <= 10
        if loss not in {writes_into_its_argument, depends_on_nothing, returns_a_vector}:
            assert f"in {loss.__name__} ({__file__}:{loss.__code__.co_firstlineno + 1}" in str(raised.value).replace(
                "In ", "in "
            )
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_shapes_that_do_not_fit_are_not_printed(capfd, caplog):
    with pytest.raises(RuntimeError, match="size"):
        per_sample_grads(lambda w, x: w @ torch.ones(2, dtype=F64), W, X, ps.Mean(), engine="compiled")
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: (w @ x) * x[0].item(),
        lambda w, x: (w @ x) ** 2 * float(x.sum()) + x.max().item(),
    ],
    ids=["factor", "float"],
)
def test_values_of_the_batch_that_are_read_are_constants(loss):
    rows = oracle(loss, W, (X,))
    for _ in range(2):
        found = per_sample_grads(loss, W, X, (ps.Stack(), ps.Loss()), engine="compiled")
        assert_trees_close(found, (rows.grads[0], rows.losses), 1e-9)


@pytest.mark.parametrize("dtype", [torch.long, F64])
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x, n: w @ x if n.item() > 1 else 2 * (w @ x),
        lambda w, x, n: sum(w @ x for _ in range(int(n))) + w[0],
        lambda w, x, n: (w * x)[: int(n)].sum() + w[0],
        lambda w, x, n: w @ x + torch.arange(n.item()).sum() * w[0],
    ],
    ids=["branch", "range", "slice", "arange"],
)
def test_a_number_of_the_first_sample_is_no_constant(loss, dtype):
    batch = X, torch.tensor([1, 2, 3, 2], dtype=dtype)
    with pytest.raises((ps.LossError, TypeError), match=r"reads values of a sample|slice indices|tensor"):
        per_sample_grads(loss, W, batch, engine="compiled")


def test_a_parameter_of_the_first_sample_is_no_constant():
    with pytest.raises(ps.LossError, match=r"reads values of a sample|cannot be compiled"):
        per_sample_grads(
            lambda v, x: v * x if v.item() > 0 else 2 * v * x, W.sign(), W, in_dims=(0, 0), engine="compiled"
        )


def test_prints_are_passed_over():
    def loss(w, x):
        print("shape", x.shape)
        return w @ x

    assert_trees_close(per_sample_grads(loss, W, X, engine="compiled"), X, 1e-12)


def test_an_error_of_the_users_passes_and_is_not_remembered():
    broken = True

    def loss(w, x):
        if broken:
            raise KeyError("mine")
        return w @ x

    with pytest.raises(KeyError, match="mine"):
        per_sample_grads(loss, W, X, ps.Mean(), engine="compiled")
    broken = False
    assert_trees_close(per_sample_grads(loss, W, X, ps.Mean(), engine="compiled"), X.mean(0), 1e-12)


# ---------------------------------------------------------------- where it is called


def square(w, x):
    return (w @ x) ** 2


def test_under_transforms_and_modes_of_the_callers():
    wanted = (ps.ClippedMean(0.5), ps.Norm())
    expected = per_sample_grads(square, W, X, wanted)

    def compiled(w, x):
        return per_sample_grads(square, w, x, wanted, engine="compiled")

    assert_trees_close(compiled(W, X), expected, 1e-12)
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with context():
            assert_trees_close(compiled(W, X), expected, 1e-12)
            assert_trees_close(compiled(W.clone(), X.clone()), expected, 1e-12)
    ws = torch.stack([W, 2 * W])
    both = torch.vmap(compiled, in_dims=(0, None))(ws, X)
    for row in range(2):
        assert_trees_close([x[row] for x in both], list(compiled(ws[row], X)), 1e-12)
    with torch.inference_mode():
        inference = W.clone()
    assert_trees_close(compiled(inference, X), expected, 1e-12)
    assert not any(x.is_inference() or x.requires_grad for x in compiled(nn.Parameter(W), X))


def test_threads():
    clear_cache()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    batches = [torch.randn(5, 3, dtype=F64) for _ in range(8)]
    losses = [lambda net, x: net(x).sum(), lambda net, x: net(x).square().sum()]
    expected = [[per_sample_grads(loss, net, x, ps.ClippedMean(0.1)) for x in batches] for loss in losses]
    found, errors = {}, []

    def work(number):
        try:
            for repeat in range(3):
                for place, x in enumerate(batches):
                    engine = "eager" if (number + place + repeat) % 4 == 0 else "compiled"
                    found[number, place, repeat] = per_sample_grads(
                        losses[number % 2], net, x, ps.ClippedMean(0.1), engine=engine
                    )
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(found) == 4 * 8 * 3
    for (number, place, _), result in found.items():
        assert_trees_close(result, expected[number % 2][place], 1e-9)


# ---------------------------------------------------------------- numbers


def test_extremes():
    """One program for all: where a number is too large or small for float32, it says so and eager computes."""
    x = torch.randn(4, 3)
    wanted = {
        "mean": ps.Mean(),
        "clipped": ps.ClippedMean(1.0),
        "norms": ps.Norm(),
        "weighted": ps.WeightedSum(lambda norms: 1 / norms),
        "cosines": ps.CosineSimilarity(),
        "gram": ps.Gram(),
    }
    for scale in (1.0, 1e-30, 1e30, 1e-42, 1e38, 0.0, torch.inf, torch.nan, 1.0):
        batch = x.clone()
        batch[::2] *= scale
        expected = per_sample_grads(torch.dot, torch.ones(3), batch, wanted)
        actual = per_sample_grads(torch.dot, torch.ones(3), batch, wanted, engine="compiled")
        for name in wanted:
            message = f"scale {scale}, {name}: " + "{}"
            torch.testing.assert_close(
                actual[name], expected[name], rtol=1e-4, atol=0, equal_nan=True, msg=message.format
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    params = {"w": torch.randn(4, 3).to(dtype), "b": torch.randn(4).to(dtype)}
    x = torch.randn(6, 3).to(dtype)

    def loss(p, x):
        return torch.tanh(p["w"] @ x + p["b"]).sum()

    wanted = (ps.Sum(), ps.Norm(), ps.Stack())
    expected = per_sample_grads(loss, params, x, wanted)
    actual = per_sample_grads(loss, params, x, wanted, engine="compiled")
    for a, e in zip(*(torch.utils._pytree.tree_leaves(tree) for tree in (actual, expected)), strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


# ---------------------------------------------------------------- the machine

PROGRAM = """
    import warnings
    import torch
    import persample as ps
    torch.manual_seed(0)
    w, x = torch.randn(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    loss = lambda w, x: torch.tanh(w @ x)
    wanted = (ps.ClippedMean(0.5), ps.Norm(), ps.NaturalGradient(0.5))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(FILTER)
        for _ in range(2):
            results = ps.per_sample_grads(loss, w, x, wanted, engine="compiled")
        results = [*results, ps.per_sample_grads(loss, w, x, ps.Mean(), engine="compiled")]
    expected = [*ps.per_sample_grads(loss, w, x, wanted), ps.per_sample_grads(loss, w, x, ps.Mean())]
    assert all(torch.allclose(a, b, rtol=1e-9, atol=0) for a, b in zip(results, expected)), (results, expected)
    ours = [str(w.message) for w in shown if "engine=" in str(w.message)]
    print(len(ours), len(shown), *ours)
"""


def run(tmp_path, program, **env):
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "CUDA_PATH": "",  # torch built for CUDA logs that it found a toolkit and no GPU
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_later_call_with_tensors_that_have_no_strides(tmp_path):
    """Torch compares strides where no error can be raised, so that the process would end."""
    program = """
        import torch
        from persample import ArgumentError, Norm, per_sample_grads

        def loss(w, x):
            return (w * x).sum()

        def call(params=torch.ones(4), batch=torch.ones(4, 4), out=None):
            return per_sample_grads(loss, params, batch, Norm(), engine="traced", out=out)

        found = call(), call(out=torch.ones(4))
        nested = torch.nested.nested_tensor([torch.ones(4) for _ in range(4)])
        with torch._subclasses.FakeTensorMode():
            fake = torch.ones(4, 4)
        for changed in ({"params": nested}, {"batch": nested}, {"out": nested}, {"batch": fake}, {"out": fake[0]}):
            try:
                call(**changed)
            except ArgumentError as error:
                assert str(error).startswith(tuple(changed)), error
            else:
                raise AssertionError(changed)
        print(call().tolist())
    """
    assert run(tmp_path, program, PYTHONWARNINGS="ignore").strip() == "[2.0, 2.0, 2.0, 2.0]"


HOLD = {
    "buffer": ("params.register_buffer('held', VALUE)", "params.held"),
    "frozen parameter": ("params.held = nn.Parameter(VALUE, requires_grad=False)", "params.held"),
    "attribute": ("params.__dict__['held'] = VALUE", "params.held"),
    "list of a module": ("params.held = [VALUE]", "params.held[0]"),
    "closure": ("held = VALUE", "held"),
    "global": ("globals()['GLOBAL'] = VALUE", "GLOBAL"),
    "dict": ("held = {'key': VALUE}", "held['key']"),
}


MAKE = """
def make():
    held, params = None, nn.Linear(4, 1, bias=False)

    def loss(params, x):
        return params(x).sum() + {read}.sum()

    def call(value, params=params):
        nonlocal held
        {hold}
        return per_sample_grads(loss, params, torch.ones(4, 4), Norm(), engine="traced")

    return call
"""


def test_a_nested_tensor_takes_the_place_of_one_that_the_loss_reads(tmp_path):
    """Torch's guards compare its strides, so that the process would end."""
    makes = {place: MAKE.format(read=read, hold=hold.replace("VALUE", "value")) for place, (hold, read) in HOLD.items()}
    program = f"""
        import torch
        from torch import nn
        from persample import ArgumentError, Norm, per_sample_grads

        plain, nested = torch.ones(4, 4), torch.nested.nested_tensor([torch.ones(4) for _ in range(4)])
        for place, source in {makes!r}.items():
            print(place, flush=True)
            exec(source)
            call = make()
            call(plain), call(plain)
            for _ in range(2):
                try:
                    call(nested)
                except ArgumentError as error:
                    assert "expected a tensor of one length, received a nested tensor" in str(error)
                else:
                    raise AssertionError
            assert call(plain).tolist() == [2.0] * 4
    """
    assert run(tmp_path, program, PYTHONWARNINGS="ignore").split("\n")[:-1] == [*HOLD]


def test_without_a_compiler(tmp_path):
    printed = run(tmp_path, PROGRAM.replace("FILTER", "'always'"), CXX="/nowhere/g++")
    assert printed.startswith("1 "), printed  # once for the process, though two programs were made
    assert "found no C++ compiler. Install one" in printed
    assert "point CXX to it" in printed


def test_warnings_of_torch_do_not_matter_where_they_are_errors(tmp_path):
    """Nor is anything logged: Inductor would say of factorizations that it has no C++ of its own for them."""
    assert run(tmp_path, PROGRAM.replace("FILTER", "'error'")).split() == ["0", "0"]


def test_a_refusal_of_our_own_names_no_class():
    own = {"torch": torch}  # pytest would rewrite the assertion
    exec("def loss(w, x):\n    assert torch.isfinite(x).all()\n    return (w * x).sum()", own)
    with pytest.raises(ps.LossError, match=r"cannot be traced: loss_fn asserts .* with no returns\. A traced loss"):
        per_sample_grads(own["loss"], torch.ones(3), torch.ones(2, 3), ps.Norm(), engine="traced")
