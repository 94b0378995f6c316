"""Backward passes that leave the last contraction of weight gradients undone."""

from persample.factors.defer.mode import Deferral
from persample.factors.defer.resolve import factor_of, suited

__all__ = ["Deferral", "factor_of", "suited"]
