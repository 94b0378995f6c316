"""The traced engine: captured losses as straight-line Python, without a compiler."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from counting import AT_ONCE, functions_entered
from grid import REDUCTIONS, part
from oracle import assert_trees_close, oracle
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from workloads import WORKLOADS, build

import persample as ps
from persample import ArgumentError, clear_cache, explain, per_sample_grads
from persample.engines.compiled.straight import simplify, straight
from persample.engines.compiled.task import Task
from persample.engines.compiled.trace import Format, trace
from persample.inputs.call import normalize
from persample.reductions.base import Reductions

NAN = float("nan")


def leaves(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_equals_the_loop(workload):
    work = build(workload)
    rows = oracle(work.loss_fn, work.params, work.batch)
    wanted = {name: REDUCTIONS[name][0](rows, torch.float64) for name in part(workload, 3)}
    for _ in range(2):  # the second time the call is recalled
        results = per_sample_grads(work.loss_fn, work.params, work.batch, wanted, engine="traced")
        for name in wanted:
            assert_trees_close(results[name], REDUCTIONS[name][1](rows), 1e-9)
        assert not any(x.requires_grad for x in leaves(results))
        for x in leaves(results):
            x.fill_(NAN)  # results own their memory: the next one must not see it


@pytest.mark.parametrize("workload", WORKLOADS)
def test_does_the_arithmetic_of_eager(workload):
    """The same operations on the same numbers: results agree to the last bits, where sums have one order."""
    work = build(workload, torch.float32)
    wanted = {"update": ps.ClippedMean(0.5), "norms": ps.Norm(), "loss": ps.Loss()}
    traced, eager = (
        per_sample_grads(work.loss_fn, work.params, work.batch, wanted, engine=engine) for engine in ("traced", "eager")
    )
    assert_trees_close(traced, eager, 1e-6)


# Their operations depend on the batch size as those of the others do.
ALIKE = {"tutorial_td", "tied_weights", "nested_params", "complex_params"}


@pytest.mark.parametrize(
    "workload", [pytest.param(x, marks=[pytest.mark.slow] if x in ALIKE else []) for x in WORKLOADS]
)
def test_one_trace_serves_other_batch_sizes(workload):
    work = build(workload)
    clear_cache()  # the losses of workloads are of one code
    for size in (4, 3, 2, 4):
        batch = tuple(x[:size] for x in work.batch)
        results = per_sample_grads(work.loss_fn, work.params, batch, (ps.ClippedMean(0.5), ps.Norm()), engine="traced")
        expected = per_sample_grads(work.loss_fn, work.params, batch, (ps.ClippedMean(0.5), ps.Norm()), engine="loop")
        assert_trees_close(results, expected, 1e-9)
    made = explain(work.loss_fn, work.params, work.batch, engine="traced").compilations
    assert [(x.engine, x.batch_size) for x in made] == [("traced", 4), ("traced", None)]


@pytest.mark.parametrize("size", [0, 1])
def test_few_samples(size):
    work = build("mlp_td")
    batch = tuple(x[:size] for x in work.batch)
    wanted = {"stack": ps.Stack(), "sum": ps.Sum(), "norm": ps.Norm(), "gram": ps.Gram()}
    results = per_sample_grads(work.loss_fn, work.params, batch, wanted, engine="traced")
    assert_trees_close(results, per_sample_grads(work.loss_fn, work.params, batch, wanted, engine="loop"), 1e-9)


def test_weights_chunks_outputs_and_a_previous_result():
    work = build("mlp_td")

    def agrees(wanted, loss=work.loss_fn, **options):
        for _ in range(2):
            traced, looped = (
                per_sample_grads(loss, work.params, work.batch, wanted, engine=engine, **options)
                for engine in ("traced", "loop")
            )
            assert_trees_close(traced, looped, 1e-9)
        return traced

    def rows(params, s_tm1, r_t, s_t):
        return torch.stack([work.loss_fn(params, s_tm1, r_t, s_t), r_t * params["0.weight"].sum()])

    agrees((ps.ClippedMean(0.5), ps.Variance()), weights=torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0]))
    agrees((ps.Stack(), ps.ClippedMean(0.5)), chunk_size=2)
    agrees((ps.Stack(), ps.Gram(), ps.ClippedSum(0.5)), rows, outputs="rows")
    out = agrees({"mean": ps.Mean(), "rows": ps.Stack()})
    places = [x.data_ptr() for x in leaves(out)]
    again = per_sample_grads(
        work.loss_fn, work.params, work.batch, {"mean": ps.Mean(), "rows": ps.Stack()}, engine="traced", out=out
    )
    assert again is out
    assert [x.data_ptr() for x in leaves(out)] == places


def test_a_stream():
    work = build("mlp_td")
    batches = [tuple(x[:3] for x in work.batch), tuple(x[3:] for x in work.batch)] * 2
    wanted = (ps.ClippedMean(0.5), ps.NoiseScale(), ps.Norm())
    traced, looped = (
        ps.accumulate(work.loss_fn, work.params, batches, wanted, engine=engine) for engine in ("traced", "loop")
    )
    assert_trees_close(traced, looped, 1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e22, 1e30, 0.0])
def test_norms_of_any_magnitude(scale):
    """As on eager: rows whose squares float32 does not hold are computed again, and zeros are no exception."""
    model = nn.Sequential(nn.Linear(40, 500), nn.Linear(500, 1))
    x = torch.randn(64, 40)
    x[::3] *= scale
    loss = lambda model, x: model(x).sum()
    wanted = ps.Norm(), ps.ClippedSum(1e-3)
    traced, eager = (per_sample_grads(loss, model, x, wanted, engine=engine) for engine in ("traced", "eager"))
    assert_trees_close(traced, eager, 1e-6)


def test_an_index_out_of_range_is_torchs_own_error():
    table = torch.randn(5, 3)

    def loss(table, i):
        return F.embedding(i, table).square().sum()

    for _ in range(2):
        per_sample_grads(loss, table, torch.tensor([0, 4]), ps.Norm(), engine="traced")
    with pytest.raises(IndexError, match="index out of range"):
        per_sample_grads(loss, table, torch.tensor([0, 5]), ps.Norm(), engine="traced")


def test_random_numbers_are_those_of_eager():
    def loss(w, x):
        return (F.dropout(w * x, 0.5) + torch.randn_like(x)).square().sum()

    found = []
    for engine in ("traced", "traced", "eager"):
        torch.manual_seed(0)
        options = {"randomness": "different", "engine": engine}
        found.append(per_sample_grads(loss, torch.ones(50), torch.ones(4, 50), ps.Stack(), **options))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x, i: w.T[i] @ x,
        lambda w, x, i: w[i][i] * x.sum(),
        lambda w, x, i: w.reshape(-1)[i].exp() * x.sum(),
        lambda w, x, i: (2 * w)[:, i, None].sum() * x.sum(),
    ],
)
def test_an_index_that_the_loss_closes_over(loss):
    """Of a tensor that depends on parameters alone, torch would read the value of a 0-d index."""
    w, x, place = torch.randn(3, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64), torch.tensor(1)
    own = lambda w, x: loss(w, x, place)
    expected = per_sample_grads(own, w, x, engine="loop")
    for engine in ("traced", "eager"):
        assert_trees_close(per_sample_grads(own, w, x, engine=engine), expected, 1e-12)
    place += 1
    assert_trees_close(per_sample_grads(own, w, x, engine="traced"), per_sample_grads(own, w, x, engine="loop"), 1e-12)


def test_logs_are_written_at_the_first_call_at_most(caplog):
    log = logging.getLogger("traced")

    def loss(w, x):
        log.warning("of shape %s", x.shape)
        log.info("seen")
        return (w @ x) ** 2

    w, x = torch.ones(3), torch.ones(4, 3)
    expected = per_sample_grads(loss, w, x, ps.Norm(), engine="loop")
    caplog.clear()
    for _ in range(2):
        assert torch.equal(per_sample_grads(loss, w, x, ps.Norm(), engine="traced"), expected)
    assert len([record for record in caplog.records if record.name == "traced"]) <= 1


@pytest.mark.parametrize("engine", ["eager", "traced"])
def test_inside_of_a_compiled_step(engine):
    """Dynamo calls the library as it is, and captures what stands around the call."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def loss(w, x):
        return torch.tanh(w * x).sum()

    def step(w, x):
        return w.sin() - 0.1 * per_sample_grads(loss, w.sin(), x, ps.ClippedMean(0.5), engine=engine).cos()

    w, x = torch.randn(3), torch.randn(4, 3)
    assert torch.equal(torch.compile(step, backend=backend)(w, x), step(w, x))
    assert len(graphs) == 2
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="per_sample_grads"):
        torch.compile(step, backend=backend, fullgraph=True)(w, x)


