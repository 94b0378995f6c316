"""torch.func's warnings of a performance drop reach the user with the reason and what to do; others as they are."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch.nn import functional as F

from persample import Norm, per_sample_grads
from persample.utils.fallback import explained

W, X = torch.ones(3), torch.randn(4, 3)


def looped(w, x):
    return F.multi_margin_loss((w * x)[None], torch.tensor([1]))


def test_the_warning_names_the_operation_and_the_fix():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        per_sample_grads(looped, W, X, Norm())
    texts = [str(warning.message) for warning in caught]
    assert any(text.startswith("loss_fn uses aten::multi_margin_loss") for text in texts)
    assert all("Write it with operations that torch.func batches" in text for text in texts)
    assert not any("performance drop" in text for text in texts)


def test_where_warnings_are_errors_it_is_one_with_the_same_words():
    with pytest.raises(UserWarning, match=r"loss_fn uses aten::multi_margin_loss.*The result is right, only slower"):
        per_sample_grads(looped, W, X, Norm())


def test_where_warnings_are_ignored_nothing_is_said():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        per_sample_grads(looped, W, X, Norm())
    assert not caught


def test_other_warnings_pass_as_they_are():
    def loss(w, x):
        warnings.warn("mine", RuntimeWarning, stacklevel=1)
        return (w * x).sum()

    with pytest.warns(RuntimeWarning, match=r"^mine$"):
        per_sample_grads(loss, W, X, Norm())
    with pytest.raises(UserWarning, match=r"^own$"), explained():
        raise UserWarning("own")


def test_what_shows_warnings_is_restored_also_after_errors_and_not_nested():
    def nested():
        with explained():
            once = warnings.showwarning
            with explained():
                assert warnings.showwarning is once
            raise ZeroDivisionError

    before = warnings.showwarning
    with pytest.raises(ZeroDivisionError):
        nested()
    assert warnings.showwarning is before


def test_threads_do_not_lose_warnings():
    seen = []

    def work():
        with explained():
            warnings.warn("from a thread", RuntimeWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen += [str(warning.message) for warning in caught]
    assert seen == ["from a thread"] * 8
