"""Rollouts of policies in vectorized gymnasium environments: batches of transitions or whole episodes."""

try:
    import gymnasium  # noqa: F401 (asked for here, so that a missing extra is named)
except ImportError as error:
    raise ImportError("persample.rl needs gymnasium. Install it with: pip install gymnasium") from error

from persample.rl.environments import RandomWalk, make_envs
from persample.rl.policies import categorical_policy, gaussian_policy
from persample.rl.rollouts import Episodes, Transitions, collect_episodes, collect_transitions
from persample.rl.tabular import exact_values, optimal_actions, transition_table
from persample.rl.td_steps import GradientTDStep, TDLambdaStep, gradient_td_step, td_lambda_step

__all__ = [
    "Episodes",
    "GradientTDStep",
    "RandomWalk",
    "TDLambdaStep",
    "Transitions",
    "categorical_policy",
    "collect_episodes",
    "collect_transitions",
    "exact_values",
    "gaussian_policy",
    "gradient_td_step",
    "make_envs",
    "optimal_actions",
    "td_lambda_step",
    "transition_table",
]
