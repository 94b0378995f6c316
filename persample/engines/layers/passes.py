"""Backward passes of losses that checkpoint activations, which keep no factors where reductions allow it.

Blocks that torch computes again in the backward pass (``torch.utils.checkpoint``) are computed under the vmap of the
forward pass again, and give layers their inputs then. The factors of all layers would take as much memory as the
activations. Where only norms, and sums scaled by norms, are asked for, each takes a forward and a backward pass of its
own, in which the factors of a layer are contracted, and freed, as soon as autograd has computed its signals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from persample._torch import temporarily_clear_interpreter_stack, top_saved_tensors_hooks, version
from persample.engines.layers.recorder import MODIFIED, LayerParams, LayerRecorder
from persample.engines.layers.shared import SharedParams
from persample.factors import Factor
from persample.factors.cost_model import Plan
from persample.gradients import Gradients, squared_norms_per_factor
from persample.utils.numerics import as_real, autocast, full_precision
from persample.utils.trees import Leaf, Tree
from persample.vmap_rules.effects import reads_state

_OF_LAYER = "of_layer"  # the attribute of what ``Again`` saves: torch compares shapes alone
Contract: TypeAlias = Callable[[int, Factor], Tensor]  # of the factor of the parameter at a place


def squares(_place: int, factor: Factor) -> Tensor:
    """Return ‖gᵢ‖² of one parameter, which several uses of it have in common."""
    return squared_norms_per_factor([factor])[0]


class Kept(Sequence[Factor]):
    """Factors that are computed, once, where they are read."""

    def __init__(self, count: int, factors: Callable[[], Sequence[Factor]]) -> None:
        self._count, self._compute = count, factors

    def __len__(self) -> int:
        """Return the number of parameters."""
        return self._count

    def __getitem__(self, place: Leaf) -> Leaf:
        """Return the factor of one parameter."""
        return self._factors[place]

    @cached_property
    def _factors(self) -> Sequence[Factor]:
        return self._compute()


@dataclass(frozen=True, kw_only=True)
class Passes(Gradients):
    """Gradients whose sums are computed by a backward pass each.

    Args:
        squares: ‖gᵢ‖² of each parameter, ``[B]`` float64 each.
        contracted: runs a pass, and returns what a function returns for the factors of each parameter, added up.
    """

    squares: list[Tensor]
    contracted: Callable[[Contract], list[Tensor]]

    @property
    def squared_norms_per_param(self) -> list[Tensor]:
        """‖gᵢ‖² of each parameter."""
        return self.squares

    def sums(self, scales: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return Σ wᵢ sᵢ gᵢ of each parameter, as ``Gradients.sums``."""

        def contract(place: int, factor: Factor) -> Tensor:
            one = Gradients((factor,), self.spec, self.losses, weights=self.weights)
            return one.sums(scales[place : place + 1], dtypes[place : place + 1])[0]

        return self.contracted(contract)


