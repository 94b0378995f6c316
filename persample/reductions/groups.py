"""Scales of gradients by the norms of each parameter, or of groups of parameters by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.gradients import Gradients
from persample.utils.numerics import root
from persample.utils.trees import Leaf

# Of a path such as params['fc.weight'] or params.layers[0].
_KEY = re.compile(r"""\[(?:'(.*?)'|"(.*?)"|(.*?))\]|\.(\w+)""")


def scales_of_groups(
    gradients: Gradients,
    given: Leaf | Mapping[str, Leaf],
    scale: Callable[[Tensor, Leaf], Tensor],
    argument: str,
    *,
    per_param: bool,
) -> list[Tensor]:
    """Return the scales of each parameter, ``[B]`` float64; of one group the same tensor.

    Args:
        gradients: the gradients of a chunk.
        given: what scales each parameter, or by name.
        scale: returns the scales from the norms of a group, and from what was given for it.
        argument: the name of ``given`` in messages.
        per_param: whether each parameter is a group of its own; it is without names.
    """
    if not isinstance(given, Mapping):
        return [scale(norms, given) for norms in gradients.norms_per_param]
    names = group_names(list(given), gradients.spec.paths, argument)
    if per_param:
        return [scale(norms, given[name]) for norms, name in zip(gradients.norms_per_param, names, strict=True)]
    squared: dict[str, list[Tensor]] = {name: [] for name in given}
    for name, one in zip(names, gradients.squared_norms_per_param, strict=True):
        squared[name].append(one)
    scales = {name: scale(root(torch.stack(own).sum(0)), given[name]) for name, own in squared.items()}
    return [scales[name] for name in names]


def group_names(names: Sequence[str], paths: Sequence[str], argument: str = "max_norm") -> list[str]:
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
        raise ArgumentError.about(argument, expected="bounds by parameter or module", received=received, fix=fix)
    return [name for name in found if name is not None]


def _contains(name: str, own: str) -> bool:
    return name in ("", own) or own.startswith(f"{name}.")
