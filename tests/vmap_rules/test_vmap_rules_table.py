"""The tables of rules: every file's rules are in them, and who differentiates the loss chooses between them."""

import importlib
import pkgutil
from collections import Counter

import pytest
import torch
from counting import FUSED, Operations
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional as F

from persample import vmap_rules
from persample.vmap_rules import SecondDerivativeError, VmapRules
from persample.vmap_rules.levels import is_differentiated_once

FILES = [
    importlib.import_module(f"persample.vmap_rules.{file.name}") for file in pkgutil.iter_modules(vmap_rules.__path__)
]


@pytest.mark.parametrize("table", ["RULES", "FIRST_DERIVATIVE_RULES"])
def test_every_rule_is_in_the_table_of_one_file(table):
    of_files = Counter(function for file in FILES for function in getattr(file, table, {}))
    assert set(of_files.values()) == {1}
    assert of_files.keys() == getattr(vmap_rules, f"_{table}").keys()


def called(differentiated_by, transform):
    """The answers of ``is_differentiated_once`` inside of a transform."""
    answers = []

    def probe(x):
        answers.append(is_differentiated_once(differentiated_by))
        return x.sin()

    with torch.no_grad():
        transform(probe)(torch.ones(3))
    return answers


@pytest.mark.parametrize(("by", "mapped", "differentiated"), [("torch.func", False, True), ("autograd", True, False)])
def test_who_differentiates_decides(by, mapped, differentiated):
    assert called(by, vmap) == [mapped]
    assert called(by, lambda probe: vmap(grad(probe))) == [differentiated]
    assert called("any", lambda probe: vmap(grad(probe))) == called("any", vmap) == [False]


def test_one_derivative_in_reverse_mode_that_is_not_recorded():
    seen = []

    def probe(x):
        seen.append(is_differentiated_once("torch.func"))
        return x.sin()

    x = torch.ones(3)
    with torch.no_grad():
        vmap(grad(probe))(x)
        vmap(lambda x: vjp(probe, x)[1](torch.ones(())))(x)
        grad(lambda x: vmap(probe)(x).sum())(x)
        vmap(grad(grad(probe)))(x)
        vmap(lambda x: jvp(probe, (x,), (x,)))(x)
        vmap(lambda x: jvp(grad(probe), (x,), (x,)))(x)
        vmap(probe)(x)
    vmap(grad(probe))(x)
    assert seen == [True] * 3 + [False] * 5


def test_only_losses_that_are_differentiated_once_reach_the_fused_kernel():
    def gradient(x, rules):
        def loss(x):
            with rules:
                return F.scaled_dot_product_attention(x, x, x).square().sum()

        return vjp(loss, x)[1](torch.ones(()))[0]

    x = torch.randn(4, 2, 5, 3)
    with torch.no_grad(), Operations() as mode:
        fused = vmap(lambda x: gradient(x, VmapRules()))(x)
        assert len(mode.shapes[FUSED]) == 1
        composed = vmap(lambda x: gradient(x, VmapRules(differentiated_by="any")))(x)
    assert len(mode.shapes[FUSED]) == 1
    torch.testing.assert_close(fused, composed)


def test_a_hand_written_gradient_rejects_a_second_derivative():
    def loss(x):
        with VmapRules():
            value = F.scaled_dot_product_attention(x, x, x).square().sum()
            (inner,) = torch.autograd.grad(value, x, create_graph=True)
        return inner.sum()

    with torch.no_grad(), pytest.raises(SecondDerivativeError):
        vmap(lambda x: vjp(loss, x))(torch.randn(4, 2, 5, 3))
