"""Memory that one call freed is there for the next, without the system's taking it back in between."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

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
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library, with rules of its own")
def test_freed_pages_are_kept():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    assert int(subprocess.check_output([sys.executable, "-c", _COUNT], env=environment)) == 0
