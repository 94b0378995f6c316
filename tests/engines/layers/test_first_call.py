"""Layers on the compiled engine as the first call of a process: nothing has been imported for them before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layer_cases import CASES, CONV, layer
from oracle import assert_trees_close, oracle, reals
from paths import ROOT, TESTS
from torch import nn

import persample as ps


def pooled(dims, pool):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return layer(lambda: nn.Sequential(conv(2, 4, 3), pool()), (2, *[6] * dims), kinds=CONV)


POOLS = {
    "MaxPool1d": pooled(1, lambda: nn.MaxPool1d(2)),
    "MaxPool2d": pooled(2, lambda: nn.MaxPool2d(2)),
    "MaxPool3d": pooled(3, lambda: nn.MaxPool3d(2)),
    "AvgPool2d": pooled(2, lambda: nn.AvgPool2d(2)),
    "AdaptiveAvgPool2d": pooled(2, lambda: nn.AdaptiveAvgPool2d(3)),
    "AdaptiveMaxPool2d": pooled(2, lambda: nn.AdaptiveMaxPool2d(2)),
    "LPPool2d": pooled(2, lambda: nn.LPPool2d(2, 2)),
}
FIRST = {name: case for name, case in CASES.items() if "," not in name and " " not in name}  # one of each kind
KINDS = {**FIRST, **POOLS}
SOON = "MaxPool2d"  # behind a convolution


def check(kind):
    """Call the compiled engine, first of all; then compare."""
    loss_fn, params, batch = KINDS[kind].build()
    assert "torch._inductor.lowering" not in sys.modules
    norms = ps.per_sample_grads(loss_fn, params, batch, ps.Norm(), engine="compiled")
    assert_trees_close(norms, reals(oracle(loss_fn, params, batch)).norm(dim=1), 1e-9)
    assert torch.isfinite(norms).all()


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[] if x == SOON else [pytest.mark.slow]) for x in KINDS])
def test_first_call_of_a_process(kind):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS, Path(__file__).parent)))}
    program = f"import test_first_call; test_first_call.check({kind!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
