"""``check``: a few samples, read without a batch axis, with one of size 1, and all together; and by each engine."""

from __future__ import annotations

import inspect
import linecache
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from persample import inputs, naive
from persample.engines.diagnosis import RAISED
from persample.errors import SAY_RANDOMNESS, STOP_STATISTICS, ArgumentError, BatchStatisticsWarning
from persample.explanation import Explanation, explain, table
from persample.inputs import Call, Outputs, Randomness
from persample.inputs.batch import dims_of_leaves, sample_structure, split_in_dims
from persample.inputs.call import NotConnectedError
from persample.inputs.params import NORMS
from persample.per_sample import per_sample_grads
from persample.reductions import Loss, Reduce, Stack
from persample.utils import rng, trees
from persample.utils.isolation import isolated
from persample.utils.numerics import storage_key
from persample.utils.origin import OURS, user_line
from persample.vmap_rules.effects import guarded

_DROPOUT = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
_DIFFERS = "differs from the loop"
_ROUNDED, _LEAST = 1e-2, 1e-6  # parts of the largest gradient, and of the largest weight, that count as 0
_WIDE = 100  # characters of an error in the table


class Run(NamedTuple):
    """The calls of one engine with one setting: seconds of the first and of a later one, and what came of them."""

    engine: str
    keep_batch_dim: bool
    first: float
    later: float
    result: str


@dataclass(frozen=True)
class Check:
    """What ``check`` returns; a table when printed.

    Args:
        findings: what may be wrong: readings that differ and where, statistics of several samples, engines that differ.
        notes: what to know: the readings that run, dropout, random numbers, how the samples count in a batch.
        runs: one row for each engine and each reading that runs.
        storage: what ``explain`` says of the samples on the eager engine; None where it takes no reading.
    """

    findings: tuple[str, ...]
    notes: tuple[str, ...]
    runs: tuple[Run, ...]
    storage: Explanation | None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        """Return the findings, the notes and the tables."""
        found = [f"! {x}" for x in self.findings] or ["Nothing was found: what runs agrees."]
        head = ("engine", "keep_batch_dim", "first call, ms", "later, ms", "gradients")
        rows = [(x.engine, str(x.keep_batch_dim), _ms(x.first), _ms(x.later), x.result[:_WIDE]) for x in self.runs]
        tables = [table(head, rows)] if rows else []
        tables += [str(self.storage)] if self.storage else []
        return "\n\n".join(["\n".join([*found, *(f"- {x}" for x in self.notes)]), *tables])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds else ""


