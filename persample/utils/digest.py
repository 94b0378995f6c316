"""Tensors and functions as short texts, by which two runs or two processes are compared."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persample.utils import trees


def as_array(x: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array; bfloat16, which NumPy does not have, as the integers of the same bits."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def digest(tree: Any) -> str:
    """Return a hash of the names, dtypes, shapes and numbers of the tensors of a tree."""
    hashed = hashlib.sha256()
    for name, leaf in zip(trees.paths(tree, ""), trees.flatten(tree)[0], strict=True):
        facts = f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor | np.ndarray) else type(leaf).__name__
        hashed.update(f"{name} {facts}\n".encode())
        if isinstance(leaf, Tensor | np.ndarray):
            hashed.update((as_array(leaf) if isinstance(leaf, Tensor) else leaf).tobytes())
    return hashed.hexdigest()[:16]


def name_of(function: Any) -> str:
    """Return the import path of a function, or that of the class of another callable."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