def test_what_cannot_be_captured_is_refused():
    with pytest.raises(ps.LossError, match=r"cannot be traced: .*A traced loss must not branch on values"):
        per_sample_grads(
            lambda w, x: w @ x if w.sum() > 0 else 2 * w @ x, torch.ones(3), torch.ones(2, 3), engine="traced"
        )


def test_explain_lists_the_programs_of_one_engine():
    def loss(w, x):
        return (w @ x) ** 2

    w, x = torch.ones(3), torch.ones(4, 3)
    per_sample_grads(loss, w, x, ps.Mean(), engine="traced")
    assert "1 program traced in" in str(explain(loss, w, x, ps.Mean(), engine="traced"))
    assert explain(loss, w, x, ps.Mean(), engine="compiled").compilations == ()
    with pytest.raises(ArgumentError, match="engine: expected 'eager' or 'traced' or 'compiled'"):
        explain(loss, w, x, engine="auto")


def of_parts(w, x, kept):
    first, second = torch.unsafe_chunk(kept, 2)  # views, as their kernel has it, and not by their schema
    return (w * x).sum() * torch.tanh(first.view(2, 1)).sum() + second.sum()


def of_written_parts(w, x, kept):
    grown = torch.exp(kept)
    first, second = torch.unsafe_chunk(grown, 2)
    bounded = torch.tanh(grown.view(2, 2))
    return (w * x).sum() * bounded.sum() + first.sum() * second.sum()


