"""The check that the second pass encodes the samples as the first pass did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from persample.composite.encoder import Encoder
from persample.errors import LossError
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.pipeline import Engine
from persample.utils import rng, trees
from persample.utils.numerics import accumulate_dtype, as_real, is_autocast

_FIX = (
    "It must draw from the global streams of torch, NumPy or random, which are replayed, and not from a generator of "
    "its own. Its result must not depend on the number of earlier calls, or on whether a graph is recorded."
)


def tolerance(encoder: Encoder, z: Any) -> float:
    """Return √eps of the coarsest format among parameters, z and autocast.

    Another dropout mask changes z by much more. Kernels that differ with and without a graph change z by a few eps.
    """
    leaves = trees.flatten(z)[0]
    dtypes = [*encoder.call.loss.spec.dtypes, *(leaf.dtype for leaf in leaves)]
    dtypes += [torch.get_autocast_dtype(x.device.type) for x in leaves if is_autocast(x.device)]
    return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex) ** 0.5


def deviation(z: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest |z − z₁| and the largest finite |z₁|, 0-d float64 each; NaN and ∞ equal themselves.

    Examples:
        >>> deviation(torch.tensor([1.0, torch.inf]), torch.tensor([4.0, torch.inf]))
        (tensor(3., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    dtype = accumulate_dtype(z.dtype) if z.is_floating_point() or z.is_complex() else torch.float64
    now, then = (as_real(x.detach()).to(dtype).flatten() for x in (z, before))
    same = (now == then) | (now.isnan() & then.isnan())
    largest = [torch.where(same, 0, (now - then).abs()), torch.where(then.isfinite(), then, 0).abs()]
    difference, size = (torch.cat([x, x.new_zeros(1)]).max().double() for x in largest)  # 0 for an empty tensor
    return difference, size


def checked(engine: Engine, encoder: Encoder, z: Any) -> Engine:
    """Return an engine that also compares z of each chunk with z of the first pass.

    Args:
        engine: an engine for the chunks of ``second_pass.contributions``, whose aux is z.
        encoder: the encoder.
        z: the result of the first pass.

    Raises:
        LossError: by the engine, if they differ; the message names the leaf and the first module that differs.
    """
    paths, bound, batched = trees.paths(z, "z"), tolerance(encoder, z), encoder.mode == "batched"

    def checked_engine(chunk: Call, required_ops: frozenset[str]) -> Gradients:
        gradients = engine(chunk, required_ops)
        _, _, before, _ = trees.unflatten(list(chunk.leaves), chunk.loss.batch)
        numbers = [x for pair in zip(gradients.aux, before, strict=True) for x in deviation(*pair)]
        found = torch.stack(numbers).tolist()  # one transfer for both, because each one waits for the device
        for path, difference, size in zip(paths, found[::2], found[1::2], strict=True):
            if not difference <= bound * size:
                off = f"{path}, off by {difference:g} beside numbers up to {size:g}"
                raise LossError(_message(chunk.loss.called, off, _first_difference(chunk, batched=batched)))
        return gradients

    return checked_engine


def _message(called: str, off: str, module: str | None) -> str:
    where = f"module {module}" if module else f"{called} itself, outside of any module,"
    return (
        f"{called}: expected the second pass to encode the samples as the first did, received another {off}: {where} "
        f"returns a different result when it is called again. {_FIX}"
    )


def _first_difference(chunk: Call, *, batched: bool) -> str | None:
    """Return the name of the first module whose outputs differ with and without a graph, or None if there is none."""
    start = rng.Streams.now()
    for arguments in [(chunk.params, chunk.leaves)] if batched else map(chunk.at, range(chunk.size)):
        runs = []
        for recording in (torch.no_grad(), torch.enable_grad()):
            start.go_back()
            with recording:
                runs.append(_module_outputs(lambda: chunk.loss.returned(*arguments)))  # noqa: B023 (called at once)
        for (module, first), (_, second) in zip(*runs, strict=False):
            if not all(torch.allclose(x, y, equal_nan=True) for x, y in zip(first, second, strict=True)):
                return _name(module, chunk.loss.params.modules)
    return None


def _module_outputs(call: Callable[[], object]) -> list[tuple[nn.Module, list[Tensor]]]:
    """Return every module called and the tensors that it returned, in the order in which the modules finished."""
    outputs: list[tuple[nn.Module, list[Tensor]]] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        outputs.append((module, [x.detach().clone() for x in trees.flatten(output)[0] if isinstance(x, Tensor)]))

    handle = register_module_forward_hook(record)
    try:
        call()
    finally:
        handle.remove()
    return outputs


def _name(module: nn.Module, roots: Sequence[nn.Module]) -> str:
    names = {part: name for root in roots for name, part in root.named_modules() if name}
    return f"{names[module]!r} ({type(module).__name__})" if module in names else type(module).__name__
