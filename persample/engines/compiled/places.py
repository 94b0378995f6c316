"""Identity guards on the variables and attributes that a loss reads: they hold while none of them was rebound."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from types import CellType, FunctionType
from typing import Any

import numpy as np

MISSING = object()


class Places:
    """Variables, attributes, container entries, closure cells and functions, with the objects they held."""

    def __init__(self) -> None:
        self._items: list[tuple[Mapping[str, Any], str, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._functions: list[tuple[FunctionType, Any, Any, Any]] = []
        self._dicts: list[tuple[Mapping[Any, Any], list[Any], list[Any]]] = []
        self._rows: list[tuple[Any, list[Any]]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def hold(self) -> bool:  # noqa: PLR0911 (one return for each kind of place)
        """Return whether every place holds the same object as before."""
        # Plain loops, because every call runs this: generators for ``all`` would take three times as long.
        for where, name, x in self._items:
            if where.get(name, MISSING) is not x:
                return False
        for cell, x in self._cells:
            if content(cell) is not x:
                return False
        for f, code, defaults, keywords in self._functions:
            if f.__code__ is not code or f.__defaults__ is not defaults or f.__kwdefaults__ is not keywords:
                return False
        for entries, keys, values in self._dicts:
            if not (_same(entries, keys) and _same(entries.values(), values)):
                return False
        for row, values in self._rows:
            if not _same(row, values):
                return False
        for x, name, value in self._slots:
            if getattr(x, name, MISSING) is not value:
                return False
        return all(x.dtype == copy.dtype and np.array_equal(x, copy) for x, copy in self._arrays)

    def item(self, where: Mapping[str, Any], name: str) -> Any:
        """Return a variable or attribute, ``MISSING`` if there is none, and guard it.

        Args:
            where: the namespace.
            name: the name in the namespace.
        """
        value = where.get(name, MISSING)
        self._items.append((where, name, value))
        return value

    def slot(self, x: Any, name: str) -> Any:
        """Return an attribute of an object without ``__dict__``, ``MISSING`` if there is none, and guard it.

        Args:
            x: the object.
            name: the attribute.
        """
        value = getattr(x, name, MISSING)
        self._slots.append((x, name, value))
        return value

    def cell(self, cell: CellType) -> Any:
        """Return the content of a closure cell, and guard it.

        Args:
            cell: the cell.
        """
        self._cells.append((cell, content(cell)))
        return content(cell)

    def function(self, x: FunctionType) -> None:
        """Guard the code and the defaults of a function.

        Args:
            x: the function.
        """
        self._functions.append((x, x.__code__, x.__defaults__, x.__kwdefaults__))

    def entries(self, x: Any) -> None:
        """Guard the entries of a container.

        Args:
            x: a dict, list, deque or set.
        """
        if isinstance(x, Mapping):
            self._dicts.append((x, list(x), list(x.values())))
        else:
            self._rows.append((x, list(x)))

    def array(self, x: np.ndarray[Any, Any]) -> None:
        """Guard the values of an array.

        Args:
            x: the array.
        """
        self._arrays.append((x, x.copy()))


def content(cell: CellType) -> Any:
    """Return the content of a closure cell, ``MISSING`` if nothing was assigned yet.

    Args:
        cell: the cell.
    """
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _same(now: Any, before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
