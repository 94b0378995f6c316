"""Linear systems: ``torch.linalg.solve``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from persample._torch import is_forward_mode, transforms


def _solve(A: Tensor, B: Tensor, *, left: bool = True, out: Tensor | None = None) -> Tensor:  # noqa: N803 (torch's names)
    # A derivative of torch's forward derivative lacks a term (pytorch/pytorch#196695), and is arbitrary under vmap.
    if out is not None or not ("jvp" in transforms() or is_forward_mode()):
        return torch.linalg.solve(A, B, left=left, out=out)
    is_vector = B.ndim == 1 or B.shape == A.shape[:-1]
    columns = B.unsqueeze(-1) if is_vector else B
    factors, pivots = torch.linalg.lu_factor(A)
    solution = torch.linalg.lu_solve(factors, pivots, columns, left=left)
    return solution.squeeze(-1) if is_vector else solution


RULES: dict[Any, Callable[..., Any]] = {torch.linalg.solve: _solve}
