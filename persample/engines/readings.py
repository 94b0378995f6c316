"""What plain autograd makes of a few samples, each alone or all in one call, and where two such readings part."""

from __future__ import annotations

import itertools
import linecache
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from persample import naive
from persample.errors import BatchStatisticsWarning
from persample.inputs import Call
from persample.inputs.call import NotConnectedError
from persample.reductions import Aux, Loss, Reduction
from persample.utils import rng, trees
from persample.utils.isolation import raise_interrupt
from persample.utils.numerics import storage_key
from persample.utils.origin import frames, is_ours, users_depth
from persample.utils.tracing import is_wrapped
from persample.utils.trees import Tree
from persample.vmap_rules.effects import guarded

_DROPOUT = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
_NOISE = 100  # roundings: a gradient of up to so many counts as 0
_LEAST = 1e-6  # the part of the largest weight that counts as 0


class Step(NamedTuple):
    """A call of a function of torch by the loss: its name, the module and the line it is in, and what it returned."""

    name: str
    module: nn.Module | None
    line: tuple[str, str, int]
    results: list[Tensor]

    def place(self, parts: Mapping[str, nn.Module]) -> str:
        """Return in words where the function was called; ``parts`` are the modules by name."""
        name = next((path.partition(".")[2] for path, part in parts.items() if part is self.module), "")
        kind = type(self.module).__name__
        module = "" if self.module is None else f" of {name!r} ({kind})" if name else f" of {kind}"
        function, file, number = self.line
        text = linecache.getline(file, number).strip()
        return f", first at {self.name.removeprefix('torch.')}{module}, in {function} ({file}:{number}): `{text}`"


class Reading(NamedTuple):
    """A loss, its gradients (a vector, or ``[K, P]``), the steps, whether it draws random numbers, or drops some."""

    loss: Tensor
    grads: Tensor
    steps: list[Step]
    is_random: bool
    drops: bool

    @property
    def is_finite(self) -> bool:
        """Whether there is no NaN and no infinity in loss and gradients."""
        return bool(self.grads.isfinite().all() and self.loss.isfinite().all())

    def equals(self, other: Reading) -> bool:
        """Return whether loss and gradients are the same."""
        return same(self.grads, other.grads) and same(self.loss, other.loss)


class _Recorder(TorchFunctionMode):
    """Notes what torch's functions make of tensors; dropout passes its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.drops = False

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Tree = (), kwargs: Tree = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            self.drops |= bool(kwargs.get("training", True) and p)
            return args[0] if args else kwargs["input"]
        if kwargs.get("dropout_p"):
            self.drops, kwargs["dropout_p"] = True, 0.0
        result = func(*args, **kwargs)
        given, results = (
            [
                x for x in trees.flatten(tree)[0] if isinstance(x, Tensor) and not is_wrapped(x)
            ]  # these outlive transforms
            for tree in ((args, kwargs), result)
        )
        known = {storage_key(x) for x in given} - {storage_key(x) for x in given if x is result}
        # Views hold no new numbers, and layers make others of them for a batch.
        found = [x for x in results if storage_key(x) not in known]
        module, line = _origin()
        # What is made of no tensor (arange of the number of samples) differs without any sample being involved.
        if found and given and (module or line[2]):
            name = resolve_name(func) or str(func)
            self.steps.append(Step(name, module, line, [x.detach().clone() for x in found]))
        return result


def _origin() -> tuple[nn.Module | None, tuple[str, str, int]]:
    """Return the innermost module whose forward runs, and the innermost line of the user's: 0 for our own calls."""
    inside = list(itertools.takewhile(lambda frame: frame.f_code is not read.__code__, frames()))
    users = ((x.f_code.co_name, x.f_code.co_filename, x.f_lineno) for x in inside if not is_ours(x))
    selves = (frame.f_locals.get("self") for frame in inside if frame.f_code.co_name == "forward")
    return next((x for x in selves if isinstance(x, nn.Module)), None), next(users, ("", "", 0))


