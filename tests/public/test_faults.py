"""What torch has wrong: the smallest input of each fault that a rule of ours corrects; writes their table in the docs.

A rule stays as long as a torch that persample supports has its fault. A test here turns red when the installed torch
computes the right numbers. Then enter its version as ``mended``; and once all supported versions are mended, delete the
rule with its row, as another test here says. ``issue`` is a number of github.com/pytorch/pytorch; 0 is unreported.
"""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from pages import Part
from paths import ROOT
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

import persample as ps
from persample.errors import KNOWN_TORCH_VERSIONS, CompilerWarning

F64, PERSAMPLE = torch.float64, ROOT / "persample"
PART = Part("torch-faults.md", "table", "public/test_faults.py")
Both = tuple[Callable[[], Any], Callable[[], Any]]  # computes what torch does; computes what it should


def numbers(*shape):
    return torch.arange(1.0, 1 + math.prod(shape), dtype=F64).sin().reshape(shape)


def mapped(function, *rows, in_dims=0) -> Both:
    """A vmap, and a loop."""
    of_loop = lambda: torch.stack([function(*row) for row in zip(*(x.unbind(in_dims) for x in rows), strict=True)])
    return lambda: vmap(function, in_dims)(*rows), of_loop


def twice(function, one, other) -> Both:
    """Two vmaps, each of one operand, and two loops."""
    first, second = torch.stack([one, 2 * one]), torch.stack([other, 2 * other, other])
    of_vmaps = lambda: vmap(vmap(function, (0, None)), (None, 0))(first, second)
    return of_vmaps, lambda: torch.stack([torch.stack([function(x, y) for x in first]) for y in second])


def by_autograd(function, *rows) -> Both:
    """The gradient of plain autograd around a vmap, and around a loop, in the last argument."""

    def gradient(of):
        leaf = rows[-1].clone().requires_grad_()
        return torch.autograd.grad(of(*rows[:-1], leaf).sum(), leaf)[0]

    of_loop = lambda *rows: torch.stack(list(map(function, *rows)))
    return lambda: gradient(vmap(function)), lambda: gradient(of_loop)


def of_forward(function, x) -> Both:
    """The gradient of a forward derivative, and finite differences."""
    derivative = lambda x: jvp(lambda y: function(y).sin().sum(), (x,), (x.cos(),))[1]

    def differences():
        steps = 1e-5 * torch.eye(x.numel(), dtype=F64).view(-1, *x.shape)
        return torch.stack([(derivative(x + e) - derivative(x - e)) / 2e-5 for e in steps]).view(x.shape)

    return lambda: grad(derivative)(x), differences


def forward_of(function, x) -> Both:
    """A forward derivative, and finite differences."""
    differences = lambda: (function(x + 1e-6 * x.cos()) - function(x - 1e-6 * x.cos())) / 2e-6
    return lambda: jvp(function, (x,), (x.cos(),))[1], differences


def without_grad_mode(function) -> Both:
    """Jacobians under vmap, and in a loop, without grad mode."""
    of_vmap, of_loop = mapped(jacrev(function), torch.stack([MATRIX, 2 * MATRIX]))
    return torch.no_grad()(of_vmap), torch.no_grad()(of_loop)


def compiled(function, *args, **options) -> Both:
    """Inductor, and no compiler."""

    def of_inductor():
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, options=options)(*args)

    return of_inductor, lambda: function(*args)


def compiled_gradient(function, x) -> Both:
    def gradient(function):
        torch._dynamo.reset()
        return torch.autograd.grad(function(leaf := x.clone().requires_grad_()), leaf)[0]

    return lambda: gradient(torch.compile(function, fullgraph=True)), lambda: gradient(function)


def beyond_a_table() -> Both:
    """Whether an index out of range reads another sample's table."""

    def reads():
        try:
            return vmap(F.embedding)(torch.tensor([[3], [0]]), numbers(2, 3, 1)).isfinite().any()
        except (IndexError, RuntimeError):
            return torch.tensor(False)

    return reads, lambda: torch.tensor(False)


def with_a_bias_of_float32() -> Both:
    """Whether a product of another dtype than its bias is refused."""

    def is_refused(function):
        try:
            return torch.tensor(not function(numbers(2, 1, 3), numbers(2, 3), numbers(2).float()).numel())
        except RuntimeError:
            return torch.tensor(True)

    mapped_linear = vmap(F.linear, (0, None, None))
    return lambda: is_refused(mapped_linear), lambda: is_refused(lambda x, *rest: F.linear(x[0], *rest))


