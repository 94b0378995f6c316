"""Per-sample gradients of any PyTorch loss, reduced any way you like.

>>> import torch
>>> from persample import Mean, per_sample_grads
>>> per_sample_grads(lambda w, x, y: (w @ x - y) ** 2, torch.zeros(2), (torch.eye(2), torch.ones(2)), Mean())
tensor([-1., -1.])
"""

from persample import losses, naive
from persample.composite import composite_grads
from persample.engines import clear_cache
from persample.errors import ArgumentError, LossError
from persample.explain import explain
from persample.inputs.modules import set_grads
from persample.per_sample import per_sample_grads
from persample.reductions import (
    Aux,
    ClippedMean,
    ClippedSum,
    CosineSimilarity,
    Dot,
    Factored,
    Gram,
    Loss,
    Mean,
    NoiseScale,
    Norm,
    Project,
    SecondMoment,
    Stack,
    Sum,
    Variance,
    WeightedSum,
)
from persample.utils.trees import stop_gradient

__all__ = [
    "ArgumentError",
    "Aux",
    "ClippedMean",
    "ClippedSum",
    "CosineSimilarity",
    "Dot",
    "Factored",
    "Gram",
    "Loss",
    "LossError",
    "Mean",
    "NoiseScale",
    "Norm",
    "Project",
    "SecondMoment",
    "Stack",
    "Sum",
    "Variance",
    "WeightedSum",
    "clear_cache",
    "composite_grads",
    "explain",
    "losses",
    "naive",
    "per_sample_grads",
    "set_grads",
    "stop_gradient",
]
