"""Errors that torch raises because of vmap: a loss that catches one goes on with other numbers than for one sample."""

from __future__ import annotations

import re
from traceback import extract_tb
from typing import Any

from torch import Tensor, stack

from persample.errors import LossError
from persample.utils.origin import raised_since, user_line
from persample.utils.trees import flatten
from persample.vmap_rules.batched import is_batched

_OF_VMAP = re.compile(
    "vmap|functorch|torch.func|[Bb]atching rule|Batched|doesn't have storage|detach views in-place|got a batched tensor"
)


def is_refusal(error: Exception, func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function of torch might not have raised an error if it were called for one sample."""
    said = str(error)
    if isinstance(error, LossError) or (isinstance(error, RuntimeError) and _OF_VMAP.search(said)):
        return True
    operands = flatten((args[func is Tensor.__getitem__ :], kwargs))[0]
    batched = [x for x in operands if isinstance(x, Tensor) and is_batched(x)]
    if isinstance(error, IndexError):  # the index of one sample
        return "Dimension" not in said and any(not x.is_floating_point() for x in batched)
    # The matrix of one sample; no kernel for batches; torch's loop over samples, whose results differ in size.
    by_sample = isinstance(error, NotImplementedError) or re.search(r"\(Batch element|stack expects each tensor", said)
    return bool(by_sample and batched) and func is not stack


def swallowed(refusal: Exception, error: BaseException | None) -> LossError | None:
    """Return what is wrong if a loss caught a refusal and went on; ``error`` is what it raised in the end, or None."""
    is_interrupt = error is not None and not isinstance(error, Exception)
    if is_interrupt or refusal in raised_since(None, error):
        return None
    line = user_line(extract_tb(refusal.__traceback__))
    return LossError(
        f"An error was caught that one sample alone might not raise{line}: the loss would "
        "go on with other numbers. Use torch.where or a mask, without an error to catch, or pass engine='loop', which "
        f"takes any loss that autograd takes. The error was: {refusal}"
    )
