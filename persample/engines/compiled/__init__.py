"""``engine="compiled"``: Dynamo captures the loss, the pipeline is traced to one flat graph, Inductor compiles it."""

from persample.engines.compiled.engine import compiled
from persample.engines.compiled.programs import clear_cache

__all__ = ["clear_cache", "compiled"]
