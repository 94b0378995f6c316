"""How the gradients of a chunk are computed: one function ``(call, required_ops) -> Gradients`` each."""

from persample.engines.compiled import Asked, Compilation, clear_cache, compilations_of, compiled, repeated
from persample.engines.empty import empty
from persample.engines.loop import loop
from persample.engines.vmap import eager
from persample.pipeline import Engine

ENGINES: dict[str, Engine] = {"eager": eager, "loop": loop, "empty": empty}

__all__ = ["ENGINES", "Asked", "Compilation", "clear_cache", "compilations_of", "compiled", "repeated"]