class PassRecorder(LayerRecorder):
    """Contracts the factors of layers during the backward pass.

    Args:
        params: the parameters of the call.
        plan: how factors are stored.
        contract: returns what is wanted of a factor; None if factors are kept.
    """

    def __init__(self, params: SharedParams, plan: Plan, contract: Contract | None = None) -> None:
        super().__init__(params, plan)
        self._contract = contract
        self._kept: dict[int, tuple[Leaf, ...]] = {}
        self._left = Counter[int]()  # uses of each parameter that have no signals yet
        self._numbers: dict[int, list[int]] = defaultdict(list)  # of the uses whose factors are kept
        self._found: dict[int, Tensor] = {}

    def record(self, use: Callable[..., None], settings: tuple[object, ...], inputs: Tensor, output: Tensor) -> None:
        """Record the call of a layer, as in ``LayerRecorder``."""
        read, number = _read(inputs, output), len(self._kept)
        places = [place for place in _places(settings[0]) if place is not None]
        self._left.update(places)
        self._kept[number] = use, settings, places, *_packed(read), version(read)
        output.register_hook(partial(self._report, number))
        if inputs.is_leaf or output.is_leaf:  # autograd would not get here otherwise
            self.outputs.append(output if output.is_leaf else get_gradient_edge(output))

    def _report(self, number: int, grad: Tensor) -> None:
        use, settings, places, unpack, saved, written = self._kept[number]
        self._kept[number] = ()
        inputs = unpack(saved)
        if unpack.__module__ == checkpoint.__module__ and not hasattr(inputs, _OF_LAYER):
            raise RuntimeError("a block that runs again calls other layers than before")
        if version(inputs) != written:
            raise RuntimeError(MODIFIED)
        with torch.no_grad(), temporarily_clear_interpreter_stack(), full_precision(grad.device):
            use(self, *settings, inputs, as_real(grad))
            self._left.subtract(places)
            for place in places:
                self._numbers[place].append(number)
            for place in filter(self._is_complete, places):
                self._add_result(place)

    def add(self, grads: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        """Add other gradients, after the factors that layers have reported, which are put in the order of the uses."""
        if self._contract is None:
            for place, numbers in self._numbers.items():
                pairs = sorted(zip(numbers, self._factors[place], strict=True), key=itemgetter(0))
                self._factors[place] = [factor for _, factor in pairs]
        super().add(grads, sizes)

    def _is_complete(self, place: int) -> bool:
        """Return whether a result can be computed: sums add up, and norms are those of all uses."""
        if self._contract is None or self._contract is not squares:
            return self._contract is not None and place not in self.params.computed
        return not (self._left[place] or self.params.computed or place in self.params.expanded)

    def _add_result(self, place: int) -> None:
        assert self._contract is not None
        result = self._contract(place, self.factor(place))
        self._factors.pop(place, None)
        self._found[place] = self._found[place].add_(result) if place in self._found else result

    def results(self) -> list[Tensor]:
        """Return what was contracted of each parameter."""
        count = len(self.params.given)
        for place in range(count):
            if place in self._factors or place not in self._found:
                self._add_result(place)
        return [self._found[place] for place in range(count)]


def _places(layer: Leaf) -> Sequence[int | None]:
    return layer[:2] if isinstance(layer, LayerParams) else (layer,)


def _read(inputs: Tensor, output: Tensor) -> Tensor:
    return (inputs if inputs.dtype == output.dtype else autocast(inputs)).detach()


def _packed(x: Tensor) -> tuple[Callable[[Leaf], Tensor], Leaf]:
    """Return a function and an argument for which it returns a tensor: as autograd saves tensors here."""
    hooks = top_saved_tensors_hooks()
    return (_itself, x) if hooks is None else (hooks[1], hooks[0](x))


def _itself(x: Tensor) -> Tensor:
    return x


class Again:
    """Stands for the recorder in blocks that run again: it gives torch the inputs of the layers there."""

    def record(self, _use: Leaf, _settings: Leaf, inputs: Tensor, output: Tensor) -> None:
        """Save the inputs of a layer, as ``PassRecorder`` did."""
        read = _read(inputs, output)
        setattr(read, _OF_LAYER, True)
        _packed(read)


class Replay(TorchFunctionMode):
    """A context of a backward pass: blocks that run again in it run under a guard."""

    def __init__(self, guard: TorchFunctionMode) -> None:
        super().__init__()
        self._guard, self._before = guard, top_saved_tensors_hooks()

    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: Tree = (), kwargs: Tree = None
    ) -> Tree:
        """Call a function; under the guard if torch collects what a block saves for its own backward pass."""
        if top_saved_tensors_hooks() in {None, self._before} or reads_state(func):  # torch's hooks read it
            return func(*args, **kwargs or {})
        return self._guard.__torch_function__(func, types, args, kwargs)
