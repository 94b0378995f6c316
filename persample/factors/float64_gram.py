"""The Gram matrix of a linear system: over all parameters, in float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.factors import contractions, cost_model
from persample.factors.base import Factor
from persample.factors.outputs import by_row
from persample.utils.norms import memory_of_rows

# The rows of a block, whose products stay in the cache: for 256 samples of an MLP of width 64, whole matrices took
# twice as long (measured, torch 2.13, AMD EPYC).
_ROWS = 64

Block = tuple[slice, slice]


def float64_gram(factors: Sequence[Factor], scale: Tensor | None = None, *, lower: bool = False) -> Tensor:
    """Return sᵢ sⱼ ⟨gᵢ, gⱼ⟩ over all parameters, ``[N, N]`` float64; N is the number of rows (B·K of K outputs).

    float64 holds the products of all float32 numbers: no operand is balanced.

    Args:
        factors: the gradients of each parameter.
        scale: the sᵢ, ``[N]`` float64, or None for ones.
        lower: whether only the lower triangle is used; numbers above it may be missing (0).

    Examples:
        >>> from persample.factors import Dense
        >>> float64_gram([Dense(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))])
        tensor([[25.,  4.],
                [ 4.,  1.]], dtype=torch.float64)
    """
    factors = list(map(by_row, factors))
    size = len(factors[0])
    blocks = _blocks(size, lower=lower)
    sums = functools.reduce(_added, _terms(factors, blocks))
    if scale is not None:
        sums = [x * scale[rows, None] * scale[columns] for x, (rows, columns) in zip(sums, blocks, strict=True)]
    return torch.cat([pad(x, (0, size - x.shape[1])) for x in sums]) if len(sums) > 1 else sums[0]


def _blocks(size: int, *, lower: bool) -> list[Block]:
    """Return the rows and columns of each block; a program for any number of samples has one block."""
    step = size if cost_model.is_for_any_size() else _ROWS
    starts = range(0, max(size, 1), max(step, 1))
    return [(slice(start, start + step), slice(min(start + step, size) if lower else size)) for start in starts]


def _terms(factors: Sequence[Factor], blocks: Sequence[Block]) -> Iterator[list[Tensor]]:
    """Yield the blocks of matrices that add up to the Gram matrix."""
    for operands in _operands(factors):
        wide = [x.double() if _is_small(x) else x for x in operands]
        yield [
            functools.reduce(torch.mul, (contractions.gram(x[rows], x[columns], torch.float64) for x in wide))
            for rows, columns in blocks
        ]
    for factor in factors:
        if not factor.norm_operands:
            matrix = factor.gram(dtype=torch.float64)
            yield [matrix[block] for block in blocks]


def _operands(factors: Sequence[Factor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield operands whose Gram matrices multiply to those of parameters.

    Parameters whose signals share memory, such as a weight and its bias, become one with the inputs of all.
    """
    groups: dict[object, tuple[Tensor, list[Tensor]]] = {}
    for operands in (factor.norm_operands for factor in factors if factor.norm_operands):
        signals, *inputs = (x.flatten(1) if x.ndim > 1 else x.unsqueeze(1) for x in operands)
        group = groups.setdefault(memory_of_rows(signals), (signals, []))
        group[1].append(inputs[0] if inputs else signals.new_ones(len(signals), 1))  # the input of a bias
    for signals, inputs in groups.values():
        joined = torch.cat(inputs, 1)
        is_row = 1 in {signals.shape[1], joined.shape[1]} and _is_small(signals) and _is_small(joined)
        yield (signals.double() * joined.double(),) if is_row else (signals, joined)


def _is_small(x: Tensor) -> bool:
    """Return whether an operand is converted as a whole: of larger ones no copy in float64 shall exist."""
    return x.numel() <= cost_model.BLOCK


def _added(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return list(map(torch.add, one, other))
