"""From stacked gradients to every quantity, in plain torch: what one writes around a library that stacks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.methods import stacked
from benchmarks.methods.method import CORRECTION, DAMPING

# From per-sample gradients by parameter name, leaves [B, …], and the name of a quantity.
reduce = partial(
    stacked.reduce,
    norm=lambda rows: rows.norm(dim=1),
    variance=lambda g: g.var(0, correction=CORRECTION),
    solve=lambda k: torch.linalg.solve(
        k + DAMPING * torch.eye(len(k), dtype=k.dtype, device=k.device), torch.ones_like(k[0])
    ),
)


def arrays(result: Any) -> Any:
    """Turn tensors into arrays."""
    if isinstance(result, Mapping):
        return {name: arrays(value) for name, value in result.items()}
    on_host = result.detach().cpu()
    return np.asarray(on_host.float() if on_host.dtype == torch.bfloat16 else on_host)
