"""Statistics of the per-sample gradients of a data set."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample import Loss, NoiseScale, Norm, Project, accumulate
from persample.inputs import Engine

QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Sample:
    """One sample: its place in the data set, the norm of its gradient, its leverage, its loss."""

    index: int
    norm: float
    leverage: float
    loss: float


@dataclass(frozen=True)
class Rows:
    """Norms, leverages and losses of all samples, ``[n]`` each."""

    norms: Tensor
    leverages: Tensor
    losses: Tensor

    def top(self, scores: Tensor, count: int) -> list[Sample]:
        """Return the samples with the highest scores, the highest first."""
        order = scores.argsort(descending=True, stable=True)[:count].tolist()
        return [Sample(i, self.norms[i].item(), self.leverages[i].item(), self.losses[i].item()) for i in order]


@dataclass(frozen=True)
class Statistics:
    """Statistics of the gradients of all samples.

    Args:
        samples: the number of samples.
        norm_quantiles: quantiles of the gradient norms, by their share.
        mean_norm: the mean of the norms.
        mean_loss: the mean of the losses.
        covariance_trace: tr Σ, the summed variance of one sample's gradient.
        squared_mean: the unbiased estimate of the squared norm of the mean gradient.
        noise_scale: their ratio.
        critical_batch_size: the noise scale as a batch size; None where the mean gradient is lost in the noise.
        top: the samples with the largest norms.
        top_leverage: the samples with the highest leverages.
    """

    samples: int
    norm_quantiles: dict[str, float]
    mean_norm: float
    mean_loss: float
    covariance_trace: float
    squared_mean: float
    noise_scale: float
    critical_batch_size: int | None
    top: list[Sample]
    top_leverage: list[Sample]


def statistics(
    loss_fn: Callable[..., Any], params: Any, batches: Any, *, top: int, dim: int, engine: Engine, group: Any = None
) -> tuple[Statistics, Rows]:
    """Compute the statistics in one pass.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018): the critical batch size is about the
    noise scale.

    Args:
        loss_fn: the loss of one sample.
        params: the parameters.
        batches: the batches of this process.
        top: how many samples to list.
        dim: the number of random projections of each gradient that leverages are computed from.
        engine: the engine.
        group: the processes, or None.

    Returns:
        The statistics, and what they were computed from.

    Examples:
        >>> batches = [torch.tensor([[1.0, 0.0], [3.0, 4.0]])]
        >>> found, rows = statistics(lambda w, x: w @ x, torch.zeros(2), batches, top=1, dim=8, engine="eager")
        >>> found.top[0].index, rows.norms
        (1, tensor([1., 5.]))
    """
    wanted = {"norms": Norm(), "losses": Loss(), "noise": NoiseScale(), "projected": Project(dim, seed=0)}
    found = accumulate(loss_fn, params, batches, wanted, engine=engine, group=group, progress=True)
    norms, losses, projected = (found[name].cpu() for name in ("norms", "losses", "projected"))
    noise, rows = found["noise"], Rows(norms, leverages(projected), losses)
    # torch.quantile refuses more than 16 million numbers
    quantiles = norms.double().sort().values[[round(share * (len(norms) - 1)) for share in QUANTILES]]
    scale = noise.noise_scale.item()
    return Statistics(
        samples=len(norms),
        norm_quantiles={f"{share:g}": value for share, value in zip(QUANTILES, quantiles.tolist(), strict=True)},
        mean_norm=norms.double().mean().item(),
        mean_loss=losses.double().mean().item(),
        covariance_trace=noise.covariance_trace.item(),
        squared_mean=noise.squared_mean.item(),
        noise_scale=scale,
        critical_batch_size=max(1, math.ceil(scale)) if 0 <= scale < math.inf else None,
        top=rows.top(rows.norms, top),
        top_leverage=rows.top(rows.leverages, top),
    ), rows


def leverages(rows: Tensor) -> Tensor:
    """Compute hᵢ = pᵢᵀ (F + λI)⁻¹ pᵢ / n, F = (1/n) Σ pᵢ pᵢᵀ, λ a thousandth of the mean ‖pᵢ‖².

    The leverage of a gradient does not change under invertible linear maps, but for λ: projections estimate it.

    Source: Drineas, Magdon-Ismail, Mahoney, Woodruff, "Fast Approximation of Matrix Coherence and Statistical Leverage"
    (2012).

    Args:
        rows: the pᵢ, ``[n, dim]``.

    Returns:
        The leverages, ``[n]`` float64.

    Examples:
        >>> leverages(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 9.0]]))
        tensor([0.4801, 0.4801, 0.9990], dtype=torch.float64)
    """
    blocks = rows.split(2**16)  # in float64 they take twice the memory
    fisher = torch.stack([block.double().T @ block.double() for block in blocks]).sum(0) / len(rows)
    damped = fisher + 1e-3 * fisher.trace() * torch.eye(len(fisher), dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    return torch.cat([((block.double() @ inverse) * block).sum(1) for block in blocks]) / len(rows)
