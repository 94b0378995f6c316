"""``nn.Module``s as ``params``: their parameters are taken out, and replaced while the loss runs."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from persample._torch import (
    OF_TENSORDICTS,
    buffer_slots,
    flat_weights,
    module_slots,
    parameter_slots,
    set_flat_weights,
    tensordict_slots,
)
from persample.utils import trees
from persample.utils.isolation import undone
from persample.utils.numerics import storage_key
from persample.utils.trees import Leaf, Tree

T = TypeVar("T")
Slots: TypeAlias = dict[str, Any]  # what a module keeps in one of its dicts, by name
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = {list, dict, OrderedDict, defaultdict}  # others may do anything when they are copied
# The entries of a list or dict in an attribute; copies of larger ones, such as vocabularies, would cost every call.
_FEW = 256


class StandIn:
    """Stands for a tensor while a loss runs; ``restore`` removes those left in a module."""

    __slots__ = ()


def named_parts(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return modules and all their parts, each once, by name, as "0.encoder.1"; faster than ``named_modules()``."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    rest = [(str(place), module) for place, module in enumerate(modules)][::-1]
    while rest:
        prefix, part = rest.pop()
        if id(part) not in seen:
            seen.add(id(part))
            found[prefix] = part
            for name, child in reversed(module_slots(part).items()):
                if child is not None:
                    rest.append((f"{prefix}.{name}", child))
    return found


class _Modules:
    """All modules of one call, and the slots in which they keep their parameters and buffers."""

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self.parts = named_parts(modules)
        self.parameters: dict[str, nn.Parameter] = {}
        # Slots are listed by the tensor in them, so that tied tensors, and modules with two names, are swapped alike.
        self._slots: list[tuple[Slots, str, str]] = []
        self._buffers: list[tuple[Slots, str, Tensor]] = []
        self._plain: list[nn.Module] = []
        self._inner: list[dict[str, Any]] = []  # of TensorDictParams, which read these in place of their slots
        first_names: dict[int, str] = {}
        for prefix, part in self.parts.items():
            # Scripted modules accept no other tensors; the arguments were checked, so these have no tensors to swap.
            is_plain = not isinstance(part, torch.jit.ScriptModule)
            slots, buffers = parameter_slots(part), buffer_slots(part)
            for name, param in slots.items():
                if param is not None:
                    first = first_names.setdefault(id(param), f"{prefix}.{name}")
                    self.parameters.setdefault(first, param)
                    if is_plain:
                        self._slots.append((slots, name, first))
            for inner in tensordict_slots(part) if OF_TENSORDICTS in part.__dict__ else ():
                self._inner.append(inner)
                for name, held in inner.items():
                    if isinstance(held, Tensor) and id(held) in first_names:
                        self._slots.append((inner, name, first_names[id(held)]))
                    elif isinstance(held, Tensor):
                        self._buffers.append((inner, name, held))
            if is_plain:
                self._plain.append(part)
                for name, held in buffers.items():
                    if held is not None:
                        self._buffers.append((buffers, name, held))
        self._held: list[tuple[Slots, Slots]] = []  # slots and their content before the swap
        self._attributes: list[tuple[Slots, Slots]] = []
        self._containers: list[tuple[Tree, Tree]] = []  # the lists and dicts in attributes, and copies of them
        self._flat_weights: list[tuple[nn.RNNBase, Any]] = []  # which recurrent layers keep beside their slots
        self.keeps = False  # whether what was swapped stays until the end of ``ParamTree.unchanged``

    def swap(self, tensors: Mapping[object, Tensor]) -> None:
        """Replace some parameters by other tensors, and all buffers by clones, until ``restore``."""
        if not self.keeps:
            self.remember()
        for slots, name, first_name in self._slots:
            if first_name in tensors:
                marks = vars(slots[name])
                slots[name] = tensors[first_name]
                if marks:
                    _mark(slots[name], marks)
        clones: dict[int, Tensor] = {}
        for buffers, name, held in self._buffers:
            if id(held) not in clones:
                clones[id(held)] = held.clone()
                _mark(clones[id(held)], vars(held))
            buffers[name] = clones[id(held)]
        if self._containers:
            placed = {id(param): tensors[name] for name, param in self.parameters.items() if name in tensors}
            for container, values in self._containers:
                for key, value in values.items() if isinstance(values, dict) else enumerate(values):
                    if id(value) in placed:
                        container[key] = placed[id(value)]

    def remember(self) -> None:
        """Record the content of the modules for ``restore``."""
        self._held += [(inner, inner.copy()) for inner in self._inner]
        for part in self._plain:
            attributes, slots, buffers = part.__dict__, parameter_slots(part), buffer_slots(part)
            self._attributes.append((attributes, attributes.copy()))
            self._held += [(slots, slots.copy()), (buffers, buffers.copy())]
            for name, held in attributes.items():
                if type(held) in _CONTAINERS and name not in _OF_EVERY_MODULE and len(held) <= _FEW:
                    self._containers.append((held, held.copy()))
            if isinstance(part, nn.RNNBase):
                self._flat_weights.append((part, flat_weights(part)))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Return the parameters, and the tensors in attributes at the time of ``remember``, with names."""
        yield from ((name.partition(".")[2], param) for name, param in self.parameters.items())
        noted = [attributes for _, attributes in self._attributes] or map(vars, self._plain)
        for part, attributes in zip(self._plain, noted, strict=True):
            for name in attributes.keys() - _OF_EVERY_MODULE:
                of_part = f"{type(part).__name__}.{name}"
                yield from ((of_part, x) for x in trees.flatten(attributes[name])[0] if isinstance(x, Tensor))

    def changed(self) -> list[tuple[Slots, Slots]]:
        """Return the slots and attributes that changed since ``remember``, with their old content."""
        return [
            (slots, values)
            for slots, values in (*self._held, *self._attributes)
            if len(slots) != len(values) or not all(map(operator.is_, slots.values(), values.values()))
        ]

    def restore(self) -> None:
        """Undo ``swap`` and the effects of a forward pass on modules: changed buffers, tensors in attributes."""
        deque(starmap(operator.ior, self._held), 0)  # one C call, which no signal can interrupt halfway
        for slots, values in self.changed():
            _restore(slots, values)
        for container, values in self._containers:
            _restore_container(container, values)
        for slots, values in self._held:
            if list(slots) != list(values):  # a slot that was deleted is now last, and optimizers rely on the order
                for name in [*values, *(slots.keys() - values.keys())]:
                    slots[name] = slots.pop(name)
        for part, weights in self._flat_weights:
            set_flat_weights(part, weights)
        self._held, self._attributes, self._containers, self._flat_weights = [], [], [], []


