"""What a loss reads beside its arguments: facts that a compiled program was made for, and tensors that stay live.

Watched are, from the loss and the reductions on: code, defaults, closure cells, the global variables that the code
names, attributes (of modules all, of other objects those that the code names), the entries of containers, NumPy arrays
by value, and what is reached from any of these. Code and global variables of installed packages are taken as constant.
"""

from __future__ import annotations

import abc
import collections
import enum
import functools
from collections.abc import Hashable, Mapping
from operator import attrgetter, eq, is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from persample.engines.compiled.code import is_installed, is_library, names
from persample.errors import LossError

_MISSING = object()
_requires_grad = attrgetter("requires_grad")
_MOST = 100_000
_CONSTANTS = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size, range, slice)
_PARTS_OF_MODULES = {"training", "_parameters", "_buffers", "_modules"}
_BARE = {object, nn.Module, Generic, Protocol, abc.ABC}
_OF_PROPERTIES = ("fget", "__func__", "func", "__wrapped__")


class Held:
    """An object as a key: equal to itself only, and alive as long as the key is.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same object."""
        return isinstance(other, Held) and self.value is other.value

    def __hash__(self) -> int:
        """Return a hash by identity."""
        return id(self.value)

    def __repr__(self) -> str:
        """Return what the object says of itself."""
        return repr(self.value)


