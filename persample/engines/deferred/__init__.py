"""Backward passes that leave the last contraction of weight gradients undone."""

from persample.engines.deferred.factorize import factor_of
from persample.engines.deferred.mode import Deferral

__all__ = ["Deferral", "factor_of"]
