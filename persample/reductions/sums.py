"""Sums and means over samples, plain, clipped to bounds and weighted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from persample.clipping import Bound, Rule, check_bound
from persample.errors import ArgumentError
from persample.factors import Op
from persample.gradients import Gradients, ParamSpec
from persample.merge import Summed
from persample.reductions.base import Average, SumOverSamples
from persample.reductions.norms import check_metric, group_names, in_metric, largest_root, scales_of_groups
from persample.utils.numerics import accumulate_dtype
from persample.utils.tracing import are_plain
from persample.utils.trees import Tree

S = TypeVar("S")


class _ScaledSum(SumOverSamples):
    """Σ wᵢ sᵢ gᵢ; subclasses define the scale sᵢ of each sample."""

    uses: ClassVar[frozenset[Op]] = frozenset({Op.weighted_sum})

    def scales(self, gradients: Gradients) -> Sequence[Tensor | None]:
        """Return the sᵢ of each parameter, ``[B]`` float64, or None for ones."""
        return [None] * len(gradients.spec.paths)

    def sums(self, gradients: Gradients) -> Tree:
        dtypes = gradients.spec.dtypes
        sums = gradients.sums(self.scales(gradients), list(map(accumulate_dtype, dtypes)))
        return gradients.spec.tree([Summed(total, dtype) for total, dtype in zip(sums, dtypes, strict=True)])


@dataclass(frozen=True)
class _Clipped(_ScaledSum):
    max_norm: Bound | Rule | Mapping[str, Bound | Rule]
    per_param: bool = False
    metric: Tree = field(default=None, kw_only=True)
    uses: ClassVar[frozenset[Op]] = frozenset({Op.weighted_sum, Op.squared_norms})
    live: ClassVar[tuple[str, ...]] = ("max_norm", "metric")

    def __post_init__(self) -> None:
        check_bounds(self.max_norm)

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if bounds by name do not name every parameter, or the metric is not like the parameters."""
        if isinstance(self.max_norm, Mapping):
            group_names(list(self.max_norm), spec.paths)
        if self.metric is not None:
            check_metric(self.metric, spec)

    def scales(self, gradients: Gradients) -> Sequence[Tensor | None]:
        """Return what the rule returns for ‖gᵢ‖, or min(1, C/‖gᵢ‖), exactly 1 where nothing is clipped."""
        measured = gradients if self.metric is None else in_metric(gradients, self.metric)
        if not (self.per_param or isinstance(self.max_norm, Mapping)):
            return [clip_scale(measured.norms, self.max_norm)] * len(gradients.spec.paths)
        return scales_of_groups(measured, self.max_norm, clip_scale, "max_norm", per_param=self.per_param)

    def largest_part(self, num_params: int | Mapping[str, int] | None) -> float:
        """Return the largest Euclidean norm that a unit's part of the sum may have."""
        largest = largest_norm(self.max_norm, num_params, per_param=self.per_param) * largest_root(self.metric)
        if not largest < math.inf:
            fix = "Pass finite bounds, and a finite metric."
            raise ArgumentError.about("max_norm", expected="a bound on every gradient", received="inf", fix=fix)
        return largest


@dataclass(frozen=True)
class Sum(_ScaledSum):
    """Σ wᵢ gᵢ: the sum of the per-sample gradients.

    Returns a tree like the parameters, in their dtypes; half precision is accumulated in float32.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 2.0]), Sum())
        tensor(3.)
    """


@dataclass(frozen=True)
class Mean(_ScaledSum, Average):
    """Σ wᵢ gᵢ / Σ wᵢ: the averaged update, equal to the gradient of the (weighted) mean loss.

    Returns a tree like the parameters, in their dtypes; half precision is accumulated in float32. Weights must not be
    negative and must not sum to 0, and an empty batch has no mean (ArgumentError).

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 2.0]), Mean())
        tensor(1.5000)
    """