class Reads:
    """What was read, and where it was found.

    Args:
        known: attribute names that code was found to use before.
    """

    def __init__(self, known: frozenset[str]) -> None:
        self.facts: list[tuple[str, Hashable]] = []
        self.tensors: list[Tensor] = []
        self._trainable: list[bool] = []
        self.used = known
        self._known = known
        self._seen: dict[int, tuple[int, Any]] = {}
        # Where each value stands: as long as the same objects stand there, nothing was rebound.
        self._items: list[tuple[Mapping[str, Any], str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._wholes: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self._rows: list[tuple[Any, tuple[Any, ...]]] = []
        self._functions: list[tuple[FunctionType, Any, Any, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    @property
    def key(self) -> tuple[tuple[str, Hashable], ...]:
        """Everything but the values of tensors, to compare and hash."""
        return tuple(self.facts)

    def hold(self) -> bool:
        """Return whether everything is where it was, without looking further."""
        return (
            all(where.get(name, _MISSING) is x for where, name, x in self._items)
            and all(_content(cell) is x for cell, x in self._cells)
            and all(
                x.__code__ is code and x.__defaults__ is defaults and x.__kwdefaults__ is keywords
                for x, code, defaults, keywords in self._functions
            )
            and all(getattr(x, name, _MISSING) is value for x, name, value in self._slots)
            and all(len(d) == len(v) and all(map(is_, d.values(), v)) and all(map(is_, d, k)) for d, k, v in self._wholes)
            and all(map(eq, map(_requires_grad, self.tensors), self._trainable))
            and all(len(row) == len(v) and all(map(is_, row, v)) for row, v in self._rows)
            and all(x.dtype == copy.dtype and np.array_equal(x, copy) for x, copy in self._arrays)
        )

    def visit(self, path: str, x: Any) -> None:
        """Note an object and all that is reached from it.

        Args:
            path: how it was reached, for messages.
            x: the object.
        """
        if isinstance(x, _CONSTANTS) and not isinstance(x, enum.Enum):
            return self._note(path, (type(x), repr(x) if isinstance(x, slice) else x))
        if isinstance(x, float | complex):
            return self._note(path, (type(x), repr(x)))  # so that nan equals itself, and -0.0 is not 0.0
        if id(x) in self._seen:
            return self._note(path, ("again", self._seen[id(x)][0]))
        self._seen[id(x)] = (len(self._seen), x)
        if isinstance(x, Tensor):
            return self._tensor(path, x)
        for kinds, look in _LOOKS:
            if isinstance(x, kinds):
                return look(self, path, x)
        return self._object(path, x)

    def _note(self, path: str, fact: Hashable) -> None:
        self.facts.append((path, fact))
        if len(self.facts) > _MOST:
            raise LossError(
                f"loss_fn reaches more objects than can be watched for changes (at {path}). Pass what it needs in "
                "batch, unbatched with None in in_dims, or use engine='eager'."
            )

    def _tensor(self, path: str, x: Tensor) -> None:
        strides = x.stride() if x.layout == torch.strided else None
        self._note(path, (type(x), x.dtype, x.device, tuple(x.shape), strides, x.requires_grad, x.is_conj(), x.is_neg()))
        self.tensors.append(x)
        self._trainable.append(x.requires_grad)

    def _function(self, path: str, x: FunctionType) -> None:
        code = x.__code__
        self._note(path, code)
        self._functions.append((x, code, x.__defaults__, x.__kwdefaults__))
        for name, cell in zip(code.co_freevars, x.__closure__ or (), strict=True):
            self._cells.append((cell, _content(cell)))
            if _content(cell) is not _MISSING:
                self.visit(f"{path} closure {name!r}", _content(cell))
        self.visit(f"{path} defaults", (x.__defaults__, x.__kwdefaults__))
        if x.__dict__:
            self._whole(f"{path} attributes", x.__dict__)
        if is_installed(code.co_filename):
            return
        read, used = names(code)
        self.used |= used
        for name in read:
            if name in x.__globals__:
                self._item(f"{path} global {name!r}", x.__globals__, name)

    def _item(self, path: str, where: Mapping[str, Any], name: str) -> None:
        value = where.get(name, _MISSING)
        self._items.append((where, name, value))
        if value is not _MISSING:
            self.visit(path, value)

    def _method(self, path: str, x: MethodType) -> None:
        self.visit(path, x.__func__)
        self.visit(f"{path} self", x.__self__)

    def _partial(self, path: str, x: functools.partial[Any]) -> None:
        self._note(path, "partial")
        self.visit(path, (x.func, x.args, x.keywords))

    def _namespace(self, path: str, x: ModuleType) -> None:
        self._note(path, ("module", x.__name__))
        if not is_library(x):
            self._named(path, vars(x))

    def _class(self, path: str, x: type) -> None:
        if is_library(x):
            return self._note(path, Held(x))
        self._note(path, ("class", x.__qualname__))
        self._named(path, vars(x), ("__call__", "__getattr__", "__getitem__"))
        for base in x.__mro__[1:]:
            self.visit(f"{path} base {base.__name__}", base)
        return None

    def _named(self, path: str, where: Mapping[str, Any], always: tuple[str, ...] = ()) -> None:
        """Visit the attributes whose names the code uses."""
        for name in sorted(name for name in where if name in self._known or name in always):
            self._item(f"{path}.{name}", where, name)

    def _whole(self, path: str, x: Mapping[Any, Any]) -> None:
        self._note(path, (type(x), len(x)))
        self._wholes.append((x, tuple(x), tuple(x.values())))
        for name, value in list(x.items()):
            if type(name) is str:
                self._note(f"{path}[{name!r}]", name)
            else:
                self.visit(f"{path} key", name)
            self.visit(f"{path}[{name!r}]", value)

    def _row(self, path: str, x: Any) -> None:
        self._note(path, (type(x), len(x)))
        if not isinstance(x, tuple):
            self._rows.append((x, tuple(x)))
        for place, value in enumerate(tuple(x)):
            self.visit(f"{path}[{place}]", value)

    def _set(self, path: str, x: Any) -> None:
        self._note(path, (type(x), frozenset(value if isinstance(value, _CONSTANTS) else Held(value) for value in x)))
        self._rows.append((x, tuple(x)))

    def _array(self, path: str, x: np.ndarray[Any, Any]) -> None:
        self._note(path, (x.dtype.str, x.shape, x.tobytes()))
        self._arrays.append((x, x.copy()))

    def _property(self, path: str, x: Any) -> None:
        self._note(path, type(x))
        for name in _OF_PROPERTIES:
            inner = getattr(x, name, None)
            if inner is not None:
                self.visit(f"{path}.{name}", inner)

    def _itself(self, path: str, x: Any) -> None:
        self._note(path, Held(x))

    def _object(self, path: str, x: Any) -> None:
        kind, own = type(x), getattr(x, "__dict__", None)
        self.visit(f"{path} class", kind)
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        if own is None and not slots:
            return self._itself(path, x)
        for name in slots:
            value = getattr(x, name, _MISSING)
            self._slots.append((x, name, value))
            if value is not _MISSING:
                self.visit(f"{path}.{name}", value)
        if own is None:
            return None
        if not _is_plain(kind):
            return self._whole(f"{path} attributes", own)
        for name in sorted(self._known | _PARTS_OF_MODULES if isinstance(x, nn.Module) else self._known):
            # An attribute that only the class has so far may get an instance's own value.
            if name in own or hasattr(kind, name):
                self._item(f"{path}.{name}", own, name)
        if isinstance(x, nn.Module):
            for name in sorted(name for name in own if name.endswith("_hooks")):
                self._whole(f"{path}.{name}", own[name])
        return None


_LOOKS: list[tuple[Any, Any]] = [
    (FunctionType, Reads._function),
    (MethodType, Reads._method),
    (BuiltinFunctionType, Reads._itself),
    (functools.partial, Reads._partial),
    (ModuleType, Reads._namespace),
    (type, Reads._class),
    ((property, staticmethod, classmethod, functools.cached_property), Reads._property),
    (dict, Reads._whole),
    ((list, tuple, collections.deque), Reads._row),
    ((set, frozenset), Reads._set),
    (np.ndarray, Reads._array),
    ((enum.Enum, np.generic), lambda reads, path, x: reads._note(path, (type(x), x))),
]


def reads(roots: Mapping[str, Any]) -> Reads:
    """Return what some objects read, by name.

    Args:
        roots: the objects.

    Raises:
        LossError: if it is more than can be watched.
    """
    found = Reads(frozenset())
    while True:
        for name, root in roots.items():
            found.visit(name, root)
        if found.used == found._known:
            return found
        found = Reads(found.used)  # once more, with the attributes that the code turned out to use


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _is_plain(kind: type) -> bool:
    """Return whether no code of a library, that of bare bases aside, reads attributes of a class's instances."""
    return all(base in _BARE or not is_library(base) for base in kind.__mro__)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))
