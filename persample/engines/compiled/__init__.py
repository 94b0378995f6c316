"""Engines of captured losses: Dynamo captures, the pipeline is traced to one flat graph, which runs, or is compiled."""

from persample.engines.compiled.earlier_calls import Asked, FlatParams, repeated
from persample.engines.compiled.engine import compiled, lift_compiled
from persample.engines.compiled.graph import Compilation
from persample.engines.compiled.programs import clear_cache, compilations_of

PROGRAMS = ("traced", "compiled")  # the engines of captured losses
