"""The workloads rebuilt in JAX from their arrays; parameters keep torch's names, ``weight [out, in]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.saved import Saved

DISCOUNT = 0.99
Params = dict[str, Array]


def loss_of(saved: Saved) -> Callable[..., Array]:
    """Return the loss of one sample: (params, frozen, *sample) → ``[]``."""
    return _LOSSES[saved.kind](saved.sizes)


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
        x = _convolution(x, params[f"{name}.weight"], stride)
        x = jax.nn.relu(x + params[f"{name}.bias"])
    features = x[0].transpose(2, 0, 1).reshape(-1)
    return linear(params, "9", jax.nn.relu(linear(params, "7", features)))


def _convolution(x: Array, weight: Array, stride: int) -> Array:
    layouts = ("NHWC", "OIHW", "NHWC")
    return lax.conv_general_dilated(x, weight, (stride, stride), "VALID", dimension_numbers=layouts)


def gru(params: Params, x: Array) -> Array:
    """``nn.GRU`` and a linear head on ``x [T, features]``; the inputs' products are taken before the loop."""
    inputs = x @ params["memory.weight_ih_l0"].T + params["memory.bias_ih_l0"]

    def step(h: Array, from_x: Array) -> tuple[Array, Array]:
        from_h = params["memory.weight_hh_l0"] @ h + params["memory.bias_hh_l0"]
        (rx, zx, nx), (rh, zh, nh) = jnp.split(from_x, 3), jnp.split(from_h, 3)
        r, z = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
        h = (1 - z) * jnp.tanh(nx + r * nh) + z * h
        return h, h

    start = jnp.zeros(params["memory.weight_hh_l0"].shape[1])
    return linear(params, "head", lax.scan(step, start, inputs)[1])


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


def _tutorial(_sizes):
    def loss(params, _frozen, s_tm1, r_t, s_t):
        return (r_t + lax.stop_gradient(s_t @ params["theta"]) - s_tm1 @ params["theta"]) ** 2

    return loss


def _td(_sizes):
    def loss(params, _frozen, s_tm1, r_t, s_t):
        target = r_t + DISCOUNT * mlp(params, s_t)[0]
        return (lax.stop_gradient(target) - mlp(params, s_tm1)[0]) ** 2

    return loss


def _reinforce(policy):
    def loss(params, _frozen, obs_t, a_t, return_t, mask_t):
        log_pi = jnp.take_along_axis(jax.nn.log_softmax(policy(params, obs_t)), a_t[:, None], -1)[:, 0]
        return -(log_pi * return_t * mask_t).sum()

    return lambda _sizes: loss


def _dqn(_sizes):
    def loss(params, frozen, *transition):
        s_tm1, a_tm1, r_t, s_t = transition
        target = r_t + DISCOUNT * nature_cnn(frozen, s_t).max()
        error = jnp.abs(nature_cnn(params, s_tm1)[a_tm1] - lax.stop_gradient(target))
        return jnp.where(error < 1, 0.5 * error**2, error - 0.5)

    return loss


def _next_token(sizes):
    def loss(params, frozen, tokens):
        logits = transformer({**frozen, **params}, tokens[:-1], sizes)
        picked = jnp.take_along_axis(logits, tokens[1:, None], -1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    return loss


def _squared_error(_sizes):
    def loss(params, _frozen, x, y):
        return jnp.square(mlp(params, x, jax.nn.relu) - y).mean()

    return loss


_LOSSES: dict[str, Callable[..., Callable[..., Array]]] = {
    "td_linear": _tutorial,
    "td_mlp": _td,
    "reinforce_mlp": _reinforce(mlp),
    "reinforce_gru": _reinforce(gru),
    "dqn_cnn": _dqn,
    "transformer": _next_token,
    "lora": _next_token,
    "wide_mlp": _squared_error,
}
