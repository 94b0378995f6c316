"""Numbers, names and tables in Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

_LONGEST = 240


@dataclass(frozen=True)
class Grid:
    r"""A table of unescaped text, for the terminal and for Markdown.

    Args:
        headings: the headings of the columns.
        rows: the cells of each row.
        numbers: the indices of right-aligned columns.

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
        """Format the table as Markdown.

        Returns:
            The Markdown table, ending in a newline.
        """
        return table(self.headings, [list(map(escaped, row)) for row in self.rows], self.numbers)


def number(value: float) -> str:
    """Format a ratio with two or three digits.

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
    """Format a time.

    Args:
        value: the time in seconds.

    Returns:
        The text, with its unit.

    Examples:
        >>> [seconds(x) for x in (12e-6, 1.7e-3, 6.04)]
        ['12.0 µs', '1.70 ms', '6.04 s']
    """
    scale, unit = next(pair for pair in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if value >= pair[0] or pair[1] == "µs")
    return f"{number(value / scale)} {unit}"


def memory(value: float) -> str:
    """Format an amount of memory.

    Args:
        value: the amount in bytes.

    Returns:
        The text, with its unit.

    Examples:
        >>> [memory(x) for x in (3 * 2**19, 12288)]
        ['1.5 MiB', '12 KiB']
    """
    size = value / 2**20
    return f"{size:.{0 if size >= 9.95 else 1}f} MiB" if size >= 1 else f"{value / 2**10:.0f} KiB"


def words(name: str) -> str:
    """Return the readable name of a quantity.

    Args:
        name: the name used in records.

    Returns:
        The words.

    Examples:
        >>> words("clipped_mean")
        'clipped mean'
    """
    known = {
        "stack": "stacked gradients",
        "gram": "Gram matrix",
        "step": "clipped mean and norms",
        "step_gram": "clipped mean, norms, products with each validation gradient",
        "step_dot": "clipped mean, norms, products with the mean validation gradient",
    }
    return known.get(name, name.replace("_", " "))


def shortened(text: str) -> str:
    r"""Join the lines of a message and truncate it; the results file has all of it.

    Args:
        text: the message.

    Returns:
        The line.

    Examples:
        >>> shortened("no\n  hooks")
        'no hooks'
    """
    line = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())  # no codes for terminals
    return line if len(line) <= _LONGEST else line[:_LONGEST].rstrip() + " …"


def escaped(text: str) -> str:
    r"""Escape the special characters of Markdown and HTML.

    Args:
        text: one line.

    Returns:
        The Markdown.

    Examples:
        >>> print(escaped("no <GRU> | *here*"))
        no &lt;GRU&gt; \| \*here\*
    """
    return html.escape(re.sub(r"([\\`*_{}\[\]#|~$])", r"\\\1", text), quote=False)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Format a Markdown table.

    Args:
        headings: the headings of the columns, escaped.
        rows: the cells of each row, escaped.
        numbers: the indices of right-aligned columns.

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
