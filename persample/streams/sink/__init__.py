"""Results in a folder instead of memory: rows as they come, sums in checkpoints, an index that says what is whole."""

from persample.streams.sink.folder import read_sink
from persample.streams.sink.saving import SinkRun

__all__ = ["SinkRun", "read_sink"]
