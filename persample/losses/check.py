"""Checks of the arguments of losses: types, shapes, actions, options. Wrong shapes would broadcast silently."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from persample.errors import ArgumentError

_ONE_SAMPLE = "A loss sees one sample: per_sample_grads or torch.vmap add the batch axis."
_MIXING = "0 is for single TD errors, 1 for whole returns."
_FRACTIONS = {"discount_t": "1 is for undiscounted rewards.", "lambda_": _MIXING, "lambda_t": _MIXING}
_TRUTHS = {*_FRACTIONS, "mask_t", "w_t"}  # where truth values are meant as 0 and 1: ~terminated


def is_tensor(name: str, value: Any) -> bool:
    """Return whether an argument is a tensor rather than a number: a mask in the place of rewards would count as one.

    Args:
        name: the name of the argument.
        value: its value; None is only for ``mask_t``.

    Returns:
        True for a tensor, False for a number or None.

    Raises:
        ArgumentError: if it is anything else, if numbers are truth values or a mask has no axis of time, or if a
            number is no discount or no λ.

    Examples:
        >>> is_tensor("r_t", torch.zeros(2)), is_tensor("r_t", 1.0)
        (True, False)
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


def is_on(name: str, option: bool) -> bool:
    """Return an option, which is often mistaken for the place of a mask.

    Args:
        name: the name of the option.
        option: its value.

    Returns:
        The value.

    Raises:
        ArgumentError: if it is no bool.
    """
    if not isinstance(option, bool):
        fix = "Pass options by name, and a mask as mask_t=."
        raise ArgumentError.about(name, expected="a bool", received=_described(option), fix=fix)
    return option


def check_same(**values: Any) -> None:
    """Check that all tensors have one shape; a number or a 0-d tensor applies to all entries.

    Args:
        values: the arguments by name.

    Raises:
        ArgumentError: if two shapes differ.
    """
    first, common = "", None
    for name, value in values.items():
        if not is_tensor(name, value) or value.ndim == 0:
            continue
        if common is not None and value.shape != common:
            raise _refused(name, f"shape [] or {list(common)}, as of {first}", value)
        first, common = first or name, value.shape


def check_steps(name: str, steps: Tensor, **values: Any) -> None:
    """Check that each argument has one entry per time step, or is a number.

    Args:
        name: the name of ``steps``.
        steps: the argument that defines the number of steps.
        values: the other arguments by name.

    Raises:
        ArgumentError: if a shape differs from that of ``steps``.
    """
    if not is_tensor(name, steps) or steps.ndim == 0:
        raise _refused(name, "a sequence, shape [T]", steps)
    for other, value in values.items():
        if is_tensor(other, value) and value.ndim and value.shape != steps.shape:
            number = "" if other == "mask_t" else "a number or shape [] or "
            raise _refused(other, f"{number or 'shape '}{list(steps.shape)}, as of {name}", value)


def time_axis(name: str, steps: Tensor, time_dim: int | None) -> int:
    """Return the axis of time, which only the caller knows if there are several.

    Args:
        name: the name of ``steps``.
        steps: one number per step, ``[T]`` or with further axes.
        time_dim: the argument of the user; None for ``[T]``.

    Returns:
        The axis, not negative.

    Raises:
        ArgumentError: if there are several axes and ``time_dim`` is None, or if it is no axis of ``steps``.

    Examples:
        >>> import torch
        >>> time_axis("r_t", torch.zeros(2, 3), -1)
        1
    """
    count = steps.ndim
    if time_dim is None and count > 1:
        fix = "Which axis is time? Pass time_dim=1 for episodes as rows, [E, T], or time_dim=0 for time first."
        raise ArgumentError.about(name, expected="shape [T]", received=f"shape {list(steps.shape)}", fix=fix)
    axis = 0 if time_dim is None else time_dim
    if isinstance(axis, bool) or not isinstance(axis, int) or not -count <= axis < count:
        expected, fix = f"an axis of {name}, from {-count} to {count - 1}", "Pass 1 for [E, T], 0 for [T]."
        raise ArgumentError.about("time_dim", expected=expected, received=repr(time_dim), fix=fix)
    return axis % count


def check_rows(name: str, rows: Tensor, **values: Any) -> None:
    """Check that each argument has one entry per row of a table.

    Args:
        name: the name of the table.
        rows: the table, one number per action on its last axis.
        values: the other arguments by name; None and numbers apply to all rows.

    Raises:
        ArgumentError: if a shape differs from that of ``rows`` without its last axis.
    """
    if not is_tensor(name, rows) or rows.ndim == 0:
        raise _refused(name, "one number per action on the last axis", rows)
    for other, value in values.items():
        if is_tensor(other, value) and value.ndim and value.shape != rows.shape[:-1]:
            raise _refused(other, f"shape {list(rows.shape[:-1])}, one entry per row of {name}", value)


def check_actions(name: str, rows: Tensor, **actions: Tensor) -> None:
    """Check that actions are one index per row of a table.

    Args:
        name: the name of the table.
        rows: the table, one number per action on its last axis.
        actions: the actions by name.

    Raises:
        ArgumentError: if actions are not integers, or not one per row.
    """
    check_rows(name, rows, **actions)
    for other, a in actions.items():
        if not isinstance(a, Tensor):
            fix = "Convert them with torch.as_tensor()."
            raise ArgumentError.about(other, expected="a tensor of integers", received=repr(a), fix=fix)
        if a.is_floating_point() or a.is_complex():
            fix = "Actions are indices: convert them with .long(); for continuous actions there are gaussian losses."
            raise ArgumentError.about(other, expected="integers", received=f"{a.dtype}", fix=fix)
        if a.shape != rows.shape[:-1]:
            raise _refused(other, f"shape {list(rows.shape[:-1])}, one action per row of {name}", a)


def check_axes(count: int, **values: Any) -> None:
    """Check the number of axes of tensors.

    Args:
        count: the number of axes of one sample.
        values: the arguments by name.

    Raises:
        ArgumentError: if a tensor has another number of axes.
    """
    for name, value in values.items():
        if is_tensor(name, value) and value.ndim != count:
            raise _refused(name, "a vector" if count else "one number", value)


def check_not_negative(name: str, value: float, fix: str) -> None:
    """Check that a number is not negative; tensors are not checked.

    Args:
        name: the name of the argument.
        value: the number.
        fix: what to pass instead.

    Raises:
        ArgumentError: if the number is negative or NaN.
    """
    if not isinstance(value, Tensor) and not value >= 0:
        raise ArgumentError.about(name, expected="a number >= 0", received=repr(value), fix=fix)


def _refused(name: str, expected: str, value: Any) -> ArgumentError:
    received = f"shape {list(value.shape)}" if isinstance(value, Tensor) else _described(value)
    return ArgumentError.about(name, expected=expected, received=received, fix=_ONE_SAMPLE)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float) else type(value).__name__
