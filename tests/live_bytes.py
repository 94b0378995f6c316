"""How much autograd keeps for backward passes."""

from __future__ import annotations

import weakref

import torch


class LiveBytes:
    """Bytes that autograd keeps for backward passes: now, and at their peak."""

    def __init__(self):
        self.now = self.peak = 0

    def measure(self, work):
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box[0]):
            work()
        return self.peak

    def _pack(self, x):
        box = _Box([x.detach()])  # a saved output would hold its own graph
        self.now += x.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(box, self._free, x.nbytes)
        return box

    def _free(self, size):
        self.now -= size


class _Box(list):
    """A list that weak references can watch."""
