"""Opacus: its hooks, which store per-sample gradients, and the two ways of clipping that do not keep them.

Models pass through ``ModuleValidator.fix``, as its documentation recommends (``nn.GRU`` becomes ``DPGRU``); clipping is
its own, without the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators import ModuleValidator
from torch.optim import SGD

from benchmarks.methods.by_hand import reduce
from benchmarks.methods.hooked import Hooked
from benchmarks.methods.method import MAX_NORM, CannotError, Method, Prepared
from benchmarks.workloads import Workload


def prepare_hooks(work: Workload, quantity: str) -> Prepared:
    hooked = Hooked(work, lambda model: GradSampleModule(ModuleValidator.fix(model), loss_reduction="sum"))
    if quantity == "mean":
        return _plain_mean(hooked)
    optimizer = _optimizer(DPOptimizer, hooked)

    def backward():
        optimizer.zero_grad(set_to_none=True)
        hooked.losses().sum().backward()

    def run():
        backward()
        return reduce(hooked.read("grad_sample"), quantity)

    def clip():
        backward()
        optimizer.clip_and_accumulate()
        return {name: total / len(work.batch[0]) for name, total in hooked.read("summed_grad").items()}

    return Prepared(clip if quantity == "clipped_mean" else run, hooked.numpy)


def prepare_clipping(work: Workload, quantity: str, *, ghost: bool) -> Prepared:
    wrap = partial(GradSampleModuleFastGradientClipping, max_grad_norm=MAX_NORM, use_ghost_clipping=ghost)
    hooked = Hooked(work, lambda model: wrap(ModuleValidator.fix(model), loss_reduction="sum"))
    runs: dict[str, Callable[[], Any]] = {"norms": _norms(hooked), "clipped_mean": _two_passes(hooked)}
    if quantity == "mean":
        return _plain_mean(hooked)
    if quantity not in runs:
        raise CannotError("its backward pass leaves the norms of the per-sample gradients, and not the gradients")
    return Prepared(runs[quantity], hooked.numpy)


def _plain_mean(hooked: Hooked) -> Prepared:
    """With its hooks off the model is an ordinary one."""
    hooked.model.disable_hooks()

    def run():
        hooked.clear()
        hooked.losses().mean().backward()
        return hooked.read("grad")

    return Prepared(run, hooked.numpy)


def _norms(hooked):
    def run():
        hooked.clear()
        hooked.losses().sum().backward()
        return hooked.model.get_norm_sample()

    return run


def _two_passes(hooked):
    """The second backward pass is that of the losses weighted by the clipping factors; it sums."""
    optimizer = _optimizer(DPOptimizerFastGradientClipping, hooked)

    def losses():  # Opacus sets a `reduction` on the criterion, which a bound method refuses
        return hooked.losses()

    criterion = DPLossFastGradientClipping(hooked.model, optimizer, losses, loss_reduction="sum")

    def run():
        optimizer.zero_grad(set_to_none=True)
        loss = criterion()
        loss.backward()
        return {name: total / len(loss.loss_per_sample) for name, total in hooked.read("grad").items()}

    return run


def _optimizer(kind, hooked):
    options = {"noise_multiplier": 0.0, "max_grad_norm": MAX_NORM, "expected_batch_size": None}
    return kind(SGD(hooked.params, lr=0.0), loss_reduction="sum", **options)


METHODS = (
    Method("Opacus hooks", "torch-peers", prepare_hooks),
    Method("Opacus ghost clipping", "torch-peers", partial(prepare_clipping, ghost=True)),
    Method("Opacus fast gradient clipping", "torch-peers", partial(prepare_clipping, ghost=False)),
)
