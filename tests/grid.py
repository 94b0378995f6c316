"""The reductions of the grid: how each is made, and what its definition gives of the gradients of a loop."""

from __future__ import annotations

import torch
from oracle import Rows, reals
from workloads import WORKLOADS

import persample as ps
from persample.factors import Dense
from persample.reductions.directions import FisherVectorProduct
from persample.utils.numerics import as_real

ENGINES = {
    "eager": {"engine": "eager"},
    "eager-chunks": {"engine": "eager", "chunk_size": 2},
    "loop": {"engine": "loop"},
    "loop-chunks": {"engine": "loop", "chunk_size": 3},
}
RTOL = {torch.float64: 1e-9, torch.float32: 1e-4}
BOUND = 0.5


def norms(rows: Rows):
    return reals(rows).norm(dim=1)


def scaled_sum(rows: Rows, scale):
    return rows.tree([torch.stack([s * g for s, g in zip(scale, grad, strict=True)]).sum(0) for grad in rows.grads])


def scaled_mean(rows: Rows, scale):
    return scaled_sum(rows, scale / len(scale))


def clip(rows: Rows):
    return torch.tensor([min(1.0, BOUND / n) if n else 1.0 for n in norms(rows).tolist()], dtype=torch.float64)


def clip_each(rows: Rows, divisor):
    own = [clip(Rows([grad], rows.losses, rows.structure)) for grad in rows.grads]
    return rows.tree(
        [
            torch.stack([s * g for s, g in zip(scale, grad, strict=True)]).sum(0) / divisor
            for scale, grad in zip(own, rows.grads, strict=True)
        ]
    )


def bounds_by_name(rows: Rows):
    """Every other parameter has a bound of its own, the others share one."""
    keyed, _ = torch.utils._pytree.tree_flatten_with_path(rows.tree(rows.grads))
    names = [".".join(str(key.key if hasattr(key, "key") else key.idx) for key in path) for path, _ in keyed]
    return dict.fromkeys(names[::2], 0.3) | {"": BOUND} if len(names) > 1 else {"": BOUND}


def clip_by_name(rows: Rows):
    count = len(rows.grads)
    groups = [([i], 0.3) for i in range(0, count, 2)] + [(range(1, count, 2), BOUND)] if count > 1 else [([0], BOUND)]
    totals = [None] * count
    for members, bound in groups:
        part = Rows([rows.grads[i] for i in members], rows.losses, rows.structure)
        scale = [min(1.0, bound / n) if n else 1.0 for n in norms(part).tolist()]
        for i in members:
            totals[i] = torch.stack([s * g for s, g in zip(scale, rows.grads[i], strict=True)]).sum(0)
    return rows.tree(totals)


def elementwise(rows: Rows, fn):
    def one(grad):
        return torch.view_as_complex(fn(torch.view_as_real(grad))) if grad.is_complex() else fn(grad)

    return rows.tree([one(grad) for grad in rows.grads])


def directions(rows: Rows, count):
    generator = torch.Generator().manual_seed(count)
    return rows.tree([torch.randn(count, *g.shape[1:], dtype=g.dtype, generator=generator) for g in rows.grads])


def dots(rows: Rows, count):
    leaves = torch.utils._pytree.tree_leaves(directions(rows, count))
    return reals(rows) @ reals(Rows(leaves, rows.losses, rows.structure)).T


def cosines(rows: Rows):
    unit = torch.stack([g / g.norm() if g.norm() else g for g in reals(rows)])
    return unit @ unit.T


def noise_scale(rows: Rows):
    g = reals(rows)
    trace = g.var(dim=0).sum()
    squared = g.mean(0).square().sum() - trace / len(g)
    return ps.reductions.NoiseScaleEstimate(trace, squared, trace / squared)


def projections(rows: Rows):
    reduction, total = ps.Project(6, seed=1), 0
    for path, grad in zip(ps.utils.trees.paths(rows.tree(rows.grads), "params"), rows.grads, strict=True):
        g = torch.view_as_real(grad) if grad.is_complex() else grad
        g = g.reshape(len(g), grad.shape[1] if grad.ndim > 1 else 1, -1)
        left, right = reduction._signs(path, *g.shape[1:], g.device)
        total = total + torch.stack([((u[:, None] * v) * g).sum((1, 2)) for u, v in zip(left, right, strict=True)], 1)
    return total / 6**0.5


def bases(rows: Rows):
    """Orthogonal matrices for both sides of each parameter; diagonals of complex ones."""
    generator = torch.Generator().manual_seed(0)

    def one(grad):
        if grad.is_complex():
            return torch.ones_like(grad[0])
        sides = grad[0].numel() // max(1, len(grad[0]) if grad.ndim > 1 else 1), len(grad[0]) if grad.ndim > 1 else 1
        made = (torch.randn(n, n, dtype=torch.float64, generator=generator) for n in sides)
        return ps.reductions.KroneckerFactor(*(torch.linalg.qr(x).Q for x in made))

    return rows.tree(list(map(one, rows.grads)))


