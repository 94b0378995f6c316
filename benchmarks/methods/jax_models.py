"""The networks rebuilt in JAX; parameters keep torch's names, ``weight [out, in]``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, Array]


def linear(params: Params, name: str, x: Array) -> Array:
    """A linear layer, with a bias if there is one."""
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def mlp(params: Params, x: Array, activation: Callable[[Array], Array] = jnp.tanh, prefix: str = "") -> Array:
    """Linear layers ``0``, ``2``, … with an activation between them."""
    names = sorted(int(name.removeprefix(prefix).split(".")[0]) for name in params if _is_weight_of(prefix, name))
    for i in names[:-1]:
        x = activation(linear(params, f"{prefix}{i}", x))
    return linear(params, f"{prefix}{names[-1]}", x)


def _is_weight_of(prefix: str, name: str) -> bool:
    return name.startswith(prefix) and name.endswith(".weight")


def nature_cnn(params: Params, image: Array) -> Array:
    """The Q-network on one image ``[4, 84, 84]``, channels last inside: XLA's layout for the CPU, and Flax's."""
    x = image.transpose(1, 2, 0)[None]
    for name, stride in (("0", 4), ("2", 2), ("4", 1)):
        x = jax.nn.relu(convolution(params, name, x, stride, "VALID"))
    features = x[0].transpose(2, 0, 1).reshape(-1)
    return linear(params, "9", jax.nn.relu(linear(params, "7", features)))


def convolution(params: Params, name: str, x: Array, stride: int, padding: str) -> Array:
    """A convolution of images ``[1, height, width, channels]``."""
    weight, layouts = params[f"{name}.weight"], ("NHWC", "OIHW", "NHWC")
    y = lax.conv_general_dilated(x, weight, (stride, stride), padding, dimension_numbers=layouts)
    return y + params[f"{name}.bias"]


def gru(params: Params, x: Array) -> Array:
    """``nn.GRU`` and a linear head on ``x [T, features]``; the inputs' products are taken before the loop."""

    def step(h: Array, from_x: Array, layer: str) -> tuple[Array, Array]:
        from_h = params[f"memory.weight_hh_{layer}"] @ h + params[f"memory.bias_hh_{layer}"]
        (rx, zx, nx), (rh, zh, nh) = jnp.split(from_x, 3), jnp.split(from_h, 3)
        r, z = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
        h = (1 - z) * jnp.tanh(nx + r * nh) + z * h
        return h, h

    return _recurrent(params, x, step, lambda start: start)


def lstm(params: Params, x: Array) -> Array:
    """``nn.LSTM`` and a linear head, in the same way."""

    def step(state: tuple[Array, Array], from_x: Array, layer: str) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        from_h = params[f"memory.weight_hh_{layer}"] @ h + params[f"memory.bias_hh_{layer}"]
        i, f, g, o = jnp.split(from_x + from_h, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return _recurrent(params, x, step, lambda start: (start, start))


def _recurrent(params: Params, x: Array, step: Callable[..., Any], state: Callable[[Array], Any]) -> Array:
    for layer in sorted(name.removeprefix("memory.bias_hh_") for name in params if "bias_hh" in name):
        inputs = x @ params[f"memory.weight_ih_{layer}"].T + params[f"memory.bias_ih_{layer}"]
        start = jnp.zeros(params[f"memory.weight_hh_{layer}"].shape[1])
        x = lax.scan(partial(step, layer=layer), state(start), inputs)[1]
    return linear(params, "head", x)


def transformer(params: Params, tokens: Array, sizes: dict[str, Any]) -> Array:
    """The causal language model on ``tokens [T]``, with or without adapters."""
    scale = sizes.get("scale", 0.0)
    x = params["embed.weight"][tokens] + params["position"]
    for i in range(sizes["layers"]):
        x = _block(params, f"blocks.{i}.", x, sizes["heads"], scale)
    return _norm(params, "norm", x) @ params["embed.weight"].T


def _block(params: Params, at: str, x: Array, heads: int, scale: float) -> Array:
    qkv = _adapted(params, f"{at}qkv", _norm(params, f"{at}norm1", x), scale)
    q, k, v = jnp.split(qkv.reshape(len(x), 3 * heads, -1), 3, axis=1)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + _adapted(params, f"{at}out", attended, scale)
    return x + mlp(params, _norm(params, f"{at}norm2", x), _gelu, f"{at}mlp.")


def _adapted(params: Params, name: str, x: Array, scale: float) -> Array:
    if f"{name}.down.weight" not in params:
        return linear(params, name, x)
    return linear(params, f"{name}.base", x) + scale * linear(params, f"{name}.up", linear(params, f"{name}.down", x))


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _norm(params: Params, name: str, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]
