"""A bar that shows how far a stream is; nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from persample.errors import ArgumentError


@contextmanager
def shown(batches: Any, *, wanted: bool) -> Iterator[Callable[[int], object]]:
    """Show the number of batches, the samples per second and the time left, on stderr, in terminals and notebooks.

    Args:
        batches: the batches; the time left is shown if they have a length.
        wanted: whether to show anything.

    Yields:
        A function to call after each batch, with the number of its samples.

    Raises:
        ArgumentError: if a bar is wanted, but not installed.
    """
    if not wanted:
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft
    except ImportError as error:
        fix = "Install it (pip install rich), or leave progress=False."
        raise ArgumentError.about("progress", expected="rich to be installed", received=str(error), fix=fix) from error
    console = Console(stderr=True)
    rate = TextColumn("{task.fields[rate]} samples/s")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        rate,
        TimeElapsedColumn(),
        TimeLeft(),
    )
    visible = console.is_terminal or console.is_jupyter
    with Progress(*columns, console=console, disable=not visible) as bar:
        task = bar.add_task("batches", total=_length(batches), rate="–")
        samples = 0

        def advance(size: int) -> None:
            nonlocal samples
            samples += size
            seconds = bar.tasks[task].elapsed or 0
            bar.update(task, advance=1, rate=f"{samples / seconds:,.0f}" if seconds else "–")

        yield advance


def _length(batches: Any) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader of an iterable data set
        return None
