"""Argument checking, one file per argument. It rejects invalid calls; later code trusts its arguments."""

from persample.inputs.derivatives import check_derivatives
from persample.inputs.normalize import check_call
from persample.inputs.options import Engine, Randomness, check_choice, check_chunk_size, check_loop, check_options
from persample.inputs.params import check_params
from persample.inputs.reductions import reductions
from persample.inputs.weights import check_averages

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
