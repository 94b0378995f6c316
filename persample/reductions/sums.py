"""Sums and means over samples, plain, clipped to bounds and weighted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Op
from persample.gradients import Gradients, ParamSpec
from persample.merge import Summed
from persample.reductions.base import Average, SumOverSamples
from persample.utils.numerics import accumulate_dtype, root
from persample.utils.tracing import are_plain, is_batched
from persample.utils.trees import Tree


class _ScaledSum(SumOverSamples):
    """Σ wᵢ sᵢ gᵢ; subclasses define the scale sᵢ of each sample."""

    uses: ClassVar[frozenset[Op]] = frozenset({Op.weighted_sum})

    def scales(self, gradients: Gradients) -> Sequence[Tensor | None]:
        """Return the sᵢ of each parameter, ``[B]`` float64, or None for ones."""
        return [None] * len(gradients.factors)

    def sums(self, gradients: Gradients) -> Tree:
        """Return the scaled sums of one chunk."""
        dtypes = gradients.spec.dtypes
        sums = gradients.sums(self.scales(gradients), list(map(accumulate_dtype, dtypes)))
        return gradients.spec.tree([Summed(total, dtype) for total, dtype in zip(sums, dtypes, strict=True)])


@dataclass(frozen=True)
class _Clipped(_ScaledSum):
    max_norm: Bound | Mapping[str, Bound]
    per_param: bool = False
    uses: ClassVar[frozenset[Op]] = frozenset({Op.weighted_sum, Op.squared_norms})
    live: ClassVar[tuple[str, ...]] = ("max_norm",)

    def __post_init__(self) -> None:
        check_bounds(self.max_norm)

    def check(self, spec: ParamSpec) -> None:
        """Raise an error if bounds by name do not name every parameter."""
        if isinstance(self.max_norm, Mapping):
            group_names(list(self.max_norm), spec.paths)

    def scales(self, gradients: Gradients) -> Sequence[Tensor | None]:
        """Return min(1, C/‖gᵢ‖), exactly 1 where nothing is clipped."""
        return clip_scales(gradients, self.max_norm, per_param=self.per_param)


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
    Adding or removing it changes the sum by at most C, and replacing it by at most 2C. With bounds by name, C is here
    the root of the sum of their squares; with ``per_param``, C times the root of the number of parameters. A weight k
    multiplies it by k. C = 0 gives zeros, C = ∞ the plain sum, and zero gradients stay zero. A NaN
    gradient of non-zero weight makes the result NaN.

    Source: Abadi et al., "Deep Learning with Differential Privacy" (2016), Algorithm 1.

    Args:
        max_norm: the bound C, a number or 0-d tensor in [0, ∞]; or bounds by name, such as ``{"head": 0.1, "": 1.0}``.
            A name stands for a parameter or for a module (or subtree) with all its parameters, whose gradients are
            clipped together; "" for all that no other name has; the longest name decides.
        per_param: clip the gradient of each parameter to C by itself, instead of all of them together.

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
        max_norm: the bound C, a number or 0-d tensor in [0, ∞]; or bounds by name, such as ``{"head": 0.1, "": 1.0}``.
            A name stands for a parameter or for a module (or subtree) with all its parameters, whose gradients are
            clipped together; "" for all that no other name has; the longest name decides.
        per_param: clip the gradient of each parameter to C by itself, instead of all of them together.

    Raises:
        ArgumentError: if ``max_norm`` is negative or NaN, or (when used) if names and parameters do not match.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([0.5, 9.0]), ClippedMean(1.0))
        tensor(0.7500)
    """


@dataclass(frozen=True)
class WeightedSum(_ScaledSum):
    """Σ wᵢ f(‖gᵢ‖) gᵢ: a sum that scales each sample by a function of its own gradient norm.

    Returns a tree like the parameters. f sees one norm at a time (a 0-d float64 tensor, under ``torch.vmap``), so the
    result does not depend on the chunks.

    Args:
        weight_fn: f, from a 0-d norm to a 0-d scale, without data-dependent control flow (use ``torch.where``).

    Raises:
        ArgumentError: if ``weight_fn`` is not callable, fails, or returns anything but one number per norm.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> unit = WeightedSum(lambda norm: 1 / norm)  # every gradient is normalized to length 1
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([0.5, 9.0]), unit)
        tensor(2.)
    """

    weight_fn: Callable[[Tensor], Tensor | float]
    uses: ClassVar[frozenset[Op]] = frozenset({Op.weighted_sum, Op.squared_norms})
    functions_of_a_norm: ClassVar[tuple[str, ...]] = ("weight_fn",)

    def __post_init__(self) -> None:
        if not callable(self.weight_fn):
            raise self._rejected(repr(self.weight_fn))

    def scales(self, gradients: Gradients) -> Sequence[Tensor | None]:
        """Return f(‖gᵢ‖)."""
        norms = gradients.norms.flatten()
        if len(norms) == 0:  # vmap rejects an empty batch
            return [gradients.norms] * len(gradients.factors)
        try:
            scale = torch.vmap(lambda norm: torch.as_tensor(self.weight_fn(norm), device=norm.device))(norms)
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._rejected(f"a function that fails: {error}") from error
        if scale.shape != norms.shape or scale.is_complex():
            raise self._rejected(f"a function that returns shape {list(scale.shape[1:])}, {scale.dtype}")
        return [scale.to(norms).view_as(gradients.norms)] * len(gradients.factors)

    @staticmethod
    def _rejected(received: str) -> ArgumentError:
        return ArgumentError.about(
            "weight_fn",
            expected="a function from one 0-d norm to one 0-d scale",
            received=received,
            fix="Compute the scale from the norm with torch operations, torch.where instead of if.",
        )


