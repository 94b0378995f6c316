"""Losses with labels drawn from the model: their gradients have the Fisher matrix as second moment."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.losses.common import check_rows, check_same, of_actions, overridable
from persample.utils.trees import stop_gradient


@overridable
def sampled_nll(outputs: Tensor, noise: Tensor, distribution: str = "categorical") -> Tensor:
    """Compute −log p(y|outputs) of a label y drawn from the model itself; no gradient flows through y.

    Over draws, E[g gᵀ] is the Fisher matrix of the model (Monte-Carlo Fisher); of the labels of the data it is the
    empirical one. The randomness is an argument: it belongs into the batch, drawn with your generator, so that a
    sample has its draw in every chunk and engine. Source: Kunstner, Balles, Hennig, "Limitations of the Empirical
    Fisher Approximation" (2019).

    Args:
        outputs: of "categorical", logits ``[*, C]``; of "gaussian", means ``[*]`` of variance 1.
        noise: of "categorical", uniform in [0, 1) (``torch.rand``), ``[*]``; of "gaussian", standard normal
            (``torch.randn``), ``[*]``. Draw it in float32 at least: bfloat16 has 256 values, too few for rare labels.
        distribution: "categorical", the model of ``F.cross_entropy``, or "gaussian", that of half the squared error.

    Returns:
        The losses, ``[*]``, without the constants of "gaussian".

    Raises:
        ArgumentError: if shapes do not fit, or ``distribution`` is unknown.

    Examples:
        >>> sampled_nll(torch.tensor([0.0, 0.0]), torch.tensor(0.7))  # log 2, of the second label
        tensor(0.6931)
        >>> sampled_nll(torch.tensor(5.0), torch.tensor(2.0), "gaussian")
        tensor(2.)
    """
    if distribution == "gaussian":
        check_same(outputs=outputs, noise=noise)
        return 0.5 * (outputs - stop_gradient(outputs + noise)).square()
    if distribution != "categorical":
        fix, received = "Other models: draw labels yourself.", repr(distribution)
        raise ArgumentError.about("distribution", expected="'categorical' or 'gaussian'", received=received, fix=fix)
    check_rows("outputs", outputs, noise=noise)
    up_to = stop_gradient(outputs).to(torch.promote_types(outputs.dtype, torch.float32)).softmax(-1).cumsum(-1)
    # Sums may end below 1: a label at which they no longer grow has probability 0, and is never drawn.
    before = (up_to <= torch.as_tensor(noise).unsqueeze(-1)) & (up_to < up_to[..., -1:])
    return -of_actions(outputs.log_softmax(-1), before.sum(-1))