def eigen_moments(rows: Rows):
    leaves = torch.utils._pytree.tree_structure(rows.tree(rows.grads)).flatten_up_to(bases(rows))
    found = []
    for grad, leaf in zip(rows.grads, leaves, strict=True):
        if grad.is_complex():
            found.append(torch.complex(grad.real.square().mean(0), grad.imag.square().mean(0)))
        else:
            turned = leaf.S.T @ grad.reshape(len(grad), len(leaf.S), len(leaf.A)) @ leaf.A
            found.append(turned.square().mean(0).view(grad.shape[1:]))
    return rows.tree(found)


def sketches(rows: Rows, reduction):
    """U g Vᵀ / rank of each parameter, entry by entry; all entries of a vector are projections of it."""
    found = []
    for path, grad in zip(ps.utils.trees.paths(rows.tree(rows.grads), "params"), rows.grads, strict=True):
        g = torch.view_as_real(grad) if grad.is_complex() else grad
        g = g.reshape(len(g), grad.shape[1] if grad.ndim > 1 else 1, -1)
        left, right = reduction._signs(path, *g.shape[1:], g.device)
        entries = [((u[:, None] * v) * g).sum((1, 2)) for u in left for v in right]
        assert len(entries) == reduction.rank**2
        found.append(torch.stack(entries, 1) / reduction.rank)
    return rows.tree(found) if reduction.per_param else sum(found)


def cast(tree, dtype):
    return torch.utils._pytree.tree_map(lambda x: x.to(dtype.to_complex() if x.is_complex() else dtype), tree)


def damping(rows: Rows):
    """The λ for which F + λI, and every diagonal block of F with it, has a condition number of at most 101."""
    g = reals(rows)
    return float(torch.linalg.eigvalsh(g @ g.T / len(g))[-1] / 100)


def fisher(rows: Rows, *, centered=False):
    g = reals(rows)
    return torch.cov(g.T, correction=0).reshape(g.shape[1], -1) if centered else g.T @ g / len(g)


def targets(rows: Rows):
    return torch.linspace(-1, 2, len(rows.losses), dtype=torch.float64)


def like_params(rows: Rows, flat):
    """A tree like the parameters from one vector of reals."""
    sizes = [g[0].numel() * (2 if g.is_complex() else 1) for g in rows.grads]
    pairs = zip(flat.split(sizes), rows.grads, strict=True)
    return rows.tree(
        [torch.view_as_complex(x.view(*g.shape[1:], 2)) if g.is_complex() else x.view(g.shape[1:]) for x, g in pairs]
    )


def natural(rows: Rows, v, *, strength=None, centered=False, kept=0.0):
    """A dense solve in the space of parameters: the minimum of (1/n) Σ (⟨gᵢ, u⟩ − vᵢ)² + λ ‖u − kept‖²."""
    matrix, weights = fisher(rows, centered=centered), v - v.mean() if centered else v
    strength = damping(rows) if strength is None else strength
    right = reals(rows).T @ weights / len(v) + strength * kept
    return like_params(rows, torch.linalg.solve(matrix + strength * torch.eye(len(matrix), dtype=matrix.dtype), right))


def natural_per_param(rows: Rows):
    each = [Rows([g], rows.losses, torch.utils._pytree.tree_structure(0)) for g in rows.grads]
    return rows.tree([natural(one, torch.ones_like(one.losses), strength=damping(rows)) for one in each])


def one_direction(rows: Rows, dtype):
    return cast(torch.utils._pytree.tree_map(lambda x: x[0], directions(rows, 1)), dtype)


def spring(rows: Rows):
    """Of a previous result, 0.9 of it."""
    kept = [0.9 * x for x in torch.utils._pytree.tree_leaves(directions(rows, 1))]
    return natural(rows, targets(rows), kept=reals(Rows(kept, rows.losses, rows.structure))[0])


def leverage(rows: Rows):
    g, matrix = reals(rows), fisher(rows)
    solved = torch.linalg.solve(matrix + damping(rows) * torch.eye(len(matrix), dtype=matrix.dtype), g.T)
    return (g.T * solved).sum(0) / len(g)


def fisher_times(rows: Rows, count):
    products = dots(rows, count)
    totals = [like_params(rows, reals(rows).T @ column / len(column)) for column in products.T]
    return torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *totals)


def others(rows: Rows, dtype):
    """The gradients of two samples, as factors."""
    return rows.tree([Dense(as_real(g[1:3]).to(dtype)) for g in rows.grads])


