"""``explain``: how the gradients of each parameter are stored, and why; and what was compiled for a loss, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NoReturn

from torch import Tensor

from persample import inputs
from persample._torch import uncaptured
from persample.engines.compiled import PROGRAMS, Compilation, compilations_of
from persample.engines.diagnosis import hinted
from persample.engines.uncompiled import eager, factored, without_checkpoints
from persample.errors import ArgumentError
from persample.factors import Dense, Factor, SumFactor
from persample.factors.cost_model import Estimate, Plan
from persample.factors.factor import is_zeros
from persample.gradients import Gradients
from persample.inputs import Call, Outputs, Randomness
from persample.pipeline import Engine
from persample.reductions import Reduce
from persample.reductions.base import Reductions
from persample.unit_gradients import of_units
from persample.utils import rng
from persample.utils.isolation import isolated
from persample.utils.trees import Tree

_NO_LAYER = "elementwise, or a sum"  # not a product of signals and inputs
_UNUSED = "the loss does not depend on it: zeros, stored once"


@dataclass(frozen=True)
class Storage:
    """How the per-sample gradients of one parameter are stored.

    Args:
        path: the name of the parameter.
        shape: the shape of the parameter.
        factor: the kind of factor, such as "Outer", "Conv", "Embedding", "Outer + Embedding" or "Dense".
        steps: T, the number of products that one sample's gradient is the sum of.
        choice: "contract" (reductions work on the factor) or "materialize" (the gradients are written out).
        stored: the bytes stored for all samples.
        written: the bytes that the written-out gradients of all samples take.
        reason: why the gradients are written out; empty if they are not.
        times: the estimated seconds of the reductions on the factor, and with the gradients written out; None where
            there is nothing to choose.
    """

    path: str
    shape: tuple[int, ...]
    factor: str
    steps: int
    choice: str
    stored: int
    written: int
    reason: str
    times: Estimate | None = None


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` returns: one row per parameter, and what was compiled; tables when printed.

    Args:
        rows: one row per parameter, in the order of the parameters.
        compilations: the programs that the engine made for the loss in this process, in order; None for
            ``engine="eager"``. A loss has no graph breaks: it is captured whole, or refused.
    """

    rows: tuple[Storage, ...]
    compilations: tuple[Compilation, ...] | None = None

    def __str__(self) -> str:
        """Return the tables."""
        head = ("parameter", "shape", "factor", "T", "choice", "stored", "written out", "ms (estimated)", "reason")
        text = table(
            head,
            [
                (
                    row.path,
                    str(list(row.shape)),
                    row.factor,
                    str(row.steps),
                    row.choice,
                    _size(row.stored),
                    _size(row.written),
                    "" if row.times is None else f"{1e3 * row.times.contract:.2g} or {1e3 * row.times.write_out:.2g}",
                    row.reason,
                )
                for row in self.rows
            ],
        )
        return text if self.compilations is None else f"{text}\n\n{_programs(self.compilations)}"