def of_double(function) -> Both:
    """Whether what is drawn has the default dtype, here float64, by Inductor and without a compiler."""

    def is_double(function):
        torch._dynamo.reset()
        torch.set_default_dtype(F64)
        try:
            return torch.tensor(function().dtype == F64)
        finally:
            torch.set_default_dtype(torch.float32)

    return lambda: is_double(torch.compile(function, fullgraph=True)), lambda: is_double(function)


def survives(program) -> Both:
    """Whether a process runs a program to its end."""
    run = lambda: subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, cwd=ROOT)
    return lambda: torch.tensor(not run().returncode), lambda: torch.tensor(True)


LOOP_FROM_CPP = """
import persample, torch
from persample.engines.compiled import lower
lower.scan = None
model, x = torch.nn.RNN(1, 1), torch.ones(1, 21, 1)
persample.per_sample_grads(lambda model, x: model(x)[0].sum(), model, x, engine="compiled")
"""


SET_DATA = """
import torch
x = torch.ones(3)
try:
    torch.vmap(torch.func.grad(lambda y: setattr(x, "data", y) or y.sum()))(torch.ones(2, 3))
except RuntimeError:  # torch refuses this, and has written
    pass
str(x)
"""


def of_fake_zeros() -> Both:
    """Whether a view of zeros without memory is a fake tensor under a mode of these."""

    def is_fake(zeros):
        with FakeTensorMode():
            return torch.tensor(isinstance(zeros([2]).view(1, 2), FakeTensor))

    return lambda: is_fake(torch.ops.aten._efficientzerotensor), lambda: is_fake(torch.zeros)


def without(rule, replacement, *args, **options) -> Both:
    """Whether a compiled program without a rule differs from its graph, which is noticed at the first run."""

    def differs():
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(f"persample.{rule}", replacement)
            ps.clear_cache()
            ps.per_sample_grads(*args, **options, engine="compiled")
        ps.clear_cache()
        return torch.tensor(any(issubclass(x.category, CompilerWarning) for x in caught))

    return differs, lambda: torch.tensor(False)


def of_complex_parts(w, x):
    z = torch.complex(w * x[0], x[1])
    part = (z - z[:, None]).clone()
    part.diagonal().copy_(torch.ones_like(z))
    loss = (torch.complex(x, x.mT) / (1 + part)).abs().sum()
    return loss, loss


def of_gathered(params, x):
    images = F.conv2d(x[None], params["kernel"], params["bias"], (2, 3), (0, 2), (1, 2))[0]
    rows = images.gather(2, torch.zeros(2, 2, 2, dtype=torch.long)).flatten()
    return F.softplus(params["head"] @ rows).sum()


def of_nan_query() -> Both:
    q, k = torch.full((1, 1, 2, 2), torch.nan), torch.ones(1, 1, 2, 2)
    return lambda: F.scaled_dot_product_attention(q, k, k), lambda: q


def of_least_scores() -> Both:
    q, mask = numbers(1, 1, 1, 2).requires_grad_(), torch.full((1, 3), torch.finfo().min, dtype=F64)
    k = numbers(1, 1, 3, 2)
    gradient = lambda backend: torch.autograd.grad(attended(q, k, mask, backend), q)[0]
    return lambda: gradient(SDPBackend.FLASH_ATTENTION), lambda: gradient(SDPBackend.MATH)


def attended(q, k, mask, backend):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask).sum()


def of_kernel(images):
    kernel = numbers(2, 2, 3, 1).requires_grad_()
    return torch.autograd.grad(F.conv2d(images, kernel, padding=1, groups=2).square().sum(), kernel)[0]


def written_column(x, place, value):
    x = x.clone()
    x[:, place] = value
    return x


def in_parts(x):
    options = LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    return F.linear_cross_entropy(x, numbers(3, 2), torch.tensor([0, 1, 2, 0]), options=options)


class Fault(NamedTuple):
    """A fault of torch: where the rule is, what shows it, the first version without it, and torch's issue."""

    rule: str
    both: Both
    mended: str = ""
    issue: int = 0


