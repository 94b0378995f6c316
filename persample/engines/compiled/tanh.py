"""tanh of float32 in compiled code on CPUs: the function of another library that Inductor calls takes twice as long."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# tanh(x) ≈ x + x³ P(x²) for |x| < 0.75. Our own fit of the relative error (weighted least squares, the weights raised
# where the error is largest until it is even): 3.7e-8, half of float32's rounding.
_SMALL = 0.75
_P = (-0.3333306908607483, 0.13326521217823029, -0.0533902570605278, 0.019664909690618515, -0.004769487306475639)


def tanh(x: Tensor) -> Any:
    """Return the hyperbolic tangent of float32 on a CPU, to 1.3 units in the last place; leave others to Inductor.

    Beyond ``_SMALL`` its size is 1 − 2 / (exp(2 |x|) + 1). That rounds to 1 where it should: an error of a few units
    would be all that is left of the derivative 1 − tanh² there.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return NotImplemented
    size, square = x.abs(), x * x
    correction: Any = _P[-1]
    for coefficient in _P[-2::-1]:
        correction = correction * square + coefficient
    small, large = size + size * (square * correction), 1 - 2 / ((2 * size).exp() + 1)
    return torch.copysign(torch.where(size < _SMALL, small, large), x)
