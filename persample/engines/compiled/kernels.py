"""Operations that compiled code leaves to torch's kernels: Inductor's versions are wrong, or round differently.

Rounding matters where a gradient consists of rounding errors, as the derivative 1 − tanh² of a saturated unit
does. Inductor calls another library's tanh, and computes some gradients by other formulas (1 − σ for 1 / (1 + e^x),
float64 constants for float32 ones). In float32, where that tanh takes twice as long, too, tanh is a formula.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from persample._torch import OpOverload, schema
from persample.utils import trees
from persample.utils.trees import Leaf

_aten = torch.ops.aten
_Rule = Callable[..., object]  # returns ``NotImplemented`` where it has no answer


# tanh(x) ≈ x + x³ P(x²) for |x| < 0.75. Our own fit of the relative error (weighted least squares, the weights raised
# where the error is largest until it is even): 3.7e-8, half of float32's rounding.
_SMALL = 0.75
_P = (-0.3333306908607483, 0.13326521217823029, -0.0533902570605278, 0.019664909690618515, -0.004769487306475639)


def tanh(x: Tensor) -> object:
    """Return the hyperbolic tangent of float32 on a CPU, to 1.3 units in the last place; leave others to Inductor.

    Beyond ``_SMALL`` its size is 1 − 2 / (exp(2 |x|) + 1). That rounds to 1 where it should: an error of a few units
    would be all that is left of the derivative 1 − tanh² there.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return NotImplemented
    size, square = x.abs(), x * x
    correction: Tensor | float = _P[-1]
    for coefficient in _P[-2::-1]:
        correction = correction * square + coefficient
    small, large = size + size * (square * correction), 1 - 2 / ((2 * size).exp() + 1)
    return torch.copysign(torch.where(size < _SMALL, small, large), x)


def with_torch_kernels(table: Mapping[OpOverload, _Rule]) -> dict[OpOverload, _Rule]:
    """Return a table of decompositions in which the operations of this file call torch's kernels."""
    table = {**table, _aten.tanh.default: tanh}
    if torch.__version__ < "2.15":
        table[_aten.pow.Scalar] = _power
    kept = [*_LEFT_TO_TORCH, *filter(_is_nearest, table)]
    return {**table, **{x: functools.partial(_decomposed, x, table.get(x, _kept)) for x in kept}}


def torch_kernel(operation: object, args: Sequence[Leaf]) -> _Rule | None:
    """Return an operation that calls torch's kernel for traced arguments; None where Inductor computes the same."""
    if not isinstance(operation, OpOverload):
        return None
    rule = _is_scaled if _is_nearest(operation) else _LEFT_TO_TORCH.get(operation)
    return _opaque(operation) if rule is not None and rule(*args) else None


def _decomposed(operation: OpOverload, otherwise: _Rule, *args: Leaf, **kwargs: object) -> object:
    return (torch_kernel(operation, args) or otherwise)(*args, **kwargs)


def _kept(*_args: object, **_kwargs: object) -> object:
    return NotImplemented  # make_fx then leaves the operation as it is


def _power(base: complex, exponent: Tensor) -> object:
    """Return a power of tensors: C++ passes numbers as floats, and would read powers of floats as integers."""
    dtype = torch.result_type(base, exponent)
    if dtype.is_floating_point or dtype.is_complex:
        return NotImplemented
    return torch.full((), base, dtype=dtype, device=exponent.device) ** exponent


@functools.cache
def _is_nearest(operation: object) -> bool:
    """Return whether an operation resizes images to their nearest elements: to a size, by scales, and by no corners."""
    names = [x.name for x in schema(operation).arguments] if isinstance(operation, OpOverload) else []
    return names[1:2] == ["output_size"] and names[-1].startswith("scales") and "align_corners" not in names


def _is_scaled(x: Tensor, sizes: Sequence[object], *rest: object) -> bool:
    """Return whether the nearest elements depend on how scales are rounded, where torch has special cases."""
    shape, scales = (rest[0], rest[1:]) if rest and isinstance(rest[0], Sequence) else (x.shape, rest)
    for size, before, scale in itertools.zip_longest(sizes, shape[2:], scales):
        is_static = isinstance(size, int) and isinstance(before, int)
        if not is_static or size not in {before, 2 * before, 4 * before} or scale not in {None, size / before}:
            return True
    return False


_TANH, _MEANS = (_aten.tanh, _aten.tanh_backward), (_aten.avg_pool2d_backward, _aten.avg_pool3d_backward)
_WRITTEN = _aten.diagonal_scatter, _aten.as_strided_scatter
_ROUNDED = _aten.hardsigmoid_backward, _aten.soft_margin_loss_backward, _aten.binary_cross_entropy_backward
_LEFT_TO_TORCH: dict[OpOverload, Callable[..., bool]] = {
    **{x.default: lambda x, *_: x.device.type == "cpu" and x.dtype == torch.float64 for x in _TANH},
    **{x.default: lambda x, *_: x.device.type == "cpu" for x in _ROUNDED},
    # With ceil_mode, count_include_pad and no divisor, Inductor divides by too much at the border.
    **{x.default: lambda *args: args[5] and args[6] and args[7] is None for x in _MEANS},
    # Inductor reads a complex copy before it has written the part into it.
    **{x.default: lambda x, *_: x.is_complex() for x in _WRITTEN},
    # Until torch 2.14, its decomposition counts what comes after -1.
    _aten.multilabel_margin_loss_forward.default: lambda *_: torch.__version__ < "2.14",
}


@functools.cache
def _opaque(operation: OpOverload) -> _Rule:
    """Return an operation ``persample::…`` that calls torch's kernel, registered when a program first needs it."""
    name, _, signature = str(schema(operation)).removeprefix("aten::").partition("(")
    compute = functools.partial(_computed, operation)
    own = torch.library.custom_op(f"persample::{name}", compute, mutates_args=(), schema=f"({signature}")
    own.register_fake(compute)
    return own


def _computed(operation: _Rule, *args: object) -> object:
    return trees.map_tensors(Tensor.contiguous, operation(*args))
