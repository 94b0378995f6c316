"""Statistics of policy gradients whose samples form units: completions of prompts, tokens of completions, steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from persample.errors import ArgumentError, LossError
from persample.factors import Op
from persample.factors.linear_system import float64_gram, solve
from persample.gradients import Gradients, weighted_sums
from persample.inputs import Outputs
from persample.inputs.units import as_ids, is_count, units_of
from persample.merge import Stacked
from persample.per_sample import per_sample_grads
from persample.reductions import NoiseScaleEstimate
from persample.reductions.base import Reduction
from persample.utils.numerics import accumulate_dtype, restore
from persample.utils.trees import Tree, flatten, unflatten


class PolicyGradients(NamedTuple):
    """The result of ``policy_gradients``, float64 except for ``update``. N samples are B, or B × K of K outputs.

    Attributes:
        update: the mean ḡ = Σ wᵢ gᵢ / Σ wᵢ, a tree like the parameters.
        within: the variance of one sample's gradient within its unit, summed over the parameters, ``[]``.
        between: that of the units' expected gradients, ``[]``, unbiased: negative at times where it is small.
            ``within + between`` is the variance of one sample of a random unit.
        snr: ‖E[g|u]‖² / tr Cov[g|u], the signal-to-noise ratio of one sample in each unit, ``[U]``. Both parts are
            unbiased, so that it may be negative; ∞ where all gradients of the unit are the same, up to rounding; 0
            where all are zero, and where no more than one sample counts.
        noise: U Var[ḡ], unbiased ‖E ḡ‖², and their ratio, the number of units at which noise and signal are equal; ∞
            where no signal is measurable. Of units of unequal sizes Var[ḡ] is rather too large than too small.
        cosines: cosines of the gᵢ with ``update``, ``[B]`` or ``[B, K]``: negative for conflicting samples, 0 for zero
            gradients and samples of weight 0.
        natural: the advantages Â = (H W/n + λI)⁻¹ A, ``[B]`` or ``[B, K]``, with Hᵢⱼ = ⟨∇ℓᵢ, ∇ℓⱼ⟩, W = diag(w) and
            n = Σ wᵢ: Σ wᵢ Âᵢ ∇ℓᵢ / n is ``NaturalGradient(λ, A)``. 0 for samples of weight 0.
    """

    update: Tree
    within: Tensor
    between: Tensor
    snr: Tensor
    noise: NoiseScaleEstimate
    cosines: Tensor
    natural: Tensor


def policy_gradients(
    loss_fn: Callable[..., Tensor],
    params: Tree,
    batch: Tree,
    advantages: Tensor | None = None,
    *,
    unit: int | Tensor | Sequence[int] = 1,
    weights: Tensor | None = None,
    damping: float | None = None,
    outputs: Outputs = "scalar",
    **options: Any,
) -> PolicyGradients:
    """Split the variance of the gradients gᵢ = Aᵢ ∇ℓᵢ within and between units, and compare each with their mean.

    Units (prompts) are independent, and so are the samples (completions) of one unit. With means ḡᵤ of nᵤ samples:
    within = Σᵤ Σᵢ wᵢ ‖gᵢ − ḡᵤ‖² / (n − U), and between = (Σᵤ nᵤ ‖ḡᵤ − ḡ‖² − (U − 1) within) / (n − Σᵤ nᵤ² / n).
    Var[ḡ] is the jackknife's, (1 − 1/U) Σᵤ ‖ḡ without u − ḡ‖². All follows from one Gram matrix, ``[N, N]`` in float64.

    With the mean reward of n samples of a unit as a baseline, these depend on each other: the estimate of ‖E[g|u]‖² is
    then 1 + 1/(n − 1)² times too large.

    Source: Searle, Casella, McCulloch, "Variance Components" (1992), section 3.6; noise scale as in McCandlish et al.,
    "An Empirical Model of Large-Batch Training" (2018); the jackknife as in Efron, Stein, "The Jackknife Estimate of
    Variance" (1981).

    Args:
        loss_fn: ``loss_fn(params, *sample)``, the loss of one sample at advantage 1, such as −log π of a completion; or
            its whole loss, without ``advantages``, as of PPO. With ``outputs="rows"`` one loss per token or step,
            ``[K]``, which are then the samples.
        params: the policy, as in ``per_sample_grads``.
        batch: B samples, as in ``per_sample_grads``.
        advantages: A, ``[B]``, or ``[B, K]`` of K outputs; None for ones.
        unit: k for units of k consecutive samples, or the ids ``[B]`` of their units. 1 for B units, which have
            several samples with ``outputs="rows"``: a completion and its tokens, an episode and its steps.
        weights: w >= 0, ``[B]``, or ``[B, K]`` such as the mask of padding: a sample of weight k counts as k samples of
            its unit.
        damping: λ > 0 of ``natural``; None for the mean of ‖∇ℓᵢ‖².
        outputs: "scalar", or "rows" for a loss that returns ``[K]``.
        **options: of ``per_sample_grads``: ``in_dims``, ``keep_batch_dim``, ``randomness``, ``chunk_size``, ``engine``.

    Returns:
        The update, and what it is made of.

    Raises:
        ArgumentError: if shapes do not fit, numbers are not finite, a weight is negative, there are fewer than two
            units that count, or none has two samples.
        LossError: if a gradient is not finite.

    Examples:
        Two prompts with two completions each, of which the last conflicts with the update:

        >>> s = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 3.0], [0.0, -1.0]])
        >>> found = policy_gradients(lambda theta, s: theta @ s, torch.zeros(2), s, unit=2)
        >>> found.update, found.within, found.snr
        (tensor([0.5000, 0.5000]), tensor(4., dtype=torch.float64), tensor([    inf, -0.3750], dtype=torch.float64))
        >>> found.cosines < 0
        tensor([False, False, False,  True])
    """
    if damping is not None and not 0 < damping < torch.inf:
        fix = "Pass λ, in the units of the squared gradients, or None."
        raise ArgumentError.about("damping", expected="a finite number > 0", received=repr(damping), fix=fix)
    wanted = _SumAndGram(*(None if x is None else torch.as_tensor(x).double() for x in (advantages, weights)))
    counts = None if wanted.weights is None else _checked_weights(wanted.weights)
    update, gram = per_sample_grads(loss_fn, params, batch, wanted, weights=counts, outputs=outputs, **options)
    sizes = gram.shape[: gram.ndim // 2]
    a, w = (x.flatten() for x in wanted.of_each(sizes, gram.device))
    h = gram.view(len(w), len(w))
    _check_finite(a, h.diagonal(), sizes)
    statistics = _statistics(a[:, None] * h * a, w, _unit_of_each(unit, sizes).to(w.device))
    eps = max(torch.finfo(x.dtype).eps for x in flatten(update)[0])
    natural = _natural(h, a, w, damping or float(w @ h.diagonal() / w.sum()) or 1.0, eps)
    return PolicyGradients(update, *statistics[:-1], statistics[-1].view(sizes), natural.view(sizes))


@dataclass(frozen=True, eq=False)
class _SumAndGram(Reduction):
    """Σ wᵢ Aᵢ ∇ℓᵢ / Σ wᵢ, and the inner products of the ∇ℓᵢ, ``[B, B]`` float64, of K outputs ``[B, K, B, K]``."""

    advantages: Tensor | None
    weights: Tensor | None
    uses: ClassVar[frozenset[Op]] = frozenset({Op.gram, Op.weighted_sum})
    live: ClassVar[tuple[str, ...]] = ("advantages", "weights")

    def of_each(self, sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return A and w in the shape of the samples; A is 0 where w is."""
        found = []
        for name, x in (("advantages", self.advantages), ("weights", self.weights)):
            if x is not None and tuple(x.shape) not in {tuple(sizes[:1]), tuple(sizes)}:
                expected = " or ".join(str(list(sizes[:ndim])) for ndim in range(1, len(sizes) + 1))
                fix = "Pass one number for each sample, or for each of its outputs."
                raise ArgumentError.about(name, expected=f"shape {expected}", received=f"{list(x.shape)}", fix=fix)
            ones = torch.ones(tuple(sizes), dtype=torch.float64, device=device)
            found.append(ones if x is None else ones * x.to(device).view(*x.shape, *[1] * (len(sizes) - x.ndim)))
        return torch.where(found[1] == 0, 0, found[0]), found[1]

    def lift(self, gradients: Gradients) -> Tree:
        """Return the factors."""
        pairs = zip(gradients.weighted_factors, gradients.spec.dtypes, strict=True)
        return gradients.spec.tree([Stacked(factor, dtype) for factor, dtype in pairs])

    def finish(self, merged: object) -> tuple[Tree, Tensor]:
        """Return the mean, and the inner products."""
        leaves, structure = flatten(merged)
        factors = [leaf.concatenated() for leaf in leaves]
        sizes = factors[0].sizes
        a, w = self.of_each(sizes, factors[0].device)
        sums = weighted_sums(factors, [a * (w / w.sum())] * len(factors), [accumulate_dtype(x.dtype) for x in leaves])
        update = [restore(x.sum(0) if len(sizes) > 1 else x, leaf.dtype) for x, leaf in zip(sums, leaves, strict=True)]
        return unflatten(update, structure), float64_gram(factors).view(*sizes, *sizes)