MATRIX, WEIGHTS = numbers(2, 2) + 3 * torch.eye(2, dtype=F64), numbers(3)
SHARED, ONE = numbers(2, 3), torch.tensor([1])
MASK = torch.tensor([[True, False, True], [True, True, False]])
GRAD_OF_MSE, GRAD_OF_HUBER, GRAD_OF_L1 = map(grad, (F.mse_loss, F.huber_loss, F.smooth_l1_loss))
UNDER_VMAP = {
    "cdist": Fault(
        "vmap_rules/products.py: _cdist",
        mapped(lambda c: grad(lambda x: c * torch.cdist(x, numbers(4, 3)).sum())(SHARED), WEIGHTS),
    ),
    "embedding, padding": Fault(
        "vmap_rules/indexing.py: _embedding",
        by_autograd(lambda i, table: F.embedding(i, table, 0), torch.tensor([[0, 1], [0, 1]]), numbers(2, 3, 2)),
    ),
    "embedding, out of range": Fault("vmap_rules/indexing.py: _embedding", beyond_a_table()),
    "index_fill": Fault(
        "vmap_rules/indexing.py: _index_fill",
        mapped(lambda x: torch.zeros(3, dtype=F64).index_fill(0, ONE, x), WEIGHTS),
    ),
    "index_select": Fault(
        "vmap_rules/indexing.py: _index_select", mapped(grad(lambda x: x.index_select(0, ONE[0]).sum()), SHARED)
    ),
    "masked_select": Fault(
        "vmap_rules/indexing.py: _masked_select",
        mapped(lambda c: vjp(lambda x: x.masked_select(MASK), WEIGHTS)[1](c)[0], numbers(2, 4)),
    ),
    "roll": Fault("vmap_rules/indexing.py: _roll", mapped(lambda x: torch.roll(x, 1), WEIGHTS)),
    "select_scatter": Fault(
        "vmap_rules/indexing.py: _select_scatter",
        by_autograd(lambda x, y: torch.select_scatter(x, y, 0, 1).square(), numbers(2, 2, 2), numbers(2, 2)),
    ),
    "mse_loss": Fault("vmap_rules/nn_functional.py: _difference_loss", twice(GRAD_OF_MSE, numbers(1), WEIGHTS[:1])),
    "huber_loss": Fault("vmap_rules/nn_functional.py: _difference_loss", twice(GRAD_OF_HUBER, WEIGHTS, WEIGHTS.cos())),
    "smooth_l1_loss": Fault("vmap_rules/nn_functional.py: _difference_loss", twice(GRAD_OF_L1, WEIGHTS, WEIGHTS.cos())),
    "smooth_l1_loss of NaN": Fault(
        "vmap_rules/nn_functional.py: _difference_loss",
        mapped(lambda x: GRAD_OF_L1(x, torch.zeros((), dtype=F64)), WEIGHTS * torch.nan),
        issue=99429,
    ),
    "linear_cross_entropy": Fault(
        "vmap_rules/nn_functional.py: _linear_cross_entropy", mapped(grad(in_parts), numbers(3, 4, 2))
    ),
    "prelu": Fault(
        "vmap_rules/nn_functional.py: _prelu",
        twice(grad(lambda x, w: F.prelu(x, w).square().sum()), numbers(2, 2), numbers(2)),
    ),
    "baddbmm times 0": Fault(
        "vmap_rules/products.py: _added",
        by_autograd(lambda x: torch.baddbmm(torch.nan * x, x[..., :0], x[:, :0], beta=0), numbers(2, 1, 3, 3)),
    ),
    "written columns": Fault(
        "vmap_rules/indexing.py: setitem",
        mapped(written_column, numbers(2, 3, 2), torch.tensor([[0], [1]]), numbers(2, 3, 1)),
    ),
    "squeeze": Fault("vmap_rules/indexing.py: of_scalar", mapped(lambda x: x.squeeze(-1), WEIGHTS)),
    "addcmul_": Fault(
        "vmap_rules/products.py: _in_place", twice(lambda y, x: (1 * x).addcmul_(y, y), WEIGHTS, WEIGHTS)
    ),
    "solve without grad mode": Fault(
        "vmap_rules/products.py: _composed_where_nested", without_grad_mode(lambda a: torch.linalg.solve(a, a[0]))
    ),
    "lu_solve without grad mode": Fault(
        "vmap_rules/products.py: _composed_where_nested",
        without_grad_mode(lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), a.sin())),
    ),
    "det without grad mode": Fault(
        "vmap_rules/products.py: _composed_where_nested", without_grad_mode(torch.linalg.det)
    ),
    "slogdet without grad mode": Fault(
        "vmap_rules/products.py: _composed_where_nested", without_grad_mode(lambda a: torch.linalg.slogdet(a)[1])
    ),
    "several outputs of solve": Fault(
        "engines/uncompiled.py: _uses_factorizations", without_grad_mode(lambda a: torch.linalg.solve(a, a.sin()))
    ),
    "channels_last": Fault(
        "vmap_rules/effects.py: _of_memory",
        mapped(lambda x: x.contiguous(memory_format=torch.channels_last), numbers(2, 1, 2, 2, 2)),
    ),
    "view_as_complex": Fault(
        "vmap_rules/effects.py: _view_as_complex",
        mapped(lambda x: torch.view_as_complex(x).abs(), numbers(2, 3), in_dims=-1),
    ),
    "data": Fault("vmap_rules/effects.py: _data", mapped(lambda x: x.data, WEIGHTS)),
    "data, written": Fault("vmap_rules/effects.py: _set_data", survives(SET_DATA)),
    "group_norm": Fault(
        "vmap_rules/nn_functional.py: _by_copy",
        mapped(lambda x: F.group_norm(x.repeat(2)[:6].reshape(1, 2, 3), 1), numbers(3, 6)),
        mended="2.14",
        issue=186414,
    ),
    "bias of another dtype": Fault("vmap_rules/products.py: _check_dtype", with_a_bias_of_float32()),
}
WITHOUT_VMAP = {
    "linear_cross_entropy, forward": Fault(
        "vmap_rules/nn_functional.py: _linear_cross_entropy", forward_of(in_parts, numbers(4, 2))
    ),
    "solve, forward": Fault(
        "vmap_rules/products.py: _solve",
        of_forward(lambda a: torch.linalg.solve(a, numbers(2)), MATRIX),
        mended="2.15",
        issue=196695,
    ),
    "solve_ex, forward": Fault(
        "factors/linear_system.py: solve_weighted",
        of_forward(lambda a: torch.linalg.solve_ex(a, numbers(2))[0], MATRIX),
        mended="2.15",
        issue=196695,
    ),
    "det, forward": Fault(
        "vmap_rules/products.py: _det", of_forward(torch.linalg.det, MATRIX), mended="2.15", issue=196695
    ),
    "layer_norm, forward": Fault(
        "vmap_rules/nn_functional.py: _layer_norm",
        of_forward(lambda x: F.layer_norm(x, (3,), WEIGHTS), WEIGHTS.cos()),
        issue=196700,
    ),
    "batch_norm, forward": Fault(
        "vmap_rules/nn_functional.py: _batch_norm",
        of_forward(lambda x: F.batch_norm(x, None, None, WEIGHTS, training=True), numbers(4, 3)),
        issue=196699,
    ),
    "instance_norm, forward": Fault(
        "vmap_rules/nn_functional.py: _instance_norm",
        of_forward(lambda x: F.instance_norm(x, weight=WEIGHTS), numbers(1, 3, 4)),
        issue=196699,
    ),
    "images of one pixel": Fault(
        "factors/conv.py: numel() == 1",
        (lambda: of_kernel(numbers(4).as_strided((1, 4, 1, 1), (4, 1, 2, 2))), lambda: of_kernel(numbers(1, 4, 1, 1))),
    ),
    "attention": Fault("vmap_rules/attention.py: _composed_heads", of_nan_query(), issue=141128),
    "attention to none": Fault("vmap_rules/attention.py: _LARGEST", of_least_scores()),
}
WHILE_TRACING = {
    "linearize": Fault(
        "vmap_rules/effects.py: _dual",
        (
            lambda: make_fx(lambda x: linearize(torch.sin, x)[1](x))(WEIGHTS)(SHARED[1]),
            lambda: SHARED[1] * SHARED[1].cos(),
        ),
    ),
    "zeros of fake tensors": Fault("engines/compiled/bounds.py: aten_efficientzerotensor", of_fake_zeros()),
    "avg_pool2d": Fault(
        "engines/compiled/lower.py: _MEANS",
        compiled_gradient(lambda x: F.avg_pool2d(x, 2, ceil_mode=True).sum(), numbers(1, 1, 3, 3)),
        issue=198119,
    ),
    "interpolate": Fault(
        "engines/compiled/lower.py: _is_scaled",
        compiled(lambda x: F.interpolate(x, scale_factor=1.2), numbers(1, 1, 2, 4)),
        issue=198201,
    ),
    "rand": Fault("engines/compiled/lower.py: _DRAWS", of_double(lambda: torch.rand(2))),
    "loops from C++": Fault("engines/compiled/lower.py: has_loops", survives(LOOP_FROM_CPP)),
    "soft_margin_loss": Fault(
        "engines/compiled/lower.py: _ROUNDED",
        compiled_gradient(lambda x: 1e16 * F.soft_margin_loss(x, torch.ones_like(x)), 36 + WEIGHTS[:1] * 0),
    ),
    "parts of complex matrices": Fault(
        "engines/compiled/lower.py: _WRITTEN",
        without(
            "engines.compiled.lower._LEFT_TO_TORCH",
            {},
            of_complex_parts,
            WEIGHTS[0],
            numbers(3, 5, 5),
            [ps.Stack(), ps.Aux()],
        ),
    ),
    "index_put": Fault(
        "engines/compiled/lower.py: _copy_overwritten",
        compiled(lambda x: x[:1].sin().expand(3, 3).index_put((ONE,), x[0].cos()), numbers(3, 3)),
        mended="2.14",
    ),
    "sums read before they are written": Fault(
        "_torch.py: _after_writes",
        without(
            "_torch._after_writes",
            lambda: None,
            of_gathered,
            {"kernel": numbers(2, 1, 4, 1) + 1, "bias": numbers(2), "head": numbers(2, 8)},
            numbers(7, 1, 6, 5),
            ps.ClippedSum(0.5),
            weights=numbers(7) + 1.1,
        ),
        mended="2.14",
        issue=185509,
    ),
    "multilabel_margin_loss": Fault(
        "engines/compiled/lower.py: multilabel_margin_loss_forward",
        compiled(lambda x: F.multilabel_margin_loss(x, torch.tensor([2, -1, 0])), WEIGHTS),
        mended="2.14",
    ),
    "pow": Fault(
        "engines/compiled/lower.py: _power",
        compiled(lambda x: x * 2 ** torch.tensor([2, 3, 0]), WEIGHTS, cpp_wrapper=True),
        mended="2.15",
    ),
    "loops over rows and columns": Fault(
        "_torch.py: _without_shared_buffers",
        compiled(
            lambda x, y: torch.softmax(x + y.t(), 1) + y.t() + x, numbers(64, 32).float(), numbers(32, 64).float()
        ),
        mended="2.14",
        issue=185702,
    ),
}
GROUPS = {
    "under `vmap`": UNDER_VMAP,
    "without `vmap`: on the loop engine, too": WITHOUT_VMAP,
    "while tracing or compiling": WHILE_TRACING,
}
FAULTS = {name: fault for faults in GROUPS.values() for name, fault in faults.items()}


