"""Random programs on the engines, against plain autograd: a second generator, written apart from those of other tests.

Each run is a process of its own, so that a crash of torch's is a finding, too. To look at one seed:
``python tests/random_outcomes.py eager 4962``.
"""

import collections

import pytest
import torch
from random_agreement import draw_call, judged, oracle
from random_outcomes import outcomes
from random_programs import draw_program
from random_shrinking import shrunk, smallest

import persample as ps

REFUSED = 0.05  # of the programs, at most: torch.func cannot batch everything


def assert_nothing_is_found(engine, start, stop):
    found = list(outcomes(engine, start, stop))
    counts = collections.Counter(outcome.kind for outcome in found)
    print(engine, dict(counts))
    findings = [f"seed {o.seed}: {o.why}\n{smallest(o, engine)}" for o in found if o.kind == "finding"]
    assert not findings, "\n\n".join(findings)
    refused = collections.Counter(o.why for o in found if o.kind == "refused")
    assert refused.total() <= REFUSED * len(found), refused
    assert counts["agrees"] >= 0.8 * len(found), counts


@pytest.mark.parametrize(("engine", "start", "stop"), [("eager", 0, 100), ("traced", 0, 3)])
def test_programs(engine, start, stop):
    assert_nothing_is_found(engine, start, stop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "start", "stop"), [("eager", 10_000, 11_000), ("traced", 40, 240), ("compiled", 100, 160)]
)
def test_many_programs(engine, start, stop):
    assert_nothing_is_found(engine, start, stop)


def test_programs_are_what_their_seed_says():
    first, second = (str(draw_program(3)) for _ in range(2))
    assert first == second
    assert "def loss(params" in first


def test_wrong_gradients_are_found(monkeypatch):
    program = next(p for p in map(draw_program, range(100)) if p and p.size == 5 and len(p.terms) > 1)
    call = draw_call(program)
    assert judged(program, call, "eager").kind == "agrees"
    right = ps.per_sample_grads

    def wrong(*args, reduce, engine, **options):
        result = right(*args, reduce=reduce, engine=engine, **options)
        return torch.utils._pytree.tree_map(lambda x: x * (1 + 1e-7), result) if engine == "eager" else result

    monkeypatch.setattr(ps, "per_sample_grads", wrong)
    assert judged(program, call, "eager").kind == "finding"
    smaller, _ = shrunk(program, call, "eager")
    assert len(smaller.source) <= len(program.source)
    assert len(oracle(smaller)[1]) == 5
