"""What every reduction is, in plain arithmetic on rows of gradients, which torch differentiates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import grad_and_value, vmap

import persample as ps
from persample.reductions import NoiseScaleEstimate
from persample.reductions.directions import FisherVectorProduct

D = torch.float64
NAMES = ("a", "b")  # the parameters


def inputs() -> dict[str, torch.Tensor]:
    """All that a call may depend on; everything is differentiated at once. One of the samples has a weight of 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 2), "b": (3,), "x": (4, 2), "other": (2, 2), "da": (3, 2), "db": (3,)}
    z = {name: torch.randn(*shape, dtype=D, generator=generator) for name, shape in shapes.items()}
    return {
        **z,
        "weights": torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=D),
        "positive": torch.tensor(0.4, dtype=D),
        "closed": torch.tensor(0.7, dtype=D),
    }


def params(z):
    return {name: z[name] for name in NAMES}


def direction(z):
    return {name: z[f"d{name}"] for name in NAMES}


def loss_of(z):
    def loss(p, x):
        y = torch.tanh(z["closed"] * p["a"] @ x)
        return (y * p["b"].cos()).square().sum() + (p["b"] * y).sum(), {"t": y.sum() * p["b"].sin().sum()}

    return loss


@dataclass(frozen=True)
class Rows:
    """Gradients ``[B, *shape]`` by name, losses and aux."""

    grads: dict[str, torch.Tensor]
    losses: torch.Tensor
    aux: Any

    @property
    def flat(self):
        return torch.cat([g.flatten(1) for g in self.grads.values()], 1)


def by_vmap(z, x="x") -> Rows:
    grads, (losses, aux) = vmap(grad_and_value(loss_of(z), has_aux=True), in_dims=(None, 0))(params(z), z[x])
    return Rows(grads, losses, aux)


def by_loop(z, x="x") -> Rows:
    """The naive loop, with a graph."""
    rows = []
    for sample in z[x]:
        value, aux = loss_of(z)(params(z), sample)
        grads = torch.autograd.grad(value, [z[name] for name in NAMES], create_graph=True)
        rows.append((dict(zip(NAMES, grads, strict=True)), value, aux))
    grads, losses, auxes = zip(*rows, strict=True)
    stacked = {name: torch.stack([row[name] for row in grads]) for name in NAMES}
    return Rows(stacked, torch.stack(losses), {"t": torch.stack([aux["t"] for aux in auxes])})


def scaled(r, scales):
    return {name: torch.tensordot(s, r.grads[name], 1) for name, s in zip(NAMES, scales, strict=True)}


def clips(z, *norms):
    return [z["weights"] * (z["positive"] / n).clamp(max=1) for n in norms]


def mean(z, sums):
    return {name: x / z["weights"].sum() for name, x in sums.items()}


def variance(r, z, correction):
    w, n = z["weights"], z["weights"].sum()
    out = {}
    for name, g in r.grads.items():
        off = g - torch.tensordot(w, g, 1) / n
        out[name] = torch.tensordot(w, off**2, 1) / (n - correction)
    return out


def noise_scale(r, z):
    n = z["weights"].sum()
    trace = sum(x.sum() for x in variance(r, z, 1).values())
    squared = (z["weights"] @ r.flat / n).square().sum() - trace / n
    return NoiseScaleEstimate(trace, squared, trace / squared)


def fisher(g, w):
    return g.T @ (w[:, None] * g) / w.sum()


def natural(r, z, targets, *, centered=False, damping=None, kept=0.0):
    g, w, n = r.flat, z["weights"], z["weights"].sum()
    if centered:
        g, targets = g - w @ g / n, targets - w @ targets / n
    strength = z["positive"] if damping is None else damping
    damped = fisher(g, w) + strength * torch.eye(g.shape[1], dtype=D)
    u = torch.linalg.solve(damped, g.T @ (w * targets) / n + strength * kept)
    return like_params(u)


def kept(z):
    return z["closed"] * torch.cat([z["da"].flatten(), z["db"]])


def like_params(u):
    return {"a": u[:6].view(3, 2), "b": u[6:]}


def leverage(r, z):
    damped = fisher(r.flat, z["weights"]) + z["positive"] * torch.eye(9, dtype=D)
    return (r.flat * torch.linalg.solve(damped, r.flat.T).T).sum(1) / z["weights"].sum()


def cosines(g, h):
    return (g / g.norm(dim=1, keepdim=True)) @ (h / h.norm(dim=1, keepdim=True)).T


