"""torch's operator database through Inductor, one operation in a program: its losses and gradients against the loop."""

import pytest
from operator_programs import compare, differentiable_operations, learned_cases

pytest.importorskip("expecttest")  # which torch's own tests are written with


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its samples
def test_every_operation_alone():
    compare(list(filter(None, (learned_cases(op, 2, "alone") for op in differentiable_operations()))))
