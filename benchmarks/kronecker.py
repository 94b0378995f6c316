"""The time of Kronecker factors and of EKFAC's second pass, in units of one batch gradient, beside their floors.

Run as ``python -m benchmarks.kronecker [eager|traced|compiled]``. Times are CPU seconds of one thread, medians of
alternating calls, and of these the medians over three processes. The floor of factors is the forward pass, the backward
pass without gradients of weights, and the products LᵀL and RᵀR of signals and inputs; that of the second pass has the
rotations and the products of squares in their place, of layers applied once to a sample. curvlinops has one batch, and
no checks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.alternating import medians, medians_of_processes
from benchmarks.models import mlp
from persample import EigenMoment, KroneckerFactors, eigenbases, per_sample_grads

SECONDS = 6
SIZES = {"MLP 64": (64, 0), "MLP 256": (256, 0), "MLP 512": (512, 0), "MLP 128, 16 tokens": (128, 16)}  # and tokens
CELLS = [
    *((name, kind) for name in SIZES for kind in ("expand", "EKFAC") if kind == "expand" or not SIZES[name][1]),
    ("MLP 128, 16 tokens", "reduce"),
]
COLUMNS = ("floor", "persample", "curvlinops")


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of one sample: the mean of its logits over tokens is that of a label."""
    logits = model(x)
    return F.cross_entropy(logits if logits.ndim == 1 else logits.mean(0), y)


def floor(model: nn.Module, x: Tensor, y: Tensor, products: Callable[[int, Tensor, Tensor], Any]) -> Any:
    """Compute the products of the inputs and signals of each layer, by plain autograd."""
    inputs, outputs, values = [], [], x
    for layer in model.children():
        if not isinstance(layer, nn.Linear):
            values = layer(values)
            continue
        inputs.append(values.detach())
        values = F.linear(values, layer.weight.detach(), layer.bias.detach())
        values = values if outputs else values.requires_grad_()
        outputs.append(values)
    total = F.cross_entropy(pooled(values), y, reduction="sum")
    return [*map(products, range(len(inputs)), inputs, torch.autograd.grad(total, outputs))]


def pooled(logits: Tensor) -> Tensor:
    """Return the mean over tokens of a batch of logits, if there are any."""
    return logits if logits.ndim == 2 else logits.mean(1)


class Pooled(nn.Sequential):
    """A model and the mean over its tokens, as curvlinops takes it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return pooled(super().forward(x))


def ratios(name: str, kind: str, engine: Any) -> list[float]:
    """Return the times of the floor, of persample and of curvlinops, over that of a batch gradient."""
    from curvlinops import KFACLinearOperator

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, tokens = SIZES[name]
    model = mlp(width, width, width, 10)
    x, y = torch.randn(300, *([tokens] if tokens else []), width), torch.randint(10, (300,))
    params, reduction = list(model.parameters()), KroneckerFactors("reduce" if kind == "reduce" else "expand")
    if kind == "EKFAC":
        every = eigenbases(per_sample_grads(loss, model, (x, y), reduction))
        reduction, bases = EigenMoment(every), [basis for path, basis in every.items() if path.endswith("weight")]

    def products(place: int, inputs: Tensor, signals: Tensor) -> Any:
        if kind == "EKFAC":
            return (signals @ bases[place].S).square_().T @ (inputs @ bases[place].A).square_()
        if kind == "reduce" and tokens:
            inputs, signals = inputs.sum(1), signals.sum(1)
        left, right = signals.flatten(0, -2), inputs.flatten(0, -2)
        return left.T @ left, right.T @ right

    def of_curvlinops() -> None:
        theirs._input_covariances, theirs._gradient_covariances = {}, {}
        theirs.compute_kronecker_factors()

    calls: dict[str, Callable[[], Any]] = {
        "batch": lambda: torch.autograd.grad(F.cross_entropy(pooled(model(x)), y), params),
        "floor": lambda: floor(model, x, y, products),
        "persample": lambda: per_sample_grads(loss, model, (x, y), reduction, engine=engine),
    }
    if kind != "EKFAC":
        options = {"fisher_type": "empirical", "kfac_approx": kind, "num_data": 300, "num_per_example_loss_terms": 1}
        theirs = KFACLinearOperator(Pooled(*model), nn.CrossEntropyLoss(), params, [(x, y)], **options)
        calls["curvlinops"] = of_curvlinops
    times = medians(calls, SECONDS)
    return [times[column] / times["batch"] if column in times else math.nan for column in COLUMNS]


def main(engine: Any = "eager") -> None:
    """Measure, and print a table in Markdown."""
    lines = [f"| {engine}, B = 300 | {' | '.join(COLUMNS)} | over the floor |", f"| --- |{' ---: |' * 4}"]
    for cell, found in zip(CELLS, medians_of_processes(ratios, [(*cell, engine) for cell in CELLS]), strict=True):
        numbers = [f"{x:.2f}" if math.isfinite(x) else "" for x in (*found, found[1] / found[0])]
        lines.append(f"| {cell[0]}, {cell[1]} | {' | '.join(numbers)} |")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
