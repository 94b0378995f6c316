"""Per-sample gradients of any PyTorch loss, reduced any way you like.

>>> import torch
>>> from persample import Mean, per_sample_grads
>>> per_sample_grads(lambda w, x, y: (w @ x - y) ** 2, torch.zeros(2), (torch.eye(2), torch.ones(2)), Mean())
tensor([-1., -1.])
"""

from persample import clipping, losses, naive
from persample.checkup import check
from persample.composite import composite_grads
from persample.curvature import Curvature, eigenbases, fisher_vector_product
from persample.engines.compiled import clear_cache
from persample.errors import (
    ArgumentError,
    BatchStatisticsWarning,
    CompileLimitWarning,
    CompilerWarning,
    ConditionWarning,
    FallbackWarning,
    LossError,
    PersampleWarning,
    RecompilationWarning,
    SinkError,
    TorchVersionWarning,
    WrapperWarning,
)
from persample.explanation import explain
from persample.inputs.params import set_grads
from persample.per_sample import per_sample_grads
from persample.reductions import (
    Aux,
    ClippedMean,
    ClippedSum,
    CosineSimilarity,
    Dot,
    EigenMoment,
    Factored,
    Gram,
    KroneckerFactors,
    Leverage,
    Loss,
    Mean,
    NaturalGradient,
    NoiseScale,
    Norm,
    Project,
    SecondMoment,
    Sketch,
    Stack,
    Sum,
    TermNorm,
    UnitIds,
    Variance,
    WeightedSum,
)
from persample.streams import accumulate, read_sink
from persample.utils.trees import stop_gradient

__version__ = "0.2.0"

__all__ = [
    "ArgumentError",
    "Aux",
    "BatchStatisticsWarning",
    "ClippedMean",
    "ClippedSum",
    "CompileLimitWarning",
    "CompilerWarning",
    "ConditionWarning",
    "CosineSimilarity",
    "Curvature",
    "Dot",
    "EigenMoment",
    "Factored",
    "FallbackWarning",
    "Gram",
    "KroneckerFactors",
    "Leverage",
    "Loss",
    "LossError",
    "Mean",
    "NaturalGradient",
    "NoiseScale",
    "Norm",
    "PersampleWarning",
    "Project",
    "RecompilationWarning",
    "SecondMoment",
    "SinkError",
    "Sketch",
    "Stack",
    "Sum",
    "TermNorm",
    "TorchVersionWarning",
    "UnitIds",
    "Variance",
    "WeightedSum",
    "WrapperWarning",
    "accumulate",
    "check",
    "clear_cache",
    "clipping",
    "composite_grads",
    "eigenbases",
    "explain",
    "fisher_vector_product",
    "losses",
    "naive",
    "per_sample_grads",
    "read_sink",
    "set_grads",
    "stop_gradient",
]
