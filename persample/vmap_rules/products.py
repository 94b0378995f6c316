"""Products: linear layers, bilinear forms, einsum, linear systems, determinants, distances, ``Tensor.addmm_``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import transforms
from persample.errors import LossError
from persample.utils.numerics import in_single_precision, is_autocast, precast
from persample.utils.trees import Leaf, Tree
from persample.vmap_rules.levels import Function, Rules, call_kernel, gradients_by_autograd, is_in_forward_mode


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear``, and reject a bias of another dtype, as torch does; torch.func would cast it."""
    # Where the input is no matrix and not contiguous, torch adds a bias of any dtype.
    if input.ndim == 2 or input.is_contiguous():
        _check_dtype(bias, weight)
    return F.linear(input, weight, bias)


def _check_dtype(bias: Tensor | None, weight: Tensor) -> None:
    if bias is not None and bias.dtype != weight.dtype and not is_autocast(bias.device):
        raise RuntimeError(f"expected weight and bias to have the same dtype, not {weight.dtype} and {bias.dtype}")


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_dtype(bias, weight)
    if input1.shape[:-1] != input2.shape[:-1] or (bias is not None and bias.shape != weight.shape[:1]):
        return torch.bilinear(input1, input2, weight, bias)  # raises
    forms = F.linear(input2, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
    out = (forms @ input1.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias


def _in_place(name: str, input: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Write the result of a method into its tensor; torch.func refuses to where samples are batched twice."""
    method = getattr(Tensor, name)
    out = RULES.get(method, method)(input, *args, **kwargs)
    if input.shape != out.shape:  # torch may resize the tensor, torch.func does not
        raise LossError(
            f"loss_fn: {name}_ expected a tensor of the shape of its result, {list(out.shape)}, received "
            f"{list(input.shape)}. Use torch.{name}, which makes a new one."
        )
    if not torch.can_cast(out.dtype, input.dtype):
        return getattr(input, f"{name}_")(*args, **kwargs)  # raises
    return input.copy_(out)


def _added(function: Function, *args: Leaf, beta: complex = 1, **kwargs: Leaf) -> Tensor:
    """Add products to a first tensor times β; for β = 0, torch.func forgets that this tensor has a gradient of 0."""
    out = function(*args, beta=beta, **kwargs)
    x = args[0] if args else kwargs["input"]
    return out if beta else out + torch.where(torch.ones_like(x, dtype=torch.bool), 0, x)


# Their gradients do not need the values that are overwritten.
_WRITTEN = "addbmm", "addcdiv", "addcmul", "addmm", "addmv", "addr", "baddbmm", "lerp", "masked_scatter", "scatter"


class LinearEinsum(NamedTuple):
    """How an einsum of a matrix and another tensor is a linear layer."""

    transposed: bool  # whether the layer's weight ``[o, i]`` is the transpose of the matrix
    contracted: int  # the axis of the other tensor that the layer takes for its last, counted from the end; negative
    made: int  # the axis of the result that is the layer's last, likewise


@functools.lru_cache
def linear_einsum(equation: str, place: int) -> LinearEinsum | None:
    """Return how an einsum of two operands, the matrix at ``place``, is a linear layer, or None if it is none.

    Examples:
        >>> linear_einsum("oi,ti->to", 0)
        LinearEinsum(transposed=False, contracted=-1, made=-1)
        >>> linear_einsum("...ti, io -> ...ot", 1)
        LinearEinsum(transposed=True, contracted=-1, made=-2)
        >>> linear_einsum("oi,oi->o", 0) is None
        True
    """
    terms, _, result = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if len(operands) != 2 or "->" not in equation:
        return None
    matrix, given = operands[place], operands[1 - place]
    contracted, made = set(given) - set(result), set(result) - set(given)
    if len(matrix) != 2 or set(matrix) != contracted | made or not len(contracted) == len(made) == 1:
        return None
    (i,), (o,) = contracted, made
    kept = given.removeprefix("...").replace(i, "")
    if "." in kept + result.removeprefix("..."):  # axes count from the end
        return None
    repeats = given.count(i) > 1 or result.count(o) > 1 or len(set(kept)) < len(kept)
    if repeats or given.replace(i, "") != result.replace(o, ""):  # repeated or moved axes
        return None
    return LinearEinsum(matrix == i + o, given.index(i) - len(given), result.index(o) - len(result))


def _composed_where_nested(function: Function, composition: Function) -> Function:
    """Return a function of square matrices that is a composition inside of forward derivatives and of two gradients.

    Until torch 2.15, a derivative of a forward derivative lacks a term (pytorch/pytorch#196695). Where another vmap
    batches the backward pass, as ``torch.func.jacrev`` in a loss does, both may be arbitrary; of ``lu_solve`` also
    under ``jacfwd``.
    """

    def rule(*args: Leaf, **kwargs: Leaf) -> Tree:
        levels = transforms()
        is_mended = torch.__version__ >= "2.15" and function is not torch.linalg.lu_solve
        is_forward = not is_mended and is_in_forward_mode()
        is_nested = is_forward or levels.count("grad") > 1
        if not is_nested or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        kwargs.pop("out", None)
        matrix, *others = args or [kwargs.pop(name) for name in ("A", "LU", "input") if name in kwargs]
        is_square = matrix.ndim > 1 and matrix.shape[-1] == matrix.shape[-2]
        return (composition if is_square else function)(matrix, *others, **kwargs)  # otherwise an error

    return rule


def _factors(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return P, L, U of A = PLU, as ``torch.linalg.lu`` does, which vmap calls once for each sample."""
    return torch.lu_unpack(*torch.linalg.lu_factor(A))


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    if B.ndim > 1 and B.shape != A.shape[:-1]:
        return _solve_matrix(A, B, left=left)
    if not left:
        return torch.linalg.solve(A, B, left=left)  # an error: vectors are columns
    return _solve_matrix(A, B.unsqueeze(-1), left=left).squeeze(-1)


def _lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    if B.ndim < 2:
        return torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)  # an error
    permutation, lower, upper = torch.lu_unpack(LU, pivots)
    matrix = permutation @ lower @ upper
    return _solve_matrix(matrix.mH if adjoint else matrix, B, left=left)


def _solve_matrix(A: Tensor, B: Tensor, *, left: bool) -> Tensor:
    if not left:
        return _solve_matrix(A.mT, B.mT, left=True).mT
    permutation, lower, upper = _factors(A)
    half = torch.linalg.solve_triangular(lower, permutation.mT @ B, upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(upper, half, upper=True)


def _slogdet(A: Tensor) -> tuple[Tensor, Tensor]:
    permutation, _, upper = _factors(A)
    pivots = upper.diagonal(dim1=-2, dim2=-1)
    # Not prod: further derivatives of it fail, or are NaN.
    signs = torch.exp(1j * pivots.angle().sum(-1)) if A.is_complex() else torch.sgn(pivots.detach()).prod(-1)
    sign = torch.linalg.det(permutation) * signs
    return torch.return_types.slogdet((sign, pivots.abs().log().sum(-1)))


def _det(A: Tensor) -> Tensor:
    sign, logabsdet = _slogdet(A)
    return sign * logabsdet.exp()


def _logdet(A: Tensor) -> Tensor:
    sign, logabsdet = _slogdet(A)
    return logabsdet + sign.log()


_COMPOSITIONS: Rules = {
    torch.linalg.solve: _solve,
    torch.linalg.lu_solve: _lu_solve,
    **dict.fromkeys((torch.linalg.det, torch.det, Tensor.det), _det),
    **dict.fromkeys((torch.linalg.slogdet, torch.slogdet, Tensor.slogdet), _slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), _logdet),
}


# torch computes Euclidean distances by a matrix product if asked to, and of as many rows as these by default.
_PRODUCT_FROM, _PRODUCT, _NO_PRODUCT = 26, "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"
_IF_MANY = "use_mm_for_euclid_dist_if_necessary"


def _cdist(
    distances: Callable[[Tensor, Tensor, float], Tensor],
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = _IF_MANY,
) -> Tensor:
    if p < 0 or not _fits_cdist(x1, x2, compute_mode) or _is_product(x1, x2, p, compute_mode):
        return torch.cdist(x1, x2, p, compute_mode)  # raises, or is composed of operations that vmap batches rightly
    if is_autocast(x1.device):
        return precast(in_single_precision, x1.device, _cdist, distances, x1, x2, p, compute_mode)
    lead = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return distances(x1.expand(*lead, *x1.shape[-2:]), x2.expand(*lead, *x2.shape[-2:]), p)


def _fits_cdist(x1: Tensor, x2: Tensor, compute_mode: str) -> bool:
    alike = x1.dtype == x2.dtype or is_autocast(x1.device)
    floats = alike and x1.is_floating_point() and x2.is_floating_point()
    known = compute_mode in {_PRODUCT, _NO_PRODUCT, _IF_MANY} and min(x1.ndim, x2.ndim) > 1
    return floats and known and x1.shape[-1] == x2.shape[-1] and x1.numel() * x2.numel() > 0


def _is_product(x1: Tensor, x2: Tensor, p: float, compute_mode: str) -> bool:
    many = max(x1.shape[-2], x2.shape[-2]) >= _PRODUCT_FROM
    return p == 2 and (compute_mode == _PRODUCT or (many and compute_mode != _NO_PRODUCT))


def _distances_by_kernel(x1: Tensor, x2: Tensor, p: float) -> Tensor:
    gradients = functools.partial(_cdist_gradients, p=p)
    return call_kernel(lambda x1, x2: (torch.cdist(x1, x2, p, _NO_PRODUCT),), gradients, x1, x2)[0]


def _cdist_gradients(_needed: object, grad: Tensor, x1: Tensor, x2: Tensor, _: Tensor, p: float) -> tuple[Tensor, ...]:
    return gradients_by_autograd(functools.partial(torch.cdist, p=p, compute_mode=_NO_PRODUCT), grad, x1, x2)


def _composed_distances(x1: Tensor, x2: Tensor, p: float) -> Tensor:
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    nan = torch.where(difference.isnan(), difference, 0)
    if not p:  # the number of entries that differ; ceil has a gradient of 0
        return (nan + (difference != 0)).ceil().sum(-1)
    if p == 1:  # the kernel's gradient of NaN is NaN, that of abs is 0
        return (difference.abs() + nan.square()).sum(-1)
    if p != torch.inf:
        return torch.linalg.vector_norm(difference, p, -1)
    # The kernel takes the largest number, passes the whole gradient to each entry that is as large, and NaN to what is
    # no finite number: a square root has this gradient at 0.
    entries = difference.abs()
    finite = entries.isfinite()
    largest = torch.where(entries.isnan(), 0, entries).detach().amax(-1, keepdim=True)
    none = torch.where(finite, 0, entries).nan_to_num(0, 0).sqrt()
    return largest.squeeze(-1) + torch.where(finite, (entries - entries.detach()) * (entries == largest), none).sum(-1)


RULES: Rules = {
    F.linear: linear,
    torch.bilinear: _bilinear,
    **{getattr(Tensor, f"{name}_"): functools.partial(_in_place, name) for name in _WRITTEN},
    **{add: functools.partial(_added, add) for add in (torch.addbmm, torch.baddbmm, Tensor.addbmm, Tensor.baddbmm)},
    **{function: _composed_where_nested(function, composition) for function, composition in _COMPOSITIONS.items()},
    torch.cdist: functools.partial(_cdist, _composed_distances),
}


FIRST_DERIVATIVE_RULES: Rules = {torch.cdist: functools.partial(_cdist, _distances_by_kernel)}
