"""tanh for compiled code in float32: Inductor calls a function of another library, which takes four times as long."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# tanh(x) ≈ x P(x²) / Q(x²) for |x| ≤ 9, beyond which float32 knows only ±1. Our own fit of the relative error (weighted
# least squares, the weights raised where the error is largest until it is even): 2.1e-8, a third of float32's rounding.
_LARGEST = 9.0
_P = (1.0, 0.13381013890204888, 0.0034955741432986234, 2.0608854125321326e-05, 1.335435439549553e-08)
_Q = (1.0, 0.46714329492404033, 0.02587692903742809, 0.0003285611993359437, 7.776430421262394e-07)


def tanh(x: Tensor) -> Any:
    """Return the hyperbolic tangent of float32 on a CPU, to 4 units in the last place; leave others to torch."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return NotImplemented
    x = x.clamp(-_LARGEST, _LARGEST)
    square = x * x
    return (x * _polynomial(_P, square) / _polynomial(_Q, square)).clamp(-1, 1)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Any:
    value: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value
