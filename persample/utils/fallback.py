"""torch.func's warnings of a performance drop, said with the reason and what to do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NO_RULE = re.compile(r"performance drop because we have not yet implemented the batching rule for (\S+?)\.? Please")


def _explain(text: str) -> str:
    found = _NO_RULE.search(text)
    if found is None:
        return text
    return (
        f"loss_fn uses {found[1]} (perhaps in its backward pass), which torch.func cannot batch: it runs once for "
        "every sample. The result is right, only slower. Write it with operations that torch.func batches (matmul, "
        "gather, sums, masks), or call it outside of the loss and pass its result in the batch."
    )


class Explained:
    """Shows warnings as before, torch.func's in other words."""

    def __init__(self, show: Any) -> None:
        self.show = show

    def __call__(self, message: Any, category: Any, *where: Any, **options: Any) -> None:
        """Show a warning.

        Args:
            message: as in ``warnings.showwarning``.
            category: as in ``warnings.showwarning``.
            *where: as in ``warnings.showwarning``.
            **options: as in ``warnings.showwarning``.
        """
        text = _explain(str(message))
        self.show(message if text == str(message) else category(text), category, *where, **options)


@contextmanager
def explained() -> Iterator[None]:
    """Explain the warnings of torch.func that are raised or shown meanwhile.

    Only how a warning is shown is changed, and no filter: those are the caller's. Where another thread restores what it
    found, this stays in place and passes every other warning on as it is.

    Raises:
        UserWarning: where the caller made warnings errors.
    """
    before = warnings.showwarning
    if not isinstance(before, Explained):
        warnings.showwarning = Explained(before)
    try:
        yield
    except UserWarning as error:
        if _NO_RULE.search(str(error)) is None:
            raise
        raise UserWarning(_explain(str(error))) from error
    finally:
        warnings.showwarning = before
