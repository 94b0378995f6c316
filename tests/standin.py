"""A device of our own, ``torch.device("standin")``: memory of the host that only its own kernels may touch.

It behaves as a GPU does where that matters to a library. Tensors of two devices do not mix, except that a number of
the host (0-d) may be an operand. Copies between the host and the device, values that Python reads, and shapes that
depend on values are transfers: ``traffic()`` records each with the line that asked for it. The device has a stream of
random numbers of its own, and backward passes run in a thread of their own. Kernels are those of the CPU, called on
the same memory. Importing this module registers the device, for the whole process.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paths import ROOT
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

LIBRARY = str(ROOT / "persample")
aten = torch.ops.aten
CPU = torch.device("cpu")
# Kernels of the CPU that only look at sizes, strides and storages, which tensors of any device have.
METADATA = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Operations that wait for the device: a GPU would finish all work, and copy what the result depends on to the host.
READS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default),
    *(aten.repeat_interleave.Tensor, aten._linalg_check_errors.default),
}
MASKED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


@dataclass(frozen=True)
class Transfer:
    """One transfer between the host and the device."""

    kind: str  # "read": to the host; "write": to the device
    operation: str
    line: str  # of the library, innermost


class Device(_DummyBackendModule):
    """What ``torch.standin`` is, as ``torch.cuda`` is for its devices."""

    def __init__(self) -> None:
        self.stream = torch.Generator().get_state()
        self.transfers: list[Transfer] = []

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.stream

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.stream = state

    def manual_seed_all(self, seed: int) -> None:
        self.stream = torch.Generator().manual_seed(seed).get_state()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def record(self, kind: str, operation: Any) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(LIBRARY)]
        line = f"{Path(frames[-1].filename).relative_to(LIBRARY)}:{frames[-1].lineno}" if frames else "the caller"
        self.transfers.append(Transfer(kind, str(operation), line))


BACKEND = Device()
_setup_privateuseone_for_python_backend("standin", backend_module=BACKEND)
DEVICE = torch.device("standin", 0)


@contextmanager
def traffic() -> Iterator[list[Transfer]]:
    """Record the transfers of a block."""
    before, BACKEND.transfers = BACKEND.transfers, []
    try:
        yield BACKEND.transfers
    finally:
        BACKEND.transfers = before


def on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == DEVICE.type


def host(x: Tensor) -> Tensor:
    """The memory of a tensor of the device, as a tensor of the host."""
    storage = x.untyped_storage()
    bytes_ = torch.empty(0, dtype=x.dtype) if not storage.nbytes() else storage.host
    out = torch.empty(0, dtype=x.dtype).set_(bytes_, x.storage_offset(), x.shape, x.stride())
    out = out.conj() if x.is_conj() else out
    return torch._neg_view(out) if x.is_neg() else out


def device(x: Tensor) -> Tensor:
    """A tensor of the device with the memory of one of the host."""
    memory = x.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), DEVICE, memory.nbytes())
    storage.host = memory  # keeps it alive
    out = torch._C._acc.create_empty_tensor([0], x.dtype)
    set_ = aten.set_.source_Storage_storage_offset
    return set_.redispatch(METADATA, out, storage, x.storage_offset(), x.shape, x.stride())


# Kernels.


def kernel(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the CPU's kernel on the same memory; return what it returns, on the device."""
    if operation in METADATA_ONLY:
        return operation.redispatch(METADATA, *args, **kwargs)
    args = tuple(map(as_declared, operation._schema.arguments, args))
    check_devices(operation, args, kwargs)
    if operation in READS or (operation in MASKED and reads_a_mask(operation, args)):
        BACKEND.record("read", operation)
    if "device" in kwargs:
        kwargs["device"] = CPU
    hosts = {}  # of each tensor of the device, by identity

    def to_host(x: Any) -> Any:
        if not on_device(x):
            return x
        return hosts.setdefault(id(x), (x, host(x)))[1]

    args, kwargs = pytree.tree_map(to_host, (args, kwargs))
    with own_stream(operation, kwargs.get("generator")):
        results = operation(*args, **kwargs)
    for x, same in hosts.values():
        if x.shape != same.shape:  # an ``out`` that was resized
            moved = device(same)
            x.set_(moved.untyped_storage(), 0, moved.shape, moved.stride())
    own = {id(same): x for x, same in hosts.values()}
    return pytree.tree_map(lambda x: own.get(id(x), device(x)) if isinstance(x, Tensor) else x, results)


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between the host and the device, or inside of the device."""
    if on_device(source) != on_device(target):
        BACKEND.record("read" if on_device(source) else "write", "copy_")
    near, far = (host(x) if on_device(x) else x for x in (source, target))
    far.copy_(near)
    return target


def as_declared(argument: Any, value: Any) -> Any:
    """Numbers where the operation takes tensors arrive here as numbers."""
    is_number = isinstance(value, bool | int | float | complex) and str(argument.type) == "Tensor"
    return torch.tensor(value) if is_number else value


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """Call the CPU's kernel, which wants the shape of a bias, too."""
    bias = [weight.shape[1] * rest[5] if rest[3] else weight.shape[0]]
    return kernel(aten.convolution_backward.default, grad, x, weight, bias, *rest)


def check_devices(operation: Any, args: Any, kwargs: Any) -> None:
    """Refuse operands of the host, but for a number."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    others = [x for x in tensors if not on_device(x) and (x.ndim or not any(map(on_device, tensors)))]
    if operation in MASKED:  # indices of the host are copied to the device
        others = [x for x in others if x.dtype != torch.long or BACKEND.record("write", operation)]
    if others:
        message = "Expected all tensors to be on the same device, but found at least two devices, standin:0 and cpu!"
        torch._check(False, lambda: f"{message} ({operation})")  # raised by torch, not by its user


def reads_a_mask(operation: Any, args: Any) -> bool:
    masks = [x for x in args[1] if x is not None and x.dtype in {torch.bool, torch.uint8}]
    fills = operation not in {aten.index.Tensor} and len(masks) == len(args[1]) and args[2].numel() == 1
    return bool(masks) and not fills


@contextmanager
def own_stream(operation: Any, generator: Any) -> Iterator[None]:
    """Let an operation draw from the device's stream of random numbers instead of the host's."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        yield
        return
    torch._check(generator is None, lambda: f"Expected a 'standin' device type for generator but found '{CPU}'")
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(BACKEND.stream)
        yield
        BACKEND.stream = torch.get_rng_state()


METADATA_ONLY = {
    *(aten.as_strided.default, aten._reshape_alias.default, aten.view.default, aten.unfold.default),
    *(aten.view_as_real.default, aten.view_as_complex.default, aten.set_.source_Storage_storage_offset),
    *(aten.set_.source_Tensor, aten.set_.source_Storage, aten.is_set_to.default),
}
_FALLBACK = torch.library.Library("_", "IMPL")
_FALLBACK.fallback(kernel, "PrivateUse1")
_OWN = torch.library.Library("aten", "IMPL")
for _name, _function in {
    "_copy_from": copy,
    "_copy_from_and_resize": copy,
    "convolution_overrideable": functools.partial(kernel, aten.convolution.default),
    "convolution_backward_overrideable": convolution_backward,
}.items():
    _OWN.impl(_name, _function, "PrivateUse1")
