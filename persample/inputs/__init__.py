"""Arguments are normalized and checked here, one file per argument; later code trusts them."""

from persample.inputs.call import Call
from persample.inputs.derivatives import check_derivatives
from persample.inputs.normalize import normalize
from persample.inputs.options import Engine, Randomness, check_choice, check_chunk_size, check_loop, check_options
from persample.inputs.params import check_params
from persample.inputs.reduce import reductions
from persample.inputs.weights import check_averages

__all__ = [
    "Call",
    "Engine",
    "Randomness",
    "check_averages",
    "check_choice",
    "check_chunk_size",
    "check_derivatives",
    "check_loop",
    "check_options",
    "check_params",
    "normalize",
    "reductions",
]
