"""Backward passes in which the last contraction of each weight gradient is deferred."""

from persample.engines.deferred.buffer import storage_key
from persample.engines.deferred.factorize import factor_of
from persample.engines.deferred.mode import Deferral
from persample.engines.deferred.placeholder import Placeholder

__all__ = ["Deferral", "Placeholder", "factor_of", "storage_key"]
