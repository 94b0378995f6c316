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
from persample.engines.uncompiled import eager, empty, loop
from persample.pipeline import Engine

# "auto" begins as "eager"; ``fallback.py`` goes on.
ENGINES: dict[str, Engine] = {"eager": eager, "auto": eager, "loop": loop}

__all__ = [
    "ENGINES",
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
