"""``import persample`` leaves the process as it was: settings are read before and after, in processes of their own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest

# What reads the process; torch, NumPy and what torch itself imports for our use of it are there before.
_READ = """
import atexit, ctypes, gc, hashlib, json, os, pickle, random, signal, sys, threading, warnings
import numpy, torch, torch.func, torch.fx, torch.utils.checkpoint, torch.nn.utils.parametrize, torch.nn.attention
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch

def digest(x):
    return hashlib.sha256(pickle.dumps(x)).hexdigest()

def settings():
    return {
        "warning filters": repr(warnings.filters),
        "what shows warnings": repr((warnings.showwarning, warnings.formatwarning)),
        "operations of torch": digest(sorted(torch._C._dispatch_get_all_op_names())),
        "libraries of torch": digest(sorted(map(str, torch.library._defs))),
        "random": digest(random.getstate()),
        "numpy random": digest(numpy.random.get_state()),
        "torch random": digest(torch.get_rng_state().tolist()),
        "dtype and device": repr((torch.get_default_dtype(), torch.get_default_device())),
        "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "gradients": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "determinism": [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()],
        "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()],
        "backends": [torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled()],
        "modes": [torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()],
        "numpy errors": numpy.geterr(),
        "environment": digest(sorted(os.environ.items())),
        "signals": repr([signal.getsignal(x) for x in sorted(signal.valid_signals())]),
        "hooks": repr((sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook)),
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold()],
        "at exit": atexit._ncallbacks(),
        "running threads": threading.active_count(),
        "classes": digest([sorted(vars(x)) for x in (torch.Tensor, torch.nn.Module, torch.autograd.Function)]),
    }
"""
_COMPARE = """
before = settings()
import persample
after = settings()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""
# glibc takes blocks above its threshold straight from the system (hblks), and gives the end of its heap (arena) back.
_MEMORY = """
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks a b c d e f".split()]

libc = ctypes.CDLL(None)
mallinfo, malloc, free = libc.mallinfo2, libc.malloc, libc.free
mallinfo.restype, malloc.restype, free.argtypes = Info, ctypes.c_void_p, [ctypes.c_void_p]
mallinfo(), free(malloc(8))
before = mallinfo()
block = torch.empty(30 * 2**20, dtype=torch.uint8)
from_system = mallinfo().hblks - before.hblks
blocks = [malloc(2**16) for _ in range(1600)]
held = mallinfo().arena
for x in reversed(blocks):
    free(x)
freed = held - mallinfo().arena
print(json.dumps([from_system, held - before.arena > 90 * 2**20, freed > 90 * 2**20]))
"""


def printed(*lines):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = [sys.executable, "-c", "\n".join(lines)]
    return json.loads(subprocess.run(code, env=environment, capture_output=True, text=True, check=True).stdout)


def test_no_setting_of_the_process_changes():
    assert printed(_READ, _COMPARE) == []


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library, with rules of its own")
def test_freed_memory_goes_back_to_the_system_as_without_it():
    without, imported = printed(_READ, _MEMORY), printed(_READ, "import persample", _MEMORY)
    assert without[:2] == imported[:2] == [1, True]
    assert without[2] <= imported[2]  # torch 2.15 built for CUDA may keep some of it without persample, too


def test_a_second_import():
    lines = (
        "import sys, torch, persample, gc",
        "w, x = torch.ones(2).double(), torch.ones(3, 2).double()",
        "def loss(w, x): return torch.tanh(w @ x)",
        "def norms(): return persample.per_sample_grads(loss, w, x, engine='compiled').norm()",
        "first = norms()",
        "for name in [n for n in sys.modules if n.startswith('persample')]: del sys.modules[name]",
        "import persample; del name; gc.collect()",
        "print(int(torch.equal(first, norms())))",
    )
    assert printed(*lines) == 1


def test_the_core_imports_neither_extras_nor_what_needs_them():
    extras = ("gymnasium", "typer", "rich", "matplotlib", "PIL", "persample.rl", "persample.cli", "tensordict")
    extras += ("pytest", "hypothesis", "torch._dynamo")
    found, compiler = printed(
        "import json, sys, torch, persample",
        "found = sorted(sys.modules)",
        "persample.per_sample_grads(lambda w, x: (w @ x) ** 2, torch.ones(3), torch.ones(2, 3), engine='traced')",
        "print(json.dumps([found, 'torch._inductor.compile_fx' in sys.modules]))",
    )
    assert "torch" in found
    assert not [name for name in found if f"{name}.".startswith(tuple(f"{extra}." for extra in extras))]
    assert not compiler  # the traced engine needs none
