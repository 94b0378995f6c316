"""Operations of our own that compiled code calls, beside torch's."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("persample", "FRAGMENT")
atexit.register(id, _library)  # keeps it: without it its operations would be gone


def define(schema: str, on_cpu: Callable[..., Any], like: Callable[..., Any]) -> None:
    """Define an operation.

    Args:
        schema: its signature, ``persample::`` left out.
        on_cpu: computes it.
        like: returns empty tensors like its results.
    """
    name = schema.partition("(")[0]
    if hasattr(torch.ops.persample, name):  # persample is imported once more
        return
    _library.define(schema)
    _library.impl(name, on_cpu, "CPU")
    torch.library.register_fake(f"persample::{name}", like, lib=_library)
