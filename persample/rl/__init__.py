"""Rollouts: vectorized gymnasium environments and a policy make batches of transitions or whole episodes."""

try:
    import gymnasium  # noqa: F401 (asked for here, so that a missing extra is named)
except ImportError as error:
    raise ImportError("persample.rl needs gymnasium. Install it with: pip install 'persample[rl]'") from error

from persample.rl.environments import make_envs
from persample.rl.episodes import Episodes, collect_episodes
from persample.rl.policies import categorical_policy, gaussian_policy
from persample.rl.transitions import Transitions, collect_transitions

__all__ = [
    "Episodes",
    "Transitions",
    "categorical_policy",
    "collect_episodes",
    "collect_transitions",
    "gaussian_policy",
    "make_envs",
]
