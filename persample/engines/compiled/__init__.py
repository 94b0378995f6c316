"""``engine="compiled"``: Dynamo captures the loss, the pipeline is traced to one flat graph, Inductor compiles it."""

from persample.engines.compiled.engine import compiled, lift_compiled
from persample.engines.compiled.graph import Compilation
from persample.engines.compiled.programs import clear_cache, compilations_of
from persample.engines.compiled.repeated import Asked, repeated

__all__ = ["Asked", "Compilation", "clear_cache", "compilations_of", "compiled", "lift_compiled", "repeated"]
