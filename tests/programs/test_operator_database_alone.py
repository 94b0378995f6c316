"""torch's operator database, traced and compiled, one operation in a program: losses and gradients against the loop."""

import pytest
from operator_programs import compare, differentiable_operations, learned_cases

pytest.importorskip("expecttest")  # which torch's own tests are written with
PARTS = 6  # each of which ends before a test times out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its samples
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("engine", ["traced", "compiled"])
def test_every_operation_alone(engine, part):
    operations = list(differentiable_operations())[part::PARTS]
    compare(list(filter(None, (learned_cases(op, 1, "alone") for op in operations))), engine)
