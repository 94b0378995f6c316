"""``check``: a few samples, read without a batch axis, with one of size 1, and all together; and by each engine."""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from persample import inputs
from persample.engines.diagnosis import RAISED
from persample.engines.readings import Reading, first_difference, first_nan, read, same, weights_of_outputs
from persample.errors import SAY_RANDOMNESS, STOP_STATISTICS, ArgumentError, BatchStatisticsWarning
from persample.explanation import Explanation, explain, table
from persample.inputs import Call, Outputs, Randomness
from persample.inputs.batch import dims_of_leaves, sample_structure, split_in_dims
from persample.inputs.params import NORMS
from persample.per_sample import per_sample_grads
from persample.reductions import Loss, Reduce, Stack
from persample.utils import rng, trees
from persample.utils.isolation import isolated, raise_interrupt
from persample.utils.origin import is_raised, user_line, users_depth

_FLAGS = {bool, type(None)}
_DIFFERS = "differs from the loop"
_ROUNDED = 1e-2  # the part of the largest gradient that counts as 0


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
        found = [f"! {x}" for x in self.findings] or ["No problem found: the readings and engines that run agree."]
        head = ("engine", "keep_batch_dim", "first call, ms", "later, ms", "gradients")
        rows = [(x.engine, str(x.keep_batch_dim), _ms(x.first), _ms(x.later), x.result) for x in self.runs]
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
    *_apart: NoReturn,
    in_dims: tuple[Any, Any] = (None, 0),
    keep_batch_dim: bool | None = None,
    randomness: Randomness = "error",
    outputs: Outputs = "scalar",
    engines: Sequence[str] = ("loop", "eager", "traced"),
    samples: int = 4,
) -> Check:
    """Compare the losses and gradients of a few samples: with and without a batch axis, together, and on each engine.

    Write gᵢ for the gradient of sample i's own loss. Three readings run by plain autograd: fn(params, xᵢ), which is
    ``keep_batch_dim=False``; fn(params, xᵢ[None]), which is ``keep_batch_dim=True``; and fn(params, x), all samples at
    once, as in ordinary training. It is a finding if the first two differ. It is another if the gradient of the third
    is neither the sum Σ gᵢ nor a mean Σ wᵢ gᵢ with wᵢ > 0, Σ wᵢ = 1: samples influence each other. A finding names the
    first function whose results differ, its module, and your line. It does not say which reading you meant. Dropout is
    off in the readings.

    Args:
        loss_fn: as in ``per_sample_grads``.
        params: as in ``per_sample_grads``, of any shapes, floating or complex.
        batch: as in ``per_sample_grads``, leaves ``[B, ...]``, B of at least 1.
        reduce: the reductions for which the storage is explained.
        in_dims: as in ``per_sample_grads``.
        keep_batch_dim: the setting that you mean; the other does not count. False for a loss written for
            one sample, True for one written for batches; None for both.
        randomness: as in ``per_sample_grads``.
        outputs: as in ``per_sample_grads``. With "rows", each output is compared.
        engines: names of engines, each called twice on the samples with each setting; "traced" takes most of the time.
        samples: how many samples are read, the first of the batch.

    Returns:
        Findings, notes, a row for each engine and setting, and the storage; readable when printed. ``ok`` is whether
        there are no findings.

    Raises:
        ArgumentError: if an argument is invalid, as in ``per_sample_grads``, or the batch is empty. Errors of the loss
            are part of the result.

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
        "keep_batch_dim": (keep_batch_dim, type(keep_batch_dim) in _FLAGS, "False, True or None", "Pass None."),
        "samples": (samples, type(samples) is int and samples > 0, "a positive int", "4 samples show most faults."),
        "engines": (engines, not isinstance(engines, str), "names of engines", f"Write engines=({engines!r},)."),
    }
    for name, (value, fits, expected, fix) in rules.items():
        if not fits:
            raise ArgumentError.about(name, expected=expected, received=repr(value), fix=fix)
    for engine in engines:
        inputs.check_options(engine=engine, randomness=randomness, chunk_size=None)
    wanted, _ = inputs.reductions(reduce, *_apart)
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
        if keep is not None:
            return call
        # Read together, samples are as in the batch: in its containers (a TensorDict stores its batch size), and on
        # its axes.
        structure = trees.structure(first[1])
        axes = dims_of_leaves("in_dims[1]", batch_dims, structure)
        leaves = tuple(x.movedim(0, axis) if axis else x for x, axis in zip(call.leaves, axes, strict=True))
        loss = replace(call.loss, batch=structure)
        return replace(call, loss=loss, leaves=leaves, leaves_batched=(False,) * len(leaves))

    found = _Comparison(normalized, samples, keep_batch_dim)
    runs: list[Run] = []
    storage = None
    with warnings.catch_warnings(record=True) as said:
        isolated(params, found.run)
        for keep in found.settings:
            options: dict[str, Any] = {**shared, "randomness": randomness, "keep_batch_dim": keep}
            runs += _runs(partial(per_sample_grads, loss_fn, *head(samples), **options), keep, engines, found.is_random)
            storage = _attempt(partial(explain, loss_fn, *head(samples), reduce, **options))[0]
    for warning in {str(x.message): x.message for x in said}.values():  # the findings say these:
        if not isinstance(warning, BatchStatisticsWarning) and "degrees of freedom" not in str(warning):
            warnings.warn(warning, stacklevel=users_depth())
    # The loop takes any loss but one with effects, and random numbers only if it is told so.
    fails = [x for x in runs if x.engine == "loop" and not x.first and "randomness=" not in x.result]
    differing = [x for x in runs if x.result == _DIFFERS]
    wrong = [f"engine={x.engine!r}, keep_batch_dim={x.keep_batch_dim}: {x.result}." for x in (*fails, *differing)]
    return Check((*found.findings, *wrong), tuple(found.notes), tuple(runs), storage)


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
    handled = sys.exc_info()[1]
    try:
        return function(), ""
    except Exception as error:
        raise_interrupt(error, handled)
        if not isinstance(error, RAISED) and not is_raised(error):
            raise
        place = user_line(traceback.extract_tb(error.__traceback__))
        return None, f"{type(error).__name__}: {error}".splitlines()[0].partition(" torch said:")[0] + place


def _runs(call: Callable[..., Any], keep: bool, engines: Sequence[str], is_random: bool) -> Iterator[Run]:
    """Call each engine twice, and compare it with the loop: yield one row for each."""

    def timed(engine: str) -> tuple[list[Tensor], float]:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("always", BatchStatisticsWarning)  # no error: the findings say it
            found = trees.flatten(call(reduce=(Stack(), Loss()), engine=engine))[0]
        return found, time.perf_counter() - start

    first = {engine: _attempt(partial(timed, engine)) for engine in dict.fromkeys(("loop", *engines)) if engines}
    for engine in engines:
        (found, said), (expected, _) = first[engine], first["loop"]
        if found is not None and (is_random or expected is None):
            said = "random" if is_random else "the loop fails"
        elif found is not None:
            # A gradient that is 0, as of the bias of attention's keys, consists of rounding errors of the others.
            grads = expected[0][:-1]  # without the loss
            total = _ROUNDED * max(float(x.abs().double().nan_to_num().norm()) for x in grads)
            pairs = zip(found[0], expected[0], strict=True)
            said = "as the loop" if all(same(x, y, total) for x, y in pairs) else _DIFFERS
        again = _attempt(partial(timed, engine))[0] if found else None
        yield Run(engine, keep, found[1] if found else 0.0, again[1] if again else 0.0, said)


class _Comparison:
    """The readings of a few samples, and what they tell.

    ``normalized`` returns the call of a number of samples with ``keep_batch_dim``, or with None for samples together.
    """

    def __init__(self, normalized: Callable[[int, bool | None], Call], samples: int, meant: bool | None) -> None:
        self._normalized, self._meant = normalized, meant
        self._calls = {keep: normalized(samples, keep) for keep in (False, True)}
        self._parts = self._calls[False].loss.params.parts
        self._own: dict[bool, list[Reading]] = {}
        self._draws = self._changes = self.is_random = False
        self.findings: list[str] = []
        self.notes: list[str] = []

    @property
    def settings(self) -> list[bool]:
        """The settings of ``keep_batch_dim`` that run, and count."""
        return [keep for keep in self._own if self._meant in {None, keep}]

    def run(self) -> None:
        """Read the samples in each way, and compare."""
        start = rng.Streams.now()
        for keep, call in self._calls.items():
            found, error = _attempt(lambda: [read(call, i, start) for i in range(call.size)])  # noqa: B023
            if found is not None:
                self._own[keep] = found
            else:
                (self.findings if self._meant is keep else self.notes).append(f"keep_batch_dim={keep} fails: {error}")
        if not self._own:
            self.findings, self.notes = [*self.findings, *self.notes], []
        self._describe(start)
        wholes, fails = self._together(start)
        start.go_back()
        self._compare_axes(takes_batches=not fails)
        broken = {keep: [i for i, x in enumerate(self._own[keep]) if not x.is_finite] for keep in self.settings}
        partly = [keep for keep, samples in broken.items() if 0 < len(samples) < len(self._own[keep])]
        if wholes and self.settings and not partly:  # a NaN of one sample is one of all
            self._compare_whole(wholes)
        for keep in self.settings:
            if not any(bool(x.grads.nan_to_num().any()) for x in self._own[keep]):
                said = f"the gradients of all {len(self._own[keep])} samples read are 0 or NaN"
                self.findings.append(f"keep_batch_dim={keep}: {said}.")
            elif keep in partly:
                where = first_nan(self._own[keep][broken[keep][0]], self._parts)
                said = f"loss or gradient of samples {broken[keep]} is NaN or infinite{where}"
                fix = "Weight 0 leaves a sample out; or divide by a number that is never 0."
                self.findings.append(f"keep_batch_dim={keep}: {said}. {fix}")

    def _describe(self, start: rng.Streams) -> None:
        """List the modules and the random numbers of which readings know nothing."""
        parts = [(path.partition(".")[2], part) for path, part in self._parts.items()]
        for name, part in parts:
            if isinstance(part, NORMS) and part.training and part.track_running_stats:
                said = "is in train mode and normalizes by statistics of its batch: no sample has a gradient of its own"
                self.findings.append(f"{name!r} ({type(part).__name__}) {said}. {STOP_STATISTICS}")
        found = [x for each in self._own.values() for x in each]
        drops, self._draws = any(x.drops for x in found), any(x.is_random for x in found)
        if drops:
            layers = [(name, part) for name, part in parts if "Dropout" in type(part).__name__ and part.training]
            names = ", ".join(repr(name) for name, part in layers if part.p) or "a function"
            self.notes.append(f"Dropout is on ({names}); off in readings. {SAY_RANDOMNESS}")
        if self._draws:
            self.notes.append(f"The loss draws random numbers: samples together are not compared. {SAY_RANDOMNESS}")
        for keep, own in [*self._own.items()][:1]:
            again, _ = _attempt(lambda: read(self._calls[keep], 0, start))  # noqa: B023
            self._changes = again is None or not again.equals(own[0])
        if self._changes:
            said = "draws from a generator of its own (generator=), or reads what an earlier call has left"
            self.notes.append(f"Called twice with one sample, the loss gives other numbers: it {said}.")
        self.is_random = drops or self._draws or self._changes

    def _together(self, start: rng.Streams) -> tuple[list[Reading], bool]:
        """Read all samples, and all but one, in one call of the loss; return whether that fails, too."""
        call = self._calls[False]
        if not self._own or self._draws or self._changes or any(call.params_batched):
            return [], False
        sizes = [size for size in (call.size, call.size - 1) if size > 1]  # one may be the size of another axis
        found, error = _attempt(lambda: [read(self._normalized(n, None), slice(0, n), start) for n in sizes])
        if found and {x.loss.shape for x in found} != {own[0].loss.shape for own in self._own.values()}:
            return [], False  # the outputs of each sample, one after the other
        if error and self._meant:
            shared = "What is not in the batch, as a list or a tensor of the closure, belongs to all samples."
            self.findings.append(f"keep_batch_dim=True, but several samples together fail: {error}. {shared}")
        elif error:
            self.notes.append(f"The loss does not take several samples together, as if written for one: {error}")
        return found or [], bool(error)

    def _compare_axes(self, *, takes_batches: bool) -> None:
        """Compare the readings with and without a batch axis."""
        if self._meant is not None or len(self._own) < 2 or self._changes:
            return
        pairs = list(zip(self._own[False], self._own[True], strict=True))
        differing = [i for i, pair in enumerate(pairs) if not pair[0].equals(pair[1])]
        if not differing:
            return
        one, other = pairs[differing[0]]
        where, samples = first_difference([one], other, self._parts), ", ".join(map(str, differing))
        text = f"keep_batch_dim=True computes another loss than keep_batch_dim=False{where}; of samples {samples}."
        if takes_batches:
            self.findings.append(f"{text} Pass the one you mean to check, too: True for a loss written for batches.")
        else:
            self.notes.append(text)

    def _compare_whole(self, wholes: Sequence[Reading]) -> None:
        """Compare the loss of all samples together with those of each."""
        counts = {}
        for keep in self.settings:
            pairs = [(self._own[keep][: len(self._own[keep]) - i], whole) for i, whole in enumerate(wholes)]
            found = [w for own, whole in pairs for w in weights_of_outputs(own, whole)]
            counts[keep] = None if any(w is None for w in found) else found[0]
        keep = max([keep for keep, w in counts.items() if w is not None] or counts)
        own, whole, w = self._own[keep], wholes[0], counts[keep]
        where = first_difference(own, whole, self._parts)
        if w is not None:
            if float(w.max() - w.min()) > 1e-3:
                shown = ", ".join(f"{x:.3g}" for x in w.tolist())
                self.notes.append(f"keep_batch_dim={keep}: together, the samples count with weights {shown}{where}.")
            return
        if same(whole.grads, own[0].grads) and False not in self._own:  # the first alone, as of an axis of 1
            return
        text = (
            f"Samples influence each other{where}. The gradient of several samples in one call is neither the sum nor "
            f"a mean of those of each alone (keep_batch_dim={keep})."
        )
        if self._meant is False:
            self.notes.append(text)
        else:
            fix = "" if self._meant else " Pass keep_batch_dim=False to check, too, for a loss written for one sample."
            self.findings.append(f"{text} Compute what samples share before the call.{fix}")