def read(call: Call, rows: int | slice, start: rng.Streams) -> Reading:
    """Differentiate the loss of one sample, or of several together, by plain autograd, from the same random numbers."""
    recorder, loss = _Recorder(), call.loss
    params, leaves = call.at(rows)
    start.go_back()

    def recorded() -> tuple[Tensor, object, Sequence[Tensor | None]]:
        with recorder:
            return naive.value_and_grad(guarded(loss), params, leaves, like=loss.params.tensors)

    value, _, grads = loss.params.unchanged(recorded)
    if all(g is None for g in grads):
        raise NotConnectedError
    pairs = zip(params, grads, strict=True)
    dense = [x.new_zeros((*value.shape, *x.shape)) if g is None else g for x, g in pairs]
    real = [torch.view_as_real(g) if g.is_complex() else g for g in dense]
    flat = torch.cat([g.reshape(*value.shape, -1).cpu() for g in real], -1)
    found = (x.dtype for step in recorder.steps for x in step.results)
    if any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in found):  # autocast: no more digits are known
        value, flat = (x if x.is_complex() else x.bfloat16() for x in (value, flat))
    return Reading(value.cpu(), flat, recorder.steps, rng.moved_since(start.torch), recorder.drops)


def same(x: Tensor, y: Tensor, scale: float = 0.0) -> bool:
    """Return whether two tensors agree within rounding errors, relative to their norms or to a larger number."""
    small, finite = min(x.dtype.itemsize, y.dtype.itemsize) < 4, torch.equal(x.isfinite(), y.isfinite())
    x, y = (z.to(torch.complex128 if z.is_complex() else torch.float64).nan_to_num(0.0, 0.0, 0.0) for z in (x, y))
    return finite and bool((x - y).norm() <= (0.1 if small else 1e-3) * max(float(x.norm()), float(y.norm()), scale))


def _alike(x: Tensor, y: Tensor) -> bool:
    """Return whether two results hold the same numbers, in whatever shape and order."""
    a, b = (torch.view_as_real(z.to(torch.complex128).reshape(-1)).nan_to_num().sort(0).values for z in (x, y))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-6)


def first_difference(own: Sequence[Reading], other: Reading, parts: Mapping[str, nn.Module]) -> str:
    """Return the place of the first step whose results are not made of those of each sample's own, or ""."""
    for steps, whole in zip(zip(*(x.steps for x in own), strict=False), other.steps, strict=False):
        rows = [list(found) for found in zip(*(x.results for x in steps), strict=False)]
        matches = {x.name for x in steps} == {whole.name} and len(rows) == len(whole.results)
        if not matches or not all(map(_consists_of, whole.results, rows)):
            return whole.place(parts)
    more = other.steps[min(len(x.steps) for x in own) :]
    return more[0].place(parts) if more else ""


def first_nan(reading: Reading, parts: Mapping[str, nn.Module]) -> str:
    """Return the place of the first step with a NaN among its results, or ""."""
    steps = (step for step in reading.steps if any(bool(x.isnan().any()) for x in step.results))
    return next((step.place(parts) for step in steps), "")


def _consists_of(x: Tensor, rows: Sequence[Tensor]) -> bool:
    """Return whether a result of several samples is made of those of each: their rows, mean or sum, or the same."""
    if x.dtype == torch.bool or len({row.shape for row in rows}) > 1:
        return True  # what is made of comparisons differs, too; lengths that depend on values cannot be compared
    wide = torch.stack([row.to(torch.complex128) for row in rows])
    return any(_alike(x, way) for way in (wide, wide.mean(0), wide.sum(0)))


def weights_of_outputs(own: Sequence[Reading], whole: Reading) -> list[Tensor | None]:
    """Return the weights of the samples in each output."""
    if whole.loss.ndim == 0:
        return [_weights(own, whole)]

    def output(reading: Reading, k: int) -> Reading:
        return Reading(reading.loss[k], reading.grads[k], *reading[2:])

    return [_weights([output(x, k) for x in own], output(whole, k)) for k in range(len(whole.loss))]


