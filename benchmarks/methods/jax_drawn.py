"""Networks of the sweep that the suite does not have, rebuilt in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.methods.jax_models import Params, convolution, linear


def convolutions(params: Params, image: Array) -> Array:
    """Convolutions of one image ``[channels, height, width]``, their mean, and a linear layer."""
    *names, last = sorted({name.split(".")[0] for name in params}, key=int)
    x = image.transpose(1, 2, 0)[None]
    for name in names:
        x = jax.nn.relu(convolution(params, name, x, 1, "SAME"))
    return linear(params, last, x[0].mean((0, 1)))


def graph_network(params: Params, sizes: dict[str, Any], x: Array, adjacency: Array) -> Array:
    """Logits of the nodes ``x [T, features]``."""
    for i in range(sizes["layers"]):
        x = jax.nn.relu(linear(params, f"own.{i}", x) + adjacency @ linear(params, f"near.{i}", x))
    return linear(params, "head", x)


def residual(params: Params, sizes: dict[str, Any], x: Array) -> Array:
    """Layers x + gain · tanh(x wᵀ) and a last product."""
    for i in range(sizes["layers"]):
        x = x + jnp.tanh(x @ params[f"weight{i}"].T) * params[f"gain{i}"]
    return x @ params["head"]
