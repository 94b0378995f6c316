"""The bounds of clipping: one for the whole gradient, or one for each named part of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.gradients import Gradients
from persample.utils.norms import root
from persample.utils.tracing import are_plain, is_hidden

Bound = float | Tensor
# Of a path such as params['fc.weight'] or params.layers[0].
_KEY = re.compile(r"""\[(?:'(.*?)'|"(.*?)"|(.*?))\]|\.(\w+)""")


def check_bounds(max_norm: Bound | Mapping[str, Bound]) -> None:
    """Check that bounds are numbers from 0 to ∞.

    Args:
        max_norm: one bound, or bounds by name.

    Raises:
        ArgumentError: if one is not.
    """
    named = isinstance(max_norm, Mapping)
    for name, bound in max_norm.items() if isinstance(max_norm, Mapping) else [("", max_norm)]:
        if named and not isinstance(name, str):
            fix = "Name parameters as in 'layers.0.weight'; '' stands for all that no other name has."
            raise ArgumentError.about("max_norm", expected="names as keys", received=repr(name), fix=fix)
        number = (isinstance(bound, Real) and not isinstance(bound, bool)) or (
            isinstance(bound, Tensor) and bound.ndim == 0
        )
        if not number or not (is_hidden(bound) or bound >= 0):
            fix = "Pass the largest norm that one sample may contribute; inf clips nothing."
            argument = f"max_norm[{name!r}]" if named else "max_norm"
            raise ArgumentError.about(argument, expected="a number >= 0", received=repr(bound), fix=fix)


def group_names(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the longest of the given names that each parameter belongs to.

    Args:
        names: of parameters, of modules or subtrees that contain them, or "" for all that no other name has.
        paths: the paths of the parameters.

    Returns:
        One name per parameter.

    Raises:
        ArgumentError: if a parameter belongs to no name, or a name has no parameter.

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
