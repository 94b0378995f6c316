"""Where what a loss reads was found: as long as the same objects stand there, nothing was rebound."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from types import CellType, FunctionType
from typing import Any

import numpy as np

MISSING = object()


class Places:
    """Variables, attributes, entries, cells and functions, and what they held."""

    def __init__(self) -> None:
        self._items: list[tuple[Mapping[str, Any], str, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._functions: list[tuple[FunctionType, Any, Any, Any]] = []
        self._dicts: list[tuple[Mapping[Any, Any], list[Any], list[Any]]] = []
        self._rows: list[tuple[Any, list[Any]]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def hold(self) -> bool:
        """Return whether everything is where it was, without looking further."""
        return (
            all(where.get(name, MISSING) is x for where, name, x in self._items)
            and all(content(cell) is x for cell, x in self._cells)
            and all(
                x.__code__ is code and x.__defaults__ is defaults and x.__kwdefaults__ is keywords
                for x, code, defaults, keywords in self._functions
            )
            and all(_same(x, keys) and _same(x.values(), values) for x, keys, values in self._dicts)
            and all(_same(x, values) for x, values in self._rows)
            and all(getattr(x, name, MISSING) is value for x, name, value in self._slots)
            and all(x.dtype == copy.dtype and np.array_equal(x, copy) for x, copy in self._arrays)
        )

    def item(self, where: Mapping[str, Any], name: str) -> Any:
        """Return a variable or attribute, ``MISSING`` if there is none, and keep an eye on it.

        Args:
            where: the namespace.
            name: its name.
        """
        value = where.get(name, MISSING)
        self._items.append((where, name, value))
        return value

    def slot(self, x: Any, name: str) -> Any:
        """Return an attribute of an object without a namespace.

        Args:
            x: the object.
            name: the attribute.
        """
        value = getattr(x, name, MISSING)
        self._slots.append((x, name, value))
        return value

    def cell(self, cell: CellType) -> Any:
        """Return what a cell of a closure holds.

        Args:
            cell: the cell.
        """
        self._cells.append((cell, content(cell)))
        return content(cell)

    def function(self, x: FunctionType) -> None:
        """Keep an eye on the code and the defaults of a function.

        Args:
            x: the function.
        """
        self._functions.append((x, x.__code__, x.__defaults__, x.__kwdefaults__))

    def entries(self, x: Any) -> None:
        """Keep an eye on the entries of a container.

        Args:
            x: a dict, list, deque or set.
        """
        if isinstance(x, Mapping):
            self._dicts.append((x, list(x), list(x.values())))
        else:
            self._rows.append((x, list(x)))

    def array(self, x: np.ndarray[Any, Any]) -> None:
        """Keep an eye on the values of an array.

        Args:
            x: the array.
        """
        self._arrays.append((x, x.copy()))


def content(cell: CellType) -> Any:
    """Return what a cell of a closure holds, ``MISSING`` if nothing was assigned yet.

    Args:
        cell: the cell.
    """
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _same(now: Any, before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
