"""The color and marker of each method in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.report.records import FILL
from benchmarks.report.tables import ordered

# Okabe, Ito, "Color Universal Design" (2008), the yellow darkened and two colours added.
_OURS, _REFERENCE = "#0072b2", "#000000"
_FAMILIES = ("#777777", "#d55e00", "#e69f00", "#cc79a7", "#a89600", "#009e73", "#56b4e9", "#7b3f00", "#5d3a9b")
_MARKERS = "os^DvPX<>"


@dataclass(frozen=True)
class Style:
    """The color and marker of a method, the same in every figure.

    Args:
        color: the color of its family: all methods whose names have the same first word.
        marker: the marker of the method within its family.
    """

    color: str
    marker: str


def styles(methods: Iterable[str]) -> dict[str, Style]:
    """Assign a color to each family of methods, and a marker to each member.

    Args:
        methods: their names, repeated or not.

    Returns:
        The styles.

    Examples:
        >>> looks = styles(["persample", "JAX jit", "persample compiled"])
        >>> looks["persample"].color == looks["persample compiled"].color != looks["JAX jit"].color
        True
    """
    colors, members, looks = {"persample": _OURS, "batch": _REFERENCE, FILL: _REFERENCE}, Counter[str](), {}
    for method in ordered(methods):
        family = method.split()[0].rstrip(",")
        color = colors.setdefault(family, _FAMILIES[(len(colors) - 3) % len(_FAMILIES)])
        looks[method] = Style(color, _MARKERS[members[color] % len(_MARKERS)])
        members[color] += 1
    return looks
