"""Clipping rules: functions of a gradient's norm that scale it to a norm of at most C.

A rule takes the place of a bound in ``ClippedSum`` and ``ClippedMean``, and of a function in ``WeightedSum``, for
gradients of samples or of units. C = 0 gives zeros, and zero gradients stay zero. NaN in a gradient
makes the result NaN, and infinity makes it NaN there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from persample.errors import ArgumentError
from persample.utils.tracing import is_unreadable
from persample.utils.trees import Leaf

Bound = float | Tensor


@dataclass(frozen=True)
class Rule(ABC):
    """A scale s(‖g‖) >= 0 with s(‖g‖) ‖g‖ <= C for all g. Rules of your own are frozen dataclasses, too.

    Args:
        max_norm: the bound C, a number or 0-d tensor in [0, ∞).
    """

    max_norm: Bound

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):  # programs make rules again, from their fields
            raise TypeError(f"{cls.__name__}: expected a dataclass, received a class with __init__. Declare fields.")

    def __post_init__(self) -> None:
        check_bound("max_norm", self.max_norm)
        if not _is_unreadable(self.max_norm) and not self.max_norm < math.inf:
            fix = "Pass the norm that gradients are scaled to, or ClippedSum(inf) for what clips nothing."
            raise ArgumentError.about("max_norm", expected="a finite number", received="inf", fix=fix)

    @abstractmethod
    def scale(self, norm: Tensor) -> Tensor:
        """Return s(‖g‖), of any shape, for norms in float64."""


@dataclass(frozen=True)
class Automatic(Rule):
    """C / (‖g‖ + γ): automatic clipping, AUTO-S, which has no threshold: C only scales the learning rate.

    γ > 0 keeps the order of the norms; AUTO-V is γ = 0, ``Normalize``.

    Source: Bu, Wang, Zha, Karypis, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger"
    (2022).

    Args:
        max_norm: the bound C, a number or 0-d tensor in [0, ∞).
        gamma: γ > 0.

    Raises:
        ArgumentError: if ``max_norm`` is negative, NaN or infinite, or ``gamma`` is no positive finite number.

    Examples:
        >>> import torch
        >>> from persample import ClippedSum, per_sample_grads
        >>> x, rule = torch.tensor([0.99, 0.0]), Automatic(1.0)
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), x, ClippedSum(rule))
        tensor(0.9900)
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("gamma", self.gamma, "Pass 0.01, as the paper does; for γ = 0 there is Normalize(max_norm).")

    def scale(self, norm: Tensor) -> Tensor:
        """Return C / (‖g‖ + γ)."""
        return _bound_like(self.max_norm, norm) / (norm + self.gamma)


@dataclass(frozen=True)
class Normalize(Rule):
    """C / ‖g‖: every gradient except 0 gets norm C; also known as AUTO-V.

    Source: Das, Hashemi, Sanghavi, Dhillon, "On the Convergence of Differentially Private Federated Learning on
    Non-Lipschitz Objectives, and with Normalized Client Updates" (2021); AUTO-V: Bu et al. (2022).

    Args:
        max_norm: the norm C, a number or 0-d tensor in [0, ∞).

    Raises:
        ArgumentError: if ``max_norm`` is negative, NaN or infinite.

    Examples:
        >>> import torch
        >>> from persample import ClippedSum, per_sample_grads
        >>> x, rule = torch.tensor([0.5, 9.0, 0.0]), Normalize(1.0)
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), x, ClippedSum(rule))
        tensor(2.)
    """

    def scale(self, norm: Tensor) -> Tensor:
        """Return C / ‖g‖, and 0 for a zero gradient."""
        is_zero = norm == 0
        return (_bound_like(self.max_norm, norm) / norm.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)


