"""The Gram matrix of a linear system: over all parameters, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.factors import contractions, cost_model
from persample.factors.base import Factor
from persample.utils.norms import memory_of_rows

# The rows of a block. Smaller ones save products above the diagonal and memory, larger ones operations: for 256 samples
# of MLPs of width 64 and 256, 64 and 128 take the same time, 256 up to 1.15 times as long (compiled; torch 2.13, AMD
# EPYC).
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
    size = prod(factors[0].sizes)
    blocks = _blocks(size, factors[0].device, lower=lower)
    sums: list[Any] = [None] * len(blocks)
    products = [() if factor.outputs else factor.norm_operands for factor in factors]
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
    sums: list[Any], blocks: Sequence[Block], signals: Tensor, inputs: Sequence[Tensor], num_biases: int
) -> None:
    """Add Gram matrices of signals, times those of inputs and the ones of biases, one block after the other."""
    operands = list(map(_in_float64, (signals, *inputs)))
    for place, (rows, columns) in enumerate(blocks):
        product, *others = (_product(x, rows, columns) for x in operands)
        if not others and num_biases > 1:  # times 1, Inductor would not add it up within the matrix product
            product = num_biases * product
        factor: Any = sum(others, num_biases) if others else None
        sums[place] = _added(sums[place], product, factor)


def _product(x: Tensor, rows: slice, columns: slice) -> Tensor:
    block = x[rows]
    return contractions.gram(block, block if rows == columns else x[columns], torch.float64)  # converted once


def _add_parts(sums: list[Any], blocks: Sequence[Block], matrix: Tensor) -> None:
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
