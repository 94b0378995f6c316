"""Diagnostics of policy gradients: of episodes and their estimators, and of samples in units such as prompts."""

from persample.rl.diagnostics.episode_estimators import (
    EpisodeGradients,
    episode_gradients,
    estimator_variances,
    leave_one_out,
    optimal_baseline,
    reward_to_go,
    total_reward,
)
from persample.rl.diagnostics.unit_statistics import PolicyGradients, policy_gradients

__all__ = [
    "EpisodeGradients",
    "PolicyGradients",
    "episode_gradients",
    "estimator_variances",
    "leave_one_out",
    "optimal_baseline",
    "policy_gradients",
    "reward_to_go",
    "total_reward",
]
