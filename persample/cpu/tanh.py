"""tanh of large float32 tensors on CPUs: by oneDNN, where MKL takes twice as long."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.cpu import onednn
from persample.utils.numeric import is_watched

# Numbers from which on two copies, in and out of oneDNN's tensors, take less time than they save (measured, torch 2.13,
# 2 cores of an AMD EPYC with AVX-512: 409 600 numbers take MKL 740 µs, oneDNN 130, and 100 to 250 to copy).
_LEAST = 2**17


def suits(x: Tensor) -> bool:
    """Return whether ``tanh`` is faster than torch.

    Args:
        x: a tensor, not wrapped.
    """
    large = x.numel() >= _LEAST and x.dtype == torch.float32 and x.device.type == "cpu"
    plain = large and type(x) is Tensor and x.permute(_order(x)).is_contiguous()
    return plain and onednn.computes()


def _order(x: Tensor) -> list[int]:
    """Return the axes of a tensor, from that of the largest stride on: as they lie in memory."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)


def tanh(x: Tensor) -> Tensor:
    """Compute tanh, not differentiated, within 1.3 units in the last place, where torch is within 0.6.

    Args:
        x: of any shape.

    Returns:
        Of the shape and layout of ``x``.

    Examples:
        >>> tanh(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.7616])
    """
    if not suits(x) or is_watched():
        return torch.tanh(x)
    numbers = x.permute(_order(x)).flatten()
    return torch.tanh_(numbers.to_mkldnn()).to_dense().as_strided(x.shape, x.stride())
