"""The batches of a stream: numbered, with their weights; errors name the batch; a bar shows how far the stream is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from persample.errors import ArgumentError, LossError
from persample.inputs import as_dicts
from persample.inputs.units import is_count
from persample.utils.trees import Leaf, Tree

_END = object()


def no_batch() -> ArgumentError:
    """Return the error for a stream without batches."""
    fix = "An empty batch is enough: it shows the shapes. Note that a generator can be used once."
    return ArgumentError.about("batches", expected="at least one batch", received="none", fix=fix)


class Batch(NamedTuple):
    """One batch of a stream.

    Attributes:
        number: how many came before it.
        name: its name in messages.
        content: what the iterable gave.
        weights: the weights of its samples, or None.
        unit: the number of samples in each unit, or the ids of their units, or None.
        loss: the name of its loss among several, or None.
    """

    number: int
    name: str
    content: Tree
    weights: Tree
    unit: Tree = None
    loss: Hashable = None


def numbered(batches: Tree, weights: object, unit: object, losses: Iterable[Hashable]) -> Iterator[Batch]:
    """Yield the batches with their numbers, weights and units; of several losses one after the other."""
    if isinstance(batches, Tensor | nn.Module | Mapping | str) or not isinstance(batches, Iterable):
        fix = "For a single batch, pass [batch], or call per_sample_grads."
        expected = "an iterable of batches, such as a DataLoader"
        raise ArgumentError.about("batches", expected=expected, received=type(batches).__name__, fix=fix)
    source = iter(batches)
    weights_of = _entries("weights", weights)
    unit_of = (lambda _: unit) if is_count(unit) else _entries("unit", unit)
    names, number = list(losses), 0
    while True:
        place = f"batches[{number // len(names)}]"
        with InBatch(place):
            content: Tree = next(source, _END)
            entry, units = weights_of(content), unit_of(content)
            if content is not _END and names != [None]:
                _check_names("batches", content, names)
                _check_names("weights", dict.fromkeys(names) if entry is None else entry, names)
        if content is _END:
            return
        for name in names:
            if name is None:
                yield Batch(number, place, as_dicts(content), entry, units)
            else:
                own = None if entry is None else entry[name]
                yield Batch(number, f"{place}[{name!r}]", as_dicts(content[name]), own, None, name)
            number += 1


def _check_names(argument: str, given: Tree, names: Sequence[Hashable]) -> None:
    if not isinstance(given, Mapping) or set(given) != set(names):
        received = f"the names {list(given)}" if isinstance(given, Mapping) else type(given).__name__
        fix = "Return what belongs to each loss by its name; a batch may be empty."
        raise ArgumentError.about(argument, expected=f"a dict with the names {names}", received=received, fix=fix)


def _entries(argument: str, given: object) -> Callable[[Leaf], Leaf]:
    """Return the function from one batch after the other to their weights, or to their units."""
    if given is None:
        return lambda _: None
    if callable(given):
        _check_takes_a_batch(argument, given)
        return lambda content: None if content is _END else given(content)
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        fix = f"Pass a list of one [B] for each batch, or a function such as lambda batch: batch['{argument}']."
        expected = "a function of a batch, or an iterable with one entry for each batch"
        raise ArgumentError.about(argument, expected=expected, received=type(given).__name__, fix=fix)
    entries = iter(given)

    def entry(content: object) -> Tree:
        found = next(entries, _END)
        if (found is _END) != (content is _END):
            fewer = "fewer entries than batches" if found is _END else "more entries than batches"
            fix = "Pass [B] for each batch" + (", or None where samples count once." if argument == "weights" else ".")
            raise ArgumentError.about(argument, expected="one entry for each batch", received=fewer, fix=fix)
        return found

    return entry


def _check_takes_a_batch(argument: str, given: Callable[..., Tree]) -> None:
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        fix = "It is called with the whole batch: lambda batch: batch[1] for the second entry of a tuple."
        received = f"{signature} ({error})"
        raise ArgumentError.about(argument, expected="a function of a batch", received=received, fix=fix) from error


class InBatch:
    """Names the batch in every error; an error of the user's own keeps its type, and gets a note."""

    def __init__(self, batch: str) -> None:  # a class: contexts made of generators take longer than small batches may
        self.batch = batch

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Name the batch in the error."""
        if isinstance(error, ArgumentError | LossError):
            if not str(error).startswith(self.batch):
                kind_of_error = ArgumentError if isinstance(error, ArgumentError) else LossError
                raise kind_of_error(f"{self.batch}: {error}") from error
        elif isinstance(error, Exception):
            notes = [*getattr(error, "__notes__", ()), f"(raised for {self.batch} of accumulate)"]
            error.__notes__ = notes  # as add_note, which Python 3.10 does not have


@contextmanager
def shown(batches: object, parts: int, *, wanted: bool) -> Iterator[Callable[[int], object]]:
    """Show the number of batches, the samples per second and the time left, on stderr, in terminals and notebooks."""
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
        task = bar.add_task("batches", total=_length(batches, parts), rate="–")
        samples = 0

        def advance(size: int) -> None:
            nonlocal samples
            samples += size
            seconds = bar.tasks[task].elapsed or 0
            bar.update(task, advance=1, rate=f"{samples / seconds:,.0f}" if seconds else "–")

        yield advance


def _length(batches: object, parts: int) -> int | None:
    try:
        return len(batches) * parts if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader of an iterable data set
        return None
