"""The linear system of all gradients: its Gram matrix over all parameters, in float64, and its solution."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.errors import ConditionWarning
from persample.factors import contractions, cost_model
from persample.factors.factor import Factor
from persample.utils.numerics import memory_of_rows
from persample.utils.tracing import holds, is_recorded, is_wrapped
from persample.utils.trees import Leaf

# The rows of a block. Smaller ones save products above the diagonal and memory, larger ones operations: for 256 samples
# of MLPs of width 64 and 256, 64 and 128 take the same time, 256 up to 1.15 times as long (compiled; torch 2.13, AMD
# EPYC).
_ROWS = 64

Block = tuple[slice, slice]


def float64_gram(factors: Sequence[Factor], scale: Tensor | None = None, *, lower: bool = False) -> Tensor:
    """Return sᵢ sⱼ ⟨gᵢ, gⱼ⟩ over all parameters, ``[N, N]`` float64; N is the number of rows (B·K of K outputs).

    float64 holds the products of all float32 numbers: no operand is balanced.
    """
    size = math.prod(factors[0].sizes)
    blocks = _blocks(size, factors[0].device, lower=lower)
    sums: list[Leaf] = [None] * len(blocks)
    products = [() if factor.outputs else factor.product_operands for factor in factors]
    for operands in _operands(filter(None, products)):
        _add_products(sums, blocks, *operands)
    for factor, product in zip(factors, products, strict=True):
        if not product:
            _add_parts(sums, blocks, factor.gram(dtype=torch.float64).view(size, size))
    for place, (rows, columns) in enumerate(blocks):
        if scale is not None:
            sums[place] = sums[place] * (scale[rows, None] * scale[columns])
        if columns.stop < size:
            sums[place] = pad(sums[place], (0, size - columns.stop))
    return sums[0] if len(blocks) == 1 else torch.cat(sums)


def _blocks(size: int, device: torch.device, *, lower: bool) -> list[Block]:
    """Return the rows and columns of each block: one on a GPU, and in a program for any number of samples."""
    step = size if device.type != "cpu" or cost_model.is_for_any_size() else _ROWS
    starts = range(0, max(size, 1), max(step, 1))
    return [(slice(start, start + step), slice(min(start + step, size) if lower else size)) for start in starts]


def _operands(products: Iterable[Sequence[Tensor]]) -> Iterator[tuple[Tensor, list[Tensor], int]]:
    """Yield signals, and what they are multiplied with: inputs, and the ones of biases.

    Gram matrices of parameters whose signals share memory, such as a weight and its bias, have those as a factor.
    """
    groups: dict[object, tuple[Tensor, list[Tensor | None]]] = {}
    for operands in products:
        signals, *others = (x.flatten(1) if x.ndim > 1 else x.unsqueeze(1) for x in operands)
        groups.setdefault(memory_of_rows(signals), (signals, []))[1].append(others[0] if others else None)
    for signals, inputs in groups.values():
        matrices = [x for x in inputs if x is not None]
        yield signals, matrices, len(inputs) - len(matrices)


def _add_products(
    sums: list[Leaf], blocks: Sequence[Block], signals: Tensor, inputs: Sequence[Tensor], num_biases: int
) -> None:
    """Add Gram matrices of signals, times those of inputs and the ones of biases, one block after the other."""
    operands = list(map(_in_float64, (signals, *inputs)))
    for place, (rows, columns) in enumerate(blocks):
        product, *others = (_product(x, rows, columns) for x in operands)
        if not others and num_biases > 1:  # times 1, Inductor would not add it up within the matrix product
            product = num_biases * product
        factor: Any = sum(others, float(num_biases)) if others else None  # of an int, torch would make a copy
        sums[place] = _added(sums[place], product, factor)


def _product(x: Tensor, rows: slice, columns: slice) -> Tensor:
    block = x[rows]
    return contractions.gram(block, block if rows == columns else x[columns], torch.float64)  # converted once


def _add_parts(sums: list[Leaf], blocks: Sequence[Block], matrix: Tensor) -> None:
    for place, block in enumerate(blocks):
        sums[place] = _added(sums[place], matrix[block])


def _in_float64(x: Tensor) -> Tensor:
    """Convert an operand, unless a copy of it is too large to exist."""
    return x.double() if x.numel() <= cost_model.block_size(x.device) // 2 else x


def _added(total: Tensor | None, product: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return total + product · factor, elementwise; None stands for 0 and for 1."""
    if factor is None:
        return product if total is None else total + product
    return product * factor if total is None else torch.addcmul(total, product, factor)