def check(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    reduce: Reduce = None,
    *,
    in_dims: tuple[Any, Any] = (None, 0),
    keep_batch_dim: bool | None = None,
    randomness: Randomness = "error",
    outputs: Outputs = "scalar",
    engines: Sequence[str] = ("loop", "eager", "traced"),
    samples: int = 4,
) -> Check:
    """Compare what a loss computes of a few samples: with and without a batch axis, together, and on each engine.

    Write gᵢ for the gradient of sample i's own loss. Three readings run by plain autograd: fn(params, xᵢ), which is
    ``keep_batch_dim=False``; fn(params, xᵢ[None]), which is ``keep_batch_dim=True``; and fn(params, x), all samples at
    once, as in ordinary training. It is a finding if the first two differ, or if the gradient of the third is not a
    mean Σ wᵢ gᵢ with wᵢ > 0, Σ wᵢ = 1, or the sum Σ gᵢ: then samples influence each other. A finding names the first
    function whose results differ, its module, and your line. It does not say which reading you meant. Dropout is off in
    the readings.

    Args:
        loss_fn: as in ``per_sample_grads``.
        params: as in ``per_sample_grads``, of any shapes, floating or complex.
        batch: as in ``per_sample_grads``, leaves ``[B, ...]``, B of at least 1.
        reduce: the reductions for which the storage is explained.
        in_dims: as in ``per_sample_grads``.
        keep_batch_dim: the setting that you mean, so that the other one does not count: False for a loss written for
            one sample, True for one written for batches; None for both.
        randomness: as in ``per_sample_grads``.
        outputs: as in ``per_sample_grads``. With "rows", the samples are not read together.
        engines: names of engines, each called twice on the samples with each setting.
        samples: how many samples are read, the first of the batch.

    Returns:
        Findings, notes, a row for each engine and setting, and the storage; readable when printed. ``ok`` is whether
        there are no findings.

    Raises:
        ArgumentError: if an argument is invalid, as in ``per_sample_grads``, or the batch is empty. Errors of the loss
            are part of the result, but for those of classes of its own.

    Examples:
        A mean over axis 1, which is another axis without the batch axis:

        >>> import torch
        >>> from persample import check
        >>> net = torch.nn.Linear(3, 3)
        >>> def pooled(net, x):
        ...     return net(x).mean(1)[0].square().sum()
        >>> print(check(pooled, net, torch.randn(8, 3, 3), engines=()).findings[0])  # doctest: +ELLIPSIS
        keep_batch_dim=True computes another loss than keep_batch_dim=False, first at Tensor.mean, in pooled (...
        >>> check(lambda net, x: net(x).square().sum(), net, torch.randn(8, 3), engines=()).ok
        True
    """
    inputs.check_outside("check", "Call it on plain tensors.")
    inputs.check_options(engine="eager", randomness=randomness, chunk_size=None, outputs=outputs)
    rules = {
        "keep_batch_dim": (keep_batch_dim, keep_batch_dim in {None, False, True}, "False, True or None", "Pass None."),
        "samples": (samples, type(samples) is int and samples > 0, "a positive int", "4 samples show most faults."),
        "engines": (engines, not isinstance(engines, str), "names of engines", f"Write engines=({engines!r},)."),
    }
    for name, (value, fits, expected, fix) in rules.items():
        if not fits:
            raise ArgumentError.about(name, expected=expected, received=repr(value), fix=fix)
    for engine in engines:
        inputs.check_options(engine=engine, randomness=randomness, chunk_size=None)
    wanted, _ = inputs.reductions(reduce)
    params_dims, batch_dims = split_in_dims(in_dims)
    batch, shared = inputs.as_dicts(batch), {"in_dims": in_dims, "outputs": outputs}

    def head(count: int) -> tuple[Any, Any]:
        return _head("in_dims[0]", params, params_dims, count), _head("in_dims[1]", batch, batch_dims, count)

    def normalized(count: int, keep: bool | None) -> Call:
        options: dict[str, Any] = {**shared, "weights": None, "keep_batch_dim": bool(keep), "batch_statistics": True}
        first = head(count)
        call = inputs.normalize(loss_fn, *first, wanted, **options)
        if call.size == 0:
            fix = "Pass a batch like those of your calls."
            raise ArgumentError.about("batch", expected="at least one sample", received="B = 0", fix=fix)
        # Read together, samples are in containers of the batch: a TensorDict stores its batch size.
        return call if keep is not None else replace(call, loss=replace(call.loss, batch=trees.structure(first[1])))

    readings = _Readings(normalized, samples, keep_batch_dim)
    isolated(params, readings.compare)
    runs: list[Run] = []
    storage = None
    for keep in readings.settings:
        options: dict[str, Any] = {**shared, "randomness": randomness, "keep_batch_dim": keep}
        runs += _runs(partial(per_sample_grads, loss_fn, *head(samples), **options), keep, engines, readings.is_random)
        storage = _attempt(partial(explain, loss_fn, *head(samples), reduce, **options))[0]
    differing = [x for x in runs if x.result == _DIFFERS]
    wrong = [f"engine={x.engine!r}, keep_batch_dim={x.keep_batch_dim}: {_DIFFERS}." for x in differing]
    return Check((*readings.findings, *wrong), tuple(readings.notes), tuple(runs), storage)


def _head(argument: str, tree: Any, dims: Any, count: int) -> Any:
    """Return the first rows of a batch, or of parameters of which every sample has its own."""
    leaves, structure = trees.flatten(tree)
    axes, rows = dims_of_leaves(argument, dims, structure), slice(0, count)
    for place, (x, axis) in enumerate(zip(leaves, axes, strict=True)):
        if axis is not None and -getattr(x, "ndim", 0) <= axis < getattr(x, "ndim", 0):  # others are refused later
            leaves[place] = x[(slice(None),) * (axis % x.ndim) + (rows,)]
    return trees.unflatten(leaves, sample_structure(tree, structure, axes, rows))


