"""The compiled engine."""

from persample.engines.compiled.cache import clear_cache
from persample.engines.compiled.engine import compiled, finished
from persample.engines.compiled.recall import recall
from persample.engines.compiled.task import Task

__all__ = ["Task", "clear_cache", "compiled", "finished", "recall"]
