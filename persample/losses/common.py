"""What all losses share: checks of arguments, which would broadcast silently; entries by action, padding, reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from persample.errors import ArgumentError
from persample.utils.trees import stop_gradient

P = ParamSpec("P")
T = TypeVar("T")
_ONE_SAMPLE = "A loss sees one sample: per_sample_grads or torch.vmap add the batch axis."
_MIXING = "0 is for single TD errors, 1 for whole returns."
_FRACTIONS = {"discount_t": "1 is for undiscounted rewards.", "lambda_": _MIXING, "lambda_t": _MIXING}
_TRUTHS = {*_FRACTIONS, "mask_t", "w_t"}  # where truth values are meant as 0 and 1: ~terminated


def is_tensor(value: object, name: str) -> TypeGuard[Tensor]:
    """Return whether an argument is a tensor rather than a number: a mask in the place of rewards would count as one.

    Anything else is rejected (None is only for ``mask_t``), as are truth values in the place of numbers, a mask without
    an axis of time, and a number that is no discount or no λ.
    """
    if isinstance(value, Tensor):
        if value.dtype is torch.bool and name not in _TRUTHS:
            fix = f"Are {name} and mask_t swapped? If not, convert it with .float(), or .long() for actions."
            raise ArgumentError.about(name, expected="numbers", received="torch.bool", fix=fix)
        if name == "mask_t" and value.ndim == 0:
            fix = "Is it a length? Pass torch.arange(T) < length."
            raise ArgumentError.about(name, expected="one entry per time step", received="shape []", fix=fix)
        return True
    if name == "mask_t" and value is None:
        return False
    if (
        name == "mask_t"
        or not isinstance(value, int | float | np.number)
        or (isinstance(value, bool) and name not in _TRUTHS)
    ):
        fix = f"Convert it with torch.as_tensor({name})."
        raise ArgumentError.about(name, expected="a tensor", received=_described(value), fix=fix)
    if name in _FRACTIONS and not 0 <= value <= 1:
        fix = _FRACTIONS[name]
        raise ArgumentError.about(name, expected="a number from 0 to 1", received=repr(value), fix=fix)
    return False


def constant(x: Tensor, **option: bool) -> Tensor:
    """Stop the gradient of a tensor if an option is on; reject anything but a bool, such as a mask in its place."""
    ((name, on),) = option.items()
    if not isinstance(on, bool):
        fix = "Pass options by name, and a mask as mask_t=."
        raise ArgumentError.about(name, expected="a bool", received=_described(on), fix=fix)
    return stop_gradient(x) if on else x


def check_shapes(shape: Sequence[int], like: str, **values: object) -> None:
    """Check that each argument has a shape, that of another one, or is a number or 0-d: others would broadcast."""
    for name, value in values.items():
        if is_tensor(value, name) and value.ndim and value.shape != shape:
            number = "" if name == "mask_t" else "a number or "
            raise _refused(name, f"{number}shape {list(shape)}, as of {like}", value)


def check_same(**values: object) -> None:
    """Check that all tensors have one shape."""
    tensors = {name: value for name, value in values.items() if is_tensor(value, name) and value.ndim}
    for like, first in tensors.items():
        check_shapes(first.shape, like, **tensors)


def check_steps(name: str, steps: Tensor, **values: object) -> None:
    """Check that each argument has one entry per time step, as ``steps``, the argument ``name``."""
    if not is_tensor(steps, name) or steps.ndim == 0:
        raise _refused(name, "a sequence, shape [T]", steps)
    check_shapes(steps.shape, name, **values)


def check_rows(name: str, rows: Tensor, **values: object) -> None:
    """Check that each argument has one entry per row of a table, the argument ``name``."""
    if not is_tensor(rows, name) or rows.ndim == 0:
        raise _refused(name, "one number per action on the last axis", rows)
    check_shapes(rows.shape[:-1], f"the rows of {name}", **values)


def check_actions(name: str, rows: Tensor, **actions: Tensor) -> None:
    """Check that actions are integers, one per row of a table, the argument ``name``."""
    check_rows(name, rows, **actions)
    for other, a in actions.items():
        if not isinstance(a, Tensor) or a.is_floating_point() or a.is_complex():
            received = f"{a.dtype}" if isinstance(a, Tensor) else repr(a)
            fix = "Actions are indices: convert them with .long(); for continuous actions there are gaussian losses."
            raise ArgumentError.about(other, expected="a tensor of integers", received=received, fix=fix)
        if a.shape != rows.shape[:-1]:
            raise _refused(other, f"shape {list(rows.shape[:-1])}, one action per row of {name}", a)


def time_axis(name: str, steps: Tensor, time_dim: int | None) -> int:
    """Return the axis of time, not negative, which only the caller knows if there are several."""
    count = steps.ndim
    if time_dim is None and count > 1:
        fix = "Which axis is time? Pass time_dim=1 for episodes as rows, [E, T], or time_dim=0 for time first."
        raise ArgumentError.about(name, expected="shape [T]", received=f"shape {list(steps.shape)}", fix=fix)
    axis = 0 if time_dim is None else time_dim
    if isinstance(axis, bool) or not isinstance(axis, int) or not -count <= axis < count:
        expected, fix = f"an axis of {name}, from {-count} to {count - 1}", "Pass 1 for [E, T], 0 for [T]."
        raise ArgumentError.about("time_dim", expected=expected, received=repr(time_dim), fix=fix)
    return axis % count


def check_axes(count: int, **values: object) -> None:
    """Check that tensors have the number of axes of one sample."""
    for name, value in values.items():
        if is_tensor(value, name) and value.ndim != count:
            raise _refused(name, "a vector" if count else "one number", value)


def check_not_negative(name: str, value: float, fix: str) -> None:
    """Check that a number is not negative; tensors are not checked."""
    if not isinstance(value, Tensor) and not value >= 0:
        raise ArgumentError.about(name, expected="a number >= 0", received=repr(value), fix=fix)


def _refused(name: str, expected: str, value: object) -> ArgumentError:
    received = f"shape {list(value.shape)}" if isinstance(value, Tensor) else _described(value)
    return ArgumentError.about(name, expected=expected, received=received, fix=_ONE_SAMPLE)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float) else type(value).__name__


def overridable(loss: Callable[P, T]) -> Callable[P, T]:
    """Let ``__torch_function__`` modes intercept a loss as a whole, like functions of ``torch.nn.functional``.

    The eager engine runs such a mode, which would otherwise intercept each access to a shape, at 2 µs each.
    """
    return wrap_torch_function(lambda *args, **_: args)(loss)


def of_actions(rows: Tensor, a: Tensor) -> Tensor:
    """Return the entry of the taken action from each row, ``[*]``: of rows ``[*, A]`` and actions ``[*]``."""
    return rows.gather(-1, a.long().unsqueeze(-1)).squeeze(-1)


def expand_to_steps(x: Tensor | float, like: Tensor) -> Tensor:
    """Expand a value to one entry per step ``[T, *]``: a tensor has the first axes of ``like``, not the last."""
    if isinstance(x, Tensor):
        if x.shape == like.shape and x.dtype == like.dtype:
            return x
        x = x.reshape(*x.shape, *[1] * (like.ndim - x.ndim)) if x.ndim else x
    return torch.ones_like(like) * x


def real_steps(mask_t: Tensor | None, like: Tensor) -> Tensor:
    """Return which of the steps ``like [T, *]`` are real: the mask, of the first axes, as ``[T, *]`` bool."""
    if mask_t is not None and mask_t.shape == like.shape:
        return mask_t.bool()
    every = torch.ones_like(like, dtype=torch.bool)
    return every if mask_t is None else expand_to_steps(mask_t.bool(), every)


def padding(mask_t: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the mask of ``real_steps``; None if all are real: without padding, losses need half of the operations."""
    return None if mask_t is None else real_steps(mask_t, like)


def unpadded(mask: Tensor | None, x: Tensor, fill: float = 0) -> Tensor:
    """Overwrite padding in ``x [*]`` or ``[*, A]`` before use: a product with 0 would keep its NaN in the gradient."""
    if mask is None:
        return x
    if mask.ndim < x.ndim:  # contiguous: repeating an expanded tensor twice takes torch four times as long
        mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)).expand_as(x).contiguous()
    return torch.where(mask, x, fill)


def over_time(loss_t: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """Reduce losses ``[T]`` that are 0 at padding: "sum", "mean" over real steps (0 if there are none), or "none"."""
    if reduction not in ("sum", "mean", "none"):
        fix = "'sum' is the REINFORCE estimator."
        raise ArgumentError.about("reduction", expected="'sum', 'mean' or 'none'", received=repr(reduction), fix=fix)
    if reduction == "none":
        return loss_t
    total = loss_t.sum(-1)
    if reduction == "sum":
        return total
    return total / (max((1, *loss_t.shape[-1:])) if mask is None else mask.sum(-1).clamp(min=1))