ones = torch.ones_like
# name: (from (rows, dtype) to the reduction, from rows to what the definition gives)
REDUCTIONS = {
    "none": (lambda r, d: None, lambda r: r.tree(r.grads)),
    "Stack": (lambda r, d: ps.Stack(), lambda r: r.tree(r.grads)),
    "Sum": (lambda r, d: ps.Sum(), lambda r: scaled_sum(r, ones(r.losses))),
    "Mean": (lambda r, d: ps.Mean(), lambda r: scaled_mean(r, ones(r.losses))),
    "Norm": (lambda r, d: ps.Norm(), norms),
    "Norm-per_param": (
        lambda r, d: ps.Norm(per_param=True),
        lambda r: r.tree([norms(Rows([g], r.losses, r.structure)) for g in r.grads]),
    ),
    "ClippedSum": (lambda r, d: ps.ClippedSum(BOUND), lambda r: scaled_sum(r, clip(r))),
    "ClippedSum-per_param": (lambda r, d: ps.ClippedSum(BOUND, per_param=True), lambda r: clip_each(r, 1)),
    "ClippedSum-by-name": (lambda r, d: ps.ClippedSum(bounds_by_name(r)), clip_by_name),
    "ClippedMean": (lambda r, d: ps.ClippedMean(BOUND), lambda r: scaled_mean(r, clip(r))),
    "ClippedMean-per_param": (
        lambda r, d: ps.ClippedMean(BOUND, per_param=True),
        lambda r: clip_each(r, len(r.losses)),
    ),
    "WeightedSum": (
        lambda r, d: ps.WeightedSum(lambda norm: torch.exp(-norm)),
        lambda r: scaled_sum(r, torch.exp(-norms(r))),
    ),
    "Gram": (lambda r, d: ps.Gram(), lambda r: reals(r) @ reals(r).T),
    "Gram-own": (lambda r, d: ps.Gram(rows="own"), lambda r: reals(r).square().sum(1)),
    "Gram-other": (lambda r, d: ps.Gram(others(r, d)), lambda r: reals(r) @ reals(r)[1:3].T),
    "CosineSimilarity": (lambda r, d: ps.CosineSimilarity(), cosines),
    "CosineSimilarity-other": (lambda r, d: ps.CosineSimilarity(others(r, d)), lambda r: cosines(r)[:, 1:3]),
    "Dot": (
        lambda r, d: ps.Dot(one_direction(r, d)),
        lambda r: dots(r, 1).squeeze(1),
    ),
    "Dot-stacked": (lambda r, d: ps.Dot(cast(directions(r, 3), d), stacked=True), lambda r: dots(r, 3)),
    "SecondMoment": (lambda r, d: ps.SecondMoment(), lambda r: elementwise(r, lambda g: g.square().mean(0))),
    "EigenMoment": (lambda r, d: ps.EigenMoment(bases(r)), eigen_moments),
    "Variance": (lambda r, d: ps.Variance(), lambda r: elementwise(r, lambda g: g.var(dim=0))),
    "Variance-plain": (
        lambda r, d: ps.Variance(correction=0),
        lambda r: elementwise(r, lambda g: g.var(dim=0, correction=0)),
    ),
    "Variance-total": (lambda r, d: ps.Variance(total=True), lambda r: reals(r).var(dim=0).sum()),
    "NoiseScale": (lambda r, d: ps.NoiseScale(), noise_scale),
    "NaturalGradient": (lambda r, d: ps.NaturalGradient(damping(r)), lambda r: natural(r, ones(r.losses))),
    "NaturalGradient-targets": (
        lambda r, d: ps.NaturalGradient(damping(r), targets(r).to(d)),
        lambda r: natural(r, targets(r)),
    ),
    "NaturalGradient-centered": (
        lambda r, d: ps.NaturalGradient(damping(r), targets(r).to(d), centered=True),
        lambda r: natural(r, targets(r), centered=True),
    ),
    "NaturalGradient-per_param": (lambda r, d: ps.NaturalGradient(damping(r), per_param=True), natural_per_param),
    "NaturalGradient-qr": (
        lambda r, d: ps.NaturalGradient(damping(r), targets(r).to(d), solver="qr"),
        lambda r: natural(r, targets(r)),
    ),
    "NaturalGradient-previous": (
        lambda r, d: ps.NaturalGradient(damping(r), targets(r).to(d), previous=one_direction(r, d), momentum=0.9),
        spring,
    ),
    "Leverage": (lambda r, d: ps.Leverage(damping(r)), leverage),
    "FisherVectorProduct": (
        lambda r, d: FisherVectorProduct(one_direction(r, d)),
        lambda r: torch.utils._pytree.tree_map(lambda x: x[0], fisher_times(r, 1)),
    ),
    "FisherVectorProduct-stacked": (
        lambda r, d: FisherVectorProduct(cast(directions(r, 3), d)),
        lambda r: fisher_times(r, 3),
    ),
    "Project": (lambda r, d: ps.Project(6, seed=1), projections),
    "Sketch": (lambda r, d: ps.Sketch(3, seed=1), lambda r: sketches(r, ps.Sketch(3, seed=1))),
    "Sketch-total": (
        lambda r, d: ps.Sketch(3, seed=1, per_param=False),
        lambda r: sketches(r, ps.Sketch(3, seed=1, per_param=False)),
    ),
    "Loss": (lambda r, d: ps.Loss(), lambda r: r.losses),
}


def part(workload: str, parts: int):
    """Return one of the parts of the reductions, another for the next model: a program of all takes long to capture."""
    return [*REDUCTIONS][[*WORKLOADS].index(workload) % parts :: parts]
