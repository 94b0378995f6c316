"""torch's operator database under the eager engine: whatever torch.func has wrong is replaced, or refused by name."""

import random
from collections import Counter

import pytest
import torch
from operator_cases import (
    EXCLUDED,
    F64,
    FLOATS_OF_LAYERS,
    FORMS,
    FORMS_OF_LAYERS,
    KEPT,
    CaseOfLayers,
    cases,
    deviation,
    measure,
    name_of,
)
from seams import answers_of_layers

from persample.errors import LossError

pytest.importorskip("expecttest")  # which torch's own tests are written with


def operations():
    from torch.testing._internal.common_methods_invocations import op_db

    excluded = EXCLUDED.keys() - KEPT
    return [op for op in op_db if F64 in op.dtypes and op.name not in excluded]


def outcome(case):
    """What came of a case: agreed, refused, not differentiable (by torch), or what is wrong."""
    try:
        expected = measure(case, "loop")
    except Exception:  # noqa: BLE001 - not a loss: torch does not differentiate this, or these roles make no sense
        return "no loss"
    try:
        actual = measure(case, "eager")
    except LossError:
        return "refused"
    except Exception as error:  # noqa: BLE001 - a crash, which is a finding
        return f"{type(error).__name__}: {error}"
    off = deviation(actual, expected)
    return "agreed" if off <= 1e-9 else f"off by {off:g}"


def compare(ops, form, most, **kind):
    """Compare the engines for some cases of each operation; print how many agreed, and return their counts."""
    counts, refused, wrong, known = Counter(), set(), [], {"agreed", "refused", "no loss"}
    for op in ops:
        for case in cases(op, form, most, **kind):
            found = outcome(case)
            counts[found if found in known else "wrong"] += 1
            if found == "refused":
                refused.add(name_of(op))
            elif found not in known:
                shapes = [tuple(case.leaves[k].shape) for k in case.places]
                wrong.append(f"{name_of(op)} {case.roles} {shapes} {case.sample.kwargs}: {found}")
    print(f"{form}: {len(ops)} operations, {dict(counts)}, refused: {', '.join(sorted(refused))}")
    assert not wrong, "\n".join(wrong)
    assert counts["agreed"] > counts["refused"]
    return counts


def compare_beside_a_layer(ops, form, most, monkeypatch):
    """Compare the engines for losses with a layer, many of which ``engines/layers`` computes."""
    answers = answers_of_layers(monkeypatch)
    agreed = compare(ops, form, most, kind=CaseOfLayers, floats=FLOATS_OF_LAYERS)["agreed"]
    computed = sum(answer is not None for answer in answers)
    print(f"{form}: {computed} computed by engines/layers")
    assert computed > agreed / 3


@pytest.mark.filterwarnings("ignore")  # torch's own, of its samples
@pytest.mark.parametrize("form", FORMS)
def test_some_operations(form):
    compare(random.Random(form).sample(operations(), 8), form, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_all_operations(form):
    compare(operations(), form, 10 if form == "function" else 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS_OF_LAYERS)
def test_some_operations_beside_a_layer(form, monkeypatch):
    strided = [op for op in operations() if op.name == "as_strided" and "in place" not in form]
    compare_beside_a_layer(strided + random.Random(form).sample(operations(), 24), form, 2, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS_OF_LAYERS)
def test_all_operations_beside_a_layer(form, monkeypatch):
    compare_beside_a_layer(operations(), form, 4 if form == "function" else 3, monkeypatch)


def test_a_wrong_result_is_found():
    right = {"a": torch.ones(2, dtype=F64), "b": torch.tensor([1.0, torch.nan], dtype=F64)}
    assert deviation(right, right) == 0
    assert deviation({**right, "b": torch.tensor([1.0, 2.0], dtype=F64)}, right) == torch.inf
    assert deviation({**right, "a": torch.tensor([1.0, 1 + 1e-7], dtype=F64)}, right) > 1e-9
