"""Smaller random programs that are still findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from random_agreement import Call, Outcome, draw_call, judged, leaf_map, unpacked
from random_programs import Program, draw_program

import persample as ps


def smallest(outcome: Outcome, engine: str) -> str:
    """The smallest program with the finding of a seed, as text; the whole one if the process ended."""
    if not outcome.program:
        return ""
    program = draw_program(outcome.seed, small=engine == "compiled")
    smaller, call = shrunk(program, draw_call(program), engine)
    return f"{smaller}\n# {call}"


def shrunk(program: Program, call: Call, engine: str) -> tuple[Program, Call]:
    """The smallest program, of those that single steps lead to, that is still a finding."""

    def fails(program, call):
        try:
            return judged(program, call, engine).kind == "finding"
        except Exception:  # noqa: BLE001 - a step too far
            return False

    progress = True
    while progress:
        progress = False
        for smaller in steps(program, call):
            if fails(*smaller):
                (program, call), progress = smaller, True
                break
    return program, call


def steps(program: Program, call: Call) -> Any:
    wanted = call.reduce.values() if isinstance(call.reduce, dict) else call.reduce
    if not isinstance(call.reduce, ps.reductions.Reduction):
        yield from ((program, replace(call, reduce=reduction)) for reduction in wanted)
    if call.reduce != ps.Stack():
        yield program, replace(call, reduce=ps.Stack())
    for name in call.options:
        yield program, replace(call, options={k: v for k, v in call.options.items() if k != name})
    if call.again:
        yield program, replace(call, again=False)
    if program.aux:
        yield replace(program, aux=None).without_dead_code(), call
    for place in range(len(program.terms)) if len(program.terms) > 1 else ():
        terms = program.terms[:place] + program.terms[place + 1 :]
        yield replace(program, terms=terms).without_dead_code(), call
    for place, statement in enumerate(program.statements):
        for code in simpler(program, statement):
            rest = (*program.statements[:place], replace(statement, code=code), *program.statements[place + 1 :])
            yield replace(program, statements=rest).without_dead_code(), call


def simpler(program: Program, statement: Any) -> Any:
    """Simpler lines that give a tensor of the same shape."""
    found = traced(program, statement.name)
    if found is None or "torch.linspace" in statement.code:
        return
    shape, dtype = found
    count = shape.numel()
    numbers = f"torch.linspace(-1, 1, {max(count, 1)}, dtype={dtype})[:{count}]"
    yield f"{statement.name} = {numbers}.reshape({tuple(shape)})"
    names = [s.name for s in (*program.bindings, *program.statements) if s is not statement and statement.uses(s.name)]
    for name in names:
        if traced(program, name) == found and statement.code != f"{statement.name} = {name} * 1.0":
            yield f"{statement.name} = {name} * 1.0"


def traced(program: Program, name: str) -> Any:
    """The shape and dtype of a tensor in a program, for its first sample."""
    try:
        probe = replace(program, terms=(f"({name} * 0).abs().sum()",), aux=f"{{'x': {name}}}")
        scope = probe.loss()(
            leaf_map(lambda leaf: leaf.row(0), program.params),
            *unpacked(leaf_map(lambda leaf: leaf.row(0), program.batch)),
        )
    except Exception:  # noqa: BLE001 - not a tensor
        return None
    return scope[1]["x"].shape, scope[1]["x"].dtype
