"""Reductions over more than one batch: iterables of batches, folders of results, several processes."""

from persample.streams.accumulation import accumulate
from persample.streams.sink import read_sink

__all__ = ["accumulate", "read_sink"]
