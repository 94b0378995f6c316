"""``engine="compiled"``: the pipeline traced to one flat graph, compiled by Inductor, cached, and called again."""

from persample.engines.compiled.cache import clear_cache
from persample.engines.compiled.engine import compiled

__all__ = ["clear_cache", "compiled"]