def projections(r):
    reduction, total = ps.Project(5, seed=1), 0
    for name, g in r.grads.items():
        left, right = reduction._signs(f"params['{name}']", 3, g[0].numel() // 3, g.device)
        total = total + torch.einsum("ko,boi,ki->bk", left.to(D), g.reshape(len(g), 3, -1), right.to(D))
    return total / 5**0.5


def sketches(r):
    reduction, found = ps.Sketch(2, seed=1), {}
    for name, g in r.grads.items():
        left, right = reduction._signs(f"params['{name}']", 3, g[0].numel() // 3, g.device)
        found[name] = (left.to(D) @ g.reshape(len(g), 3, -1) @ right.to(D).mT).flatten(1) / 2
    return found


def factored(z, **options):
    return ps.per_sample_grads(loss_of(z), params(z), z["other"], ps.Factored(), **options)


def norms(r):
    return r.flat.norm(dim=1)


def norm_of_each(r):
    return {name: g.flatten(1).norm(dim=1) for name, g in r.grads.items()}


ONES = torch.ones(4, dtype=D)
# The reduction, made from the inputs, and the same from rows; ``other`` computes the rows of a second batch.
REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "Stack()": (lambda z: ps.Stack(), lambda r, z, rows: r.grads),
    "Sum()": (lambda z: ps.Sum(), lambda r, z, rows: scaled(r, [z["weights"]] * 2)),
    "Mean()": (lambda z: ps.Mean(), lambda r, z, rows: mean(z, scaled(r, [z["weights"]] * 2))),
    "Norm()": (lambda z: ps.Norm(), lambda r, z, rows: norms(r)),
    "Norm(per_param=True)": (lambda z: ps.Norm(per_param=True), lambda r, z, rows: norm_of_each(r)),
    "ClippedSum(C)": (
        lambda z: ps.ClippedSum(z["positive"]),
        lambda r, z, rows: scaled(r, clips(z, norms(r)) * 2),
    ),
    "ClippedMean(C)": (
        lambda z: ps.ClippedMean(z["positive"]),
        lambda r, z, rows: mean(z, scaled(r, clips(z, norms(r)) * 2)),
    ),
    "ClippedMean(C, per_param=True)": (
        lambda z: ps.ClippedMean(z["positive"], per_param=True),
        lambda r, z, rows: mean(z, scaled(r, clips(z, *norm_of_each(r).values()))),
    ),
    "WeightedSum(f)": (
        lambda z: ps.WeightedSum(lambda norm: 1 / (z["positive"] + norm)),
        lambda r, z, rows: scaled(r, [z["weights"] / (z["positive"] + norms(r))] * 2),
    ),
    "Gram()": (lambda z: ps.Gram(), lambda r, z, rows: r.flat @ r.flat.T),
    "Gram(other)": (
        lambda z, **options: ps.Gram(factored(z, **options)),
        lambda r, z, rows: r.flat @ rows(z, "other").flat.T,
    ),
    "CosineSimilarity()": (lambda z: ps.CosineSimilarity(), lambda r, z, rows: cosines(r.flat, r.flat)),
    "CosineSimilarity(other)": (
        lambda z, **options: ps.CosineSimilarity(factored(z, **options)),
        lambda r, z, rows: cosines(r.flat, rows(z, "other").flat),
    ),
    "Dot(d)": (
        lambda z: ps.Dot(direction(z)),
        lambda r, z, rows: sum((g * z[f"d{name}"]).flatten(1).sum(1) for name, g in r.grads.items()),
    ),
    "Dot(d, stacked=True)": (
        lambda z: ps.Dot({name: torch.stack([d, d.sin()]) for name, d in direction(z).items()}, stacked=True),
        lambda r, z, rows: sum(
            torch.stack([(g * d).flatten(1).sum(1) for d in (z[f"d{name}"], z[f"d{name}"].sin())], 1)
            for name, g in r.grads.items()
        ),
    ),
    "Project(dim, seed)": (lambda z: ps.Project(5, seed=1), lambda r, z, rows: projections(r)),
    "Sketch(rank, seed)": (lambda z: ps.Sketch(2, seed=1), lambda r, z, rows: sketches(r)),
    "SecondMoment()": (
        lambda z: ps.SecondMoment(),
        lambda r, z, rows: {
            name: torch.tensordot(z["weights"], g**2, 1) / z["weights"].sum() for name, g in r.grads.items()
        },
    ),
    "Variance()": (lambda z: ps.Variance(), lambda r, z, rows: variance(r, z, 1)),
    "NoiseScale()": (lambda z: ps.NoiseScale(), lambda r, z, rows: noise_scale(r, z)),
    "NaturalGradient(λ)": (lambda z: ps.NaturalGradient(z["positive"]), lambda r, z, rows: natural(r, z, ONES)),
    "NaturalGradient(λ, targets)": (
        lambda z: ps.NaturalGradient(z["positive"], targets=lambda aux: aux["t"]),
        lambda r, z, rows: natural(r, z, r.aux["t"]),
    ),
    "NaturalGradient(λ, centered=True)": (
        lambda z: ps.NaturalGradient(z["positive"], targets=z["x"][:, 0], centered=True),
        lambda r, z, rows: natural(r, z, z["x"][:, 0], centered=True),
    ),
    "NaturalGradient(λ, previous, momentum)": (
        lambda z: ps.NaturalGradient(z["positive"], previous=direction(z), momentum=z["closed"]),
        lambda r, z, rows: natural(r, z, ONES, kept=kept(z)),
    ),
    "Leverage(λ)": (lambda z: ps.Leverage(z["positive"]), lambda r, z, rows: leverage(r, z)),
    "fisher_vector_product": (
        lambda z: FisherVectorProduct(direction(z)),
        lambda r, z, rows: like_params(fisher(r.flat, z["weights"]) @ torch.cat([z["da"].flatten(), z["db"]])),
    ),
    "Loss()": (lambda z: ps.Loss(), lambda r, z, rows: r.losses),
    "Aux()": (lambda z: ps.Aux(), lambda r, z, rows: r.aux),
    "Factored()": (lambda z: ps.Factored(), lambda r, z, rows: r.grads),
}
