"""What an editor makes of code that uses persample; a type checker has ``tests/users_code.py``."""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path

import jedi
import pytest
from paths import ROOT

import persample
from persample import accumulate, composite_grads, explain, per_sample_grads
from persample.rl.diagnostics import policy_gradients

FUNCTIONS = [per_sample_grads, explain, composite_grads, accumulate]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("persample.per_sa", "per_sample_grads"),
        ("persample.Clip", "ClippedMean"),
        ("persample.losses.td_", "td_loss"),
        ("persample.per_sample_grads(f, p, b, chu", "chunk_size="),
        ("persample.explain(f, p, b).ro", "rows"),
    ],
)
def test_editors_complete(typed, completed):
    script = jedi.Script(f"import persample\n{typed}", path=ROOT / "user.py")
    assert completed in {completion.name_with_symbols for completion in script.complete()}


def test_the_package_says_that_it_is_typed():
    assert (Path(persample.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.combinations(FUNCTIONS, 2)), ids=lambda function: function.__name__
)
def test_functions_share_names_order_and_defaults(one, other):
    """``reduce`` and ``chunk_size`` of composite_grads have defaults of their own, which its docstring explains."""
    first, second = inspect.signature(one).parameters, inspect.signature(other).parameters
    shared = [name for name in first if name in second]
    assert shared == [name for name in second if name in first]
    own = {"reduce", "chunk_size"} if composite_grads in {one, other} else set()
    assert all(first[name].default == second[name].default for name in shared if name not in own)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_options_are_named(function):
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    assert kinds[:4] == kinds[:1] * 4
    assert {*kinds[4:]} - {inspect.Parameter.VAR_POSITIONAL} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_help_explains_every_argument(function):
    text = inspect.getdoc(function)
    documented = re.findall(r"^    (\w+): ", text.partition("Args:")[2].partition("Returns:")[0], re.MULTILINE)
    assert documented == [name for name in inspect.signature(function).parameters if name != "_apart"]
    assert all(f"\n{section}:\n" in text for section in ("Args", "Returns", "Raises", "Examples"))


def test_help_names_the_options_that_are_passed_on():
    assert "``keep_batch_dim``" in inspect.getdoc(policy_gradients).partition("**options: ")[2]
