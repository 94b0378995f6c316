"""What every test of factored gradients asserts: the numbers of the plain loop, and which parameters are factored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from grid import REDUCTIONS
from oracle import assert_trees_close, oracle
from torch import Tensor, nn

from persample import Factored, Norm, per_sample_grads
from persample.factors import SumFactor

B = 5
F64 = torch.float64
# One reduction that wants the gradients written out switches factoring off for the whole call.
TOGETHER = tuple(name for name in REDUCTIONS if name not in {"none", "Stack", "NaturalGradient-qr"})
ALONE = ("Sum", "Norm", "ClippedMean", "Gram", "Variance")


@dataclass(frozen=True)
class Case:
    """A loss, its parameters, one sample's tensors (as shapes, or as what makes them), and what is factored.

    Parameters that ``kinds`` does not name come back dense.
    """

    loss_fn: Callable[..., Tensor]
    params: Any
    batch: tuple[Any, ...] = ((9,),)
    kinds: Mapping[str, str] = field(default_factory=dict)
    rtol: float = 1e-9

    def build(self, dtype=F64):
        """Return what ``per_sample_grads`` takes."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            params = self.params() if callable(self.params) else {k: _made(spec) / 2 for k, spec in self.params.items()}
            batch = tuple(_cast(_made(spec, B), dtype) for spec in self.batch)
        params = params.to(dtype) if isinstance(params, nn.Module) else {k: _cast(x, dtype) for k, x in params.items()}
        return self.loss_fn, params, batch

    def tolerance(self, dtype):
        """Return by how much numbers may differ, relative to the largest, and where all of them are zero."""
        return self.rtol if dtype == F64 else 1e-4, torch.finfo(dtype).eps


def tokens(rows, *shape):
    """Return what draws one sample's integers below ``rows``."""
    return lambda batch: torch.randint(rows, (batch, *shape))


def _made(spec, *lead):
    return spec(*lead) if callable(spec) else torch.randn(*lead, *spec, dtype=F64)


def _cast(x, dtype):
    return x.to(dtype.to_complex() if x.is_complex() else dtype) if x.is_floating_point() or x.is_complex() else x


def kinds(loss_fn, params, batch, *beside):
    """Return the parameters that are not dense, and their kinds: whatever can be factored, or what suits ``beside``."""
    factors = per_sample_grads(loss_fn, params, batch, (Factored(), *beside))[0]
    return {name: kind for name, factor in factors.items() if (kind := kind_of(factor)) != "Dense"}


def kind_of(factor):
    """Return the name of a factor's kind, or the names of the kinds that it adds up."""
    parts = factor.parts if isinstance(factor, SumFactor) else (factor,)
    return "+".join(sorted(type(part).__name__ for part in parts))


def assert_reductions(case, dtype=F64, together=TOGETHER, alone=ALONE):
    """Reductions in one call, whole and in chunks, and some of them each in a call of its own: all as the loop says."""
    loss_fn, params, batch = case.build(dtype)
    rows = oracle(loss_fn, params, batch)
    wanted = {name: REDUCTIONS[name][0](rows, dtype) for name in together}
    expected = {name: REDUCTIONS[name][1](rows) for name in together}
    calls = [(wanted, None), (wanted, 2), *(({name: wanted[name]}, None) for name in alone)]
    for reduce, chunk_size in calls:
        results = per_sample_grads(loss_fn, params, batch, reduce, chunk_size=chunk_size)
        for name, result in results.items():
            assert_trees_close(result, expected[name], *case.tolerance(dtype))


def assert_factors(case):
    """Factors stand for the gradients that the loop gives."""
    loss_fn, params, batch = case.build()
    rows = oracle(loss_fn, params, batch)
    grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in rows.grads]
    for chunk_size in (None, 2):
        factors = per_sample_grads(loss_fn, params, batch, Factored(), chunk_size=chunk_size)
        assert_trees_close([factor.materialize() for factor in factors.values()], grads, *case.tolerance(F64))


def assert_found(case):
    """Which parameters are factored beside norms, and for plain sums or one's own contractions; and the gradients."""
    assert kinds(*case.build(), Norm()) == case.kinds
    assert kinds(*case.build()).items() >= case.kinds.items()
    assert_factors(case)
