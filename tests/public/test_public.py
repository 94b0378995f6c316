"""What the package shows to the outside."""

from __future__ import annotations

import doctest
import inspect
import re
import sys

import pytest
from paths import ROOT

import persample
from persample import losses, naive, rl
from persample.rl import diagnostics, training

REFERENCE = (ROOT / "docs" / "reference.md").read_text()
FUNCTIONS_AND_CLASSES = [name for name in persample.__all__ if not inspect.ismodule(getattr(persample, name))]
NAMES = [
    *(f"persample.{name}" for name in FUNCTIONS_AND_CLASSES),
    *(f"persample.losses.{name}" for name in losses.__all__ if name != "stop_gradient"),
    *(f"persample.rl.{name}" for name in rl.__all__),
    *(f"persample.rl.diagnostics.{name}" for name in diagnostics.__all__),
    *(f"persample.rl.training.{name}" for name in training.__all__),
    *(f"persample.naive.{name}" for name in ("loop", "value_and_grad", "stack_mean_backward", "backward_each")),
]
FORMULAS = [
    *(f"persample.{name}" for name in persample.__all__ if name in persample.reductions.__all__),
    *(f"persample.losses.{name}" for name in losses.__all__ if name not in {"stop_gradient", "VTraceOutput"}),
]


def place(name):
    """Where the reference finds it: a function of its module's name would be taken for the module."""
    return f"{name}.{name.rpartition('.')[2]}" if name in sys.modules else name


def test_the_version_is_that_of_the_package():
    assert f'\nversion = "{persample.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_all_is_sorted_and_complete():
    assert sorted(persample.__all__) == persample.__all__
    reductions = {
        name
        for name, value in vars(persample.reductions).items()
        if inspect.isclass(value) and issubclass(value, persample.reductions.Reduction)
    }
    assert reductions - {"Reduction"} <= set(persample.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented_with_an_example(name):
    namespace = {"persample": persample, "losses": losses, "naive": naive}
    thing = eval(name, namespace)
    assert inspect.getdoc(thing)
    if not (inspect.isclass(thing) and issubclass(thing, (Exception, tuple))):  # results are shown where they are made
        assert doctest.DocTestFinder(recurse=False).find(thing, name)[0].examples
    assert f"::: {place(name)}\n" in REFERENCE


@pytest.mark.parametrize("name", FORMULAS)
def test_every_reduction_and_loss_has_a_formula(name):
    (row,) = [line for line in REFERENCE.splitlines() if f"](#{place(name)}) | " in line]
    assert re.search(r"\$.+\$", row)


@pytest.mark.parametrize("name", NAMES)
def test_public_functions_say_what_they_return(name):
    thing = eval(name, {"persample": persample, "losses": losses, "naive": naive})
    if inspect.isfunction(thing) and inspect.signature(thing).return_annotation not in {"None", "NoReturn"}:
        assert re.search(r"^(Returns|Yields):$", inspect.getdoc(thing), re.MULTILINE)
