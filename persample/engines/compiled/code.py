"""The names that a function's code uses, and whether the code belongs to an installed package."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

_INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
_OURS = Path(__file__).resolve().parents[2]


class Names(NamedTuple):
    """The names that code uses.

    Attributes:
        read: the names of global variables.
        used: the names of possible attributes; constant strings count too, because ``getattr`` may take them.
    """

    read: tuple[str, ...]
    used: frozenset[str]


@functools.lru_cache(4096)
def names(code: CodeType) -> Names:
    """Return the names that code uses, including those of nested functions.

    Args:
        code: the code of a function.
    """
    read: set[str] = set()
    used: set[str] = set()
    for part in _parts(code):
        used.update(part.co_names, (x for x in part.co_consts if isinstance(x, str) and x.isidentifier()))
        read.update(x.argval for x in dis.get_instructions(part) if x.opname in {"LOAD_GLOBAL", "LOAD_NAME"})
    return Names(tuple(sorted(read)), frozenset(used))


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


@functools.lru_cache(4096)
def is_installed(file: str) -> bool:
    """Return whether a file is part of Python, of this library, or of an installed package, so its code is constant.

    Args:
        file: a path, or a placeholder for one such as ``<frozen os>``.
    """
    if file.startswith("<frozen") or not file:
        return True
    return not {_OURS, *_INSTALLED}.isdisjoint(Path(file).resolve().parents)


def is_library(x: Any) -> bool:
    """Return whether a class or module comes with Python, with this library, or with an installed package.

    Args:
        x: a class or a module.
    """
    module = x if isinstance(x, ModuleType) else sys.modules.get(x.__module__)
    if module is None:
        return False
    return is_installed(getattr(module, "__file__", None) or "") and module.__name__ != "__main__"
