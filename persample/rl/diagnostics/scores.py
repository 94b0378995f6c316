"""Shared by all diagnostics: the loss Σₜ wₜ log π(aₜ|sₜ) of one episode, and sample weights taken from aux."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from persample.errors import ArgumentError
from persample.gradients import Gradients
from persample.losses.steps import unpadded
from persample.reductions import Reduction
from persample.rl.episodes import Episodes

LogProbFn = Callable[..., Tensor]


@dataclass(frozen=True)
class WeightedByAux(Reduction):
    """A reduction of samples weighted by the aux output of the loss.

    One pass computes several weightings; ``per_sample_grads(weights=…)`` takes one.

    Args:
        reduction: the reduction to apply.
        column: the index into the weights ``[K]`` that the loss returns, which are not negative.
    """

    reduction: Reduction
    column: int
    uses: ClassVar[frozenset[str]] = frozenset({"second_moment", "weighted_sum"})

    def lift(self, gradients: Gradients) -> Any:
        """Lift the weighted samples with the inner reduction.

        Args:
            gradients: the gradients of one chunk.

        Returns:
            The mergeable tree of the inner reduction.
        """
        weights = gradients.aux[:, self.column].double()
        return self.reduction.lift(replace(gradients, weights=weights))

    def finish(self, merged: Any) -> Any:
        """Return the result of the inner reduction.

        Args:
            merged: the tree of ``lift``, merged over all chunks.

        Returns:
            The result.
        """
        return self.reduction.finish(merged)


def score_fn(log_prob_fn: LogProbFn) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the loss of one episode, whose gradient is Σₜ wₜ ∇log π(aₜ|sₜ).

    Args:
        log_prob_fn: ``(params, obs_t [T, *obs], a_t [T, *act]) → [T]``, the log-probabilities of the actions taken.

    Returns:
        A function ``(params, obs_t, a_t, weight_t, aux)`` → the sum and ``aux``.
    """

    def score(params: Any, *sample: Tensor) -> tuple[Tensor, Tensor]:
        obs_t, a_t, weight_t, aux = sample
        log_pi_t = log_prob_fn(params, obs_t, a_t)
        if not isinstance(log_pi_t, Tensor) or log_pi_t.shape != weight_t.shape:
            received = f"shape {list(log_pi_t.shape)}" if isinstance(log_pi_t, Tensor) else type(log_pi_t).__name__
            fix = "It is called as log_prob_fn(params, obs_t, a_t) with one episode; see categorical_log_prob."
            expected = f"a function that returns log π(aₜ|sₜ), shape {list(weight_t.shape)}"
            raise ArgumentError.about("log_prob_fn", expected=expected, received=received, fix=fix)
        return (log_pi_t * weight_t).sum(), aux

    return score


def score_batch(episodes: Episodes, weight_t: Tensor, aux: Tensor) -> tuple[Tensor, ...]:
    """Return the batch of ``score_fn``.

    Args:
        episodes: E episodes, padded to T steps; padding is replaced by 0.
        weight_t: the weights, ``[E, T]``.
        aux: the aux output of the loss, ``[E, K]``.

    Returns:
        Observations, actions, weights and ``aux``.

    Raises:
        ArgumentError: if the weights do not fit the episodes.
    """
    shape = list(episodes.mask_t.shape)
    if list(weight_t.shape) != shape:
        fix = "One weight per step; see persample.rl.diagnostics.reward_to_go."
        received = f"shape {list(weight_t.shape)}"
        raise ArgumentError.about("weight_t", expected=f"shape {shape}", received=received, fix=fix)
    obs_t, a_t, weight_t = (unpadded(episodes.mask_t, x) for x in (episodes.obs_t, episodes.a_t, weight_t))
    return obs_t, a_t, weight_t, aux


def check_enough(episodes: Episodes) -> None:
    """Check that there are at least two episodes.

    Args:
        episodes: the episodes.

    Raises:
        ArgumentError: if there are fewer.
    """
    if (count := len(episodes.mask_t)) < 2:
        fix = "One episode has no spread: collect more."
        raise ArgumentError.about("episodes", expected="2 or more", received=f"{count}", fix=fix)
