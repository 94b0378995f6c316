"""What the losses refuse, instead of broadcasting into a wrong number."""

from __future__ import annotations

import pytest
import torch

from persample import ArgumentError, losses, per_sample_grads

T, A = 4, 3
V, Q, LOGITS = torch.zeros(T), torch.zeros(T, A), torch.zeros(T, A)
ACTIONS = torch.zeros(T, dtype=torch.long)
ONE, ROW, ACTION = torch.tensor(0.0), torch.zeros(A), torch.tensor(0)
MU, MASK = torch.zeros(T, 2), torch.ones(T, dtype=torch.bool)

REFUSED = {
    "td-column": (
        lambda: losses.td_learning(V[:, None], V, 0.9, V),
        r"r_t: expected a number or shape \[4, 1\], as of v_tm1",
    ),
    "td-loss-column": (
        lambda: losses.td_loss(V, V, 0.9, V[:, None]),
        r"v_t: expected a number or shape \[4\], as of v_tm1",
    ),
    "td-lambda-values": (
        lambda: losses.td_lambda(V[1:], V, 0.9, V, 0.5),
        r"v_tm1: expected .* \[4\], as of r_t, .*\[3\]",
    ),
    "sarsa-action-number": (
        lambda: losses.sarsa(ROW, 1, ONE, 0.9, ROW, ACTION),
        r"a_tm1: expected a tensor of integers, received 1",
    ),
    "sarsa-action": (
        lambda: losses.sarsa(ROW, ACTION, ONE, 0.9, ROW, ACTION + 0.5),
        r"a_t: expected a tensor of integers, .*float32",
    ),
    "sarsa-actions": (
        lambda: losses.sarsa(ROW, ACTIONS, ONE, 0.9, ROW, ACTION),
        r"a_tm1: expected a number or shape \[\], as of the rows of q_tm1, received shape \[4\]",
    ),
    "sarsa-next": (
        lambda: losses.sarsa(ROW, ACTION, ONE, 0.9, ROW[1:], ACTION),
        r"q_t: expected a number or shape \[3\], as of q_tm1, received shape \[2\]",
    ),
    "sarsa-scalar-q": (
        lambda: losses.sarsa(ONE, ACTION, ONE, 0.9, ONE, ACTION),
        "q_t: expected one number per action on the last axis",
    ),
    "expected-sarsa": (
        lambda: losses.expected_sarsa(ROW, ACTION, ONE, 0.9, ROW, ROW[:2]),
        r"probs_a_t: expected a number or shape \[3\], as of q_tm1",
    ),
    "q-reward": (
        lambda: losses.q_learning(Q, ACTIONS, V[:, None], 0.9, Q),
        r"r_t: expected a number or shape \[4\], as of the rows of q_tm1, received shape \[4, 1\]",
    ),
    "q-one-action": (
        lambda: losses.q_learning(Q, ACTION, V, 0.9, Q),
        r"a_tm1: expected shape \[4\], one action per row of q_tm1, received shape \[\]",
    ),
    "double-q": (
        lambda: losses.double_q_learning(ROW, ACTION, ONE, 0.9, ROW, ROW[:2]),
        r"q_t_selector: expected a number or shape \[3\]",
    ),
    "sarsa-lambda": (
        lambda: losses.sarsa_lambda(Q, ACTIONS, V, 0.9, Q, ACTIONS[1:], 0.5),
        r"a_t: expected a number or shape \[4\], as of the rows of q_t",
    ),
    "q-lambda": (
        lambda: losses.q_lambda(Q, ACTIONS, V, V[1:], Q, 0.5),
        r"discount_t: expected a number or shape \[4\], as of r_t, received shape \[3\]",
    ),
    "retrace": (
        lambda: losses.retrace(Q, Q, ACTIONS, ACTIONS, V, 0.9, Q[:, 1:], V, 0.5),
        r"pi_t: expected a number or shape \[4, 3\], as of q_t",
    ),
    "retrace-mu": (
        lambda: losses.retrace(Q, Q, ACTIONS, ACTIONS, V, 0.9, Q, Q, 0.5),
        r"mu_t: expected a number or shape \[4\], as of r_t, received shape \[4, 3\]",
    ),
    "vtrace": (
        lambda: losses.vtrace_td_error_and_advantage(V, V, V, 0.9, V[:, None]),
        r"rho_tm1: expected .*\[4\], as of r_t, received shape \[4, 1\]",
    ),
    "categorical": (
        lambda: losses.categorical_td_learning(ROW, ROW[1:], ONE, 0.9, ROW, ROW),
        r"v_logits_tm1: expected a number or shape \[3\], as of v_atoms_tm1",
    ),
    "categorical-batch": (
        lambda: losses.categorical_td_learning(ROW, Q, V, 0.9, ROW, Q),
        r"v_logits_tm1: expected a vector, received shape \[4, 3\]. A loss sees one sample",
    ),
    "categorical-rewards": (
        lambda: losses.categorical_td_learning(ROW, ROW, V, 0.9, ROW, ROW),
        r"r_t: expected one number, received shape \[4\]. A loss sees one sample",
    ),
    "quantiles": (lambda: losses.quantile_regression_loss(ROW, V, ROW), r"tau_src: expected a number or shape \[3\]"),
    "quantiles-huber": (
        lambda: losses.quantile_regression_loss(ROW, ROW, ROW, -1.0),
        r"huber_param: expected a number >= 0, received -1.0. Use 0 for the absolute error",
    ),
    "sampled": (lambda: losses.sampled_nll(Q, V, "poisson"), r"distribution: expected 'categorical' or 'gaussian'"),
    "sampled-noise": (lambda: losses.sampled_nll(V, V), r"noise: expected a number or shape \[\], as of the rows"),
    "huber": (lambda: losses.huber_loss(V, 0.0), r"delta: expected a number > 0, received 0.0"),
    "huber-nan": (lambda: losses.huber_loss(V, float("nan")), r"delta: expected a number > 0, received nan"),
    "returns-scalar": (lambda: losses.discounted_returns(ONE, 0.9, 0.0), r"r_t: expected a sequence, shape \[T\]"),
    "lambda-returns-scalar": (lambda: losses.lambda_returns(ONE, 0.9, V), r"r_t: expected a sequence, shape \[T\]"),
    "returns-mask": (
        lambda: losses.discounted_returns(V, 0.9, 0.0, mask_t=V[1:].bool()),
        r"mask_t: expected .*\[4\], as of r_t, received shape \[3\]",
    ),
    "returns-rows": (
        lambda: losses.discounted_returns(torch.ones(2, 3), 1.0, 0.0),
        r"r_t: expected shape \[T\], received shape \[2, 3\]\. Which axis is time\? Pass time_dim=1 for",
    ),
    "returns-axis": (
        lambda: losses.lambda_returns(V, 1.0, V, time_dim=1),
        r"time_dim: expected an axis of r_t, from -1 to 0, received 1\. Pass 1 for \[E, T\]",
    ),
    "vtrace-rows": (
        lambda: losses.vtrace_td_error_and_advantage(Q, Q, Q, 0.9, Q),
        r"r_t: expected shape \[T\], received shape \[4, 3\]",
    ),
    "td-lambda-rows": (
        lambda: losses.td_lambda(Q, Q, 0.9, Q, 0.5),
        r"r_t: expected a vector, received shape \[4, 3\]\. A loss sees one sample",
    ),
    "sarsa-lambda-rows": (
        lambda: losses.sarsa_lambda(Q[None], ACTIONS[None], V[None], 0.9, Q[None], ACTIONS[None], 0.5),
        r"r_t: expected a vector, received shape \[1, 4\]\. A loss sees one sample",
    ),
    "actor-critic-rows": (
        lambda: losses.advantage_actor_critic_loss(LOGITS[None], Q, ACTIONS[None], V[None], 0.9),
        r"r_t: expected a vector, received shape \[1, 4\]\. A loss sees one sample",
    ),
    "n": (lambda: losses.n_step_bootstrapped_returns(V, 0.9, V, 0), r"n: expected a positive int, received 0"),
    "n-bool": (
        lambda: losses.n_step_bootstrapped_returns(V, 0.9, V, True),
        r"n: expected a positive int, received True",
    ),
    "advantages": (
        lambda: losses.truncated_generalized_advantage_estimation(V, 0.9, 0.5, V),
        r"values: expected shape \[5\], the values at times 0 … T, received shape \[4\]. Append",
    ),
    "policy-actions": (
        lambda: losses.policy_gradient_loss(LOGITS, ACTIONS[:, None], V),
        r"a_t: expected a number or shape \[4\], as of the rows of logits_t, received shape \[4, 1\]",
    ),
    "policy-float-actions": (
        lambda: losses.reinforce_loss(LOGITS, V, V),
        r"a_t: expected a tensor of integers, received torch.float32. .*gaussian",
    ),
    "policy-advantages": (
        lambda: losses.policy_gradient_loss(LOGITS, ACTIONS, V[:, None]),
        r"adv_t: expected .*\[4\], as of a_t",
    ),
    "policy-mask": (
        lambda: losses.reinforce_loss(LOGITS, ACTIONS, V, torch.ones(T, 1)),
        r"mask_t: expected shape \[4\], as of the rows of logits_t",
    ),
    "entropy": (lambda: losses.entropy_loss(LOGITS, V[:, None]), r"w_t: expected a number or shape \[4\]"),
    "reduction": (
        lambda: losses.entropy_loss(LOGITS, reduction="total"),
        r"reduction: expected 'sum', 'mean' or 'none', received 'total'",
    ),
    "epsilon": (
        lambda: losses.clipped_surrogate_pg_loss(V, V, -0.1),
        r"epsilon: expected a number >= 0, received -0.1. Ratios are clipped",
    ),
    "ratios": (
        lambda: losses.clipped_surrogate_pg_loss(V, V[:, None], 0.1),
        r"adv_t: expected .*\[4\], as of prob_ratios_t, received shape \[4, 1\]",
    ),
    "policies": (
        lambda: losses.categorical_importance_sampling_ratios(LOGITS, LOGITS[:, 1:], ACTIONS),
        r"mu_logits_t: expected a number or shape \[4, 3\], as of pi_logits_t",
    ),
    "gaussian-actions": (
        lambda: losses.gaussian_policy_gradient_loss(MU, 1.0, V, V),
        r"a_t: expected a number or shape \[4, 2\], as of mu_t, received shape \[4\]",
    ),
    "gaussian-sigma": (
        lambda: losses.gaussian_log_prob(MU, V, MU),
        r"sigma_t: expected a number or shape \[2\] or \[4, 2\], received shape \[4\]. Pass one for all",
    ),
    "actor-critic-mask": (
        lambda: losses.advantage_actor_critic_loss(LOGITS, torch.zeros(5), ACTIONS, V, 0.9, mask_t=torch.ones(1)),
        r"mask_t: expected shape \[4\], as of r_t, received shape \[1\]",
    ),
    "return-mask": (
        lambda: losses.reinforce_loss(LOGITS, ACTIONS, MASK, V),
        r"return_t: expected numbers, received torch.bool\. Are return_t and mask_t swapped\? If not, convert it",
    ),
    "advantage-mask": (
        lambda: losses.clipped_surrogate_pg_loss(V, MASK, 0.1),
        r"adv_t: expected numbers, received torch.bool\. Are adv_t and mask_t swapped",
    ),
    "reward-mask": (
        lambda: losses.discounted_returns(MASK, 0.9, 0.0, mask_t=V),
        r"r_t: expected numbers, received torch.bool\. Are r_t and mask_t swapped",
    ),
    "value-mask": (
        lambda: losses.discounted_returns(V, 0.9, MASK),
        r"v_t: expected numbers, received torch.bool\. Are v_t and mask_t swapped",
    ),
    "action-mask": (
        lambda: losses.reinforce_loss(LOGITS, MASK, V),
        r"a_t: expected numbers, received torch.bool\. .*or \.long\(\) for actions",
    ),
    "reward-truth": (
        lambda: losses.td_learning(ONE, ONE.bool(), 0.9, ONE),
        r"r_t: expected numbers, received torch.bool",
    ),
    "lengths": (
        lambda: torch.vmap(lambda n: losses.reinforce_loss(LOGITS, ACTIONS, V, n))(torch.tensor([2, 3])),
        r"mask_t: expected one entry per time step, received shape \[\]\. Is it a length\? Pass torch.arange\(T\) <",
    ),
    "discount": (
        lambda: losses.discounted_returns(V, 99, 0.0),
        r"discount_t: expected a number from 0 to 1, received 99\. 1 is for undiscounted",
    ),
    "discount-nan": (
        lambda: losses.td_learning(ONE, ONE, float("nan"), ONE),
        r"discount_t: expected a number from 0 to 1, received nan",
    ),
    "lambda": (
        lambda: losses.td_lambda(V, V, 0.9, V, -0.5),
        r"lambda_: expected a number from 0 to 1, received -0.5\. 0 is for single TD errors",
    ),
    "lambda-n-step": (
        lambda: losses.n_step_bootstrapped_returns(V, 0.9, V, 2, 95),
        r"lambda_t: expected a number from 0 to 1, received 95",
    ),
    "option-mask": (
        lambda: losses.discounted_returns(V, 0.9, 0.0, MASK),
        r"stop_target_gradients: expected a bool, received a tensor of shape \[4\]\. .* a mask as mask_t=",
    ),
    "option-number": (
        lambda: losses.q_learning(ROW, ACTION, ONE, 0.9, ROW, 0.5),
        r"stop_target_gradients: expected a bool, received 0.5\. Pass options by name",
    ),
    "list": (
        lambda: losses.discounted_returns([1.0, 2.0], 0.9, 0.0),
        r"r_t: expected a tensor, received list\. Convert it with torch.as_tensor\(r_t\)",
    ),
    "array": (
        lambda: losses.reinforce_loss(LOGITS, ACTIONS, V.numpy()),
        r"return_t: expected a tensor, received ndarray\. Convert it with torch.as_tensor\(return_t\)",
    ),
    "array-mask": (
        lambda: losses.entropy_loss(LOGITS, mask_t=MASK.numpy()),
        r"mask_t: expected a tensor, received ndarray",
    ),
    "true-reward": (lambda: losses.td_learning(ONE, True, 0.9, ONE), r"r_t: expected a tensor, received True"),
    "false-value": (lambda: losses.discounted_returns(V, 0.9, False), r"v_t: expected a tensor, received False"),
    "values-list": (
        lambda: losses.truncated_generalized_advantage_estimation(V, 0.9, 0.5, [0.0] * 5),
        r"values: expected a tensor, received list",
    ),
    "policy-option": (
        lambda: losses.policy_gradient_loss(LOGITS, ACTIONS, V, 1.0, MASK),
        r"use_stop_gradient: expected a bool, received a tensor of shape \[4\]",
    ),
    "true-mask": (
        lambda: losses.discounted_returns(V, 0.9, 0.0, mask_t=True),
        r"mask_t: expected a tensor, received True",
    ),
    "number-rewards": (
        lambda: losses.discounted_returns(1.0, 0.9, 0.0),
        r"r_t: expected a sequence, shape \[T\], received 1.0",
    ),
    "number-logits": (lambda: losses.entropy_loss(1.0), r"logits_t: expected one number per action .*received 1.0"),
    "actor-critic": (
        lambda: losses.advantage_actor_critic_loss(LOGITS, V, ACTIONS, V, 0.9),
        r"values: expected shape \[5\], the values at times 0 … T",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("true", [True, torch.tensor(True), MASK], ids=repr)
def test_factors_may_be_truth_values(true):
    """``~terminated`` is a discount; λ and weights are switched off by False."""
    returns = losses.lambda_returns(V + 1, true, V, true)
    torch.testing.assert_close(returns, losses.lambda_returns(V + 1, 1.0, V, 1.0))
    torch.testing.assert_close(losses.entropy_loss(LOGITS, true), losses.entropy_loss(LOGITS))


def test_shapes_are_those_of_one_sample_under_vmap_too():
    """The batch axis is not counted; a forgotten squeeze is still seen."""
    theta, s = torch.zeros(2, 1), torch.ones(5, 2)

    def loss(theta, s, r):
        return losses.td_learning(s @ theta, r[None, None], 0.9, s @ theta).sum()

    with pytest.raises(
        ArgumentError, match=r"r_t: expected a number or shape \[1\], as of v_tm1, received shape \[1, 1\]"
    ):
        per_sample_grads(loss, theta, (s, torch.ones(5)))
