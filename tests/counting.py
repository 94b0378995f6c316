"""What a call does, seen from outside: the operations that it dispatches, and the functions that it enters."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import persample

LIBRARY = f"{Path(persample.__file__).parent}{os.sep}"
# The functions that a traced or compiled call enters if it is like an earlier one; a new one enters hundreds.
AT_ONCE = 150
FUSED = "_scaled_dot_product_flash_attention_for_cpu"  # attention of CPUs


class Operations(TorchDispatchMode):
    """Counts operations that are no views, and keeps the shapes of their arguments and weak references to results."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.shapes: dict[str, list[tuple]] = {}
        self.results: list[weakref.ref] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in arguments)
        if not is_view and func not in {torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default}:
            self.counts[str(func)] += 1
            given = tuple(tuple(x.shape) for x in args if isinstance(x, torch.Tensor))
            self.shapes.setdefault(func._overloadpacket.__name__, []).append(given)
            self.results += [weakref.ref(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result


def operations(call, *args):
    """Return the operations that a warm call dispatches."""
    call(*args)
    with Operations() as mode:
        call(*args)
    return mode


def functions_entered(call, *args, **options):
    """Return what a call returns, and how often it enters Python functions of the library, by file."""
    entered = Counter()

    def count(frame, event, _):
        entered[frame.f_code.co_filename] += event == "call" and LIBRARY in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        result = call(*args, **options)
    finally:
        sys.setprofile(None)
    return result, +entered
