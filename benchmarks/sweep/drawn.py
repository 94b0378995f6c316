"""The workloads of the sweep: every one is a classification, of the sample or of each of its steps."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.sweep.draws import ONE_STEP, Draw
from benchmarks.sweep.networks import CHANNELS, CLASSES, HEADS, SCALE, VOCABULARY, network, residual
from benchmarks.workload import Workload


def build(draw: Draw) -> Workload:
    """Build a workload from torch's random numbers."""
    sizes = {**asdict(draw), "heads": HEADS, **({"scale": SCALE} if draw.kind == "LoRA" else {})}
    functional = _functional if draw.kind == "functional" else None
    return Workload(f"drawn {draw.kind}", sizes, network(draw), _loss, _batch_loss, _batch(draw), functional=functional)


def _loss(model, *sample: Tensor) -> Tensor:
    *inputs, y = sample
    return F.cross_entropy(model(*inputs), y)


def _batch_loss(model, *batch: Tensor) -> Tensor:
    *inputs, y = batch
    return F.cross_entropy(model(*inputs).flatten(0, -2), y.flatten())


def _functional(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(residual(params, x), y)


def _batch(draw: Draw) -> tuple[Tensor, ...]:
    count, steps = draw.batch_size, draw.steps
    if draw.kind in ("transformer", "LoRA"):
        tokens = torch.randint(VOCABULARY, (count, steps + 1))
        return tokens[:, :-1], tokens[:, 1:]
    if draw.kind == "CNN":
        side = math.isqrt(steps)
        return torch.rand(count, CHANNELS, side, side), torch.randint(CLASSES, (count,))
    each = (count,) if draw.kind in ONE_STEP and steps == 1 else (count, steps)
    x, y = torch.randn(*each, draw.width), torch.randint(CLASSES, each)
    if draw.kind == "graph network":
        return x, torch.softmax(torch.randn(count, steps, steps), -1), y
    return x, y
