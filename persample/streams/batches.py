"""The batches of a stream: numbered, with their weights; errors name the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from persample.errors import ArgumentError, LossError

_END = object()


def no_batch() -> ArgumentError:
    """Return the error for a stream without batches."""
    fix = "An empty batch is enough: it shows the shapes. Note that a generator can be used once."
    return ArgumentError.about("batches", expected="at least one batch", received="none", fix=fix)


@dataclass(frozen=True)
class Batch:
    """One batch of a stream.

    Args:
        number: how many came before it.
        content: what the iterable gave.
        weights: the weights of its samples, or None.
    """

    number: int
    content: Any
    weights: Any

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"batches[{self.number}]"


def numbered(batches: Any, weights: Any) -> Iterator[Batch]:
    """Iterate over the batches.

    Args:
        batches: an iterable of batches.
        weights: None, a function from a batch to its weights, or an iterable with one entry for each batch.

    Yields:
        The batches.

    Raises:
        ArgumentError: if an argument is of another kind, or if there are not as many weights as batches.
    """
    if isinstance(batches, Tensor | nn.Module | dict | str) or not isinstance(batches, Iterable):
        fix = "For a single batch, pass [batch], or call per_sample_grads."
        expected = "an iterable of batches, such as a DataLoader"
        raise ArgumentError.about("batches", expected=expected, received=type(batches).__name__, fix=fix)
    source = iter(batches)
    weights_of = _weights(weights)
    number = 0
    while True:
        with named(f"batches[{number}]"):
            content = next(source, _END)
            entry = weights_of(content)
        if content is _END:
            return
        yield Batch(number, content, entry)
        number += 1


def _weights(weights: Any) -> Callable[[Any], Any]:
    """Return the function from one batch after the other to their weights."""
    if weights is None:
        return lambda _: None
    if callable(weights):
        _check_takes_a_batch(weights)
        return lambda content: None if content is _END else weights(content)
    if isinstance(weights, Tensor) or not isinstance(weights, Iterable):
        fix = "Pass a list of one [B] for each batch, or a function such as lambda batch: batch['weight']."
        expected = "a function of a batch, or an iterable with one entry for each batch"
        raise ArgumentError.about("weights", expected=expected, received=type(weights).__name__, fix=fix)
    entries = iter(weights)

    def entry(content: Any) -> Any:
        found = next(entries, _END)
        if (found is _END) != (content is _END):
            fewer = "fewer entries than batches" if found is _END else "more entries than batches"
            fix = "Pass None for a batch whose samples count once."
            raise ArgumentError.about("weights", expected="one entry for each batch", received=fewer, fix=fix)
        return found

    return entry


def _check_takes_a_batch(weights: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(weights)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        fix = "It is called with the whole batch: lambda batch: batch[1] for the second entry of a tuple."
        received = f"{signature} ({error})"
        raise ArgumentError.about("weights", expected="a function of a batch", received=received, fix=fix) from error


@contextmanager
def named(batch: str) -> Iterator[None]:
    """Name the batch in every error; an error of the user's own keeps its type, and gets a note.

    Args:
        batch: the name.

    Raises:
        ArgumentError: as it was raised, with the name in front.
        LossError: the same.
    """
    try:
        yield
    except (ArgumentError, LossError) as error:
        if str(error).startswith(batch):
            raise
        kind = ArgumentError if isinstance(error, ArgumentError) else LossError
        raise kind(f"{batch}: {error}") from error
    except Exception as error:
        notes = [*getattr(error, "__notes__", ()), f"(raised for {batch} of accumulate)"]
        error.__notes__ = notes  # as add_note, which Python 3.10 does not have
        raise
