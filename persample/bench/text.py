"""Numbers, names and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

_LONGEST = 240


@dataclass(frozen=True)
class Grid:
    r"""A table in plain words, for a terminal as well as for a page.

    Args:
        headings: of the columns.
        rows: their cells.
        numbers: the columns that are aligned to the right.

    Examples:
        >>> print(Grid(["method", "ratio"], [["fill_", "2.50"]], {1}).markdown(), end="")
        | method | ratio |
        | --- | ---: |
        | fill\_ | 2.50 |
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[int] = ()

    def markdown(self) -> str:
        """Write it for a page.

        Returns:
            The Markdown table, ending in a newline.
        """
        return table(self.headings, [list(map(escaped, row)) for row in self.rows], self.numbers)


def number(value: float) -> str:
    """Write a ratio to three digits at most, in a way that columns of them can be read.

    Args:
        value: the ratio.

    Returns:
        The text.

    Examples:
        >>> [number(x) for x in (0.0162, 0.8412, 23.91, 314.2)]
        ['0.016', '0.84', '23.9', '314']
    """
    if value < 0.0995:
        return f"{value:.2g}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def seconds(value: float) -> str:
    """Write a time.

    Args:
        value: in seconds.

    Returns:
        The text, with its unit.

    Examples:
        >>> [seconds(x) for x in (12e-6, 1.7e-3, 6.04)]
        ['12.0 µs', '1.70 ms', '6.04 s']
    """
    scale, unit = next(pair for pair in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if value >= pair[0] or pair[1] == "µs")
    return f"{number(value / scale)} {unit}"


def memory(value: float) -> str:
    """Write an amount of memory.

    Args:
        value: in bytes.

    Returns:
        The text, with its unit.

    Examples:
        >>> [memory(x) for x in (3 * 2**19, 12288)]
        ['1.5 MiB', '12 KiB']
    """
    size = value / 2**20
    return f"{size:.{0 if size >= 9.95 else 1}f} MiB" if size >= 1 else f"{value / 2**10:.0f} KiB"


def words(name: str) -> str:
    """Write the name of a quantity for readers.

    Args:
        name: as in the records.

    Returns:
        The words.

    Examples:
        >>> words("clipped_mean")
        'clipped mean'
    """
    return {"stack": "stacked gradients", "gram": "Gram matrix"}.get(name, name.replace("_", " "))


def shortened(text: str) -> str:
    r"""Put what a library said on one line that is not too long; the results file has all of it.

    Args:
        text: in the library's words.

    Returns:
        The line.

    Examples:
        >>> shortened("no\n  hooks")
        'no hooks'
    """
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST].rstrip() + " …"


def escaped(text: str) -> str:
    r"""Mark everything that Markdown or HTML would read as plain text.

    Args:
        text: on one line.

    Returns:
        The Markdown.

    Examples:
        >>> print(escaped("no <GRU> | *here*"))
        no \<GRU\> \| \*here\*
    """
    return re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", text)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Lay out a Markdown table.

    Args:
        headings: of the columns.
        rows: their cells.
        numbers: the columns that are aligned to the right.

    Returns:
        The table, ending in a newline.

    Examples:
        >>> print(table(["method", "ratio"], [["loop", "2.50"]], {1}), end="")
        | method | ratio |
        | --- | ---: |
        | loop | 2.50 |
    """
    rules = ["---:" if column in numbers else "---" for column in range(len(headings))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, rules, *rows))