def of_an_output(w, x, kept):
    out = torch.empty(4)
    view = out.view(2, 2)
    torch.add(kept, 1, out=out)
    return (w * x).sum() * (view * 10).sum() + out.sum()


@pytest.mark.parametrize("loss", [of_parts, of_written_parts, of_an_output])
def test_memory_of_others_is_left_alone(loss):
    kept, w, x = torch.ones(4), torch.ones(2), torch.ones(3, 2)
    own = lambda w, x: loss(w, x, kept)
    expected = per_sample_grads(own, w, x, (ps.Loss(), ps.Stack()), engine="loop")
    for _ in range(3):
        assert_trees_close(per_sample_grads(own, w, x, (ps.Loss(), ps.Stack()), engine="traced"), expected, 1e-6)
        assert torch.equal(kept, torch.ones(4))


@pytest.mark.parametrize(
    ("loss", "lengths"),
    [
        (lambda w, table, x: ((table[1:].squeeze(0) * w).softmax(0) * x).sum(), (5, 6, 7, 2)),
        (lambda w, table, x: ((table[-3:] * w).tanh() * x).mean(), (8, 9, 7, 2)),
        (lambda w, table, x: ((table[1:][-5:] * w).tanh() * x).var(), (8, 9, 2)),
    ],
)
def test_other_lengths_of_what_all_samples_share(loss, lengths):
    """A program for any length must not serve one at which an axis of 1 appears, or a slice begins before the first."""
    w, x = torch.randn(4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    for length in lengths:
        batch = torch.randn(length, 4, dtype=torch.float64), x
        options = {"in_dims": (None, (None, 0))}
        traced, looped = (
            per_sample_grads(loss, w, batch, ps.Stack(), engine=engine, **options) for engine in ("traced", "loop")
        )
        assert_trees_close(traced, looped, 1e-9)


@pytest.mark.parametrize("engine", ["traced", "compiled"])
@pytest.mark.parametrize("name", ["data", "T"])
def test_a_view_of_the_sample_that_is_not_recorded_is_refused(name, engine):
    """Dynamo would return that of the first sample; since torch 2.14 it records transposes."""
    message = (
        r"cannot be (traced|compiled): it returns a view of an argument that Dynamo does not record: return a copy"
    )
    loss, x = lambda w, x: ((w @ x).sum(), getattr(x, name)), torch.randn(3, 2)
    if name == "T" and torch.__version__ >= "2.14":
        assert torch.equal(per_sample_grads(loss, torch.ones(2, 2), x, ps.Aux(), engine=engine), x)
        return
    with pytest.raises(ps.LossError, match=message):
        per_sample_grads(loss, torch.ones(2, 2), x, ps.Aux(), engine=engine)


# Straight-line code.


def traced(function, *inputs):
    graph = make_fx(function)(*inputs)
    simplify(graph)
    return graph


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_what_changes_nothing_is_dropped():
    def function(x, w):
        same = x.detach().unsqueeze(0).squeeze(0).view(6, 2).view(3, 4)
        return [torch.addmm(w[0], same, w.t()) + torch.mm(x, w.t())]

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    graph = traced(function, x, w)
    aten = torch.ops.aten
    kept = [aten.select.int, aten.t.default, aten.addmm.default, aten.mm.default, aten.add.Tensor]
    assert targets(graph) == kept
    assert torch.equal(*straight(graph)([x, w]), *function(x, w))


def test_views_of_what_is_written_or_promoted():
    def function(x, number, one, half):
        kept = torch.relu(x.unsqueeze(0))
        same = kept * torch.ones(1, 4)
        kept += 1
        promoted = x.unsqueeze(0) * one.view(())  # not as by a tensor with an axis
        wide = number.unsqueeze(0) * number.double().unsqueeze(0)
        image = x.view(1, 1, 2, 2).clone(memory_format=torch.channels_last)
        return [same, kept, promoted, wide, image, half.unsqueeze(0) * one.view(())]

    inputs = torch.randn(4), torch.tensor(1.5), torch.tensor([2.0], dtype=torch.float64), torch.randn(4).half()
    found, expected = straight(traced(function, *inputs))([*inputs]), function(*inputs)
    assert all(map(torch.equal, found, expected))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


def test_an_operation_that_refuses_symbolic_sizes():
    """torch's decomposition for symbolic sizes lays the images out otherwise than the kernel: no view of them fits."""

    def loss(w, x):
        return F.interpolate(w, scale_factor=2).flatten()[0] + F.linear(w[0, 0], x).abs().sum()

    w = torch.randn(3, 2, 3).transpose(0, 2).contiguous().transpose(0, 2)
    for size in (5, 3, 4):
        x = torch.randn(size, 2, 3)
        found = per_sample_grads(loss, w, x, engine="traced")
        assert_trees_close(found, per_sample_grads(loss, w, x, engine="loop"), 1e-6)


def test_what_is_written_is_kept():
    def function(x):
        power, view = x**1.0, x.clone()
        view.view(4).add_(1)
        power.add_(view)
        return power, x * torch.ones_like(x)

    x = torch.randn(2, 2)
    expected = function(x)
    assert all(map(torch.equal, straight(traced(function, x))([x]), expected))


@pytest.mark.parametrize("workload", [x for x in WORKLOADS if x != "embedding_attention"])
def test_off_the_cpu_no_value_is_read_and_no_size_is_unknown(workload):
    """A tensor of the device ``meta`` has no values: what would wait for a GPU raises here.

    The graph of the workload that is left out has a mask made on the device of the capture.
    """
    work = build(workload)
    wanted = [ps.ClippedMean(0.5), ps.Norm(), ps.Stack(), ps.Gram(), ps.Loss()]
    call = normalize(
        work.loss_fn, work.params, work.batch, wanted, weights=None, in_dims=(None, 0), keep_batch_dim=False
    )
    task = Task(Reductions(wanted), call, finishes=True, engine="traced").captured()
    formats = [Format.of(x)._replace(device=torch.device("meta")) for x in task.tensors]
    made = trace(task, lambda: [x.empty() for x in formats], compiles=False)
    outputs = straight(made.graph)([*(x.empty() for x in formats), *made.captured])
    assert {x.device.type for x in outputs} == {"meta"}
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        outputs[0].sum().item()


def test_tensors_are_deleted_after_their_last_use():
    alive = []

    def seen(x):
        alive.append(sum(reference() is not None for reference in references))
        references.append(weakref.ref(x))
        return x

    references = []
    graph = make_fx(lambda x: [torch.sin(torch.cos(torch.exp(x)))])(torch.ones(3))
    for node in list(graph.graph.nodes):
        if node.op == "call_function":
            with graph.graph.inserting_after(node):
                kept = graph.graph.call_function(seen, (node,))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    straight(graph)([torch.ones(3)])
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("stream", [False, True], ids=["call", "stream"])
def test_results_are_freed_with_the_last_reference_to_them(stream):
    """No cycle holds them until Python collects garbage: a loop of steps would keep several gradients."""
    model, batch = nn.Linear(3, 2), torch.randn(4, 3)

    def call():
        one = {"engine": "traced", "reduce": {"update": ps.ClippedMean(1.0), "rows": ps.Stack()}}
        if stream:
            return ps.accumulate(lambda m, x: m(x).sum(), model, [batch, batch], **one)
        return per_sample_grads(lambda m, x: m(x).sum(), model, batch, **one)

    call()
    gc.disable()
    try:
        results = call()
        seen = [weakref.ref(x) for x in leaves(results)]
        del results
        assert seen
        assert not [x for x in seen if x() is not None]
    finally:
        gc.enable()


def test_weights_of_a_repeated_call_are_its_own():
    """Calls alternate between weights of several dtypes, numbers, and none: each is answered with its own."""
    model, batch = nn.Linear(3, 1), torch.randn(4, 3)
    wanted = {"mean": ps.Mean(), "sum": ps.Sum(), "clipped": ps.ClippedMean(0.5), "variance": ps.Variance()}
    given = [1 + torch.rand(4), 1 + torch.rand(4).double(), torch.tensor([0, 1, 2, 3]), [1.0, 2.0, 3.0, 4.0], None]

    def loss(model, x):
        return model(x).square().sum()

    for weights in given:
        eager = per_sample_grads(loss, model, batch, wanted, weights=weights)
        traced = per_sample_grads(loss, model, batch, wanted, weights=weights, engine="traced")
        assert_trees_close(traced, eager, 1e-6)
        streams = (
            ps.accumulate(loss, model, [batch, batch], wanted, weights=lambda _, w=weights: w, engine=engine)
            for engine in ("traced", "eager")
        )
        assert_trees_close(*streams, 1e-6)
        _, entered = functions_entered(per_sample_grads, loss, model, batch, wanted, weights=weights, engine="traced")
        assert entered.total() < AT_ONCE
    assert len(explain(loss, model, batch, wanted, engine="traced").compilations) == 4  # with weights and without
    for weights, reason in (([0.0] * 4, "weights that sum to 0"), ([1.0] * 3, r"shape \[3\]"), ([NAN] * 4, "NaN")):
        with pytest.raises(ArgumentError, match=reason):
            per_sample_grads(loss, model, batch, wanted, weights=weights, engine="traced")
        with pytest.raises(ArgumentError, match=reason):
            ps.accumulate(loss, model, [batch], wanted, weights=lambda _, w=weights: w, engine="traced")
