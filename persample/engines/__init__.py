"""How the gradients of a chunk are computed: one function ``(call, required_ops) -> Gradients`` each."""

from persample.engines.compiled import (
    Asked,
    Compilation,
    FlatParams,
    Total,
    clear_cache,
    compilations_of,
    compiled,
    lift_compiled,
    merge_compiled,
    repeated,
)
from persample.engines.empty import empty
from persample.engines.loop import loop
from persample.engines.vmap import eager
from persample.pipeline import Engine

# "auto" begins as "eager"; ``fallback.py`` goes on.
ENGINES: dict[str, Engine] = {"eager": eager, "auto": eager, "loop": loop}
# Those of captured losses.
PROGRAMS = ("traced", "compiled")

__all__ = [
    "ENGINES",
    "PROGRAMS",
    "Asked",
    "Compilation",
    "FlatParams",
    "Total",
    "clear_cache",
    "compilations_of",
    "compiled",
    "empty",
    "lift_compiled",
    "merge_compiled",
    "repeated",
]
