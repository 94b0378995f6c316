"""The objects that a loss reads beside its arguments: facts that key a compiled program, and tensors that stay live.

The walk starts at the loss, the modules and the reductions, and follows everything reachable: code, defaults, closure
cells, the global variables that the code names, entries of containers, NumPy arrays by value, and attributes. Of
modules and library objects it follows all attributes; of other objects, those that the code names. Code and global
variables of installed packages count as constant.
"""

from __future__ import annotations

import abc
import collections
import enum
import functools
import weakref
from collections.abc import Hashable, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Generic, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from persample._torch import MODULE_SLOTS
from persample.engines.compiled.code import is_installed, is_library, names
from persample.engines.compiled.places import MISSING, Places
from persample.errors import LossError

Facts = tuple[tuple[str, Hashable], ...]

_MOST = 100_000
_CONSTANTS = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size, range)
_OF_MODULES = {"forward", "training", *MODULE_SLOTS}
_BARE = {object, nn.Module, Generic, Protocol, abc.ABC}
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)


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


class Reads:
    """The objects that a loss reads: facts about them, the tensors among them, and guards on their places.

    Args:
        known: attribute names that the reachable code uses, as far as an earlier walk found them.
    """

    def __init__(self, known: frozenset[str] = frozenset()) -> None:
        self.tensors: list[Tensor] = []
        self.places = Places()
        self.known = known
        self.used = known
        self._facts: list[tuple[str, Hashable]] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # by id; the objects stay alive, so that no id is reused

    @property
    def facts(self) -> Facts:
        """Everything but the values of tensors, as a key."""
        return tuple(self._facts)

    def visit(self, path: str, x: Any) -> None:
        """Record an object and every object reachable from it.

        Args:
            path: the path from the loss to the object, for messages.
            x: the object.
        """
        if isinstance(x, _CONSTANTS) and not isinstance(x, enum.Enum):
            self._note(path, (type(x), x))
        elif isinstance(x, float | complex | slice):
            self._note(path, (type(x), repr(x)))  # unlike ==, repr makes nan equal to itself, and -0.0 unequal to 0.0
        elif id(x) in self._seen:
            self._note(path, ("again", self._seen[id(x)][0]))
        else:
            self._seen[id(x)] = (len(self._seen), x)
            if self._is_known(path, x):
                if not is_library(type(x)):  # a subclass: a NamedTuple, an Enum
                    self._attributes(path, x)
            else:
                self._object(path, x)

    def _is_known(self, path: str, x: Any) -> bool:  # noqa: PLR0912 (one case per kind of object)
        match x:
            case Tensor():
                self._tensor(path, x)
            case FunctionType():
                self._function(path, x)
            case MethodType():
                self.visit(path, x.__func__)
                self.visit(f"{path} self", x.__self__)
            case functools.partial():
                self._note(path, "partial")
                self.visit(path, (x.func, x.args, x.keywords))
            case ModuleType():
                self._note(path, ("module", x.__name__))
                if not is_library(x):
                    self._named(path, vars(x))
            case type():
                self._class(path, x)
            case dict() | MappingProxyType():
                self._dict(path, x)
            case list() | tuple() | collections.deque():
                self._row(path, x)
            case set() | frozenset():
                self._row(path, x)
            case weakref.ref():
                self.visit(path, x())
            case np.ndarray():
                self._note(path, (x.dtype.str, x.shape, x.tobytes()))
                self.places.array(x)
            case enum.Enum() | np.generic():
                self._note(path, (type(x), x))
            case _ if isinstance(x, _DESCRIPTORS):
                self._note(path, type(x).__name__)
                for name in ("fget", "__func__", "func"):
                    self.visit(f"{path}.{name}", getattr(x, name, None))
            case BuiltinFunctionType():
                self._note(path, Held(x))
            case _:
                return False
        return True

    def _note(self, path: str, fact: Hashable) -> None:
        self._facts.append((path, fact))
        if len(self._facts) > _MOST:
            raise LossError(
                f"loss_fn reaches more objects than can be watched for changes (at {path}). Pass what it needs in "
                "batch, unbatched with None in in_dims, or use engine='eager'."
            )

    def _tensor(self, path: str, x: Tensor) -> None:
        form = tuple(x.shape), x.stride() if x.layout == torch.strided else x.layout, x.dtype, x.device
        self._note(path, (type(x), form, x.requires_grad, x.is_conj(), x.is_neg()))
        self.tensors.append(x)
        if "grad" in self.known and x.is_leaf:
            self.visit(f"{path}.grad", self.places.slot(x, "grad"))

    def _function(self, path: str, x: FunctionType) -> None:
        code = x.__code__
        self._note(path, code)
        self.places.function(x)
        for name, cell in zip(code.co_freevars, x.__closure__ or (), strict=True):
            value = self.places.cell(cell)
            if value is not MISSING:
                self.visit(f"{path} closure {name!r}", value)
        self.visit(f"{path} defaults", x.__defaults__)
        self.visit(f"{path} defaults", x.__kwdefaults__)
        self._dict(f"{path} attributes", x.__dict__)
        if not is_installed(code.co_filename):
            found = names(code)
            self.used |= found.used
            for name in found.read:
                self._item(f"{path} global {name!r}", x.__globals__, name)

    def _item(self, path: str, where: Mapping[str, Any], name: str) -> None:
        value = self.places.item(where, name)
        if value is not MISSING:
            self.visit(path, value)

    def _named(self, path: str, where: Mapping[str, Any], *always: str) -> None:
        """Visit the attributes whose names the code uses."""
        for name in sorted(name for name in where if name in self.known or name in always):
            self._item(f"{path}.{name}", where, name)

    def _class(self, path: str, x: type) -> None:
        self._note(path, Held(x))
        if not is_library(x):
            # No code names methods such as __mul__, which Python calls, or forward, which nn.Module calls.
            special = [name for name, f in vars(x).items() if name.startswith("__") and isinstance(f, FunctionType)]
            self._named(path, vars(x), "forward", *special)
            for base in x.__mro__[1:]:
                self.visit(f"{path} base {base.__name__}", base)

    def _dict(self, path: str, x: Mapping[Any, Any]) -> None:
        self._note(path, (type(x), len(x)))
        self.places.entries(x)
        for name, value in list(x.items()):
            self.visit(f"{path} key", name)
            self.visit(f"{path}[{name!r}]", value)

    def _row(self, path: str, x: Any) -> None:
        self._note(path, (type(x), len(x)))
        if not isinstance(x, tuple):
            self.places.entries(x)
        for place, value in enumerate(tuple(x)):
            self.visit(f"{path}[{place}]", value)

    def _object(self, path: str, x: Any) -> None:
        if getattr(x, "__dict__", None) is None and not any(map(_slots, type(x).__mro__)):
            self._note(path, Held(x))
        self._attributes(path, x)

    def _attributes(self, path: str, x: Any) -> None:
        kind, own = type(x), getattr(x, "__dict__", None)
        self.visit(f"{path} class", kind)
        for name in [name for base in kind.__mro__ for name in _slots(base)]:
            value = self.places.slot(x, name)
            if value is not MISSING:
                self.visit(f"{path}.{name}", value)
        if own is not None and not all(base in _BARE or not is_library(base) for base in kind.__mro__):
            self._dict(f"{path} attributes", own)  # the library's own code reads them too
        elif own is not None:
            self._used_attributes(path, x, own)

    def _used_attributes(self, path: str, x: Any, own: dict[str, Any]) -> None:
        is_module = isinstance(x, nn.Module)
        for name in sorted(self.known | _OF_MODULES if is_module else self.known):
            # An attribute of the class may later be shadowed by one of the instance.
            if name in own or hasattr(type(x), name):
                self._item(f"{path}.{name}", own, name)
        for name in sorted(name for name in own if is_module and name.endswith("_hooks")):
            self._dict(f"{path}.{name}", own[name])


def reads(roots: Mapping[str, Any]) -> Reads:
    """Return all objects that are reachable from some root objects.

    Args:
        roots: the root objects by name.

    Raises:
        LossError: if there are too many to watch.
    """
    found = Reads()
    while True:
        for name, root in roots.items():
            found.visit(name, root)
        if found.used == found.known:
            return found
        found = Reads(found.used)  # walk again: the code found in this walk uses more attributes


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    given = [slots] if isinstance(slots, str) else list(slots)
    private = [name for name in given if name.startswith("__") and not name.endswith("__")]
    public = [name for name in given if isinstance(vars(kind).get(name), MemberDescriptorType)]
    return public + [f"_{kind.__name__.lstrip('_')}{name}" for name in private]
