"""Threads beside a call: what torch keeps once for all threads is not put back under another one's hands."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from persample import Norm, per_sample_grads

ENGINES = ("eager", "loop", "compiled")
W, X = torch.linspace(-1, 1, 3, dtype=torch.float64), torch.arange(12, dtype=torch.float64).view(4, 3).cos()


def meets(steps):
    """Start a thread that does the first of two steps, and return what has it do the second."""
    inside, goes_on = threading.Event(), threading.Event()

    def run():
        steps(lambda: (inside.set(), goes_on.wait(30)))

    def finish():
        goes_on.set()
        thread.join()

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(30)
    return finish


def failing(_w, _x):
    raise ValueError("mine")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_derivative_of_another_thread_goes_on(engine):
    def derive(pause):
        def function(z):
            pause()
            return (z * W).tanh().sum()

        found.append(jvp(function, (X[0],), (X[1],))[1])

    found = []
    finish = meets(derive)
    try:
        norms = per_sample_grads(lambda w, x: (w * x).sum(), W, X, Norm(), engine=engine)
        with pytest.raises(ValueError, match="mine"):
            per_sample_grads(failing, W, X, Norm(), engine=engine)
    finally:
        finish()
    torch.testing.assert_close(norms, X.norm(dim=1))
    torch.testing.assert_close(found[0], (X[1] * W * (1 - (X[0] * W).tanh() ** 2)).sum())


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_what_another_thread_switches_meanwhile_stays_switched(engine):
    def attend(pause):
        with sdpa_kernel(SDPBackend.MATH):
            pause()

    def loss(w, x):
        finish()
        return (w * x).sum()

    finish = meets(attend)
    assert not torch.backends.cuda.flash_sdp_enabled()
    per_sample_grads(loss, W, X, Norm(), engine=engine)
    assert torch.backends.cuda.flash_sdp_enabled()
