"""Damped positive semi-definite linear systems, in float64."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from persample.errors import ConditionWarning
from persample.utils.tracing import holds, is_recorded, is_wrapped

_EPS = torch.finfo(torch.float64).eps


def solve(
    matrix: Tensor, damping: Tensor, right: Tensor, *, eps: float, minimum_norm: bool, scale: Tensor | None = None
) -> tuple[Tensor, bool]:
    """Solve (A + λI) X = B by Cholesky factorization; for λ = 0, return A⁺B, the solution of minimum norm.

    A is a Gram matrix of rows that were rounded to a relative precision. Its eigenvalues below rounding errors (those
    of the rows, squared, and those of float64) count as 0, and so does a damping so small that the factorization fails.
    NaN or infinity in A makes all of X NaN.

    Args:
        matrix: A, ``[B, B]`` float64, of which only the lower triangle is read; its diagonal is overwritten.
        damping: λ >= 0, 0-d float64.
        right: B, ``[B, K]`` float64.
        eps: the relative precision of the rows.
        minimum_norm: whether λ is 0.
        scale: what the rounding errors of A are relative to, 0-d; None for its largest eigenvalue.

    Returns:
        X, ``[B, K]``, and whether λ counted as 0.

    Warns:
        ConditionWarning: if λ counts as 0 and less than half of the digits of X are right.

    Examples:
        >>> matrix, right = torch.tensor([[3.0, 0.0], [0.0, 0.0]]).double(), torch.ones(2, 1).double()
        >>> solve(matrix.clone(), torch.tensor(1.0).double(), right, eps=1e-16, minimum_norm=False)[0].T
        tensor([[0.2500, 1.0000]], dtype=torch.float64)
        >>> solve(matrix, torch.tensor(0.0).double(), right, eps=1e-16, minimum_norm=True)[0].T
        tensor([[0.3333, 0.0000]], dtype=torch.float64)
    """
    poison = 0 * matrix.diagonal().sum()  # every row that is not finite shows there
    if not minimum_norm:
        matrix.diagonal().add_(damping)
        upper, info = torch.linalg.cholesky_ex(matrix.mT, upper=True)  # in LAPACK's layout: a fifth less time
        if is_wrapped(info):
            poison = poison + torch.where(info == 0, 0, torch.nan)
        if is_wrapped(info) or not holds(info != 0):
            # Two triangular solves, which do not copy the factor, as cholesky_solve does.
            half = torch.linalg.solve_triangular(upper.mT, right, upper=False)
            return torch.linalg.solve_triangular(upper, half, upper=True) + poison, False
        matrix.diagonal().sub_(damping)
    known = torch.where(poison == 0, matrix, 0)  # eigenvalues of NaN are an error
    return _pseudo_inverse(known, eps, scale) @ right + poison, True


def solve_weighted(gram: Tensor, weights: Tensor, n: Tensor, damping: Tensor, right: Tensor) -> Tensor:
    """Solve (K W/n + λI) X = B, W = diag(w), by steps that can be differentiated, also where a weight is 0.

    Args:
        gram: K, ``[B, B]`` float64.
        weights: w, ``[B]`` float64.
        n: the number of samples, 0-d float64.
        damping: λ > 0, 0-d float64.
        right: B, ``[B, K]`` float64.

    Returns:
        X, ``[B, K]``; NaN where the matrix is singular.
    """
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    # Not solve_ex: a derivative of its forward derivative lacks a term (pytorch/pytorch#196695).
    factors, pivots, info = torch.linalg.lu_factor_ex(gram * weights / n + damping * identity)
    return torch.linalg.lu_solve(factors, pivots, right) + torch.where(info == 0, 0, torch.nan)


def _pseudo_inverse(matrix: Tensor, eps: float, scale: Tensor | None) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix.detach())
    largest = values[-1].clamp_min(0)
    least = len(values) * max(_EPS, eps**2) * (largest if scale is None else scale.detach())
    if is_recorded(matrix):  # the derivatives of eigenvectors do not exist where eigenvalues are equal
        whole = matrix.tril() + matrix.tril(-1).mT  # the derivative of pinv reads both triangles
        return torch.linalg.pinv(whole, atol=least, rtol=torch.zeros_like(least), hermitian=True)
    kept = values > least
    _warn_if_ill_conditioned(largest / torch.where(kept, values, torch.inf).amin(), eps)
    return (vectors * torch.where(kept, 1 / values, 0)) @ vectors.T


def _warn_if_ill_conditioned(condition: Tensor, eps: float) -> None:
    """Warn if the error of a solution, √κ times that of the rows or κ times that of float64, exceeds √eps."""
    largest = min(1 / eps, eps**0.5 / _EPS)
    if not is_wrapped(condition) and holds(condition > largest):
        warnings.warn(
            f"damping: expected a positive number, received one that counts as 0 for a Gram matrix of condition number "
            f"{float(condition):.0e}; beyond {largest:.0e}, less than half of the digits of the result are right. "
            "Pass a larger damping, such as a thousandth of the mean of the squared gradient norms.",
            ConditionWarning,
            stacklevel=2,
        )