def _attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a function and "", or None and the first line of its error."""
    try:
        return function(), ""
    except RAISED as error:
        place = user_line(traceback.extract_tb(error.__traceback__))
        return None, f"{type(error).__name__}: {error}".splitlines()[0] + place


def _runs(call: Callable[..., Any], keep: bool, engines: Sequence[str], is_random: bool) -> Iterator[Run]:
    """Call each engine twice, and compare it with the loop: yield one row for each."""

    def timed(engine: str) -> tuple[list[Tensor], float]:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BatchStatisticsWarning)  # the findings say it
            found = trees.flatten(call(reduce=(Stack(), Loss()), engine=engine))[0]
        return found, time.perf_counter() - start

    expected, _ = _attempt(lambda: timed("loop")[0])
    for engine in engines:
        found, said = _attempt(lambda: (timed(engine), timed(engine)))  # noqa: B023 - called at once
        (result, first), (_, later) = found or ((None, 0.0), (None, 0.0))
        if result is not None and (is_random or expected is None):
            said = "random" if is_random else "the loop fails"
        elif result is not None:
            # A gradient that is 0, as of the bias of attention's keys, consists of rounding errors of the others.
            total = _ROUNDED * max(
                float(x.abs().double().nan_to_num().norm()) for x in expected[:-1]
            )  # but for the loss
            same = (_same(x, y, total) for x, y in zip(result, expected, strict=True))
            said = "as the loop" if all(same) else _DIFFERS
        yield Run(engine, keep, first, later, said)


class _Noted(NamedTuple):
    """A call of a function of torch by the loss: its name, the module and the line it is in, and what it returned."""

    name: str
    module: nn.Module | None
    line: tuple[str, str, int]
    results: list[Tensor]


class _Recorder(TorchFunctionMode):
    """Notes what torch's functions make of tensors; dropout passes its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[_Noted] = []
        self.drops = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            self.drops |= bool(kwargs.get("training", True) and p)
            return args[0] if args else kwargs["input"]
        if kwargs.get("dropout_p"):
            self.drops, kwargs["dropout_p"] = True, 0.0
        result = func(*args, **kwargs)
        given = [x for x in trees.flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        known = {storage_key(x) for x in given} - {storage_key(x) for x in given if x is result}
        # Views hold no new numbers, and layers make others of them for a batch.
        found = [x for x in trees.flatten(result)[0] if isinstance(x, Tensor) and storage_key(x) not in known]
        module, line = _place()
        # What is made of no tensor (arange of the number of samples) differs without any sample being involved.
        if found and given and (module or line[2]):
            self.noted.append(
                _Noted(resolve_name(func) or str(func), module, line, [x.detach().clone() for x in found])
            )
        return result


def _place() -> tuple[nn.Module | None, tuple[str, str, int]]:
    """Return the innermost module whose forward runs, and the innermost line of the user's: 0 for our own calls."""
    frame, module, line = inspect.currentframe(), None, ("", "", 0)
    while frame is not None and frame.f_code is not _read.__code__:
        code = frame.f_code
        if not line[2] and not code.co_filename.startswith(OURS):
            line = code.co_name, code.co_filename, frame.f_lineno
        if module is None and code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            module = frame.f_locals["self"]
        frame = frame.f_back
    return module, line


class _Reading(NamedTuple):
    """A loss, its gradients as one vector, and the calls noted on the way."""

    loss: Tensor
    grads: Tensor
    noted: list[_Noted]
    is_random: bool
    drops: bool


def _read(call: Call, rows: int | slice, start: rng.Streams) -> _Reading:
    """Differentiate the loss of one sample, or of several read together, by plain autograd."""
    recorder, loss = _Recorder(), call.loss
    params, leaves = call.at(rows)
    start.go_back()

    def recorded() -> Any:
        with recorder:
            return naive.value_and_grad(guarded(loss), params, leaves, like=loss.params.tensors)

    value, _, grads = loss.params.unchanged(recorded)
    if all(g is None for g in grads):
        raise NotConnectedError
    pairs = zip(params, grads, strict=True)
    dense = [x.new_zeros((*value.shape, *x.shape)) if g is None else g for x, g in pairs]
    flat = torch.cat([(torch.view_as_real(g) if g.is_complex() else g).reshape(-1).cpu() for g in dense])
    return _Reading(value.cpu(), flat, recorder.noted, rng.moved_since(start.torch), recorder.drops)


def _same(x: Tensor, y: Tensor, scale: float = 0.0) -> bool:
    """Return whether two tensors agree within rounding errors, relative to their norms or to a larger number."""
    small, same_nan = min(x.dtype.itemsize, y.dtype.itemsize) < 4, torch.equal(x.isnan(), y.isnan())
    x, y = (z.to(torch.complex128 if z.is_complex() else torch.float64).nan_to_num() for z in (x, y))
    return same_nan and bool((x - y).norm() <= (0.1 if small else 1e-3) * max(float(x.norm()), float(y.norm()), scale))


def _alike(x: Tensor, y: Tensor) -> bool:
    """Return whether two results hold the same numbers, in whatever shape and order."""
    a, b = (torch.view_as_real(z.to(torch.complex128).reshape(-1)).nan_to_num().sort(0).values for z in (x, y))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-6)