@dataclass(frozen=True)
class ClippedSum(_Clipped):
    """Σ wᵢ gᵢ min(1, C/‖gᵢ‖): the sum of per-sample gradients, each clipped to norm C first.

    Returns a tree like the parameters. One sample of weight 1 contributes at most C (to 4 eps of the output dtype).
    Adding or removing it changes the sum by at most C, and replacing it by at most 2C. With bounds by name, C is
    replaced here by the root of the sum of their squares; with ``per_param``, by C times the root of the number of
    parameters. A weight k multiplies it by k. C = 0 gives zeros, C = ∞ the plain sum, and zero gradients stay zero. A
    NaN gradient of non-zero weight makes the result NaN.

    Source: Abadi et al., "Deep Learning with Differential Privacy" (2016), Algorithm 1.

    Args:
        max_norm: the bound C, a number or 0-d tensor in [0, ∞]; or a rule of ``persample.clipping``; or these by name,
            such as ``{"head": 0.1, "": 1.0}``. A name stands for a parameter or for a module (or subtree) with all its
            parameters, whose gradients are clipped together; "" for all that no other name has; the longest decides.
        per_param: clip the gradient of each parameter to C by itself, instead of all of them together.
        metric: D, a tree like the parameters of positive tensors that broadcast with them: then ‖gᵢ‖ is
            ‖D⁻¹ᐟ² gᵢ‖, and the sum remains that of the gᵢ. See ``Norm``.

    Raises:
        ArgumentError: if ``max_norm`` is negative or NaN, or (when used) if names and parameters do not match.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([0.5, 9.0]), ClippedSum(1.0))
        tensor(1.5000)
        >>> params, x = {"body": torch.zeros(2), "head": torch.tensor(0.0)}, torch.tensor([[3.0, 4.0]])
        >>> by_name = ClippedSum({"body": 5.0, "head": 0.5})  # gradients (3, 4) and 1
        >>> per_sample_grads(lambda p, x: p["body"] @ x + p["head"], params, x, by_name)
        {'body': tensor([3., 4.]), 'head': tensor(0.5000)}
    """


@dataclass(frozen=True)
class ClippedMean(_Clipped, Average):
    """Σ wᵢ gᵢ min(1, C/‖gᵢ‖) / Σ wᵢ: the average of per-sample gradients, each clipped to norm C first.

    Returns a tree like the parameters. The bounds are those of ClippedSum, the rules for weights those of Mean.

    Args:
        max_norm: the bound C, a number or 0-d tensor in [0, ∞]; or a rule of ``persample.clipping``; or these by name,
            such as ``{"head": 0.1, "": 1.0}``. A name stands for a parameter or for a module (or subtree) with all its
            parameters, whose gradients are clipped together; "" for all that no other name has; the longest decides.
        per_param: clip the gradient of each parameter to C by itself, instead of all of them together.
        metric: D, a tree like the parameters of positive tensors that broadcast with them: then ‖gᵢ‖ is
            ‖D⁻¹ᐟ² gᵢ‖, and the sum remains that of the gᵢ. See ``Norm``.

    Raises:
        ArgumentError: if ``max_norm`` is negative or NaN, or (when used) if names and parameters do not match.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([0.5, 9.0]), ClippedMean(1.0))
        tensor(0.7500)
    """


Scale = Rule | Callable[[Tensor], Tensor | float]


@dataclass(frozen=True)
class WeightedSum(_ScaledSum):
    """Σ wᵢ f(‖gᵢ‖) gᵢ: a sum that scales each sample by a function of its own gradient norm.

    Returns a tree like the parameters. f sees one norm at a time (a 0-d float64 tensor, under ``torch.vmap``), so the
    result does not depend on the chunks.

    Args:
        weight_fn: f, from a 0-d norm to a 0-d scale, without data-dependent control flow (use ``torch.where``); or a
            rule of ``persample.clipping``; or these by name, as in ``ClippedSum``.
        per_param: scale the gradient of each parameter by its own norm, instead of all of them together.

    Raises:
        ArgumentError: if ``weight_fn`` is not callable, fails, or returns anything but one number per norm; or (when
            used) if names and parameters do not match.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> unit = WeightedSum(lambda norm: 1 / norm)  # every gradient is normalized to length 1
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([0.5, 9.0]), unit)
        tensor(2.)
    """

    weight_fn: Scale | Mapping[str, Scale]
    per_param: bool = False
    uses: ClassVar[frozenset[Op]] = frozenset({Op.weighted_sum, Op.squared_norms})
    live: ClassVar[tuple[str, ...]] = ("weight_fn",)
    functions_of_a_norm: ClassVar[tuple[str, ...]] = ("weight_fn",)

    def __post_init__(self) -> None:
        for argument, scale in _named("weight_fn", self.weight_fn):
            if not isinstance(scale, Rule) and not callable(scale):
                raise _rejected(argument, repr(scale))

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if functions by name do not name every parameter."""
        if isinstance(self.weight_fn, Mapping):
            group_names(list(self.weight_fn), spec.paths, "weight_fn")

    def scales(self, gradients: Gradients) -> Sequence[Tensor | None]:
        if not (self.per_param or isinstance(self.weight_fn, Mapping)):
            return [_scale_of(gradients.norms, self.weight_fn)] * len(gradients.spec.paths)
        return scales_of_groups(gradients, self.weight_fn, _scale_of, "weight_fn", per_param=self.per_param)

    def largest_part(self, num_params: int | Mapping[str, int] | None) -> float:
        """Return the largest norm of a unit's part of the sum, of rules."""
        given = self.weight_fn if isinstance(self.weight_fn, Mapping) else {"": self.weight_fn}
        rules = {name: scale for name, scale in given.items() if isinstance(scale, Rule)}
        if len(rules) < len(given):
            return super().largest_part(num_params)
        return largest_norm(rules if given is self.weight_fn else rules[""], num_params, per_param=self.per_param)


