"""Which norms sums are scaled by: those of groups of parameters, and norms in a diagonal or Kronecker metric."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Factor
from persample.gradients import Gradients, ParamSpec
from persample.utils.numerics import root
from persample.utils.tracing import is_unreadable
from persample.utils.trees import Leaf, Tree, TreeSpec, flatten, leaves_like, on_one_line
from persample.utils.trees import structure as structure_of

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

    ``given`` scales each parameter, or by name; ``argument`` is its name in messages. ``scale`` returns the scales from
    the norms of a group, and from what was given for it. Without names, ``per_param`` makes each parameter a group.
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


class RankOne(NamedTuple):
    """A metric of one parameter that is a product, D = r cᵀ: under it, gradients stay factors.

    Attributes:
        rows: r, positive, ``[o]``, the first axis of the parameter.
        columns: c, positive, ``[*rest]``, all others.
    """

    rows: Tensor
    columns: Tensor


def check_metric(metric: Tree, spec: ParamSpec) -> None:
    """Reject a metric that is no tree like the parameters of positive tensors, or of products of them."""
    if metric is None:
        return
    leaves = leaves_like(metric, spec.structure)
    if leaves is None:
        raise _rejected("metric", f"the structure {on_one_line(spec.structure)}", on_one_line(structure_of(metric)))
    for path, shape, leaf in zip(spec.paths, spec.shapes, leaves, strict=True):
        name = path.replace("params", "metric", 1)
        parts: tuple[Leaf, ...] = leaf if isinstance(leaf, RankOne) else (leaf,)
        expected = f"a positive real tensor that broadcasts to {list(shape)}, or RankOne(rows, columns)"
        for part, wanted in zip(parts, _shapes(leaf, shape), strict=True):
            if not isinstance(part, Tensor) or part.is_complex() or not _broadcasts(part.shape, wanted):
                received = (
                    f"shape {list(part.shape)}, {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
                )
                raise _rejected(name, expected, received)
            if not is_unreadable(part) and part.numel() and not bool((part > 0).all()):
                raise _rejected(name, expected, f"{float(part.min()):g} among its numbers")


def _rejected(name: str, expected: str, received: str) -> ArgumentError:
    fix = "Pass for example Adam's second moments, plus a small number."
    return ArgumentError.about(name, expected=expected, received=received, fix=fix)


def _shapes(leaf: Leaf, shape: torch.Size) -> list[torch.Size]:
    return [shape[:1], shape[1:]] if isinstance(leaf, RankOne) else [shape]


def _broadcasts(shape: torch.Size, wanted: torch.Size) -> bool:
    return len(shape) <= len(wanted) and all(
        size in (1, other) for size, other in zip(reversed(shape), reversed(wanted), strict=False)
    )


def in_metric(gradients: Gradients, metric: Tree) -> Gradients:
    """Return the gradients D⁻¹ᐟ² gᵢ, or the gᵢ where the metric is None."""
    if metric is None:
        return gradients
    spec = gradients.spec
    scaled = tuple(scaled_by_metric(gradients.factors, metric, spec.structure, spec.dtypes))
    return Gradients(scaled, spec, gradients.losses, weights=gradients.weights)


def scaled_by_metric(
    factors: Sequence[Factor], metric: Tree, structure: TreeSpec, dtypes: Sequence[torch.dtype]
) -> list[Factor]:
    """Return the factors of D⁻¹ᐟ² gᵢ of each parameter."""
    if metric is None:
        return list(factors)
    leaves = leaves_like(metric, structure) or []
    return list(map(_scaled, factors, leaves, dtypes))


def _scaled(factor: Factor, metric: Leaf, dtype: torch.dtype) -> Factor:
    """Return the factor of D⁻¹ᐟ² gᵢ, which stays one of products where D = r cᵀ, also of one row or column."""
    shape = torch.Size(factor.shape[len(factor.outputs) :])
    shape = shape[:-1] if dtype.is_complex else shape
    pair = metric if isinstance(metric, RankOne) else _as_pair(metric, len(shape))

    def roots(x: Tensor, wanted: torch.Size) -> Tensor:
        return x.to(device=factor.device, dtype=torch.float64).rsqrt().expand(wanted)

    if pair is None:
        whole = roots(metric, shape)
        return factor.times_elements(whole.unsqueeze(-1).expand(*shape, 2) if dtype.is_complex else whole)
    rows, columns = map(roots, pair, _shapes(pair, shape))
    return factor.times_rank_one(rows, columns.unsqueeze(-1).expand(*shape[1:], 2) if dtype.is_complex else columns)


def _as_pair(metric: Tensor, axes: int) -> RankOne | None:
    """Return rows and columns whose product is the metric, as its shape shows; None if it does not."""
    whole = metric[(None,) * (axes - metric.ndim)]
    if axes < 2:
        return None
    if whole.shape[1:].numel() == 1:
        return RankOne(whole.flatten(), whole.new_ones(()))
    return RankOne(whole.new_ones(()), whole[0]) if len(whole) == 1 else None


def largest_root(metric: Tree) -> float:
    """Return √(max D), of all parameters; 1 without a metric."""
    leaves, _ = flatten(metric, is_leaf=lambda x: isinstance(x, RankOne))
    parts = [leaf if isinstance(leaf, RankOne) else (leaf,) for leaf in leaves if leaf is not None]
    largest = [math.prod(float(x.max()) for x in part) for part in parts if all(x.numel() for x in part)]
    return math.sqrt(max(largest, default=1.0))