def _weights(own: Sequence[Reading], whole: Reading) -> Tensor | None:
    """Return w such that loss and gradient of all samples are Σ wᵢ ℓᵢ and Σ wᵢ gᵢ: ones, or a mean."""
    grads = torch.stack([x.grads.double() for x in own], 1)
    losses = torch.stack([x.loss.double() for x in own])
    ways = [torch.ones(len(own)).double(), torch.full((len(own),), 1 / len(own)).double()]
    scales = [max(float(x.abs().max()), 1e-300) for x in (grads, losses)]
    # The weights of samples without gradient and loss, and of dependent ones, follow from the sum of all alone.
    system = torch.cat([grads / scales[0], losses[None] / scales[1], torch.ones_like(losses)[None]])
    target = torch.cat([whole.grads.double() / scales[0], whole.loss.double()[None] / scales[1], losses.new_ones(1)])
    if bool(system.isfinite().all() and target.isfinite().all()):
        found = torch.linalg.lstsq(system, target[:, None], driver="gelsd").solution[:, 0]
        ways += [found] if bool((found > _LEAST * found.max()).all()) and abs(float(found.sum()) - 1) < 1e-3 else []
    for w in ways:
        fits = same((grads @ w).to(whole.grads.dtype), whole.grads, float((grads * w).norm(dim=0).max()))
        if fits and same((losses @ w).to(whole.loss.dtype), whole.loss, float((losses * w).abs().max())):
            return w
    return None


def vanish(results: Tree, reductions: Sequence[Reduction]) -> bool:
    """Return whether all results of gradients, in the memory of a CPU, consist of zeros and NaN."""
    of_gradients = [x for x, one in zip(results, reductions, strict=True) if not isinstance(one, Loss | Aux)]
    tensors = [x for x in trees.flatten(of_gradients)[0] if isinstance(x, Tensor) and x.numel()]
    if not tensors or any(x.device.type != "cpu" or is_wrapped(x) for x in tensors):
        return False
    # The first element of one tensor is enough in most calls.
    if any(abs(x[(0,) * x.ndim].item()) > 0 for x in reversed(tensors)):
        return False
    return not any(bool(x.nan_to_num().any()) for x in tensors)


def warn_of_statistics(call: Call, rows: int) -> None:
    """Warn if a loss without gradient for a batch of one sample has one for ``rows``, or subtracts a statistic."""
    if any(call.params_batched):  # no batch has parameters of each sample
        return
    start, handled = rng.Streams.now(), sys.exc_info()[1]
    call = replace(call, loss=replace(call.loss, keep_batch_dim=False))
    try:
        alone, together = (read(call, slice(0, count), start) for count in (1, max(rows, 2)))
    except Exception as error:  # noqa: BLE001 - the loss need not take a batch
        raise_interrupt(error, handled)
        return
    finally:
        start.go_back()
    # The results of both whose rows differ: a statistic, and what is made of it.
    pairs = [
        (b, *xs)
        for a, b in zip(alone.steps, together.steps, strict=False)
        for xs in zip(a.results, b.results, strict=False)
    ]
    differing = [(step, row, x) for step, row, x in pairs if not _begins_with(x, row)]
    if not differing or float(alone.grads.abs().max()) > 0:
        return
    step, *same_size = differing[0]
    cancels = same_size[0].shape == same_size[1].shape and any(
        x.shape != row.shape and not row.nan_to_num().any() for _, row, x in differing
    )
    size = float(together.grads.abs().max()) / torch.finfo(together.grads.dtype).eps
    if (cancels and call.randomness == "error") or _NOISE < size < torch.inf:  # random rows differ without a statistic
        warnings.warn(
            f"{call.loss.called} takes a statistic of its batch, which keep_batch_dim=True makes one sample"
            f"{step.place(call.loss.params.parts)}. All gradients are 0 or NaN. Compute the statistic of all samples "
            "before the call, and pass it in batch; or use composite_grads, for losses that couple samples.",
            BatchStatisticsWarning,
            stacklevel=users_depth(),
        )


def _begins_with(x: Tensor, row: Tensor) -> bool:
    longer = [axis for axis, (n, m) in enumerate(zip(x.shape, row.shape, strict=False)) if n > m]
    first = x.narrow(longer[0], 0, row.shape[longer[0]]) if longer else x
    wide = torch.complex128
    return first.shape == row.shape and torch.allclose(first.to(wide), row.to(wide), rtol=1e-3, equal_nan=True)
