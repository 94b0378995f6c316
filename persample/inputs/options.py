"""The options that are one word or one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

from persample._torch import transforms
from persample.errors import ArgumentError

Engine: TypeAlias = Literal["eager", "compiled", "loop"]
Randomness: TypeAlias = Literal["error", "same", "different"]


def check_options(*, engine: Any, randomness: Any, chunk_size: Any) -> None:
    """Refuse options that no engine knows.

    Args:
        engine: name of an engine.
        randomness: what random operations do.
        chunk_size: how many samples are processed at a time.

    Raises:
        ArgumentError: if one is not of the values it can take.
    """
    check_choice("engine", engine, get_args(Engine))
    check_loop(engine)
    check_choice("randomness", randomness, get_args(Randomness))
    check_chunk_size(chunk_size)


def check_loop(engine: str) -> None:
    """Refuse the loop engine under transforms of the caller's, which plain autograd does not see through.

    Args:
        engine: name of an engine.

    Raises:
        ArgumentError: if the call stands inside of a transform and the engine is the loop.
    """
    around = transforms() if engine == "loop" else []
    if around:
        expected = f"an engine that works under torch.func.{around[0]}"
        raise ArgumentError.about("engine", expected=expected, received="'loop'", fix="Pass engine='eager'.")


def check_chunk_size(chunk_size: Any) -> None:
    """Refuse what is no number of samples.

    Args:
        chunk_size: how many samples are processed at a time.

    Raises:
        ArgumentError: if it is neither a positive int nor None.
    """
    if chunk_size is not None and not (type(chunk_size) is int and chunk_size > 0):
        fix = "Pass how many samples to process at a time, or None for all."
        raise ArgumentError.about("chunk_size", expected="a positive int or None", received=repr(chunk_size), fix=fix)


def check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a word that is not one of those an option can be.

    Args:
        argument: the option.
        value: what the user passed.
        choices: the words.

    Raises:
        ArgumentError: if it is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(repr(name) for name in choices)
        raise ArgumentError.about(argument, expected=expected, received=repr(value), fix="Pick one of them.")
