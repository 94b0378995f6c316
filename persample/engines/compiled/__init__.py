"""``engine="compiled"``: Dynamo captures the loss, the pipeline is traced to one flat graph, Inductor compiles it."""

from persample.engines.compiled.engine import compiled, lift_compiled, merge_compiled
from persample.engines.compiled.graph import Compilation
from persample.engines.compiled.packing import Total
from persample.engines.compiled.programs import clear_cache, compilations_of
from persample.engines.compiled.repeated import Asked, FlatParams, repeated

__all__ = [
    "Asked",
    "Compilation",
    "FlatParams",
    "Total",
    "clear_cache",
    "compilations_of",
    "compiled",
    "lift_compiled",
    "merge_compiled",
    "repeated",
]
