"""How the gradients of a chunk are computed: one function (lift, loss, samples, randomness) → partial each."""

from persample.engines.compiled import Task, clear_cache, compiled, finished, recall
from persample.engines.empty import empty
from persample.engines.loop import loop
from persample.engines.vmap import eager

__all__ = ["Task", "clear_cache", "compiled", "eager", "empty", "finished", "loop", "recall"]