def _mark(x: Tensor, marks: Mapping[str, object]) -> None:
    """Give a tensor the attributes of another one, such as marks for weight decay, but torch.compile's own."""
    vars(x).update({name: mark for name, mark in marks.items() if not name.startswith("_dynamo_")})


def _restore(slots: Slots, held: Slots) -> None:
    for name, value in list(slots.items()):
        if isinstance(value, Tensor | StandIn) and value is not held.get(name):
            if name in held:
                slots[name] = held[name]
            else:
                del slots[name]
    for name, value in held.items():  # a lazy attribute that became a buffer, say, which is gone
        slots.setdefault(name, value)


def _restore_container(container: Tree, held: Tree) -> None:
    """Restore a list or dict in which tensors, or containers with tensors, were replaced."""
    now, before = (list(x.values()) if isinstance(x, dict) else x for x in (container, held))
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    known = set(map(id, before))
    new = trees.flatten([x for x in now if id(x) not in known])[0]
    if not any(isinstance(x, Tensor | StandIn) for x in new):
        return
    if isinstance(container, list):
        container[:] = held
        return
    container.update(held)  # first: a signal that comes now leaves new tensors, so that the second call goes on
    for name in [*container]:
        if name not in held:
            del container[name]


@dataclass(frozen=True)
class ParamTree:
    """The user's ``params``, flattened."""

    tensors: tuple[Leaf, ...]  # the tensors to differentiate, one per parameter
    result: trees.TreeSpec  # of results: ``params``, with a dict of parameters by name for every module
    paths: tuple[str, ...]  # one readable name per tensor
    leaves: tuple[Leaf, ...]  # the leaves of ``params``, modules among them
    structure: trees.TreeSpec
    slots: tuple[int | str, ...]  # the place of each tensor: an index into ``leaves``, or a name inside the modules
    inside: _Modules = field(default_factory=_Modules)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules in ``params``."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, nn.Module))

    @property
    def formats(self) -> dict[str, str]:
        """The shape, the dtype and the kind of device of each parameter, in words, by path."""
        pairs = zip(self.paths, self.tensors, strict=True)
        return {path: f"shape {list(x.shape)}, {x.dtype} on {x.device.type}" for path, x in pairs}

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """The modules and all their submodules, by index among the modules and name, such as "0.encoder.1"."""
        return self.inside.parts

    def arguments(self, values: Sequence[Tensor]) -> Tree:
        """Return ``params`` with other tensors in place of its own; modules stay as they are."""
        leaves = list(self.leaves)
        for slot, value in zip(self.slots, values, strict=True):
            if isinstance(slot, int):
                leaves[slot] = value
        return trees.unflatten(leaves, self.structure)

    def call(self, values: Sequence[Tensor], loss_fn: Callable[..., Tree], sample: Sequence[Leaf]) -> Tree:
        """Call a loss with other tensors in place of the parameters, also of those inside of modules."""
        args, inside = self.arguments(values), self.inside
        if not inside.parts:
            return loss_fn(args, *sample)

        def swapped() -> Tree:
            inside.swap(dict(zip(self.slots, values, strict=True)))
            return loss_fn(args, *sample)

        return swapped() if inside.keeps else undone(swapped, inside.restore)

    def buffer_name(self, x: Tensor) -> str | None:
        """Return the name of a tensor that is a buffer now; None of any other."""
        slots = (pair for part in self.parts.values() for pair in buffer_slots(part).items())
        return next((name for name, held in slots if held is x), None)

    @cached_property
    def owned(self) -> list[tuple[str, Tensor]]:
        """The tensors that a loss must leave alone, with their names: all but buffers, of which it gets clones."""
        return [*zip(self.paths, self.tensors, strict=True), *self.inside.named()]

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the tensors that a loss must leave alone, by their own ids and by those of their storages."""
        return {key: name for name, x in reversed(self.owned) for key in (id(x), storage_key(x))}

    @property
    def frozen(self) -> list[nn.Parameter]:
        """The parameters of modules that require no gradients; those of other classes or layouts may have no memory."""
        found = self.inside.parameters.values()
        return [x for x in found if not x.requires_grad and type(x) is nn.Parameter and x.layout == torch.strided]

    def unchanged(self, body: Callable[[], T]) -> T:
        """Call a function, then undo its effects on the modules; swapped parameters stay in place until then.

        Backward passes belong into the function, because a block may run again in its own backward pass.
        """
        inside = self.inside

        def remembered() -> T:
            inside.keeps = True
            inside.remember()
            return body()

        def restore() -> None:
            inside.keeps = False
            inside.restore()

        return undone(remembered, restore)


def take_apart(params: object, name: str = "params") -> ParamTree:
    """Return ``params``, flattened; of a module what has ``requires_grad``, tied parameters by their first name."""
    leaves, structure = trees.flatten(params)
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    if not modules:
        paths = tuple(trees.paths(params, name))
        return ParamTree(tuple(leaves), structure, paths, tuple(leaves), structure, tuple(range(len(leaves))))
    inside = _Modules(modules)
    trained: list[dict[str, Tensor]] = [{} for _ in modules]
    for path, param in inside.parameters.items():
        if param.requires_grad:
            place, _, own = path.partition(".")
            trained[int(place)][own] = param
    pieces = list(leaves)
    slots: list[int | str] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            root = len(modules) - len(trained)
            pieces[index] = trained.pop(0)
            slots += [f"{root}.{own}" for own in pieces[index]]
        else:
            slots.append(index)
    result = trees.unflatten(pieces, structure)
    tensors, of_result = trees.flatten(result)
    paths = tuple(trees.paths(result, name))
    return ParamTree(tuple(tensors), of_result, paths, tuple(leaves), structure, tuple(slots), inside)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that require gradients, by name; a tied one by its first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, part in named_parts([module]).items():
        for name, param in parameter_slots(part).items():
            if param is not None and param.requires_grad:
                found.setdefault(id(param), (f"{prefix}.{name}".removeprefix("0."), param))
    return dict(found.values())