_EPS = torch.finfo(torch.float64).eps


def solve(
    matrix: Tensor, damping: Tensor, right: Tensor, *, eps: float, minimum_norm: bool, scale: Tensor | None = None
) -> tuple[Tensor, bool]:
    """Solve (A + λI) X = B by Cholesky factorization; for λ = 0, return A⁺B, the solution of minimum norm.

    All are float64: A ``[B, B]``, of which only the lower triangle is read, its diagonal is overwritten; λ 0-d; B and X
    ``[B, K]``. A is a Gram matrix of rows that were rounded to the relative precision ``eps``. Its eigenvalues below
    rounding errors (those of the rows, squared, and those of float64) count as 0, and so does a damping so small that
    the factorization fails: the second result. They are relative to ``scale``, or to the largest eigenvalue. NaN or
    infinity in A makes all of X NaN. A ``ConditionWarning`` if λ counts as 0 and less than half of the digits of X are
    right.

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

    All are float64: K ``[B, B]``, w ``[B]``, n and λ > 0 0-d, B ``[B, K]``. X is NaN where the matrix is singular.
    """
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    # Not solve_ex: a derivative of its forward derivative lacks a term (pytorch/pytorch#196695).
    factors, pivots, info = torch.linalg.lu_factor_ex(gram * weights / n + damping * identity)
    return torch.linalg.lu_solve(factors, pivots, right) + torch.where(info == 0, 0, torch.nan)


def least_squares(rows: Tensor, damping: Tensor, right: Tensor, *, eps: float) -> Tensor:
    """Return Aᵀ (A Aᵀ + λI)⁻¹ b, and A⁺ b for λ = 0, by a QR factorization of A: its condition number is not squared.

    All are float64: A ``[N, P]``, b ``[N]``, the result ``[P]``; ``eps`` is the relative precision of the rows. The
    singular values of the triangular factor below the rounding errors of A count as 0. NaN or infinity in A makes all
    of the result NaN. A ``ConditionWarning`` if less than half of its digits are right.

    Examples:
        >>> rows, right = torch.tensor([[1.0, 0.0], [1.0, 1e-5]]).double(), torch.ones(2).double()
        >>> least_squares(rows, torch.tensor(1e-30).double(), right, eps=1e-16).round(decimals=3)
        tensor([1., 0.], dtype=torch.float64)
    """
    poison = 0 * rows.sum()
    known = torch.where(poison == 0, rows, 0)  # singular values of NaN are an error
    is_wide = rows.shape[0] < rows.shape[1]
    basis, triangle = torch.linalg.qr(known.mT if is_wide else known)
    left, values, right_vectors = torch.linalg.svd(triangle, full_matrices=False)
    kept = values > max(rows.shape) * max(_EPS, eps) * values.max()
    inverse = torch.where(kept, values / torch.where(kept, values.square() + damping, 1), 0)
    _warn_of_digits(values, kept, damping, eps)
    if is_wide:
        return basis @ (left @ (inverse * (right_vectors @ right))) + poison
    return right_vectors.mT @ (inverse * (left.mT @ (basis.mT @ right))) + poison


def _warn_of_digits(values: Tensor, kept: Tensor, damping: Tensor, eps: float) -> None:
    """Warn if the error of a solution, the condition number times that of the rows, exceeds √eps."""
    damped = (values.square() + damping).sqrt()
    condition = damped.max() / torch.where(kept, damped, torch.inf).amin()
    if not is_wrapped(condition) and holds(condition * eps > eps**0.5):
        warnings.warn(
            f"damping: received one for which the condition number of the gradients is {float(condition):.0e}, of rank "
            f"{int(kept.sum())}; about {max(0.0, -math.log10(float(condition) * eps)):.0f} digits of the result are "
            "right. Pass a larger damping, or float64 parameters.",
            ConditionWarning,
            stacklevel=2,
        )


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
