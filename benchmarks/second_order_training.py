"""Second-order training beside Adam at equal CPU time: an autoencoder by K-FAC, Poisson's equation by SPRING.

Run as ``python -m benchmarks.second_order_training`` (seven minutes of one core), which writes
results/training/second_order.json; ``… figure`` draws docs/second-order-training.png from it. Each method tries eight
SETTINGS on a seed of their own, and trains five others with the best. Learning rates fall linearly to 0 over the time.
Everything counts but drawing the curves; Adam is plain torch, and so are the mean gradients that K-FAC solves for.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.machine import environment
from persample import Curvature, KroneckerFactors, NaturalGradient, accumulate, per_sample_grads
from persample.losses import sampled_nll
from persample.utils.trees import tree_map

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/training/second_order.json"
SECONDS, POINTS = 8.0, 16
ADAM = {"rate": (0.004, 0.008, 0.016, 0.032)}
SETTINGS = {
    ("autoencoder", "Adam"): ADAM | {"size": (256, 512)},
    ("autoencoder", "K-FAC"): {"rate": (0.1, 0.3), "damping": (0.01, 0.03), "size": (256, 512)},
    ("Poisson", "Adam"): ADAM | {"size": (128, 256)},
    ("Poisson", "SPRING"): {"rate": (0.1, 0.3), "damping": (1e-3, 1e-5), "momentum": (0.3, 0.8)},
}


def initial(sizes, dtype):
    layers = enumerate(itertools.pairwise(sizes))
    shapes = {f"{n}.{kind}": shape for n, (i, o) in layers for kind, shape in (("weight", (o, i)), ("bias", (o,)))}
    return {name: torch.randn(s, dtype=dtype) / s[-1] ** 0.5 * (len(s) == 2) for name, s in shapes.items()}


def network(p, x):
    for n in range(layers := len(p) // 2):
        x = F.linear(x, p[f"{n}.weight"], p[f"{n}.bias"])
        x = x.tanh() if n + 1 < layers else x
    return x


def laplacian(p, x):
    """In one forward pass, with rows for the value, the five derivatives, and their second ones, summed."""
    value, slopes, second = x[..., None, :], torch.eye(5, dtype=x.dtype).expand(*x.shape, 5), 0 * x[..., None, :]
    for n in range(layers := len(p) // 2):
        rows = F.linear(torch.cat([value, slopes, second], -2), p[f"{n}.weight"])
        value, slopes, second = rows.split([1, 5, 1], -2)
        if n + 1 < layers:
            value = (value + p[f"{n}.bias"]).tanh()
            second = (1 - value**2) * (second - 2 * value * (slopes**2).sum(-2, keepdim=True))
            slopes = (1 - value**2) * slopes
    return second[..., 0, 0]


def exact(x):
    return (math.pi * x).cos().sum(-1)


def inside(p, x):  # the output, and its residual
    error = laplacian(p, x) + math.pi**2 * exact(x)
    return error, error


def boundary(p, x):
    error = network(p, x)[..., 0] - exact(x)
    return error, error


class Poisson:
    """Δu = f in [0, 1]⁵ with u on its faces, by an MLP 5-32-32-1 in float64; the error of u, relative to its norm."""

    def __init__(self, size=256):
        self.params, self.size = initial((5, 32, 32, 1), torch.float64), size
        self.test = torch.rand(2000, 5, dtype=torch.float64)

    def draw(self):
        faces = self.size // 4
        x, y = torch.rand(self.size + faces, 5, dtype=torch.float64).split([self.size, faces])
        y[torch.arange(faces), torch.randint(5, (faces,))] = torch.randint(2, (faces,)).double()
        return {"inside": x, "boundary": y}

    def loss(self, batch):
        parts = inside(self.params, batch["inside"])[0], boundary(self.params, batch["boundary"])[0]
        return sum(part.square().mean() for part in parts) / 2

    def error(self):
        return (boundary(self.params, self.test)[0].norm() / exact(self.test).norm()).item()

    def second_order(self, rate, damping, momentum):
        losses, update = {"inside": inside, "boundary": boundary}, None

        def step(left):
            nonlocal update
            spring = NaturalGradient(damping, lambda aux: aux, previous=update, momentum=momentum)
            update = accumulate(losses, self.params, [self.draw()], spring)
            length = math.sqrt(sum(x.square().sum() for x in update.values()))
            with torch.no_grad():
                for name, p in self.params.items():
                    p.sub_(update[name], alpha=rate * left * min(1.0, 1 / length))

        return step


def reconstruction(p, x, noise):
    return sampled_nll(network(p, x), noise, "gaussian").sum()


class Autoencoder:
    """64-64-32-8-32-64-64 on 1,500 digits, in batches; the mean squared error of all of them."""

    def __init__(self, size):
        from sklearn.datasets import load_digits

        self.params, self.size = initial((64, 64, 32, 8, 32, 64, 64), torch.float32), size
        self.x = torch.tensor(load_digits().data[:1500] / 16, dtype=torch.float32)

    def draw(self):
        return self.x[torch.randint(len(self.x), (self.size,))]

    def loss(self, x):
        return (network(self.params, x) - x).square().sum(-1).mean() / 2

    def error(self):
        return (network(self.params, self.x) - self.x).square().mean().item()

    def second_order(self, rate, damping, size):
        """Fisher factors of labels of the model, every ten steps; momentum; a bound of 0.1 on uᵀFu."""
        names, factors, curvature, steps = list(self.params), None, None, itertools.count()
        velocity = {name: torch.zeros_like(p) for name, p in self.params.items()}

        def step(left):
            nonlocal factors, curvature
            x = self.draw()
            if next(steps) % 10 == 0:
                new = per_sample_grads(reconstruction, self.params, (x, torch.randn_like(x)), KroneckerFactors())
                factors = new if factors is None else tree_map(lambda a, b: 0.8 * a + 0.2 * b, factors, new)
                curvature = Curvature(factors)
            grads = dict(zip(names, torch.autograd.grad(self.loss(x), list(self.params.values())), strict=True))
            update = curvature.solve(grads, damping)
            scale = min(1.0, 0.3 / math.sqrt(sum((update[name] * grads[name]).sum() for name in names)))
            with torch.no_grad():
                for name, p in self.params.items():
                    p.sub_(velocity[name].mul_(0.9).add_(update[name], alpha=scale), alpha=rate * left)

        return step


def adam(task, rate, **_):
    optimizer = torch.optim.Adam(task.params.values(), rate, fused=True)

    def step(left):
        optimizer.param_groups[0]["lr"] = rate * left
        optimizer.zero_grad()
        task.loss(task.draw()).backward()
        optimizer.step()

    return step


def train(problem, method, setting, seed):
    torch.manual_seed(seed)
    task = {"autoencoder": Autoencoder, "Poisson": Poisson}[problem](
        **{k: v for k, v in setting.items() if k == "size"}
    )
    for p in task.params.values():
        p.requires_grad_()
    step = adam(task, **setting) if method == "Adam" else task.second_order(**setting)
    curve, used, steps = [task.error()], 0.0, 0
    for mark in range(1, POINTS + 1):
        while used < mark / POINTS * SECONDS:
            start, steps = time.process_time(), steps + 1
            step(max(0.0, 1 - used / SECONDS))
            used += time.process_time() - start
        curve.append(float(f"{task.error():.4g}"))
    return {"problem": problem, "method": method, **setting, "seed": seed, "steps": steps, "error": curve}


def measure():
    tried, best = [], {}
    for cell, choices in SETTINGS.items():
        settings = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
        runs = [train(*cell, setting, 100) for setting in settings]
        best[cell] = min(zip(runs, settings, strict=True), key=lambda pair: pair[0]["error"][-1])[1]
        tried += [run | {"error": run["error"][-1]} for run in runs]
    runs = [train(*cell, setting, seed) for seed in range(5) for cell, setting in best.items()]
    found = {"environment": environment(), "seconds": SECONDS, "tried": tried, "runs": runs}
    RESULTS.write_text(json.dumps(found).replace('{"problem"', '\n{"problem"') + "\n", encoding="utf-8")


def figure():
    from matplotlib.figure import Figure

    found, picture = json.loads(RESULTS.read_text(encoding="utf-8")), Figure(figsize=(8, 3), layout="constrained")
    names = {"autoencoder": "mean squared error", "Poisson": "relative error of u"}
    for axes, (problem, label) in zip(picture.subplots(1, 2), names.items(), strict=True):
        for run in (run for run in found["runs"] if run["problem"] == problem):
            color = "tab:blue" if run["method"] == "Adam" else "tab:orange"
            seconds = [n * found["seconds"] / POINTS for n in range(POINTS + 1)]
            axes.plot(seconds, run["error"], color=color, lw=1.2, label=run["method"] if run["seed"] == 0 else None)
        axes.set(yscale="log", xlabel="CPU seconds", ylabel=label, title=problem)
        axes.legend(frameon=False)
    picture.savefig(ROOT / "docs/second-order-training.png", dpi=130)


if __name__ == "__main__":
    torch.set_num_threads(1)
    figure() if "figure" in sys.argv else measure()
