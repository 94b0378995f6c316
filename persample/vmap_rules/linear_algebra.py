"""Linear systems and determinants that a loss differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from persample._torch import is_forward_mode, transforms


def _composed_where_nested(function: Callable[..., Any], composition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of square matrices that is a composition inside of forward derivatives and of two gradients.

    A derivative of torch's forward derivative lacks a term (pytorch/pytorch#196695). Where another vmap batches the
    backward pass, as ``torch.func.jacrev`` in a loss does, both may be arbitrary.
    """

    def rule(*args: Any, **kwargs: Any) -> Any:
        levels = transforms()
        is_nested = "jvp" in levels or levels.count("grad") > 1 or is_forward_mode()
        if not is_nested or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        kwargs.pop("out", None)
        matrix, *others = args or [kwargs.pop(name) for name in ("A", "LU", "input") if name in kwargs]
        is_square = matrix.ndim > 1 and matrix.shape[-1] == matrix.shape[-2]
        return (composition if is_square else function)(matrix, *others, **kwargs)  # otherwise an error

    return rule


def _factors(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: N803
    """Return P, L, U of A = PLU, as ``torch.linalg.lu`` does, which vmap calls once for each sample."""
    return torch.lu_unpack(*torch.linalg.lu_factor(A))


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:  # noqa: N803
    if B.ndim > 1 and B.shape != A.shape[:-1]:
        return _solve_matrix(A, B, left=left)
    if not left:
        return torch.linalg.solve(A, B, left=left)  # an error: vectors are columns
    return _solve_matrix(A, B.unsqueeze(-1), left=left).squeeze(-1)


def _lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:  # noqa: N803
    if B.ndim < 2:
        return torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)  # an error
    permutation, lower, upper = torch.lu_unpack(LU, pivots)
    matrix = permutation @ lower @ upper
    return _solve_matrix(matrix.mH if adjoint else matrix, B, left=left)


def _solve_matrix(A: Tensor, B: Tensor, *, left: bool) -> Tensor:  # noqa: N803
    if not left:
        return _solve_matrix(A.mT, B.mT, left=True).mT
    permutation, lower, upper = _factors(A)
    half = torch.linalg.solve_triangular(lower, permutation.mT @ B, upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(upper, half, upper=True)


def _slogdet(A: Tensor) -> Any:  # noqa: N803
    permutation, _, upper = _factors(A)
    pivots = upper.diagonal(dim1=-2, dim2=-1)
    # Not prod: further derivatives of it fail, or are NaN.
    signs = torch.exp(1j * pivots.angle().sum(-1)) if A.is_complex() else torch.sgn(pivots.detach()).prod(-1)
    sign = torch.linalg.det(permutation) * signs
    return torch.return_types.slogdet((sign, pivots.abs().log().sum(-1)))


def _det(A: Tensor) -> Tensor:  # noqa: N803
    sign, logabsdet = _slogdet(A)
    return sign * logabsdet.exp()


def _logdet(A: Tensor) -> Tensor:  # noqa: N803
    sign, logabsdet = _slogdet(A)
    return logabsdet + sign.log()


_COMPOSITIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.solve: _solve,
    torch.linalg.lu_solve: _lu_solve,
    **dict.fromkeys((torch.linalg.det, torch.det, Tensor.det), _det),
    **dict.fromkeys((torch.linalg.slogdet, torch.slogdet, Tensor.slogdet), _slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), _logdet),
}
RULES: dict[Any, Callable[..., Any]] = {
    function: _composed_where_nested(function, composition) for function, composition in _COMPOSITIONS.items()
}
