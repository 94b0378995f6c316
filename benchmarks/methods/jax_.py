"""JAX: ``jit(vmap(grad(loss)))``, the reduction inside the jit."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.methods import jax_losses, stacked
from benchmarks.methods.method import CORRECTION, DAMPING, Method, Prepared
from benchmarks.quantities import QUANTITIES
from benchmarks.saved import Saved

reduce = partial(
    stacked.reduce,
    norm=lambda rows: jnp.linalg.norm(rows, axis=1),
    variance=lambda g: g.var(0, ddof=CORRECTION),
    solve=lambda k: jnp.linalg.solve(k + DAMPING * jnp.eye(len(k)), jnp.ones(len(k))),
)


def prepare(saved: Saved, quantity: str) -> Prepared:
    gradient = jax.grad(jax_losses.loss_of(saved))
    return jitted(
        saved, lambda *args: reduce(jax.vmap(gradient, (None, None, *(0 for _ in saved.batch)))(*args), quantity)
    )


def jitted(saved, function):
    """Compile (params, frozen, *batch) → result; the first run does so."""
    args = jax.tree.map(jnp.asarray, (saved.params, saved.frozen, *saved.batch))
    compiled = jax.jit(function)
    return Prepared(
        run=lambda: jax.block_until_ready(compiled(*args)), numpy=lambda result: jax.tree.map(np.asarray, result)
    )


METHODS = (Method("JAX jit(vmap(grad))", "jax", prepare, shown_for=QUANTITIES),)