def _scale_of(norms: Tensor, scale: Scale) -> Tensor:
    """Return f of each norm."""
    if isinstance(scale, Rule):
        return scale.scale(norms)
    if norms.numel() == 0:  # vmap rejects an empty batch
        return norms
    try:
        found = torch.vmap(lambda norm: torch.as_tensor(scale(norm), device=norm.device))(norms.flatten())
    except (RuntimeError, TypeError, ValueError) as error:
        raise _rejected("weight_fn", f"a function that fails: {error}") from error
    if found.shape != (norms.numel(),) or found.is_complex():
        raise _rejected("weight_fn", f"a function that returns shape {list(found.shape[1:])}, {found.dtype}")
    return found.to(norms).view_as(norms)


def _rejected(argument: str, received: str) -> ArgumentError:
    return ArgumentError.about(
        argument,
        expected="a function from one 0-d norm to one 0-d scale",
        received=received,
        fix="Compute the scale from the norm with torch operations, torch.where instead of if.",
    )


def largest_norm(
    bounds: Bound | Rule | Mapping[str, Bound | Rule], num_params: int | Mapping[str, int] | None, *, per_param: bool
) -> float:
    """Return the root of the sum of the squared bounds of all groups of parameters, each of which counts once."""
    squares = 0.0
    for name, bound in bounds.items() if isinstance(bounds, Mapping) else [("", bounds)]:
        own = num_params.get(name) if isinstance(num_params, Mapping) else num_params
        if per_param and not (
            isinstance(own, int) and own > 0 and isinstance(num_params, Mapping) == isinstance(bounds, Mapping)
        ):
            expected = "the number of parameter tensors" + (" of each name" * isinstance(bounds, Mapping))
            fix = "Each of them is clipped by itself: pass for example len(list(model.parameters()))."
            raise ArgumentError.about("num_params", expected=expected, received=repr(num_params), fix=fix)
        number = float(bound.max_norm if isinstance(bound, Rule) else bound)
        squares += number**2 * (own if per_param and own else 1)
    return math.sqrt(squares)


def check_bounds(max_norm: Bound | Rule | Mapping[str, Bound | Rule]) -> None:
    """Check that bounds are rules, or numbers from 0 to ∞."""
    if type(max_norm) is float and max_norm >= 0:  # the usual case
        return
    for argument, bound in _named("max_norm", max_norm):
        if not isinstance(bound, Rule):
            check_bound(argument, bound)


def _named(argument: str, given: S | Mapping[str, S]) -> Iterable[tuple[str, S]]:
    """Return the single values of an argument that may be by name, with their names in messages."""
    if not isinstance(given, Mapping):
        return [(argument, given)]
    for name in given:
        if not isinstance(name, str):
            fix = "Name parameters as in 'layers.0.weight'; '' stands for all that no other name has."
            raise ArgumentError.about(argument, expected="names as keys", received=repr(name), fix=fix)
    return [(f"{argument}[{name!r}]", value) for name, value in given.items()]


def clip_scale(norms: Tensor, bound: Bound | Rule) -> Tensor:
    """Return what a rule returns; of a number C min(1, C/‖gᵢ‖), exactly 1 for C = ∞ and for zero gradients."""
    if isinstance(bound, Rule):
        return bound.scale(norms)
    limit = bound.to(norms) if isinstance(bound, Tensor) else float(bound)
    kept = norms <= limit
    if are_plain([norms]) and not isinstance(bound, Tensor):
        return (limit / norms).masked_fill_(kept, 1)
    return (limit / norms.masked_fill(kept, 1)).masked_fill(kept, 1)  # derivatives exist at ‖gᵢ‖ = 0, too
