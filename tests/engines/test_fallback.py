"""Operations without a batching rule: torch runs them sample by sample, and its own warning reaches the caller."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch.nn import functional as F

from persample import ClippedMean, Norm, per_sample_grads

W, X = torch.ones(3), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
_SCRIPT = """
import torch
from torch.nn import functional as F
from persample import Norm, per_sample_grads
w, x = torch.ones(3), torch.ones(4, 3)
per_sample_grads(lambda w, x: (w * x).sum(), w, x, Norm())  # torch's own imports reset what was shown
for _ in range(3):
    per_sample_grads(lambda w, x: F.multi_margin_loss((w * x)[None], torch.tensor([1])), w, x, Norm())
"""


def looped(w, x):
    return F.multi_margin_loss((w * x)[None], torch.tensor([1]))


@pytest.mark.parametrize("reduce", [Norm(), ClippedMean(1.0)], ids=["norm", "clipped mean"])
def test_the_warning_names_the_operation(reduce):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = per_sample_grads(looped, W, X, reduce)
    texts = [str(warning.message) for warning in caught]
    assert any("performance drop" in text and "aten::multi_margin_loss" in text for text in texts)
    torch.testing.assert_close(found, per_sample_grads(looped, W, X, reduce, engine="loop"))


def test_by_default_it_is_shown_once_for_each_operation():
    shown = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True).stderr
    assert shown.count("rule for aten::multi_margin_loss.") == 1


def test_where_warnings_are_errors_it_is_one():
    with pytest.raises(UserWarning, match=r"performance drop .* aten::multi_margin_loss"):
        per_sample_grads(looped, W, X, Norm())


def test_where_warnings_are_ignored_nothing_is_said():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        per_sample_grads(looped, W, X, Norm())
    assert not caught


@pytest.mark.parametrize("engine", ["eager", "loop", "traced", "compiled"])
def test_a_call_changes_neither_the_filters_nor_what_shows_warnings(engine):
    seen = []

    def loss(w, x):
        seen.append((warnings.showwarning, list(warnings.filters)))
        return (w * x).sum()

    before = warnings.showwarning, list(warnings.filters)
    per_sample_grads(loss, W, X, Norm(), engine=engine)
    assert (warnings.showwarning, list(warnings.filters)) == before
    if engine not in {"traced", "compiled"}:  # it reads the loss instead of calling it
        assert seen
        assert all(found == before for found in seen)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_warnings_of_the_loss_pass_as_they_are(engine):
    def loss(w, x):
        warnings.warn("mine", RuntimeWarning, stacklevel=1)
        return (w * x).sum()

    with pytest.warns(RuntimeWarning, match=r"^mine$"):
        per_sample_grads(loss, W, X, Norm(), engine=engine)


def test_warnings_of_a_compiled_loss_are_passed_over():
    def loss(w, x):
        warnings.warn("mine", RuntimeWarning, stacklevel=1)
        return (w * x).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = per_sample_grads(loss, W, X, Norm(), engine="compiled")
    assert not caught
    assert torch.allclose(result, per_sample_grads(lambda w, x: (w * x).sum(), W, X, Norm()))
