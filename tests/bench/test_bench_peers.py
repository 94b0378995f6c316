"""What the peers of the benchmark share: batched losses, layered models, reductions of stacks; none is missing.

The peers' libraries are not installed here; the runner checks every result of theirs before it is timed.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import models, workloads
from benchmarks.methods import FILES, by_hand, stacked
from benchmarks.methods.hooked import Hooked
from benchmarks.methods.layers import layered, losses
from benchmarks.quantities import QUANTITIES
from benchmarks.sweep import drawn
from benchmarks.sweep.draws import KINDS, Draw

BENCHMARKS = Path(workloads.__file__).parent


def small_lora():
    base = workloads.transformer(50, 3, length=8, width=16, layers=2)
    model = models.with_lora(base.model, rank=4, scale=2.0)
    return replace(base, kind="lora", model=model)


def small_wide():
    def loss(model, x, y):
        return F.mse_loss(model(x), y)

    batch = (torch.randn(4, 7), torch.randn(4, 5))
    return workloads.Workload("wide_mlp", {}, models.mlp(7, 6, 5, activation=nn.ReLU), loss, loss, batch)


SMALL = {
    "td_linear": lambda: workloads.td_linear(5),
    "td_mlp": lambda: workloads.td_mlp(6, 16),
    "reinforce_mlp": lambda: workloads.reinforce("reinforce_mlp", models.mlp(4, 8, 2), 20),
    "reinforce_gru": lambda: workloads.reinforce("reinforce_gru", models.GRUPolicy(4, 8, 2), 12),
    "dqn_cnn": lambda: workloads.dqn_cnn(2),
    "transformer": lambda: workloads.transformer(50, 3, length=8, width=16, layers=2),
    "lora": small_lora,
    "wide_mlp": small_wide,
    **{f"drawn {kind}": lambda kind=kind: drawn.build(Draw(0, kind, 3, 4, 8, 2)) for kind in KINDS},
}


def build(kind):
    torch.manual_seed(0)
    return SMALL[kind]().to(torch.float64)


def keys_of(file, name):
    """The keys of a dict at the top of a file that cannot be imported here."""
    tree = ast.parse((BENCHMARKS / "methods" / file).read_text())
    assigned = (node for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == name)
    return {key.value for key in next(assigned).value.keys}


@pytest.mark.parametrize("kind", SMALL)
def test_batched_losses_are_those_of_the_samples(kind):
    work = build(kind)
    together = losses(work)(work.model, *work.batch)
    alone = torch.stack([work.loss_fn(work.model, *sample) for sample in zip(*work.batch, strict=True)])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("kind", SMALL)
def test_batched_losses_hold_targets_fixed(kind):
    work = build(kind)
    params = [p for p in work.model.parameters() if p.requires_grad]
    found = torch.autograd.grad(losses(work)(work.model, *work.batch).mean(), params)
    torch.testing.assert_close(found, torch.autograd.grad(work.batch_loss(work.model, *work.batch), params))


@pytest.mark.parametrize("kind", sorted(SMALL.keys() - {"drawn functional"}))  # of bare parameters
def test_layered_models_compute_the_same_with_every_parameter_in_a_layer(kind):
    work = build(kind)
    model, original = layered(work.model)
    torch.testing.assert_close(losses(work)(model, *work.batch), losses(work)(work.model, *work.batch))
    trained = [original(name) for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(trained) == sorted(work.params)
    holders = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    assert all(next(m.children(), None) is None for m in holders)


@pytest.mark.parametrize("kind", SMALL)
def test_what_a_library_leaves_on_layers_is_read_under_the_original_names_and_shapes(kind):
    work = build(kind)
    hooked = Hooked(work, lambda model: model)
    hooked.losses().mean().backward()
    params = {name: p for name, p in work.model.named_parameters() if p.requires_grad}
    mean = torch.autograd.grad(work.batch_loss(work.model, *work.batch), list(params.values()))
    assert hooked.numpy(hooked.read("grad")).keys() == params.keys()
    for name, expected in zip(params, mean, strict=True):
        np.testing.assert_allclose(hooked.numpy(hooked.read("grad"))[name], expected, rtol=1e-9, atol=1e-14)
    hooked.clear()
    assert set(hooked.read("grad").values()) == {None}


def test_stacks_left_on_layers_keep_their_batch_axis():
    work = build("td_linear")
    hooked = Hooked(work, lambda model: model)
    (weight,) = hooked.params
    weight.grad_sample = torch.arange(15.0).view(5, 1, 3)
    np.testing.assert_array_equal(hooked.numpy(hooked.read("grad_sample"))["theta"], np.arange(15.0).reshape(5, 3))


@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["some are clipped", "all are zero"])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_reductions_of_stacks_are_their_formulas_in_numpy_and_torch(quantity, scale):
    rng = np.random.default_rng(0)
    stack = {"weight": scale * rng.normal(size=(5, 3, 2)), "bias": scale * rng.normal(size=(5, 3)) / 3}
    g = np.concatenate([stack["weight"].reshape(5, 6), stack["bias"]], 1)
    norms = np.sqrt((g**2).sum(1))
    clipped = np.where(norms > 1, 1 / np.maximum(norms, 1), 1)[:, None] * g
    expected = {
        "stack": g,
        "mean": g.sum(0) / 5,
        "norms": norms,
        "clipped_mean": clipped.sum(0) / 5,
        "gram": np.einsum("ik,jk->ij", g, g),
        "variance": ((g - g.mean(0)) ** 2).sum(0) / 4,
        "natural_gradient": np.linalg.solve(g.T @ g / 5 + np.eye(9), g.mean(0)),
    }[quantity]
    with np.errstate(divide="ignore"):
        in_numpy = stacked.reduce(
            stack,
            quantity,
            lambda rows: np.linalg.norm(rows, axis=1),
            lambda x: x.var(0, ddof=1),
            lambda k: np.linalg.solve(k + np.eye(len(k)), np.ones(len(k))),
        )
    in_torch = by_hand.arrays(by_hand.reduce({name: torch.tensor(x) for name, x in stack.items()}, quantity))
    for found in (in_numpy, in_torch):
        np.testing.assert_allclose(flat(found, quantity), expected, rtol=1e-9, atol=1e-14)


def flat(result, quantity):
    if not isinstance(result, dict):
        return result
    rows = (-1,) if quantity != "stack" else (5, -1)
    return np.concatenate([result[name].reshape(rows) for name in ("weight", "bias")], -1)


def test_every_kind_of_workload_is_rebuilt_for_the_peers():
    kinds = {workloads.build(name).kind for name in workloads.WORKLOADS if "5120" not in name and "32000" not in name}
    kinds |= {"wide_mlp", *(f"drawn {kind}" for kind in KINDS)}
    assert kinds == SMALL.keys() == keys_of("jax_losses.py", "_LOSSES")
    assert keys_of("mindspore_.py", "_LOSSES") == {"td_linear", "td_mlp", "reinforce_mlp", "wide_mlp"}


def test_every_file_of_methods_belongs_to_an_environment_that_make_creates():
    with_methods = {path.stem for path in (BENCHMARKS / "methods").glob("*.py") if "\nMETHODS" in path.read_text()}
    assert with_methods == {name for names in FILES.values() for name in names}
    makefile = (BENCHMARKS.parent / "Makefile").read_text()
    created = set(re.findall(r"\.venv-(\w+)/\.installed", makefile.split("\nPEERS :=")[1].splitlines()[0]))
    assert (
        created == {path.stem for path in (BENCHMARKS / "environments").glob("*.txt")} == {"peers", "jax", "mindspore"}
    )


def test_every_requirement_of_the_peers_is_pinned():
    pinned = set(re.findall(r"^([\w.-]+)==", (BENCHMARKS.parent / "constraints.txt").read_text(), re.MULTILINE))
    for path in (BENCHMARKS / "environments").glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith(("#", "--constraint"))]
        assert lines
        assert all("==" in line or line in pinned for line in lines), path
