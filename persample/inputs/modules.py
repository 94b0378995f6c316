"""``nn.Module``s as ``params``: their parameters are taken out, replaced while the loss runs, and given gradients."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from persample._torch import buffer_slots, flat_weights, module_slots, parameter_slots, set_flat_weights
from persample.errors import ArgumentError
from persample.utils import trees
from persample.utils.interrupts import undone
from persample.utils.strides import storage_key

T = TypeVar("T")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = {list, dict, OrderedDict, defaultdict}  # others may do anything when they are copied
# The entries of a list or dict in an attribute; copies of larger ones, such as vocabularies, would cost every call.
_FEW = 256


class StandIn:
    """Stands for a tensor while a loss runs; what is left of it in a module is removed, as tensors are."""

    __slots__ = ()


class _Modules:
    """All modules of one call, and the slots in which they keep their parameters and buffers.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.parts: dict[str, nn.Module] = {}
        seen: set[nn.Module] = set()
        for place, module in enumerate(modules):
            self.parts.update(module.named_modules(seen, str(place)))
        self.parameters: dict[str, nn.Parameter] = {}
        first_names: dict[int, str] = {}
        for prefix, part in self.parts.items():
            for name, param in parameter_slots(part).items():
                if param is not None and id(param) not in first_names:
                    first_names[id(param)] = f"{prefix}.{name}"
                    self.parameters[f"{prefix}.{name}"] = param
        # Slots are listed by the tensor in them, so that tied tensors, and modules with two names, are swapped alike.
        # Scripted modules accept no other tensors; the arguments were checked, so these have no tensors to swap.
        self._plain = [part for part in self.parts.values() if not isinstance(part, torch.jit.ScriptModule)]
        self._recurrent = [part for part in self._plain if isinstance(part, nn.RNNBase)]
        self._slots: list[tuple[dict[str, Any], str, str]] = [
            (parameter_slots(part), name, first_names[id(held)])
            for part in self._plain
            for name, held in parameter_slots(part).items()
            if held is not None
        ]
        self._buffers = [
            (buffer_slots(part), name, held)
            for part in self._plain
            for name, held in buffer_slots(part).items()
            if held is not None
        ]
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []  # slots and their content before the swap
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []  # the lists and dicts in attributes, and copies of them
        self._flat_weights: list[tuple[nn.RNNBase, Any]] = []  # which recurrent layers keep beside their slots
        self.keeps = False  # whether what was swapped stays until the end of ``ParamTree.unchanged``

    def swap(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some parameters by other tensors, and all buffers by clones, until ``restore``.

        Args:
            tensors: the new tensors, by the first name of each parameter.
        """
        clones = {id(held): _marked(held.clone(), held) for _, _, held in self._buffers}
        if not self.keeps:
            self.remember()
        for slots, name, first_name in self._slots:
            if first_name in tensors:
                slots[name] = _marked(tensors[first_name], slots[name])
        for buffers, name, held in self._buffers:
            buffers[name] = clones[id(held)]
        if self._containers:
            placed = {id(self.parameters[name]): x for name, x in tensors.items()}
            for container, values in self._containers:
                for key, value in values.items() if isinstance(values, dict) else enumerate(values):
                    if id(value) in placed:
                        container[key] = placed[id(value)]

    def remember(self) -> None:
        """Note what the modules hold, for ``restore``."""
        self._attributes = [(part.__dict__, dict(part.__dict__)) for part in self._plain]
        self._containers = [
            (held, list(held) if isinstance(held, list) else dict(held))
            for attributes, _ in self._attributes
            for name, held in attributes.items()
            if type(held) in _CONTAINERS and name not in _OF_EVERY_MODULE and len(held) <= _FEW
        ]
        self._flat_weights = [(part, flat_weights(part)) for part in self._recurrent]
        self._held = [
            (slots, dict(slots)) for part in self._plain for slots in (parameter_slots(part), buffer_slots(part))
        ]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Return the parameters, and the tensors that attributes held when ``remember`` noted them, with names."""
        yield from ((name.partition(".")[2], param) for name, param in self.parameters.items())
        noted = [attributes for _, attributes in self._attributes] or map(vars, self._plain)
        for part, attributes in zip(self._plain, noted, strict=True):
            for name in attributes.keys() - _OF_EVERY_MODULE:
                of_part = f"{type(part).__name__}.{name}"
                yield from ((of_part, x) for x in trees.flatten(attributes[name])[0] if isinstance(x, Tensor))

    @property
    def has_changed(self) -> bool:
        """Whether the modules hold other tensors than ``remember`` noted."""
        return any(_differ(slots, values) for slots, values in (*self._held, *self._attributes))

    def restore(self) -> None:
        """Undo ``swap`` and the effects of a forward pass on modules: changed buffers, tensors in attributes."""
        if not self._held:
            return
        deque(starmap(operator.ior, self._held), 0)  # one C call, which no signal can interrupt halfway
        for slots, values in (*self._held, *self._attributes):
            _restore(slots, values)
        for container, values in self._containers:
            _restore_container(container, values)
        for slots, values in self._held:
            if list(slots) != list(values):  # a slot that was deleted is now last, and optimizers rely on the order
                _reorder(slots, values)
        for part, weights in self._flat_weights:
            set_flat_weights(part, weights)
        self._held = self._attributes = []
        self._containers = []
        self._flat_weights = []


def _marked(x: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the attributes that a user gave another one, such as marks for weight decay."""
    marks = vars(like)
    if marks:  # torch.compile's own are about the memory of that very tensor
        vars(x).update({name: mark for name, mark in marks.items() if not name.startswith("_dynamo_")})
    return x


def _differ(slots: dict[str, Any], held: dict[str, Any]) -> bool:
    return len(slots) != len(held) or not all(map(operator.is_, slots.values(), held.values()))


def _restore(slots: dict[str, Any], held: dict[str, Any]) -> None:
    if not _differ(slots, held):
        return
    for name, value in list(slots.items()):
        if isinstance(value, Tensor | StandIn) and value is not held.get(name):
            if name in held:
                slots[name] = held[name]
            else:
                del slots[name]
    for name, value in held.items():
        if isinstance(value, Tensor):
            slots.setdefault(name, value)


def _restore_container(container: Any, held: Any) -> None:
    """Put back what a list or dict held, if it holds other tensors now, or containers with tensors."""
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


def _reorder(slots: dict[str, Any], held: dict[str, Any]) -> None:
    for name in [*held, *(slots.keys() - held.keys())]:
        slots[name] = slots.pop(name)


@dataclass(frozen=True)
class ParamTree:
    """The user's ``params``, flattened.

    Args:
        tensors: the tensors to differentiate, one per parameter.
        result: the structure of results: ``params`` with every module replaced by a dict of its parameters by name.
        paths: one readable name per tensor.
        leaves: the leaves of ``params``, modules among them.
        structure: the structure of ``params``.
        slots: the place of each tensor: an index into ``leaves``, or a name inside the modules.
        inside: the modules in ``leaves``, or None.
    """

    tensors: tuple[Any, ...]
    result: trees.TreeSpec
    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: trees.TreeSpec
    slots: tuple[int | str, ...]
    inside: _Modules | None = None

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
        return self.inside.parts if self.inside else {}

    def arguments(self, values: Sequence[Tensor]) -> Any:
        """Return ``params`` with other tensors in place of its own; modules stay as they are."""
        placed = dict(zip(self.slots, values, strict=True))
        return trees.unflatten([placed.get(index, leaf) for index, leaf in enumerate(self.leaves)], self.structure)

    def call(self, values: Sequence[Tensor], loss_fn: Callable[..., Any], sample: Sequence[Any]) -> Any:
        """Call a loss with other tensors in place of the parameters, also of those inside of modules."""
        args = self.arguments(values)
        if self.inside is None:
            return loss_fn(args, *sample)
        inside, named = self.inside, zip(self.slots, values, strict=True)
        tensors = {name: value for name, value in named if isinstance(name, str)}

        def swapped() -> Any:
            inside.swap(tensors)
            return loss_fn(args, *sample)

        return swapped() if inside.keeps else undone(swapped, inside.restore)

    def buffer_name(self, x: Tensor) -> str | None:
        """Return the name of a tensor that is a buffer now; None of any other."""
        slots = (pair for part in self.parts.values() for pair in buffer_slots(part).items())
        return next((name for name, held in slots if held is x), None)

    @cached_property
    def owned(self) -> list[tuple[str, Tensor]]:
        """The tensors that a loss must leave alone, with their names: all but buffers, of which it gets clones."""
        return [*zip(self.paths, self.tensors, strict=True), *(self.inside.named() if self.inside else ())]

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the tensors that a loss must leave alone, by their own ids and by those of their storages."""
        return {key: name for name, x in reversed(self.owned) for key in (id(x), storage_key(x))}

    @property
    def frozen(self) -> list[nn.Parameter]:
        """The parameters of modules that require no gradients; those of other classes or layouts may have no memory."""
        found = self.inside.parameters.values() if self.inside else ()
        return [x for x in found if not x.requires_grad and type(x) is nn.Parameter and x.layout == torch.strided]

    @property
    def has_changed(self) -> bool:
        """Whether the modules hold other objects than when ``unchanged`` noted them."""
        return self.inside is not None and self.inside.has_changed

    def unchanged(self, body: Callable[[], T]) -> T:
        """Call a function, and undo its effects on the modules; until then, what ``call`` has swapped stays in place.

        Backward passes belong into the function, because a block may run again in its own backward pass.
        """
        if self.inside is None:
            return body()
        inside = self.inside

        def remembered() -> T:
            inside.keeps = True
            inside.remember()
            return body()

        def restore() -> None:
            inside.keeps = False
            inside.restore()

        return undone(remembered, restore)


def take_apart(params: Any, name: str = "params") -> ParamTree:
    """Return ``params``, flattened.

    Of a module only parameters with ``requires_grad`` count, a tied one once, under its first name.

    Args:
        params: a pytree of tensors and ``nn.Module``s, or a single one of them.
        name: the name of the argument, for messages.
    """
    leaves, spec = trees.flatten(params)
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    if not modules:
        paths = tuple(trees.paths(params, name))
        return ParamTree(tuple(leaves), spec, paths, tuple(leaves), spec, tuple(range(len(leaves))))

    inside = _Modules(modules)
    trainable = {path: param for path, param in inside.parameters.items() if param.requires_grad}
    pieces = list(leaves)
    slots: list[int | str] = []
    prefixes = iter(range(len(modules)))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            prefix = f"{next(prefixes)}."
            inner = [path for path in trainable if path.startswith(prefix)]
            pieces[index] = {path.removeprefix(prefix): trainable[path] for path in inner}
            slots += inner
        else:
            slots.append(index)
    result = trees.unflatten(pieces, spec)
    tensors, result_spec = trees.flatten(result)
    paths = tuple(trees.paths(result, name))
    return ParamTree(tuple(tensors), result_spec, paths, tuple(leaves), spec, tuple(slots), inside)


def set_grads(module: nn.Module, grads: Mapping[str, Tensor], accumulate: bool = False) -> None:
    """Put reduced gradients into ``.grad``, so that any ``torch.optim`` optimizer can step on them.

    Args:
        module: the module whose parameters receive the gradients.
        grads: a tensor of the parameter's shape for every parameter with ``requires_grad``, by name: what
            ``per_sample_grads(loss_fn, module, batch, Mean())`` returns. A tensor is converted if its dtype or device
            differs from the parameter's, and otherwise not copied.
        accumulate: add to the gradients that are there, as ``.backward()`` does, instead of replacing them.

    Raises:
        ArgumentError: if ``module`` is no module, a trainable parameter is missing, a name is unknown, or a shape
            differs.

    Examples:
        >>> import torch
        >>> linear = nn.Linear(2, 1, bias=False)
        >>> set_grads(linear, {"weight": torch.ones(1, 2)})
        >>> torch.optim.SGD(linear.parameters(), lr=0.1).step()
    """
    if not isinstance(module, nn.Module):
        fix = "Pass the module that the gradients are of; then call optimizer.step()."
        raise ArgumentError.about("module", expected="an nn.Module", received=type(module).__name__, fix=fix)
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if not isinstance(grads, Mapping):
        fix = "Pass what per_sample_grads(loss_fn, module, batch, Mean()) returns for this very module."
        raise ArgumentError.about("grads", expected="a dict by name", received=type(grads).__name__, fix=fix)
    missing, unknown = sorted(params.keys() - grads.keys()), sorted(grads.keys() - params.keys())
    if missing or unknown:
        raise ArgumentError.about(
            "grads",
            expected="one gradient per trainable parameter of the module, by name",
            received=f"missing {missing}, unknown or frozen {unknown}",
            fix="Pass what per_sample_grads(loss_fn, module, batch, Mean()) returns for this very module.",
        )
    for name, param in params.items():
        grad = grads[name]
        if not isinstance(grad, Tensor) or grad.shape != param.shape or grad.is_complex() > param.is_complex():
            received = f"shape {list(grad.shape)}, {grad.dtype}" if isinstance(grad, Tensor) else type(grad).__name__
            expected = f"shape {list(param.shape)}, {param.dtype}"
            fix = "Reduce over the samples first, for example with Mean()."
            raise ArgumentError.about(f"grads[{name!r}]", expected=expected, received=received, fix=fix)
    for name, param in params.items():
        grad = grads[name].detach().to(param)
        # Not in place: the gradient that is there may be a result that the caller keeps.
        param.grad = param.grad + grad if accumulate and param.grad is not None else grad


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that require gradients, by name; a tied one by its first name.

    They are those of ``named_parameters()``, whose nested generators take several times as long.

    Args:
        module: the module.

    Examples:
        >>> list(trained_parameters(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
        ['0.weight', '0.bias']
    """
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()

    def visit(part: nn.Module, prefix: str) -> None:
        seen.add(id(part))
        for name, param in parameter_slots(part).items():
            if param is not None and param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                found[prefix + name] = param
        for name, child in module_slots(part).items():
            if child is not None and id(child) not in seen:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return found


def add_grads(params: ParamTree, grads: Any) -> None:
    """Add gradients to ``.grad``, as ``.backward()`` does.

    Args:
        params: the parameters, leaf tensors that require gradients.
        grads: a tree of gradients like the parameters.
    """
    for param, grad in zip(params.tensors, trees.flatten(grads)[0], strict=True):
        if param.grad is None:
            param.grad = grad.clone()
        else:
            param.grad.add_(grad)
