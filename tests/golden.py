"""Values and gradients that RLax gives, recorded once: rlax 0.1.9 with jax 0.10.2, float64.

Every case names the call. ``grads`` are jax.grad of Σₖ k·outputₖ (k = 1, 2, … in reading order) by every argument that
receives a gradient at all; where there is a flag, with the flag False, and ``stopped`` with it True. RLax's policy
losses take means over time, so ours are compared with ``reduction="mean"``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Golden(NamedTuple):
    name: str
    call: str
    arguments: dict[str, Any]
    value: Any
    grads: dict[str, Any]
    flag: str | None = None
    stopped: dict[str, Any] | None = None


GOLDEN = [
    Golden(
        "td_learning",
        "rlax.td_learning",
        {"v_tm1": 0.3, "r_t": 1.0, "discount_t": 0.9, "v_t": -1.1},
        value=-0.29,
        flag="stop_target_gradients",
        stopped={"v_tm1": -1.0},
        grads={"v_tm1": -1.0, "r_t": 1.0, "discount_t": -1.1, "v_t": 0.9},
    ),
    Golden(
        "td_loss",
        "rlax.td_learning, squared",
        {"v_tm1": 0.3, "r_t": 1.0, "discount_t": 0.9, "v_t": -1.1},
        value=0.0841,
        flag="stop_target_gradients",
        stopped={"v_tm1": 0.58},
        grads={"v_tm1": 0.58, "r_t": -0.58, "discount_t": 0.638, "v_t": -0.522},
    ),
    Golden(
        "td_lambda",
        "rlax.td_lambda",
        {
            "v_tm1": [0.3, -1.2, 0.8],
            "r_t": [1.0, -0.5, 2.0],
            "discount_t": [0.9, 0.0, 0.7],
            "v_t": [-1.1, 0.9, 1.5],
            "lambda_": [0.5, 0.9, 0.3],
        },
        value=[-0.02, 0.7, 2.25],
        flag="stop_target_gradients",
        stopped={"v_tm1": [-1.0, -2.0, -3.0]},
        grads={
            "v_tm1": [-1.0, -2.0, -3.0],
            "r_t": [1.0, 2.45, 3.0],
            "discount_t": [-0.8, 6.94575, 4.5],
            "v_t": [0.45, 0.0, 2.1],
            "lambda_": [0.54, 0.0, 0.0],
        },
    ),
    Golden(
        "sarsa",
        "rlax.sarsa",
        {"q_tm1": [0.2, -0.4], "a_tm1": 1, "r_t": 1.0, "discount_t": 0.9, "q_t": [1.3, 0.7], "a_t": 0},
        value=2.57,
        flag="stop_target_gradients",
        stopped={"q_tm1": [0.0, -1.0]},
        grads={"q_tm1": [0.0, -1.0], "r_t": 1.0, "discount_t": 1.3, "q_t": [0.9, 0.0]},
    ),
    Golden(
        "expected_sarsa",
        "rlax.expected_sarsa",
        {"q_tm1": [0.2, -0.4], "a_tm1": 1, "r_t": 1.0, "discount_t": 0.9, "q_t": [1.3, 0.7], "probs_a_t": [0.25, 0.75]},
        value=2.165,
        flag="stop_target_gradients",
        stopped={"q_tm1": [0.0, -1.0]},
        grads={"q_tm1": [0.0, -1.0], "r_t": 1.0, "discount_t": 0.85, "q_t": [0.225, 0.675], "probs_a_t": [1.17, 0.63]},
    ),
    Golden(
        "sarsa_lambda",
        "rlax.sarsa_lambda",
        {
            "q_tm1": [[0.2, -0.4], [1.3, 0.7], [-0.6, 0.1]],
            "a_tm1": [0, 1, 0],
            "r_t": [1.0, -0.5, 2.0],
            "discount_t": [0.9, 0.0, 0.7],
            "q_t": [[1.2, 0.5], [-0.3, 0.6], [0.4, -0.9]],
            "a_t": [1, 0, 1],
            "lambda_": [0.5, 0.9, 0.3],
        },
        value=[0.8, -1.2, 1.97],
        flag="stop_target_gradients",
        stopped={"q_tm1": [[-1.0, 0.0], [0.0, -2.0], [-3.0, 0.0]]},
        grads={
            "q_tm1": [[-1.0, 0.0], [0.0, -2.0], [-3.0, 0.0]],
            "r_t": [1.0, 2.45, 3.0],
            "discount_t": [0.0, 2.94735, -2.7],
            "q_t": [[0.0, 0.45], [0.0, 0.0], [0.0, 2.1]],
            "lambda_": [-0.9, 0.0, 0.0],
        },
    ),
    Golden(
        "q_learning",
        "rlax.q_learning",
        {"q_tm1": [0.2, -0.4], "a_tm1": 1, "r_t": 1.0, "discount_t": 0.9, "q_t": [1.3, 0.7]},
        value=2.57,
        flag="stop_target_gradients",
        stopped={"q_tm1": [0.0, -1.0]},
        grads={"q_tm1": [0.0, -1.0], "r_t": 1.0, "discount_t": 1.3, "q_t": [0.9, 0.0]},
    ),
    Golden(
        "double_q_learning",
        "rlax.double_q_learning",
        {
            "q_tm1": [0.2, -0.4],
            "a_tm1": 1,
            "r_t": 1.0,
            "discount_t": 0.9,
            "q_t_value": [1.3, 0.7],
            "q_t_selector": [-0.6, 0.1],
        },
        value=2.03,
        flag="stop_target_gradients",
        stopped={"q_tm1": [0.0, -1.0]},
        grads={"q_tm1": [0.0, -1.0], "r_t": 1.0, "discount_t": 0.7, "q_t_value": [0.0, 0.9]},
    ),
    Golden(
        "q_lambda",
        "rlax.q_lambda",
        {
            "q_tm1": [[0.2, -0.4], [1.3, 0.7], [-0.6, 0.1]],
            "a_tm1": [0, 1, 0],
            "r_t": [1.0, -0.5, 2.0],
            "discount_t": [0.9, 0.0, 0.7],
            "q_t": [[1.2, 0.5], [-0.3, 0.6], [0.4, -0.9]],
            "lambda_": [0.5, 0.9, 0.3],
        },
        value=[1.115, -1.2, 2.88],
        flag="stop_target_gradients",
        stopped={"q_tm1": [[-1.0, 0.0], [0.0, -2.0], [-3.0, 0.0]]},
        grads={
            "q_tm1": [[-1.0, 0.0], [0.0, -2.0], [-3.0, 0.0]],
            "r_t": [1.0, 2.45, 3.0],
            "discount_t": [0.35, 5.1744, 1.2],
            "q_t": [[0.45, 0.0], [0.0, 0.0], [2.1, 0.0]],
            "lambda_": [-1.53, 0.0, 0.0],
        },
    ),
    Golden(
        "retrace",
        "rlax.retrace",
        {
            "q_tm1": [[0.2, -0.4], [1.3, 0.7], [-0.6, 0.1]],
            "q_t": [[1.2, 0.5], [-0.3, 0.6], [0.4, -0.9]],
            "a_tm1": [0, 1, 0],
            "a_t": [1, 0, 1],
            "r_t": [1.0, -0.5, 2.0],
            "discount_t": [0.9, 0.6, 0.7],
            "pi_t": [[0.25, 0.75], [0.4, 0.6], [0.9, 0.1]],
            "mu_t": [0.5, 0.8, 0.3],
            "lambda_": 0.9,
        },
        value=[1.258484293196, -0.3839700084004, 2.789],
        flag="stop_target_gradients",
        stopped={"q_tm1": [[-1.0, 0.0], [0.0, -2.0], [-3.0, 0.0]]},
        grads={
            "q_tm1": [[-1.0, 0.0], [0.0, -2.0], [-3.0, 0.0]],
            "q_t": [[0.225, -0.135], [-0.08429999051625, 1.0116], [2.367980994025, 0.2631089993361]],
            "r_t": [1.0, 2.81, 3.758699990516],
            "discount_t": [0.5094269924397, 3.821740460658, 1.014848997439],
            "pi_t": [[1.08, 0.45], [4.215210690987, 1.0116], [1.052435997345, -2.367980994025]],
            "mu_t": [0.0, -2.360505315987, 0.0],
            "lambda_": 1.932653966212,
        },
    ),
    Golden(
        "vtrace_td_error_and_advantage",
        "rlax.vtrace_td_error_and_advantage, concatenated",
        {
            "v_tm1": [0.3, -1.2, 0.8],
            "v_t": [-1.1, 0.9, 1.5],
            "r_t": [1.0, -0.5, 2.0],
            "discount_t": [0.9, 0.6, 0.7],
            "rho_tm1": [0.6, 1.7, 2.5],
            "lambda_": [0.8, 0.9, 0.5],
            "clip_rho_threshold": 1.5,
            "clip_pg_rho_threshold": 2.0,
        },
        value=[1.41684, 3.6825, 3.375, 1.36284, 5.10425, 4.5, 2.5714, 1.8025, 3.05],
        flag="stop_target_gradients",
        stopped={
            "v_tm1": [-3.4, -8.808, -14.01],
            "v_t": [0.0, 0.0, 14.7],
            "r_t": [9.4, 16.5, 21.0],
            "discount_t": [16.4124, 63.31875, 31.5],
            "rho_tm1": [9.0856, 15.0125, 0.0],
            "lambda_": [31.15395, 33.4125, 0.0],
        },
        grads={
            "v_tm1": [-3.0, -13.84, -27.417],
            "v_t": [0.54, 8.28, 32.4219],
            "r_t": [10.0, 30.3, 46.317],
            "discount_t": [17.52, 103.68375, 69.4755],
            "rho_tm1": [11.447, 15.0125, 0.0],
            "lambda_": [33.1425, 52.0425, 0.0],
        },
    ),
    Golden(
        "categorical_td_learning",
        "rlax.categorical_td_learning",
        {
            "v_atoms_tm1": [-1.0, 0.5, 2.0],
            "v_logits_tm1": [0.1, -0.4, 0.8],
            "r_t": 0.3,
            "discount_t": 0.6,
            "v_atoms_t": [-2.0, 0.0, 1.1, 2.0],
            "v_logits_t": [0.5, 0.2, -0.3, -1.0],
        },
        value=1.430227017146,
        flag="stop_target_gradients",
        stopped={"v_logits_tm1": [-0.1514579651544, -0.2860458003851, 0.4375037655395]},
        grads={
            "v_atoms_tm1": [-0.1425598123166, 0.03003914991016, 0.09499037692009],
            "v_logits_tm1": [-0.1514579651544, -0.2860458003851, 0.4375037655395],
            "r_t": 0.01753028548637,
            "discount_t": -0.5880320445963,
            "v_atoms_t": [0.0828748508408, 0.06139519953915, -0.0893713701112, -0.04438050897692],
            "v_logits_t": [-0.0457226282104, 0.08891824300257, -0.002173719536528, -0.04102189525564],
        },
    ),
    Golden(
        "quantile_regression_loss",
        "rlax.quantile_regression_loss",
        {"dist_src": [-0.5, 0.4, 1.3], "tau_src": [0.2, 0.5, 0.8], "dist_target": [0.1, 0.9]},
        value=0.56,
        flag="stop_target_gradients",
        stopped={"dist_src": [-0.2, 0.0, 0.2], "tau_src": [1.0, 0.1, -0.8], "dist_target": [-0.25, 0.25]},
        grads={"dist_src": [-0.2, 0.0, 0.2], "tau_src": [1.0, 0.1, -0.8], "dist_target": [-0.25, 0.25]},
    ),
    Golden(
        "quantile_regression_loss",
        "rlax.quantile_regression_loss",
        {"dist_src": [-0.5, 0.4, 1.3], "tau_src": [0.2, 0.5, 0.8], "dist_target": [0.1, 0.9], "huber_param": 0.7},
        value=0.2015,
        flag="stop_target_gradients",
        stopped={"dist_src": [-0.13, -0.05, 0.11], "tau_src": [0.4575, 0.04, -0.3375], "dist_target": [-0.085, 0.155]},
        grads={"dist_src": [-0.13, -0.05, 0.11], "tau_src": [0.4575, 0.04, -0.3375], "dist_target": [-0.085, 0.155]},
    ),
    Golden(
        "huber_loss",
        "rlax.huber_loss",
        {"x": [-2.0, -0.3, 0.0, 0.5, 1.5], "delta": 0.8},
        value=[1.28, 0.045, 0.0, 0.125, 0.88],
        grads={"x": [-0.8, -0.6, 0.0, 2.0, 4.0]},
    ),
    Golden(
        "discounted_returns",
        "rlax.discounted_returns",
        {"r_t": [1.0, -0.5, 2.0], "discount_t": [0.9, 0.6, 0.7], "v_t": [-1.1, 0.9, 1.5]},
        value=[2.197, 1.33, 3.05],
        flag="stop_target_gradients",
        stopped={},
        grads={"r_t": [1.0, 2.9, 4.74], "discount_t": [1.33, 8.845, 7.11], "v_t": [0.0, 0.0, 3.318]},
    ),
    Golden(
        "lambda_returns",
        "rlax.lambda_returns",
        {"r_t": [1.0, -0.5, 2.0], "discount_t": [0.9, 0.6, 0.7], "v_t": [-1.1, 0.9, 1.5], "lambda_": [0.5, 0.9, 0.3]},
        value=[1.04545, 1.201, 3.05],
        flag="stop_target_gradients",
        stopped={},
        grads={
            "r_t": [1.0, 2.45, 4.323],
            "discount_t": [0.0505, 6.94575, 6.4845],
            "v_t": [0.45, 0.147, 3.0261],
            "lambda_": [2.0709, 3.1605, 0.0],
        },
    ),
    Golden(
        "n_step_bootstrapped_returns",
        "rlax.n_step_bootstrapped_returns",
        {
            "r_t": [1.0, -0.5, 2.0],
            "discount_t": [0.9, 0.6, 0.7],
            "v_t": [-1.1, 0.9, 1.5],
            "n": 2,
            "lambda_t": [0.5, 0.9, 0.3],
        },
        value=[0.523, 1.201, 3.05],
        flag="stop_target_gradients",
        stopped={},
        grads={
            "r_t": [1.0, 2.45, 4.08],
            "discount_t": [-0.53, 6.075, 6.12],
            "v_t": [0.45, 0.39, 2.856],
            "lambda_t": [1.026, 2.58, 0.0],
        },
    ),
    Golden(
        "truncated_generalized_advantage_estimation",
        "rlax.truncated_generalized_advantage_estimation",
        {
            "r_t": [1.0, -0.5, 2.0],
            "discount_t": [0.9, 0.6, 0.7],
            "lambda_": [0.5, 0.9, 0.3],
            "values": [0.3, -1.2, 0.8, 1.5],
        },
        value=[0.69775, 2.395, 2.25],
        flag="stop_target_gradients",
        stopped={},
        grads={
            "r_t": [1.0, 2.45, 4.323],
            "discount_t": [-0.0025, 6.92125, 6.4845],
            "lambda_": [2.1555, 3.3075, 0.0],
            "values": [-1.0, -1.55, -2.853, 3.0261],
        },
    ),
    Golden(
        "policy_gradient_loss",
        "rlax.policy_gradient_loss",
        {
            "logits_t": [[0.5, -1.0], [2.0, 0.3], [-0.7, 0.4]],
            "a_t": [1, 0, 1],
            "adv_t": [0.7, -1.3, 2.0],
            "w_t": [1.0, 0.5, -2.0],
        },
        value=-0.02247097499162,
        flag="use_stop_gradient",
        stopped={
            "logits_t": [
                [0.1907673777785, -0.1907673777785],
                [0.03346747410143, -0.03346747410143],
                [-0.3329865258732, 0.3329865258732],
            ],
            "w_t": [0.3969964315293, -0.07270727940072, 0.1915568834103],
        },
        grads={
            "logits_t": [
                [0.1907673777785, -0.1907673777785],
                [0.03346747410143, -0.03346747410143],
                [-0.3329865258732, 0.3329865258732],
            ],
            "adv_t": [0.5671377593276, 0.02796433823104, -0.1915568834103],
            "w_t": [0.3969964315293, -0.07270727940072, 0.1915568834103],
        },
    ),
    Golden(
        "reinforce_loss",
        "rlax.policy_gradient_loss with w_t = 1",
        {"logits_t": [[0.5, -1.0], [2.0, 0.3], [-0.7, 0.4]], "a_t": [1, 0, 1], "return_t": [0.7, -1.3, 2.0]},
        value=0.5158460355389,
        grads={
            "logits_t": [
                [0.1907673777785, -0.1907673777785],
                [0.06693494820287, -0.06693494820287],
                [0.1664932629366, -0.1664932629366],
            ]
        },
    ),
    Golden(
        "entropy_loss",
        "rlax.entropy_loss",
        {"logits_t": [[0.5, -1.0], [2.0, 0.3], [-0.7, 0.4]], "w_t": [1.0, 0.5, -2.0]},
        value=0.1446194547384,
        grads={
            "logits_t": [
                [0.07457322603517, -0.07457322603517],
                [0.03700496164043, -0.03700496164043],
                [0.1374045783348, -0.1374045783348],
            ],
            "w_t": [-0.1583505212308, -0.1434589933428, -0.1873497363203],
        },
    ),
    Golden(
        "clipped_surrogate_pg_loss",
        "rlax.clipped_surrogate_pg_loss",
        {"prob_ratios_t": [0.5, 1.1, 1.9, 0.6], "adv_t": [1.0, -2.0, 0.5, -0.3], "epsilon": 0.2},
        value=0.335,
        flag="use_stop_gradient",
        stopped={"prob_ratios_t": [-0.25, 0.5, 0.0, 0.0]},
        grads={"prob_ratios_t": [-0.25, 0.5, 0.0, 0.0], "adv_t": [-0.125, -0.275, -0.3, -0.2]},
    ),
    Golden(
        "categorical_importance_sampling_ratios",
        "rlax.categorical_importance_sampling_ratios",
        {
            "pi_logits_t": [[0.5, -1.0], [2.0, 0.3], [-0.7, 0.4]],
            "mu_logits_t": [[0.2, -0.4], [1.3, 0.7], [-0.6, 0.1]],
            "a_t": [1, 0, 1],
        },
        value=[0.514826500405, 1.30957403616, 1.122828248055],
        grads={
            "pi_logits_t": [
                [-0.4209090063992, 0.4209090063992],
                [0.404567401284, -0.404567401284],
                [-0.841245024312, 0.841245024312],
            ],
            "mu_logits_t": [
                [0.3324009765986, -0.3324009765986],
                [-0.9280786024877, 0.9280786024877],
                [1.117704427379, -1.117704427379],
            ],
        },
    ),
    Golden(
        "gaussian_log_prob",
        "rlax.gaussian_diagonal().logprob(a_t, mu_t, sigma_t)",
        {
            "mu_t": [[0.2, -0.4], [1.3, 0.7], [-0.6, 0.1]],
            "sigma_t": [[0.5, 1.0], [2.0, 0.3], [0.7, 0.4]],
            "a_t": [[1.2, 0.5], [-0.3, 0.6], [0.4, -0.9]],
        },
        value=[-3.549729885849, -1.702606998199, -4.710319553862],
        grads={
            "mu_t": [[4.0, 0.9], [-0.8, -2.222222222222], [6.122448979592, -18.75]],
            "sigma_t": [[6.0, -0.19], [-0.36, -5.925925925926], [4.460641399417, 39.375]],
            "a_t": [[-4.0, -0.9], [0.8, 2.222222222222], [-6.122448979592, 18.75]],
        },
    ),
    Golden(
        "gaussian_entropy_loss",
        "-mean(rlax.gaussian_diagonal().entropy(0, sigma_t) * w_t)",
        {"sigma_t": [[0.5, 1.0], [2.0, 0.3], [0.7, 0.4]], "w_t": [1.0, 0.5, -2.0]},
        value=-0.05947760865939,
        grads={
            "sigma_t": [
                [-0.6666666666667, -0.3333333333333],
                [-0.08333333333333, -0.5555555555556],
                [0.952380952381, 1.666666666667],
            ],
            "w_t": [-0.7149099619498, -0.7756838142145, -0.5216371301988],
        },
    ),
    Golden(
        "gaussian_policy_gradient_loss",
        "-mean(rlax.gaussian_diagonal().logprob(a_t, mu_t, sigma_t) * adv_t * w_t)",
        {
            "mu_t": [[0.2, -0.4], [1.3, 0.7], [-0.6, 0.1]],
            "sigma_t": [[0.5, 1.0], [2.0, 0.3], [0.7, 0.4]],
            "a_t": [[1.2, 0.5], [-0.3, 0.6], [0.4, -0.9]],
            "adv_t": [0.7, -1.3, 2.0],
            "w_t": [1.0, 0.5, -2.0],
        },
        value=-5.821053948061,
        flag="use_stop_gradient",
        stopped={
            "mu_t": [
                [-0.9333333333333, -0.21],
                [-0.08666666666667, -0.2407407407407],
                [2.721088435374, -8.333333333333],
            ],
            "sigma_t": [[-1.4, 0.04433333333333], [-0.039, -0.641975308642], [1.98250728863, 17.5]],
            "w_t": [0.8282703066982, -0.7377963658862, 3.140213035908],
        },
        grads={
            "mu_t": [
                [-0.9333333333333, -0.21],
                [-0.08666666666667, -0.2407407407407],
                [2.721088435374, -8.333333333333],
            ],
            "sigma_t": [[-1.4, 0.04433333333333], [-0.039, -0.641975308642], [1.98250728863, 17.5]],
            "adv_t": [1.183243295283, 0.2837678330332, -3.140213035908],
            "w_t": [0.8282703066982, -0.7377963658862, 3.140213035908],
        },
    ),
    Golden(
        "advantage_actor_critic_loss",
        "rlax.policy_gradient_loss, .truncated_generalized_advantage_estimation and .entropy_loss, added up",
        {
            "logits_t": [[0.5, -1.0], [2.0, 0.3], [-0.7, 0.4]],
            "values": [0.3, -1.2, 0.8, 1.5],
            "a_t": [1, 0, 1],
            "r_t": [1.0, -0.5, 2.0],
            "discount_t": [0.9, 0.6, 0.7],
            "lambda_": 0.8,
            "value_cost": 0.4,
            "entropy_cost": 0.05,
        },
        value=2.588190932196,
        grads={
            "logits_t": [
                [0.343621623538, -0.343621623538],
                [-0.1126633368656, 0.1126633368656],
                [0.1838698063453, -0.1838698063453],
            ],
            "values": [-0.3325866666667, -0.6026666666667, -0.6, 0.0],
        },
    ),
]

# The parameters of RLax 0.1.9 in their order, as inspect.signature gives them.
SIGNATURES = {
    "td_learning": "v_tm1 r_t discount_t v_t stop_target_gradients",
    "td_lambda": "v_tm1 r_t discount_t v_t lambda_ stop_target_gradients",
    "sarsa": "q_tm1 a_tm1 r_t discount_t q_t a_t stop_target_gradients",
    "expected_sarsa": "q_tm1 a_tm1 r_t discount_t q_t probs_a_t stop_target_gradients",
    "sarsa_lambda": "q_tm1 a_tm1 r_t discount_t q_t a_t lambda_ stop_target_gradients",
    "q_learning": "q_tm1 a_tm1 r_t discount_t q_t stop_target_gradients",
    "double_q_learning": "q_tm1 a_tm1 r_t discount_t q_t_value q_t_selector stop_target_gradients",
    "q_lambda": "q_tm1 a_tm1 r_t discount_t q_t lambda_ stop_target_gradients",
    "retrace": "q_tm1 q_t a_tm1 a_t r_t discount_t pi_t mu_t lambda_ eps stop_target_gradients",
    "vtrace_td_error_and_advantage": (
        "v_tm1 v_t r_t discount_t rho_tm1 lambda_ clip_rho_threshold clip_pg_rho_threshold stop_target_gradients "
        "sample_mask"
    ),
    "categorical_td_learning": "v_atoms_tm1 v_logits_tm1 r_t discount_t v_atoms_t v_logits_t stop_target_gradients",
    "quantile_regression_loss": "dist_src tau_src dist_target huber_param stop_target_gradients",
    "huber_loss": "x delta",
    "policy_gradient_loss": "logits_t a_t adv_t w_t use_stop_gradient",
    "entropy_loss": "logits_t w_t",
    "clipped_surrogate_pg_loss": "prob_ratios_t adv_t epsilon use_stop_gradient",
    "discounted_returns": "r_t discount_t v_t stop_target_gradients",
    "lambda_returns": "r_t discount_t v_t lambda_ stop_target_gradients",
    "n_step_bootstrapped_returns": "r_t discount_t v_t n lambda_t stop_target_gradients",
    "truncated_generalized_advantage_estimation": "r_t discount_t lambda_ values stop_target_gradients",
    "categorical_importance_sampling_ratios": "pi_logits_t mu_logits_t a_t",
}

OPTIONS = {"n", "huber_param", "delta", "epsilon", "clip_rho_threshold", "clip_pg_rho_threshold"}
OPTIONS |= {"value_cost", "entropy_cost"}


def arguments(golden, dtype=torch.float64):
    """The recorded literals, as leaves where they are real numbers."""
    made = {}
    for name, value in golden.arguments.items():
        x = torch.tensor(value)
        x = torch.tensor(value, dtype=dtype).requires_grad_() if x.is_floating_point() else x
        made[name] = value if name in OPTIONS else x
    return made