@dataclass(frozen=True)
class PerSampleAdaptive(Rule):
    """C / (‖g‖ + r / (‖g‖ + r)): per-sample adaptive clipping, PSAC.

    Large gradients get almost norm C, as under ``Normalize``; small ones are not blown up: s(0) = C.

    Source: Xia, Shen, Yao, Fu, Xu, Xu, Fu, "Differentially Private Learning with Per-Sample Adaptive Clipping" (2023).

    Args:
        max_norm: the bound C, a number or 0-d tensor in [0, ∞).
        r: the number r > 0.

    Raises:
        ArgumentError: if ``max_norm`` is negative, NaN or infinite, or ``r`` is no positive finite number.

    Examples:
        >>> import torch
        >>> from persample import ClippedSum, per_sample_grads
        >>> x, rule = torch.tensor([1.0, 0.0]), PerSampleAdaptive(1.0, r=1.0)
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), x, ClippedSum(rule))  # 1 / (1 + 1/2)
        tensor(0.6667)
    """

    r: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("r", self.r, "Pass a small number such as 0.1.")

    def scale(self, norm: Tensor) -> Tensor:
        """Return C / (‖g‖ + r / (‖g‖ + r))."""
        return _bound_like(self.max_norm, norm) / (norm + self.r / (norm + self.r))


def next_bound(max_norm: float, norms: Tensor, quantile: float = 0.5, rate: float = 0.2) -> float:
    """Return C exp(−η (b − γ)), b the share of norms that are at most C: the bound of the next step.

    C moves to the γ-quantile of the norms. Within a call C is given. The result is not private: for privacy, b needs
    noise, which takes a part of the budget.

    Source: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping" (2021),
    Algorithm 1.

    Args:
        max_norm: the bound C > 0 of this step.
        norms: the norms of this step's samples or units, ``[B]``, as ``Norm()`` returns them.
        quantile: γ, from 0 to 1.
        rate: the learning rate η > 0.

    Raises:
        ArgumentError: if a number is out of its range, or ``norms`` is no ``[B]`` with B > 0.

    Examples:
        >>> import torch
        >>> next_bound(1.0, torch.tensor([0.5, 2.0, 3.0, 4.0]), quantile=0.5, rate=1.0)  # exp(-(1/4 - 1/2))
        1.2840254166877414
    """
    check_positive("max_norm", max_norm, "Begin with a guess such as 0.1.")
    check_positive("rate", rate, "Pass 0.2, as the paper does.")
    if not (isinstance(quantile, Real) and 0 <= quantile <= 1):
        fix = "Pass the share of gradients that are not to be clipped."
        raise ArgumentError.about("quantile", expected="a number from 0 to 1", received=repr(quantile), fix=fix)
    if not isinstance(norms, Tensor) or norms.ndim != 1 or not len(norms):
        received = f"shape {list(norms.shape)}" if isinstance(norms, Tensor) else type(norms).__name__
        fix = "Ask for Norm() beside the clipped sum."
        raise ArgumentError.about("norms", expected="norms [B], at least one", received=received, fix=fix)
    share = float((norms <= max_norm).double().mean())
    return float(max_norm) * math.exp(-rate * (share - quantile))


def check_bound(argument: str, bound: Leaf) -> None:
    """Reject a bound that is no number from 0 to ∞."""
    number = (isinstance(bound, Real) and not isinstance(bound, bool)) or (
        isinstance(bound, Tensor) and bound.ndim == 0 and not bound.is_complex()
    )
    if not number or not (_is_unreadable(bound) or bound >= 0):
        fix = "Pass the largest norm that one sample may contribute; inf clips nothing."
        raise ArgumentError.about(argument, expected="a number >= 0", received=repr(bound), fix=fix)


def check_positive(argument: str, number: object, fix: str) -> None:
    """Reject what is no positive finite number."""
    if not (isinstance(number, Real) and not isinstance(number, bool) and 0 < float(number) < math.inf):
        raise ArgumentError.about(argument, expected="a positive number", received=repr(number), fix=fix)


def _is_unreadable(bound: Leaf) -> bool:
    return isinstance(bound, Tensor) and is_unreadable(bound)


def _bound_like(bound: Bound, norm: Tensor) -> Tensor | float:
    return bound.to(norm) if isinstance(bound, Tensor) else float(bound)