def _consists_of(x: Tensor, rows: Sequence[Tensor]) -> bool:
    """Return whether a result of several samples is made of those of each: their rows, mean or sum, or the same."""
    if len({row.shape for row in rows}) > 1:
        return True  # lengths that depend on values cannot be compared
    wide = torch.stack([row.to(torch.complex128) for row in rows])
    return any(_alike(x, way) for way in (wide, wide.mean(0), wide.sum(0)))


def _weights(own: Sequence[_Reading], whole: _Reading) -> Tensor | None:
    """Return w such that loss and gradient of all samples are Σ wᵢ ℓᵢ and Σ wᵢ gᵢ: ones, or a mean."""
    grads = torch.stack([x.grads.double() for x in own], 1)
    losses = torch.stack([x.loss.double() for x in own])
    ways = [torch.ones(len(own)).double(), torch.full((len(own),), 1 / len(own)).double()]
    scales = [max(float(x.abs().max()), 1e-300) for x in (grads, losses)]
    system = torch.cat([grads / scales[0], losses[None] / scales[1]])
    target = torch.cat([whole.grads.double() / scales[0], whole.loss.double()[None] / scales[1]])
    if bool(system.isfinite().all() and target.isfinite().all()):
        found = torch.linalg.lstsq(system, target[:, None], driver="gelsd").solution[:, 0]
        ways += [found] if bool((found > _LEAST * found.max()).all()) and abs(float(found.sum()) - 1) < 1e-3 else []
    for w in ways:
        fits = _same((grads @ w).to(whole.grads.dtype), whole.grads, float((grads * w).norm(dim=0).max()))
        if fits and _same((losses @ w).to(whole.loss.dtype), whole.loss, float((losses * w).abs().max())):
            return w
    return None


