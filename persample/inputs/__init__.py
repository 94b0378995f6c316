"""Arguments are normalized and checked here; later code trusts them."""

from persample.inputs.batch import as_dicts
from persample.inputs.call import Call, normalize
from persample.inputs.options import (
    Engine,
    NestedCallError,
    Outputs,
    Randomness,
    TotalWeight,
    check_averages,
    check_choices,
    check_chunk_size,
    check_loop,
    check_options,
    check_out,
    check_outside,
    check_weights,
    is_differentiated,
    reductions,
)
from persample.inputs.params import check_params
