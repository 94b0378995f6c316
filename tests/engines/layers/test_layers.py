"""Layers of torch.nn in their configurations: gradients as in the loop, and those of weights factored."""

from __future__ import annotations

import pytest
from factored import assert_found, assert_reductions
from layer_cases import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_weight_norm_interface_backward"),  # one kernel, which vmap runs in a loop
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]
every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@every_case
def test_equals_the_loop(case):
    assert_reductions(case)


@every_case
def test_is_found(case):
    assert_found(case)
