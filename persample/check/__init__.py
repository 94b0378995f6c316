"""Everything the door refuses, one file per argument. What is past it is trusted."""

from persample.check.call import check_call
from persample.check.derivatives import check_derivatives
from persample.check.options import Engine, Randomness, check_choice, check_chunk_size, check_loop, check_options
from persample.check.params import check_params
from persample.check.reduce import reductions
from persample.check.weights import check_averages

__all__ = [
    "Engine",
    "Randomness",
    "check_averages",
    "check_call",
    "check_choice",
    "check_chunk_size",
    "check_derivatives",
    "check_loop",
    "check_options",
    "check_params",
    "reductions",
]