def _checked_weights(weights: Tensor) -> Tensor:
    """Return which samples count, ``[B]`` bool, as some of their outputs have a weight."""
    if not (bool((weights >= 0).all()) and 0 < weights.sum() < torch.inf):
        expected, fix = "finite numbers >= 0, not all 0", "Pass 0 for what does not count, such as padding."
        raise ArgumentError.about("weights", expected=expected, received="others", fix=fix)
    return (weights != 0).view(len(weights), -1).any(1)


def _check_finite(a: Tensor, squared_norms: Tensor, sizes: Sequence[int]) -> None:
    """Reject NaN and infinity in advantages and gradients of samples that count."""
    if not bool(a.isfinite().all()):
        fix = "Groups of equal rewards have a deviation of 0: add a small number to it."
        raise ArgumentError.about("advantages", expected="finite numbers", received="NaN or infinity", fix=fix)
    bad = squared_norms.isfinite().logical_not().nonzero()
    if len(bad):
        raise LossError(
            f"policy_gradients: expected finite gradients, received NaN or infinity in sample "
            f"{int(bad[0]) // math.prod(sizes[1:])}. Select, as the losses of persample.losses do, or pass weight 0."
        )


def _unit_of_each(unit: Any, sizes: Sequence[int]) -> Tensor:
    """Return the place of each sample's unit in the order of their first samples, ``[N]``."""
    units_of(unit, sizes[0], keep_ids=False)  # checks it
    ids = np.arange(sizes[0]) // unit if is_count(unit) else as_ids(unit, sizes[0])
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[inverse]).repeat_interleave(math.prod(sizes[1:]))


