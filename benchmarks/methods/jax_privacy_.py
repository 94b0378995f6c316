"""jax_privacy's ``clipped_grad`` under jit: a sum over samples of what became of each gradient, and their norms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax_privacy import clipped_grad

from benchmarks.methods.jax_ import jitted
from benchmarks.methods.jax_losses import loss_of
from benchmarks.methods.method import CORRECTION, MAX_NORM, CannotError, Method, Prepared
from benchmarks.saved import Saved


def prepare(saved: Saved, quantity: str) -> Prepared:
    if quantity in {"stack", "gram"}:
        raise CannotError("clipped_grad computes “the sum of clipped gradients”; of single ones it returns the norms")
    return jitted(saved, {"norms": _norms, "variance": _variance}.get(quantity, _mean)(saved, quantity))


def _mean(saved, quantity):
    return _clipped_grad(saved, MAX_NORM if quantity == "clipped_mean" else jnp.inf, normalize_by=len(saved.batch[0]))


def _norms(saved, _quantity):
    gradient = _clipped_grad(saved, jnp.inf, return_grad_norms=True)
    return lambda *args: gradient(*args)[1].grad_norms


def _variance(saved, _quantity):
    """From Σg and Σg², which its ``pre_clipping_transform`` makes of each gradient."""
    n = len(saved.batch[0])
    sums = _clipped_grad(saved, jnp.inf, pre_clipping_transform=lambda g: (g, jax.tree.map(jnp.square, g)))

    def variance(*args):
        return jax.tree.map(lambda total, squares: (squares - total**2 / n) / (n - CORRECTION), *sums(*args))

    return variance


def _clipped_grad(saved, max_norm, **options: Any):
    if (
        saved.kind == "dqn_cnn"
    ):  # one sample at a time, or XLA takes half a minute for its sum over grouped convolutions
        options["microbatch_size"] = 1
    batch_argnums = tuple(range(2, 2 + len(saved.batch)))
    return clipped_grad(
        loss_of(saved), l2_clip_norm=max_norm, batch_argnums=batch_argnums, keep_batch_dim=False, **options
    )


METHODS = (Method("jax_privacy clipped_grad", "jax", prepare),)
