"""Compiled programs without Inductor, which takes seconds: the traced graph runs as it is."""

from __future__ import annotations

from persample.engines.compiled import program


def without_compiling(monkeypatch):
    """Run the traced graphs, functional and decomposed, operation by operation."""
    monkeypatch.setattr(program, "lower", lambda _, flat, *__: lambda tensors: flat.forward(*tensors))


def without_inductor(monkeypatch):
    """Run the traced graphs as they are, which takes the least time."""
    without_compiling(monkeypatch)
    monkeypatch.setattr(program, "functional", lambda graph, *_: graph)


def lowered(monkeypatch):
    """Collect the graphs that Inductor would compile; they run operation by operation."""
    graphs = []

    def lower(_, flat, *__):
        graphs.append(flat)
        return lambda tensors: flat.forward(*tensors)

    monkeypatch.setattr(program, "lower", lower)
    return graphs
