"""Results read back from a folder, and checked."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from persample.errors import SinkError
from persample.streams.sink.column import Column
from persample.streams.sink.index import Index


def read_sink(folder: str | Path, *, verify: bool = True) -> dict[str, Tensor]:
    """Read the results that ``accumulate(..., sink=folder)`` has written.

    Nothing is unpickled. Tensors are mapped into memory: what is not used is not read. Writes to them do not reach the
    files.

    Args:
        folder: the folder.
        verify: compare the checksums of the files, which reads all of them once. Sizes, dtypes and shapes are
            compared in any case.

    Returns:
        The tensors of the results by name: ``result`` for ``reduce=Norm()``, ``result['norms']`` for
        ``{"norms": Norm()}``.

    Raises:
        SinkError: if the folder holds no finished results, or a file is not what was written; the message names it.

    Examples:
        >>> import tempfile, torch
        >>> from persample import Mean, Norm, accumulate, read_sink
        >>> folder, batches = tempfile.mkdtemp(), [torch.eye(2), 2 * torch.eye(2)]
        >>> wanted = {"mean": Mean(), "norms": Norm()}
        >>> results = accumulate(lambda w, x: w @ x, torch.zeros(2), batches, wanted, sink=folder)
        >>> read_sink(folder)
        {"result['mean']": tensor([0.7500, 0.7500]), "result['norms']": tensor([1., 1., 2., 2.])}
    """
    folder = Path(folder)
    index = Index.read(folder)
    if not index.finished:
        raise SinkError(
            f"sink: {str(folder)!r} holds {index.batches} batches of a run that has not ended. Call accumulate with "
            "the same arguments and resume=True."
        )
    results = {}
    for name, record in {**index.values, **index.rows}.items():
        column = Column.of(folder, record)
        column.check(contents=verify)
        results[name] = column.mapped() if name in index.rows else column.mapped()[0]
    return results
