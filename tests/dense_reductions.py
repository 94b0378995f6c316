"""What every reduction is of gradients written out, as its formula says: plain sums over rows, in the widest dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

import persample as ps
from persample.factors import Dense as DenseFactor
from persample.factors import Factor, Outer


def wide(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def reals(x):
    """Rows of real numbers, complex ones as pairs."""
    x = wide(x)
    return (torch.view_as_real(x) if x.is_complex() else x[..., None]).flatten(1)


def like(flat, tensor):
    """Real numbers as a tensor of a shape, pairs of them where it is complex."""
    if tensor.is_complex():
        return torch.view_as_complex(flat.reshape(*tensor.shape, 2).clone())
    return flat.reshape(tensor.shape)


class Dense:
    """The gradients ``[B, *shape]`` of all parameters, their losses and aux; reductions of them.

    Every answer is a list of pairs: the numbers, and the size of what was added up to make them.
    """

    def __init__(self, grads, losses, aux, weights):
        self.grads, self.losses, self.aux = [wide(g) for g in grads], wide(losses), aux
        self.size = len(losses)
        self.weights = torch.ones(self.size, dtype=torch.float64) if weights is None else weights.double()
        kept = self.weights != 0  # samples of weight 0 are not there, NaN or not
        self.kept = [g[kept] for g in self.grads]
        self.w = self.weights[kept]
        self.flat = torch.cat([reals(g) for g in self.grads], 1)
        self.top = float(self.flat.nan_to_num().abs().max()) if self.flat.numel() else 0.0

    def norms(self, grads):
        return sum((reals(g).square().sum(1) for g in grads), torch.zeros(len(grads[0]), dtype=torch.float64)).sqrt()

    def total(self, scales):
        size = self.top * float(self.w.abs().sum()) if len(self.w) else 0.0
        return [
            (torch.tensordot((self.w * s).to(g.dtype), g, dims=1), size) for g, s in zip(self.kept, scales, strict=True)
        ]

    def mean(self, totals):
        n = self.w.sum()
        return [(x / n, size / float(n)) for x, size in totals]

    def ones(self):
        return [torch.ones_like(self.w)] * len(self.kept)

    def clips(self, bound, per_param):
        groups = [[g] for g in self.kept] if per_param else [self.kept] * len(self.kept)
        return [torch.where(n <= bound, 1.0, bound / n) for n in map(self.norms, groups)]

    def moment(self, center):
        n = self.w.sum()
        out = []
        for g in self.kept:
            mean = torch.tensordot(self.w.to(g.dtype), g, dims=1) / n if center else torch.zeros_like(g.sum(0))
            off = g - mean
            squares = torch.complex(off.real**2, off.imag**2) if off.is_complex() else off**2
            out.append(torch.tensordot(self.w.to(g.dtype), squares, dims=1))
        return out

    def answer(self, reduction):
        """The numbers a reduction returns, flat, each with its size."""
        name = type(reduction).__name__.lower()
        return getattr(self, f"of_{name}")(reduction)

    def of_stack(self, _):
        return [(g, self.row_sizes().reshape(-1, *[1] * (g.ndim - 1))) for g in self.grads]

    def row_sizes(self):
        return self.flat.abs().amax(1) if self.flat.numel() else torch.zeros(self.size, dtype=torch.float64)

    def of_sum(self, _):
        return self.total(self.ones())

    def of_mean(self, _):
        return self.mean(self.total(self.ones()))

    def of_clippedsum(self, r):
        return self.total(self.clips(r.max_norm, r.per_param))

    def of_clippedmean(self, r):
        return self.mean(self.total(self.clips(r.max_norm, r.per_param)))

    def of_weightedsum(self, r):
        return self.total([r.weight_fn(self.norms(self.kept))] * len(self.kept))

    def of_norm(self, r):
        sizes = self.row_sizes()
        return [(self.norms([g]), sizes) for g in self.grads] if r.per_param else [(self.norms(self.grads), sizes)]

    def of_gram(self, r):
        other = self.others(r)
        return [(self.flat @ other.T, self.flat.norm(dim=1)[:, None] * other.norm(dim=1))]

    def of_cosinesimilarity(self, r):
        (units, tiny), (others, vague) = self.units(self.flat), self.units(self.others(r))
        return [(units @ others.T, torch.where(tiny[:, None] | vague, torch.inf, 1.0))]

    def others(self, r):
        """The rows that the pairs are with: those of another batch, or the same."""
        if r.other is None:
            return self.flat
        factors = pytree.tree_leaves(r.other, is_leaf=lambda x: isinstance(x, Factor))
        return torch.cat([reals(x.materialize()) for x in factors], 1)

    def units(self, rows):
        """Rows of length 1 or 0, and where rounding decides which."""
        n = rows.norm(dim=1)
        return torch.where(n[:, None] == 0, 0, rows / n[:, None]), n < 1e-9 * max(self.top, 1e-300)

    def of_naturalgradient(self, r):
        blocks, targets = [reals(g) for g in self.kept], self.targets(r)[self.weights != 0]
        groups = [[block] for block in blocks] if r.per_param else [blocks]
        found = [part for group in groups for part in self.preconditioned(group, targets, r)]
        return [(like(x, g[0]), size) for (x, size), g in zip(found, self.kept, strict=True)]

    def targets(self, r):
        if callable(r.targets):
            rows = [pytree.tree_map(lambda x, i=i: x[i], self.aux) for i in range(self.size)]
            return torch.stack([torch.as_tensor(r.targets(row)).double() for row in rows])
        return torch.ones_like(self.weights) if r.targets is None else r.targets.double()

    def preconditioned(self, blocks, v, r):
        """(F + λI)⁻¹ times the mean of vᵢ gᵢ, for the parameters of some blocks."""
        rows, n = torch.cat(blocks, 1), self.w.sum()
        length = rows.norm() * v.norm() + 1e-300
        if r.centered:
            rows, v = (x - torch.tensordot(self.w, x, dims=1) / n for x in (rows, v))
        x, condition = self.solved(rows, (self.w * v) @ rows / n, float(r.damping))
        size = condition * float(x.norm()) + float(length) / float(r.damping)
        return [(part, size) for part in x.split([block.shape[1] for block in blocks])]

    def solved(self, rows, right, damping):
        fisher = (self.w[:, None] * rows).T @ rows / self.w.sum()
        size = float(fisher.norm()) if fisher.numel() else 0.0
        return torch.linalg.solve(
            fisher + damping * torch.eye(len(fisher), dtype=fisher.dtype), right
        ), 1 + size / damping

    def of_leverage(self, r):
        rows = torch.cat([reals(g) for g in self.kept], 1)
        solved, condition = self.solved(rows, self.flat.T, float(r.damping))
        scores = (self.flat * solved.T).sum(1) / self.w.sum()
        return [(scores, condition * self.flat.square().sum(1) / float(r.damping * self.w.sum()))]

    def of_dot(self, r):
        ways = torch.cat([reals(wide(d)[None]) for d in pytree.tree_leaves(r.direction)], 1)[0]
        return [(self.flat @ ways, self.norms(self.grads) * ways.norm())]

    def of_secondmoment(self, _):
        return [(x / self.w.sum(), self.top**2) for x in self.moment(center=False)]

    def of_variance(self, r):
        return [
            (x / (self.w.sum() - r.correction), self.top**2 * float(self.w.sum() / (self.w.sum() - r.correction)))
            for x in self.moment(center=True)
        ]

    def of_noisescale(self, _):
        n = self.w.sum()
        both = [x.real + x.imag if x.is_complex() else x for x in self.moment(center=True)]
        trace = sum(x.sum() for x in both) / (n - 1)
        means = [x for x, _ in self.mean(self.total(self.ones()))]
        squared = sum(x.abs().square().sum() for x in means) - trace / n
        size = self.top**2 * max(self.flat.shape[1], 1) * float(n / (n - 1))
        ratio = abs(float(trace / squared)) * size / max(abs(float(squared)), 1e-300) if squared else torch.inf
        return [
            (trace, size),
            (squared, size),
            (trace / squared, ratio + (size / abs(float(squared)) if squared else 0)),
        ]

    def of_loss(self, _):
        return [(self.losses, self.losses.abs() + 1)]

    def of_aux(self, _):
        return [(wide(x), float(x.abs().max()) + 1 if x.numel() else 1.0) for x in pytree.tree_leaves(self.aux)]


def squash(norm):
    return 1 / (1 + norm)


def magnitude(aux):
    return sum(x.abs().sum() for x in pytree.tree_leaves(aux))


def draw_damping(rng):
    return rng.choice([0.1, 1.0, torch.tensor(0.5)])


def draw_factor(rng, generator, p):
    """The factor of one parameter's gradients in a batch of three."""

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=p.real.dtype)

    if p.ndim == 2 and not p.is_complex() and rng.random() < 0.6:
        terms = rng.choice([1, 2])
        left, right = (randn(3, 1, terms, n) for n in p.shape)
        return Outer(left, right, tuple(p.shape), left.dtype)
    return DenseFactor(randn(3, *p.shape, *[2] * p.is_complex()))


