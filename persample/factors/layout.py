"""The layout of a product of small tensors in the shape of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The mapping of blocks ``[n, G, o, i]`` to tensors ``[n, *shape]``: axes are split, permuted and merged.

    Args:
        groups: the sizes of the axes merged in G, along which both operands vary.
        rows: the sizes of the axes merged in o, along which only the left operand varies.
        columns: the sizes of the axes merged in i, along which only the right operand varies.
        order: for each axis of the product, its place among (groups, rows, columns).
        shape: the shape of one result: the axes of the product, merged or split where it differs.

    Examples:
        >>> import torch
        >>> layout = Layout((), (2,), (3,), (1, 0), (3, 2))  # a transposed matrix
        >>> layout.restore(torch.arange(6.0).view(1, 1, 2, 3)).shape
        torch.Size([1, 3, 2])
    """

    groups: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_matrix(cls, rows: int, columns: int) -> Layout:
        """Return the layout of a plain matrix."""
        return cls((), (rows,), (columns,), (0, 1), (rows, columns))

    @classmethod
    def of_blocks(cls, groups: int, rows: int, columns: int) -> Layout:
        """Return the layout of several matrices, ``[G, o, i]``."""
        return cls((groups,), (rows,), (columns,), (0, 1, 2), (groups, rows, columns))

    @property
    def block(self) -> tuple[int, int, int]:
        """G, o and i."""
        return prod(self.groups), prod(self.rows), prod(self.columns)

    @property
    def is_matrix(self) -> bool:
        """Whether o is the first axis of the shape, and i all the others."""
        groups, rows, _ = self.block
        return groups == 1 and self.order == tuple(range(len(self.order))) and rows == (*self.shape, 1)[0]

    def restore(self, blocks: Tensor) -> Tensor:
        """Return ``[n, *shape]`` from ``[n, G, o, i]``, a view where the strides allow it."""
        if self.order == tuple(range(len(self.order))):
            return blocks.reshape(blocks.shape[0], *self.shape)
        split = blocks.reshape(len(blocks), *self.groups, *self.rows, *self.columns)
        return split.permute(0, *(axis + 1 for axis in self.order)).reshape(len(blocks), *self.shape)

    def blocks(self, values: Tensor) -> Tensor:
        """Return ``[n, G, o, i]`` from ``[n, *shape]``: the inverse of ``restore``."""
        sizes = (*self.groups, *self.rows, *self.columns)
        split = values.reshape(len(values), *(sizes[axis] for axis in self.order))
        return split.permute(0, *(axis + 1 for axis in self._sorted())).reshape(len(values), *self.block)

    def stacked(self, count: int, *, of_rows: bool) -> Layout:
        """Return the layout in which one more axis comes first, merged in o, or in i, also as the first."""
        place = len(self.groups) + (0 if of_rows else len(self.rows))
        rows, columns = ((count, *self.rows), self.columns) if of_rows else (self.rows, (count, *self.columns))
        order = (place, *(axis + (axis >= place) for axis in self.order))
        return Layout(self.groups, rows, columns, order, (count, *self.shape))

    def _sorted(self) -> list[int]:
        return sorted(range(len(self.order)), key=self.order.__getitem__)
