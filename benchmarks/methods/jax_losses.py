"""The workloads' losses rebuilt in JAX from their arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.methods import jax_drawn
from benchmarks.methods.jax_models import gru, lstm, mlp, nature_cnn, transformer
from benchmarks.saved import Saved

DISCOUNT = 0.99


def loss_of(saved: Saved) -> Callable[..., Array]:
    """Return the loss of one sample: (params, frozen, *sample) → ``[]``."""
    return _LOSSES[saved.kind](saved.sizes)


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
        return _cross_entropy(logits, tokens[1:])

    return loss


def _classes(network):
    """Return the loss of the sweep's workloads, whose networks take (params, sizes, *inputs)."""

    def of(sizes):
        def loss(params, frozen, *sample):
            *inputs, y = sample
            return _cross_entropy(network({**frozen, **params}, sizes, *inputs), y)

        return loss

    return of


def _sized(network):
    """Give a network whose parameters say all the sizes the same arguments."""
    return lambda params, _sizes, x: network(params, x)


def _cross_entropy(logits: Array, y: Array) -> Array:
    picked = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


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
    "drawn MLP": _classes(_sized(mlp)),
    "drawn CNN": _classes(_sized(jax_drawn.convolutions)),
    "drawn GRU": _classes(_sized(gru)),
    "drawn LSTM": _classes(_sized(lstm)),
    "drawn transformer": _classes(lambda params, sizes, tokens: transformer(params, tokens, sizes)),
    "drawn LoRA": _classes(lambda params, sizes, tokens: transformer(params, tokens, sizes)),
    "drawn graph network": _classes(jax_drawn.graph_network),
    "drawn functional": _classes(jax_drawn.residual),
}
