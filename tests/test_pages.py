"""Memory that one call freed is there for the next, without the system's taking it back in between."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from persample.cpu import pages

# glibc takes blocks above its threshold straight from the system; ``hblks`` counts them.
_COUNT = """
import ctypes
import torch, persample
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks a b c d e f".split()]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
before = mallinfo().hblks
block = torch.empty(30 * 2**20, dtype=torch.uint8)
print(mallinfo().hblks - before)
blocks = [torch.empty(16 * 2**20, dtype=torch.uint8) for _ in range(10)]
held = mallinfo().arena
del blocks
print(held - mallinfo().arena)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library, with rules of its own")
def test_freed_pages_are_kept():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    taken, given_back = map(int, subprocess.check_output([sys.executable, "-c", _COUNT], env=environment).split())
    assert taken == 0
    assert given_back == 0


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")]
)
def test_thresholds_of_the_users_stay(monkeypatch, name, value):
    opened = []
    monkeypatch.setattr(ctypes, "CDLL", opened.append)
    monkeypatch.setenv(name, value)
    pages.keep()
    assert not opened
    monkeypatch.delenv(name)
    pages.keep()
    assert opened == [None] * (os.name == "posix")