Bound = float | Tensor
# Of a path such as params['fc.weight'] or params.layers[0].
_KEY = re.compile(r"""\[(?:'(.*?)'|"(.*?)"|(.*?))\]|\.(\w+)""")


def check_bounds(max_norm: Bound | Mapping[str, Bound]) -> None:
    """Check that bounds are numbers from 0 to ∞."""
    named = isinstance(max_norm, Mapping)
    for name, bound in max_norm.items() if isinstance(max_norm, Mapping) else [("", max_norm)]:
        if named and not isinstance(name, str):
            fix = "Name parameters as in 'layers.0.weight'; '' stands for all that no other name has."
            raise ArgumentError.about("max_norm", expected="names as keys", received=repr(name), fix=fix)
        number = (isinstance(bound, Real) and not isinstance(bound, bool)) or (
            isinstance(bound, Tensor) and bound.ndim == 0
        )
        if not number or not (is_batched(bound) or bound >= 0):
            fix = "Pass the largest norm that one sample may contribute; inf clips nothing."
            argument = f"max_norm[{name!r}]" if named else "max_norm"
            raise ArgumentError.about(argument, expected="a number >= 0", received=repr(bound), fix=fix)


def group_names(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the longest of the given names that each parameter belongs to.

    Examples:
        >>> group_names(["body", "body.bias", ""], ["params['body.weight']", "params['body.bias']", "params['scale']"])
        ['body', 'body.bias', '']
    """
    dotted = [".".join(map("".join, _KEY.findall(path))) for path in paths]
    found = [max((name for name in names if _contains(name, own)), key=len, default=None) for own in dotted]
    missing = [own for own, name in zip(dotted, found, strict=True) if name is None]
    unknown = sorted({*names} - {*found})
    if missing or unknown:
        faults = [f"no bound for {missing}"] if missing else []
        faults += [f"bounds for {unknown}, which name no parameter"] if unknown else []
        received = ", and ".join(faults)
        fix = f"The parameters are {dotted}; '' stands for all that no other name has, inf clips nothing."
        raise ArgumentError.about("max_norm", expected="bounds by parameter or module", received=received, fix=fix)
    return [name for name in found if name is not None]


def clip_scales(gradients: Gradients, max_norm: Bound | Mapping[str, Bound], *, per_param: bool) -> list[Tensor]:
    """Return min(1, C/‖gᵢ‖) of each parameter's group, exactly 1 where nothing is clipped (C = ∞, or a zero gradient).

    Args:
        gradients: the gradients of a chunk.
        max_norm: one bound for all parameters together, or bounds by name.
        per_param: whether each parameter is a group of its own.

    Returns:
        The scales of each parameter, ``[B]`` float64; of one group the same tensor.
    """
    if not isinstance(max_norm, Mapping) and not per_param:
        return [_scale(gradients.norms, max_norm)] * len(gradients.factors)
    bounds = max_norm if isinstance(max_norm, Mapping) else {"": max_norm}
    names = group_names(list(bounds), gradients.spec.paths)
    if per_param:
        return [_scale(norms, bounds[name]) for norms, name in zip(gradients.norms_per_param, names, strict=True)]
    squared: dict[str, list[Tensor]] = {name: [] for name in bounds}
    for name, one in zip(names, gradients.squared_norms_per_param, strict=True):
        squared[name].append(one)
    scales = {name: _scale(root(torch.stack(own).sum(0)), bounds[name]) for name, own in squared.items()}
    return [scales[name] for name in names]


def _contains(name: str, own: str) -> bool:
    return name in ("", own) or own.startswith(f"{name}.")


def _scale(norms: Tensor, bound: Bound) -> Tensor:
    limit = bound.to(norms) if isinstance(bound, Tensor) else float(bound)
    kept = norms <= limit
    if are_plain([norms]) and not isinstance(bound, Tensor):
        return (limit / norms).masked_fill_(kept, 1)
    return (limit / norms.masked_fill(kept, 1)).masked_fill(kept, 1)  # derivatives exist at ‖gᵢ‖ = 0, too