def _programs(compilations: Sequence[Compilation]) -> str:
    seconds = sum(x.seconds for x in compilations)
    lines = [
        (", ".join(x.reductions), str(x.batch_size or "any"), f"{x.seconds:.1f}", x.reason or "the first")
        for x in compilations
    ]
    engine = compilations[0].engine if compilations else "made"
    noun = "program" if len(compilations) == 1 else "programs"
    summary = f"{len(compilations)} {noun} {engine} in {seconds:.1f} s, no graph breaks"
    return f"{summary}\n{table(('reductions', 'batch size', 'seconds', 'because this changed'), lines)}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, aligned below a head."""
    lines = [head, *lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


@uncaptured
def explain(
    loss_fn: Callable[..., Tensor | tuple[Tensor, Tree]],
    params: Tree,
    batch: Tree,
    reduce: Reduce = None,
    *_apart: NoReturn,
    in_dims: tuple[Tree, Tree] = (None, 0),
    keep_batch_dim: bool = False,
    randomness: Randomness = "error",
    outputs: Outputs = "scalar",
    unit: int | Tensor | Sequence[int] | None = None,
    memory: int | Literal["low"] | None = None,
    engine: Literal["eager", "traced", "compiled"] = "eager",
) -> Explanation:
    """Return how the gradients of each parameter are stored for some reductions, and why.

    The loss and its backward pass run twice on the whole batch; nothing is reduced. Programs make the same choices;
    those made for the loss so far are listed, too.

    Args:
        loss_fn: as in ``per_sample_grads``.
        params: as in ``per_sample_grads``.
        batch: as in ``per_sample_grads``, with at least one sample.
        reduce: as in ``per_sample_grads``.
        in_dims: as in ``per_sample_grads``.
        keep_batch_dim: as in ``per_sample_grads``.
        randomness: as in ``per_sample_grads``.
        outputs: as in ``per_sample_grads``.
        unit: as in ``per_sample_grads``: rows are of the gradients of units, of the largest units if sizes differ.
        memory: as in ``per_sample_grads``.
        engine: "eager" (also for "auto"), or "traced" or "compiled" to list the engine's programs, with the seconds of
            the first calls, which later calls have to save.

    Returns:
        One row per parameter: kind of factor, T, choice ("contract": results are computed from the factor;
        "materialize": the gradients are written out), the bytes stored and those of written-out gradients, the
        estimated milliseconds of both choices in this order, and why gradients are written out. And one row per
        program: reductions, batch size, seconds, and the guard or size that had changed.

    Raises:
        ArgumentError: as ``per_sample_grads`` does, and for an empty batch.
        LossError: as ``per_sample_grads`` does.

    Examples:
        >>> import torch
        >>> from persample import ClippedMean, explain
        >>> def loss(params, x):
        ...     return (params["v"] @ torch.tanh(params["w"] @ x)) ** 2
        >>> params = {"w": torch.ones(64, 32), "v": torch.ones(64)}
        >>> print(explain(loss, params, torch.ones(8, 32), ClippedMean(1.0)))
        parameter    shape     factor  T  choice       stored   written out  ms (estimated)  reason
        params['w']  [64, 32]  Outer   1  contract     3.0 KiB  64.0 KiB
        params['v']  [64]      Dense   1  materialize  2.0 KiB  2.0 KiB                      elementwise, or a sum
    """
    inputs.check_outside("explain", "Gradients that are differentiated are written out.")
    inputs.check_choices(engine=(engine, ("eager", *PROGRAMS)))
    inputs.check_options(engine="eager", randomness=randomness, chunk_size=None, memory=memory, outputs=outputs)
    wanted, _ = inputs.reductions(reduce, *_apart)
    uses = Reductions(wanted).required_ops

    def compute() -> Explanation:
        call = inputs.normalize(
            loss_fn,
            params,
            inputs.as_dicts(batch),
            wanted,
            weights=None,
            in_dims=in_dims,
            keep_batch_dim=keep_batch_dim,
            randomness=randomness,
            outputs=outputs,
            memory=memory,
            unit=unit,
        )
        if call.size == 0:
            fix = "Pass a batch like those of your calls."
            raise ArgumentError.about("batch", expected="at least one sample", received="B = 0", fix=fix)
        with hinted(call):
            passes = without_checkpoints(call, lambda: _passes(call, uses))
        times = [_times(factor, call.plan(uses)) for factor in passes[0]]
        rows = tuple(map(_storage, call.loss.spec.paths, *passes, times))
        made = tuple(x for x in compilations_of(loss_fn) if x.engine == engine)
        return Explanation(rows, made if engine in PROGRAMS else None)

    return isolated(params, compute)


def _passes(call: Call, required_ops: frozenset[str]) -> tuple[Sequence[Factor], Sequence[Factor], list[str]]:
    """Return the factors that could be stored, those that the engine stores, and the reasons for written-out ones."""
    start = rng.snapshot()
    why = ""

    def keeping(chunk: Call, ops: frozenset[str]) -> Gradients:
        nonlocal why
        found, why = factored(chunk, ops)
        return found

    could = _of_call(call, keeping, frozenset())
    rng.rewind(start)
    stored, plan = _of_call(call, eager, required_ops), call.plan(required_ops)
    rng.rewind(start)
    reasons = [why or _NO_LAYER if isinstance(x, Dense) else x.reason_to_write_out(plan) for x in could]
    return could, stored, [_UNUSED if is_zeros(x) else reason for x, reason in zip(could, reasons, strict=True)]


def _of_call(call: Call, engine: Engine, ops: frozenset[str]) -> Sequence[Factor]:
    """Return the factors of samples, or of units; of units of several sizes those of the largest, which come last."""
    if call.units is None:
        return tuple(engine(call, ops).factors)
    *_, last = of_units(call, engine, ops)
    return tuple(last.factors)


def _times(factor: Factor, plan: Plan) -> Estimate | None:
    """Return the estimated time of both ways, where the gradients are sums of several products."""
    has_choice = not isinstance(factor, Dense) and factor.is_product and factor.num_terms > 1
    return plan.estimate(factor.size) if has_choice else None


def _storage(path: str, could: Factor, stored: Factor, reason: str, times: Estimate | None) -> Storage:
    """Return the row of one parameter."""
    factored = not isinstance(stored, Dense)
    kind = stored if factored else could
    parts = kind.parts if isinstance(kind, SumFactor) else (kind,)
    name = " + ".join(
        sorted((type(part).__name__ for part in parts), reverse=True)
    )  # in one order, whichever use of a parameter comes first
    width = stored.dtype.itemsize
    choice, reason = ("contract", "") if factored else ("materialize", reason)
    sizes = stored.stored * width, len(stored) * prod(stored.shape) * width
    return Storage(path, stored.shape, name, kind.num_terms, choice, *sizes, reason, times)


def _size(count: int) -> str:
    """Return a number of bytes as text with a unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