class _Readings:
    """The readings of a few samples, and what they tell.

    ``normalized`` returns the call of a number of samples with ``keep_batch_dim``, or with None for samples together.
    """

    def __init__(self, normalized: Callable[[int, bool | None], Call], samples: int, meant: bool | None) -> None:
        self._normalized, self._meant = normalized, meant
        self._calls = {keep: normalized(samples, keep) for keep in (False, True)}
        self._own: dict[bool, list[_Reading]] = {}
        self.findings: list[str] = []
        self.notes: list[str] = []

    @property
    def settings(self) -> list[bool]:
        """The settings of ``keep_batch_dim`` that run, and count."""
        return [keep for keep in self._own if self._meant in {None, keep}]

    @property
    def is_random(self) -> bool:
        """Whether engines draw numbers of their own."""
        return self._draws or self._drops

    def compare(self) -> None:
        """Read the samples in each way, and compare."""
        start = rng.Streams.now()
        for keep, call in self._calls.items():
            found, error = _attempt(lambda: [_read(call, i, start) for i in range(call.size)])  # noqa: B023
            if found is not None:
                self._own[keep] = found
            else:
                (self.findings if self._meant is keep else self.notes).append(f"keep_batch_dim={keep} fails: {error}")
        if not self._own:
            self.findings, self.notes = [*self.findings, *self.notes], []
        self._list_modules()
        wholes, fails = self._together(start)
        start.go_back()
        self._compare_axes(takes_batches=not fails)
        if wholes:
            self._compare_whole(wholes)
        for keep in self.settings:
            if not any(bool(x.grads.nan_to_num().any()) for x in self._own[keep]):
                self.findings.append(f"keep_batch_dim={keep}: the gradients of all samples are 0 or NaN.")

    def _together(self, start: rng.Streams) -> tuple[list[_Reading], bool]:
        """Read all samples, and all but one, in one call of the loss; return whether that fails, too."""
        call = self._calls[False]
        if not self._own or self._draws or any(call.params_batched) or call.loss.outputs == "rows":
            return [], False
        sizes = [size for size in (call.size, call.size - 1) if size > 1]  # one may be the size of another axis
        found, error = _attempt(lambda: [_read(self._normalized(n, None), slice(0, n), start) for n in sizes])
        if error:
            self.notes.append(f"The loss does not take several samples together, as if written for one: {error}")
        return found or [], bool(error)

    def _list_modules(self) -> None:
        parts = [(path.partition(".")[2], part) for path, part in self._calls[False].loss.params.parts.items()]
        for name, part in parts:
            if isinstance(part, NORMS) and part.training and part.track_running_stats:
                said = "is in train mode and normalizes by statistics of its batch: no sample has a gradient of its own"
                self.findings.append(f"{name!r} ({type(part).__name__}) {said}. {STOP_STATISTICS}")
        if self._drops:
            names = [
                repr(name) for name, part in parts if "Dropout" in type(part).__name__ and part.training and part.p
            ]
            self.notes.append(f"Dropout is on ({', '.join(names) or 'a function'}); off in readings. {SAY_RANDOMNESS}")
        if self._draws:
            self.notes.append(f"The loss draws random numbers. {SAY_RANDOMNESS}")

    @property
    def _drops(self) -> bool:
        return any(x.drops for each in self._own.values() for x in each)

    @property
    def _draws(self) -> bool:
        return any(x.is_random for each in self._own.values() for x in each)

    def _compare_axes(self, *, takes_batches: bool) -> None:
        """Compare the readings with and without a batch axis."""
        if self._meant is not None or len(self._own) < 2:
            return
        pairs = list(zip(self._own[False], self._own[True], strict=True))
        differing = [i for i, (a, b) in enumerate(pairs) if not (_same(a.grads, b.grads) and _same(a.loss, b.loss))]
        if not differing:
            return
        plain, kept = pairs[differing[0]]
        steps = zip(plain.noted, kept.noted, strict=False)
        where = next((self._named(b) for a, b in steps if a.name != b.name or not all(map(_alike, a[3], b[3]))), "")
        samples = ", ".join(map(str, differing))
        text = f"keep_batch_dim=True computes another loss than keep_batch_dim=False{where}; of samples {samples}."
        if takes_batches:
            self.findings.append(f"{text} Pass the one you mean to check, too: True for a loss written for batches.")
        else:
            self.notes.append(text)

    def _compare_whole(self, wholes: Sequence[_Reading]) -> None:
        """Compare the loss of all samples together with those of each."""
        weights = {}
        for keep in self.settings:
            found = [_weights(self._own[keep][: len(self._own[keep]) - i], whole) for i, whole in enumerate(wholes)]
            weights[keep] = None if any(w is None for w in found) else found[0]
        if any(w is not None for w in weights.values()) or not weights:
            for keep, w in weights.items():
                if w is None or float(w.max() - w.min()) < 1e-3:
                    continue
                shown = ", ".join(f"{x:.3g}" for x in w.tolist())
                self.notes.append(f"keep_batch_dim={keep}: together, the samples count with weights {shown}.")
            return
        keep = max(weights)
        own, whole = self._own[keep], wholes[0]
        if _same(whole.grads, own[0].grads) and False not in self._own:  # the first alone, as of an axis of 1
            return
        where = ""
        for step, of_all in zip(zip(*(x.noted for x in own), strict=False), whole.noted, strict=False):
            rows = [list(found) for found in zip(*(x.results for x in step), strict=False)]
            matches = {x.name for x in step} == {of_all.name} and len(rows) == len(of_all.results)
            if not matches or not all(map(_consists_of, of_all.results, rows)):
                where = self._named(of_all)
                break
        text = (
            f"Samples influence each other{where}. The gradient of several samples in one call is neither the sum nor "
            f"a mean of those of each alone (keep_batch_dim={keep})."
        )
        if self._meant is False:
            self.notes.append(text)
        else:
            fix = "" if self._meant else " Pass keep_batch_dim=False to check, too, for a loss written for one sample."
            self.findings.append(f"{text} Compute what samples share before the call.{fix}")

    def _named(self, call: _Noted) -> str:
        """Return in words where a function was called."""
        parts = self._calls[False].loss.params.parts.items()
        name = next((path.partition(".")[2] for path, part in parts if part is call.module), "")
        kind = type(call.module).__name__
        module = "" if call.module is None else f" of {name!r} ({kind})" if name else f" of {kind}"
        function, file, number = call.line
        text = linecache.getline(file, number).strip()
        return f", first at {call.name.removeprefix('torch.')}{module}, in {function} ({file}:{number}): `{text}`"