def of_rows(reduction, places):
    """The same reduction for a batch of other rows: targets belong to samples."""
    if isinstance(getattr(reduction, "targets", None), torch.Tensor):
        return replace(reduction, targets=reduction.targets[places])
    return reduction


def draw_reductions(rng, generator, params, size, *, has_aux):
    """One to four reductions, whatever they are."""

    def direction():
        return pytree.tree_map(lambda p: torch.randn(tuple(p.shape), generator=generator, dtype=p.dtype), params)

    def other():
        return rng.choice([None, pytree.tree_map(lambda p: draw_factor(rng, generator, p), params)])

    def natural():
        targets = [None, torch.randn(size, generator=generator, dtype=torch.float64)] + [magnitude] * has_aux
        flags = {"per_param": rng.random() < 0.3, "centered": rng.random() < 0.3}
        return ps.NaturalGradient(draw_damping(rng), rng.choice(targets), **flags)

    makers = [
        *(ps.Stack, ps.Stack, ps.Sum, ps.Mean, ps.Norm, natural, natural),
        *(ps.SecondMoment, ps.Variance, ps.NoiseScale, ps.Loss, lambda: ps.Variance(0)),
        lambda: ps.Norm(per_param=True),
        lambda: ps.ClippedSum(rng.choice([0.0, 0.5, 2.0, float("inf")])),
        lambda: ps.ClippedSum(0.7, per_param=True),
        lambda: ps.ClippedMean(1.0),
        lambda: ps.WeightedSum(squash),
        lambda: ps.Dot(direction()),
        lambda: ps.Gram(other()),
        lambda: ps.CosineSimilarity(other()),
        lambda: ps.Leverage(draw_damping(rng)),
    ]
    makers += [ps.Aux] * has_aux
    return [make() for make in rng.sample(makers, rng.choice([1, 1, 2, 3, 4]))]
