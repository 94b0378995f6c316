"""torch's operator database, traced and compiled, several operations in a program: Inductor fuses what stands together.

In a file of its own: the files of the slow tests run on several cores.
"""

import random

import pytest
from operator_programs import compare, differentiable_operations, learned_cases

pytest.importorskip("expecttest")  # which torch's own tests are written with
MOST = 18  # operations in a program


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its samples
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("engine", ["traced", "compiled"])
def test_all_operations_together(engine, seed):
    several = [case for op in differentiable_operations() for case in learned_cases(op, 1, seed)]
    random.Random(seed).shuffle(several)
    compare([several[k : k + MOST] for k in range(0, len(several), MOST)], engine)
