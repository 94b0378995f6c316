"""Diagnostics of policy gradients from per-sample gradients: variance, baselines, agreement, batch size."""

from persample.rl.diagnostics.scores import leave_one_out, reward_to_go, total_reward
from persample.rl.diagnostics.variance import EpisodeGradients, episode_gradients, estimator_variances, optimal_baseline

__all__ = [
    "EpisodeGradients",
    "episode_gradients",
    "estimator_variances",
    "leave_one_out",
    "optimal_baseline",
    "reward_to_go",
    "total_reward",
]
