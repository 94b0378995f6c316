"""Threads beside a call: what torch keeps once for all threads is not put back under another one's hands."""

from __future__ import annotations

import sys
import threading
import warnings

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.func import jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from persample import Norm, _torch, per_sample_grads

ENGINES = ("eager", "loop", "traced", "compiled")
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


def masked_attention(w, x):
    return F.scaled_dot_product_attention(x @ w, x, x, attn_mask=torch.ones(3, 3, dtype=torch.bool).tril()).sum()


MULTI_HEAD = nn.MultiheadAttention(4, 2).double()


def multi_head(model, x):
    return model(x, x, x, need_weights=False, attn_mask=torch.ones(3, 3, dtype=torch.bool).triu(1))[0].sum()


def settings():
    """Everything that torch and Python keep once for all threads, and the modes of this thread."""
    cuda, modules = torch.backends.cuda, vars(torch.backends).values()
    flags = [(flag, getattr(x, flag)) for x in modules for flag in ("enabled", "deterministic") if hasattr(x, flag)]
    return {
        "attention": (
            *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
            *(cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        ),
        "backends": flags,
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.get_config_copy(),
        "warnings": list(warnings.filters),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "dispatch modes": _torch.dispatch_flags(),
    }


def together(*functions):
    """Call functions in a thread each, at once; return what they raised, or how the settings of a thread changed."""
    failures, barrier = [], threading.Barrier(len(functions))

    def run(function):
        barrier.wait(60)
        try:
            before = settings()
            function()
            after = settings()
            failures.extend(name for name in ("dynamo", "inductor", "modes") if before[name] != after[name])
        except Exception as error:  # noqa: BLE001 (reported below)
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_attention_in_two_threads_leaves_the_choice_of_kernels():
    def run():
        for _ in range(60):
            per_sample_grads(masked_attention, torch.eye(4).double(), torch.ones(4, 2, 3, 4).double(), Norm())
            per_sample_grads(multi_head, MULTI_HEAD, torch.ones(4, 3, 4).double(), Norm())

    before, interval = settings(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet inside of a context, if there is one
    try:
        assert together(run, run) == []
    finally:
        sys.setswitchinterval(interval)
    assert settings() == before


def test_calls_beside_torch_compile_leave_all_settings():
    w, x = torch.eye(4).double(), torch.ones(4, 2, 3, 4).double()

    def eager():
        for _ in range(20):
            per_sample_grads(masked_attention, w, x, Norm())
            per_sample_grads(multi_head, MULTI_HEAD, x[:, 0], Norm())

    def compiled():
        for number in range(3):
            per_sample_grads(
                lambda w, x, k=number: masked_attention(w, x).sin() * (k + 1), w, x, Norm(), engine="compiled"
            )

    def own():
        for number in range(3):
            torch.compile(lambda x, k=number: (x.sin() + k).cumsum(0).exp())(x)

    before = settings()
    assert together(eager, compiled, own) == []
    after = settings()
    # A mode that torch enters when it runs what torch.compile has compiled is under no lock of torch's.
    _torch.set_dispatch_flags(before["dispatch modes"])
    assert {**after, "dispatch modes": before["dispatch modes"]} == before
