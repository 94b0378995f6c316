"""The compiled engine."""

from persample.engines.compiled.cache import clear_cache
from persample.engines.compiled.engine import compiled, finished
from persample.engines.compiled.recall import recall

__all__ = ["clear_cache", "compiled", "finished", "recall"]
