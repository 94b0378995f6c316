"""Losses of reinforcement learning, for one sample (a transition, an episode), with RLax's names and signs."""

from persample.losses.policy_gradient import reinforce_loss
from persample.losses.returns import discounted_returns
from persample.losses.td import td_learning, td_loss
from persample.trees import stop_gradient

__all__ = ["discounted_returns", "reinforce_loss", "stop_gradient", "td_learning", "td_loss"]
