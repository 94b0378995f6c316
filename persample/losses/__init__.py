"""Losses of reinforcement learning for one sample (a transition or an episode), with the names and signs of RLax.

Values, rewards, discounts and logits are real floating tensors, actions integers. A result has the dtype that torch's
promotion rules give for the floating arguments.
"""

from persample.losses.action_values import double_q_learning, expected_sarsa, q_learning, sarsa
from persample.losses.distributional import categorical_td_learning, quantile_regression_loss
from persample.losses.gaussian import gaussian_entropy_loss, gaussian_log_prob, gaussian_policy_gradient_loss
from persample.losses.multistep import VTraceOutput, q_lambda, retrace, sarsa_lambda, vtrace_td_error_and_advantage
from persample.losses.policy_gradient import (
    advantage_actor_critic_loss,
    categorical_importance_sampling_ratios,
    categorical_log_prob,
    clipped_surrogate_pg_loss,
    entropy_loss,
    policy_gradient_loss,
    reinforce_loss,
)
from persample.losses.returns import (
    discounted_returns,
    lambda_returns,
    n_step_bootstrapped_returns,
    truncated_generalized_advantage_estimation,
)
from persample.losses.sampled import sampled_nll
from persample.losses.td import huber_loss, td_lambda, td_learning, td_loss
from persample.utils.trees import stop_gradient

__all__ = [
    "VTraceOutput",
    "advantage_actor_critic_loss",
    "categorical_importance_sampling_ratios",
    "categorical_log_prob",
    "categorical_td_learning",
    "clipped_surrogate_pg_loss",
    "discounted_returns",
    "double_q_learning",
    "entropy_loss",
    "expected_sarsa",
    "gaussian_entropy_loss",
    "gaussian_log_prob",
    "gaussian_policy_gradient_loss",
    "huber_loss",
    "lambda_returns",
    "n_step_bootstrapped_returns",
    "policy_gradient_loss",
    "q_lambda",
    "q_learning",
    "quantile_regression_loss",
    "reinforce_loss",
    "retrace",
    "sampled_nll",
    "sarsa",
    "sarsa_lambda",
    "stop_gradient",
    "td_lambda",
    "td_learning",
    "td_loss",
    "truncated_generalized_advantage_estimation",
    "vtrace_td_error_and_advantage",
]
