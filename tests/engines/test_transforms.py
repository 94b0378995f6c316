"""Transforms around a call × reductions × engines: the same as plain arithmetic on the rows of ``vmap(grad(loss))``.

``PYTHONPATH=tests python tests/engines/test_transforms.py`` writes the table into ``docs/transforms.md``.
"""

from __future__ import annotations

import sys

import plain
import pytest
import torch
from oracle import assert_trees_close
from pages import Part
from plain import REDUCTIONS, by_loop, by_vmap
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import persample as ps
from persample.factors import Factor

# torch.func.jvp itself is the first to call it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
PART = Part("transforms.md", "table", "engines/test_transforms.py")


def by_autograd(f, z):
    leaves = {name: x.clone().requires_grad_() for name, x in z.items()}
    return torch.autograd.grad(scalar(f)(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True)


def scalar(f):
    return lambda z: f(z).sin().sum()


def pulled_back(f, z):
    value, pullback = vjp(f, z)
    return value, pullback(value.cos())


def varied(z):
    return {name: torch.stack([x, x.roll(1, 0) if x.ndim else 2 * x]) for name, x in z.items()}


TRANSFORMS = {
    "grad": lambda f, z: grad(scalar(f))(z),
    "vjp": pulled_back,
    "jvp": lambda f, z: jvp(f, (z,), ({name: x.cos() for name, x in z.items()},)),
    "jacrev": lambda f, z: jacrev(f)(z),
    "jacfwd": lambda f, z: jacfwd(f)(z),
    "hessian": lambda f, z: hessian(scalar(f))(z),
    "jacrev(jacfwd)": lambda f, z: jacrev(jacfwd(scalar(f)))(z),
    "vmap": lambda f, z: vmap(f)(varied(z)),
    "vmap(grad)": lambda f, z: vmap(grad(scalar(f)))(varied(z)),
    "autograd": by_autograd,
}
# torch's own derivatives of forward derivatives lack a term for linear systems (pytorch/pytorch#196695).
SAME_BY_PLAIN_ARITHMETIC = {"jacrev(jacfwd)": "hessian"}
ENGINES = ("eager", "compiled", "auto", "loop")


def serves(transform, engine):
    """Whether an engine takes a call under a transform; otherwise it raises an error."""
    return engine != "loop" or transform == "autograd"


def call(reduction, z, **options):
    make = REDUCTIONS[reduction][0]
    wanted = make(z, **options) if "other" in reduction else make(z)
    return ps.per_sample_grads(plain.loss_of(z), plain.params(z), z["x"], wanted, weights=z["weights"], **options)


def written_out(tree):
    return pytree.tree_map(lambda x: x.materialize() if isinstance(x, Factor) else x, tree)


def flat(tree):
    return torch.cat([x.reshape(-1) for x in pytree.tree_leaves(written_out(tree))])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_plain_arithmetic_gives_the_same(transform, reduction):
    around, z = TRANSFORMS[transform], plain.inputs()
    rows = by_loop if transform == "autograd" else by_vmap
    plainly = TRANSFORMS[SAME_BY_PLAIN_ARITHMETIC.get(transform, transform)]
    expected = plainly(lambda z: flat(REDUCTIONS[reduction][1](rows(z), z, rows)), z)
    for engine in ENGINES:
        options = {"engine": engine, "differentiable": transform == "autograd"}
        if not serves(transform, engine):
            with pytest.raises(
                ps.ArgumentError, match=r"received 'loop'\. Pass engine='eager'; or .*differentiable=True"
            ):
                around(lambda z, options=options: flat(call(reduction, z, **options)), z)
            continue
        found = around(lambda z, options=options: flat(call(reduction, z, **options)), z)
        assert_trees_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_results_have_the_structure_of_any_call(reduction):
    z = plain.inputs()
    leaves = {name: x.clone().requires_grad_() for name, x in z.items()}
    constant, recorded = call(reduction, leaves), call(reduction, leaves, differentiable=True)
    assert not any(x.requires_grad for x in pytree.tree_leaves(written_out(constant)))
    assert all(x.requires_grad for x in pytree.tree_leaves(written_out(recorded)))
    detached = pytree.tree_map(torch.Tensor.detach, written_out(recorded))
    assert_trees_close(detached, written_out(constant), rtol=1e-9)


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("reduce", [ps.Mean(), ps.ClippedMean(0.5), ps.Variance(), ps.NaturalGradient(0.1)])
def test_a_0d_parameter_has_the_derivatives_by_weights_of_one_with_an_axis(reduce, engine):
    x, weights = torch.tensor([1.0, 2.0, -1.0]).double(), torch.tensor([1.0, 0.5, 0.0]).double()
    found = []
    for p in (torch.tensor(0.3).double(), torch.tensor([0.3]).double()):
        given = weights.clone().requires_grad_()
        result = ps.per_sample_grads(
            lambda p, x: (p.sum() * x - 1) ** 2, p, x, reduce, weights=given, differentiable=True, engine=engine
        )
        found += torch.autograd.grad(result.sum(), given)
    assert torch.equal(*found)
    assert found[0].any()


def table():
    lines = [f"| | {' | '.join(f'`{name}`' if name != 'autograd' else name for name in TRANSFORMS)} |"]
    lines.append("| --- |" + " --- |" * len(TRANSFORMS))
    engines = {name: ", ".join(e for e in ENGINES if serves(name, e)) for name in TRANSFORMS}
    short = {engines["grad"]: "✓", engines["autograd"]: "✓✓"}
    lines += [f"| `{name}` | {' | '.join(short[engines[around]] for around in TRANSFORMS)} |" for name in REDUCTIONS]
    legend = "; ".join(f"{mark}: equal on {names}" for names, mark in short.items())
    return (
        "\n".join(lines) + f"\n\n{legend}. On the loop engine, transforms of `torch.func` are an error that says so.\n"
    )


def test_the_page_shows_the_table():
    PART.assert_is(table())


if __name__ == "__main__":
    PART.write(table())
    sys.stdout.write(f"{len(TRANSFORMS)} transforms, {len(REDUCTIONS)} reductions\n")