def version(text):
    return tuple(map(int, text.split(".")[:2]))


def is_right(both):
    found, right = both
    try:
        torch.testing.assert_close(found().detach(), right().detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    except (RuntimeError, AssertionError):
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_torch_has_it(name):
    fault = FAULTS[name]
    is_mended = bool(fault.mended) and version(torch.__version__) >= version(fault.mended)
    assert is_right(fault.both) == is_mended, "mended by torch? See the top of this file."


@pytest.mark.parametrize("name", FAULTS)
def test_its_rule_is_needed(name):
    """By the oldest torch that persample supports; and it exists."""
    fault = FAULTS[name]
    oldest = KNOWN_TORCH_VERSIONS.partition(",")[0].removeprefix(">=")
    assert not fault.mended or version(fault.mended) > version(oldest)
    file, _, rule = fault.rule.partition(": ")
    assert rule in (PERSAMPLE / file).read_text()


def table():
    """Return the faults as Markdown, as the page shows them."""
    tables = []
    for group, faults in GROUPS.items():
        lines = [f"| **{group}** | corrected in | issue | mended in |", "| --- | --- | --- | --- |"]
        for name, fault in faults.items():
            file, _, rule = fault.rule.partition(": ")
            issue = fault.issue and f"[#{fault.issue}](https://github.com/pytorch/pytorch/issues/{fault.issue})"
            place = file.rpartition("/")[2]  # file names are unique
            lines.append(f"| {name} | `{place}` `{rule}` | {issue or '–'} | {fault.mended or '–'} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def test_the_page_shows_this_table():
    PART.assert_is(table())


def test_every_fault_is_in_one_group():
    assert len(FAULTS) == sum(map(len, GROUPS.values()))


if __name__ == "__main__":
    PART.write(table())
