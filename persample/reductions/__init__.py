"""Reductions of per-sample gradients. Each one is a class with ``lift`` and ``finish``."""

from persample.reductions.base import Reduce, Reduction
from persample.reductions.directions import Dot, Project, Sketch
from persample.reductions.kronecker import EigenMoment, KroneckerFactor, KroneckerFactors
from persample.reductions.leverage import Leverage
from persample.reductions.moments import NoiseScale, NoiseScaleEstimate, SecondMoment, Variance
from persample.reductions.norms import RankOne
from persample.reductions.pairs import CosineSimilarity, Gram
from persample.reductions.rows import Aux, Factored, Loss, Norm, Stack, TermNorm, UnitIds
from persample.reductions.second_order import NaturalGradient
from persample.reductions.sums import ClippedMean, ClippedSum, Mean, Sum, WeightedSum

__all__ = [
    "Aux",
    "ClippedMean",
    "ClippedSum",
    "CosineSimilarity",
    "Dot",
    "EigenMoment",
    "Factored",
    "Gram",
    "KroneckerFactor",
    "KroneckerFactors",
    "Leverage",
    "Loss",
    "Mean",
    "NaturalGradient",
    "NoiseScale",
    "NoiseScaleEstimate",
    "Norm",
    "Project",
    "RankOne",
    "Reduce",
    "Reduction",
    "SecondMoment",
    "Sketch",
    "Stack",
    "Sum",
    "TermNorm",
    "UnitIds",
    "Variance",
    "WeightedSum",
]
