"""persample: three engines, each with fresh results and with the storage of the previous call's (``out=``)."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.methods.by_hand import arrays
from benchmarks.methods.method import CORRECTION, DAMPING, MAX_NORM, Method, Prepared
from benchmarks.quantities import QUANTITIES
from benchmarks.workloads import Workload
from persample import (
    ClippedMean,
    Dot,
    Factored,
    Gram,
    Mean,
    NaturalGradient,
    Norm,
    Stack,
    Variance,
    per_sample_grads,
)
from persample.reductions import Reduction

REDUCTIONS = {
    "stack": Stack(),
    "mean": Mean(),
    "norms": Norm(),
    "clipped_mean": ClippedMean(MAX_NORM),
    "gram": Gram(),
    "variance": Variance(correction=CORRECTION),
    "natural_gradient": NaturalGradient(DAMPING),
}


def _reductions(work: Workload, quantity: str) -> Reduction | dict[str, Reduction]:
    if quantity in REDUCTIONS:
        return REDUCTIONS[quantity]
    wanted = {"update": ClippedMean(MAX_NORM), "norms": Norm()}
    held_out = partial(per_sample_grads, work.loss_fn, work.model, work.held_out)
    match quantity:
        case "step_gram":
            return {**wanted, "gram": Gram(held_out(Factored()))}
        case "step_dot":
            return {**wanted, "dot": Dot(held_out(Mean()))}
    return wanted


def prepare(work: Workload, quantity: str, *, engine: str, reuses: bool = False) -> Prepared:
    loss_fn, params = (work.loss_fn, work.model) if work.functional is None else (work.functional, work.params)
    call = partial(per_sample_grads, loss_fn, params, work.batch, _reductions(work, quantity), engine=engine)
    if not reuses:
        return Prepared(call, arrays)
    start = time.perf_counter()
    out = call()
    return Prepared(partial(call, out=out), arrays, setup_seconds=time.perf_counter() - start)


METHODS = (
    Method("persample eager", "torch", partial(prepare, engine="eager"), shown_for=QUANTITIES),
    Method("persample eager, out=", "torch", partial(prepare, engine="eager", reuses=True), shown_for=("stack",)),
    Method("persample traced", "torch", partial(prepare, engine="traced"), shown_for=QUANTITIES),
    Method("persample traced, out=", "torch", partial(prepare, engine="traced", reuses=True), shown_for=("stack",)),
    Method("persample compiled", "torch", partial(prepare, engine="compiled"), shown_for=QUANTITIES),
    Method("persample compiled, out=", "torch", partial(prepare, engine="compiled", reuses=True), shown_for=("stack",)),
)