def _statistics(k: Tensor, w: Tensor, unit: Tensor) -> tuple[Tensor, Tensor, Tensor, NoiseScaleEstimate, Tensor]:
    """Return within, between, snr, noise and cosines ``[N]`` from the inner products ``k [N, N]`` of the gᵢ."""
    members = w * (unit == unit.unique()[:, None])  # [U, N]
    n_u, n = members.sum(1), w.sum()
    count = (n_u > 0).sum()
    if count < 2 or n <= count:
        expected = "two or more units that count, of which one or more have two samples"
        fix = "Pass the number of completions of each prompt, or the id of each sample's prompt."
        raise ArgumentError.about("unit", expected=expected, received=f"{int(count)} of {float(n):g} samples", fix=fix)
    p, means = n_u / n, members / torch.where(n_u > 0, n_u, 1)[:, None]
    products = means @ k @ means.T  # of the ḡᵤ
    squares, toward = products.diagonal(), products @ p
    square = p @ toward  # ‖ḡ‖²
    deviations = (squares - 2 * toward + square).clamp(min=0)  # ‖ḡᵤ − ḡ‖²
    spread = (members @ k.diagonal() - n_u * squares).clamp(min=0)  # Σᵢ wᵢ ‖gᵢ − ḡᵤ‖² in each unit
    within = spread.sum() / (n - count)
    between = (n_u @ deviations - (count - 1) * within) / (n - n_u @ p)
    noise = spread / torch.where(n_u > 1, n_u - 1, torch.inf)
    snr = torch.where((n_u <= 1) | (noise + squares == 0), 0, (squares - noise / n_u) / noise)
    moved = (n_u / (n - n_u)).square() * deviations  # ‖ḡ without u − ḡ‖²
    variance = moved.sum() * (count - 1) / count  # of ḡ, by the jackknife
    signal = square - variance  # 0, up to rounding, where one unit alone has gradients
    noise_scale = torch.where(signal > 1e-12 * square, count * variance / signal, torch.inf)
    lengths = (k.diagonal() * square).clamp(min=0).sqrt()
    cosines = torch.where(lengths > 0, k @ (w / n) / lengths, 0)
    return within, between, snr, NoiseScaleEstimate(count * variance, signal, noise_scale), cosines


def _natural(h: Tensor, a: Tensor, w: Tensor, damping: float, eps: float) -> Tensor:
    """Return (H W/n + λI)⁻¹ A, by the symmetric system of √w."""
    root, n = w.sqrt(), w.sum()
    solved, _ = solve(root[:, None] * h * root, n * damping, (root * a)[:, None], eps=eps, minimum_norm=False)
    return torch.where(w > 0, n * solved[:, 0] / root, 0)
