"""What tests put in the place of Inductor: its graphs run operation by operation, are collected, or become wrong."""

from __future__ import annotations

import importlib

import torch

from persample.engines.compiled import capture, programs

lowering = importlib.import_module("persample.engines.compiled.lower")


def compilations():
    """Return the number of programs that are alive."""
    captures = [made for entry in capture._entries.values() for made in entry.captures]
    return sum(len(family.programs) for made in captures for family in made.programs.values())


def without_compiling(monkeypatch):
    """Run the graphs that Inductor would compile, functional and decomposed, operation by operation."""
    lowered(monkeypatch)


def lowered(monkeypatch):
    """Collect the graphs that Inductor would compile; they run operation by operation."""
    graphs = []

    def lower(_, flat, *__):
        graphs.append(flat)
        return lambda tensors: flat.forward(*tensors)

    monkeypatch.setattr(programs, "lower", lower)
    return graphs


def failing_after_the_run(monkeypatch, message):
    """Make programs fail once they have written their results."""

    def lower(graph, *_):
        def run(tensors):
            graph.forward(*tensors)
            torch._check(False, lambda: message)

        return run

    monkeypatch.setattr(programs, "lower", lower)


def wrong_code(monkeypatch, operation, factor=1.001):
    """Make the code of one operation wrong, by a factor, as a wrong lowering would; compile nothing."""

    class Wrong(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            return value * factor if n.target is operation else value

    monkeypatch.setattr(lowering, "_compiled", lambda graph, *_: lambda tensors: Wrong(graph).run(*tensors))


def without_corrections(monkeypatch):
    """Leave to Inductor also the operations that torch's kernels compute because its code is wrong."""
    monkeypatch.setattr(lowering, "with_torch_kernels", dict)
    monkeypatch.setattr(lowering, "_LEFT_TO_TORCH", {})


def calls_in_cpp(monkeypatch):
    """Collect of each program whether Inductor is told to call its kernels from C++."""
    found = []

    def compile_graph(graph, *_, calls_in_cpp, **__):
        found.append(calls_in_cpp)
        return lambda tensors: graph.forward(*tensors)

    monkeypatch.setattr(lowering, "compile_graph", compile_graph)
    return found
