"""Flags that hold while one call computes: contexts of the package set them, ``interrupts`` puts them back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

flags = threading.local()


@contextmanager
def inside(called: str) -> Iterator[None]:
    """Say that a function of the user's runs, whose results are differentiated.

    Args:
        called: what the caller calls it.
    """
    before, flags.inside = is_inside(), called
    try:
        yield
    finally:
        flags.inside = before


def is_inside() -> str | None:
    """Return the name of the function of the user's that runs in this thread, if one does."""
    return getattr(flags, "inside", None)
