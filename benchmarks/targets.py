"""The targets of the suite: ratios to the batch gradient, unless another method or a unit is named.

Other targets have scripts or tests of their own: compile times with a warm disk cache (``benchmarks/compile_time.py``),
writes into ``out=``, at most 1.4 times ``fill_`` over the same bytes (``benchmarks/same_memory.py``), and allocated
memory (``tests/public/test_memory.py``).
"""

from __future__ import annotations

from benchmarks.report.records import Target

EAGER, COMPILED = "persample eager", "persample compiled"
JAX = "JAX jit(vmap(grad))"


def _clipped(issue: int, method: str, limits: dict[str, float]) -> list[Target]:
    return [Target(workload, "clipped_mean", method, limit, issue) for workload, limit in limits.items()]


TARGETS: tuple[Target, ...] = (
    *_clipped(
        3,
        EAGER,
        {
            "TD(0) MLP 256, B=1024": 1.6,
            "TD(0) MLP 256, B=256": 2.5,
            "REINFORCE MLP 64, 32x200": 1.25,
            "GRU policy, 32x50": 3.5,
            "DQN Nature CNN, B=32": 1.8,
            "transformer tied, B=16": 1.2,
            "transformer tied 32000, B=16": 1.8,
        },
    ),
    Target("wide MLP 5120, B=32", "clipped_mean", EAGER, 1.3, 3, "memory"),
    Target("TD(0) MLP 256, B=256", "norms", EAGER, 1.0, 3, relative_to=EAGER, relative_quantity="clipped_mean"),
    Target("TD(0) MLP 256, B=256", "gram", EAGER, 2.0, 3, relative_to=EAGER, relative_quantity="clipped_mean"),
    *_clipped(
        4,
        COMPILED,
        {
            "TD(0) MLP 256, B=256": 0.95,
            "TD(0) MLP 256, B=1024": 0.9,
            "TD(0) MLP 64, B=256": 0.8,
            "REINFORCE MLP 64, 32x200": 0.75,
            "REINFORCE MLP 256, 32x200": 0.9,
            "DQN Nature CNN, B=32": 1.3,
            "transformer tied, B=16": 0.95,
        },
    ),
    *(
        Target(workload, "natural_gradient", method, limit, 23, measure)
        for workload in (
            "TD(0) MLP 64, B=256",
            "TD(0) MLP 256, B=256",
            "REINFORCE MLP 64, 32x200",
            "DQN Nature CNN, B=32",
        )
        for method, limit, measure in (
            (EAGER, 3.5, "time"),
            (COMPILED, 2.5, "time"),
            (EAGER, 1.5, "memory"),
            (COMPILED, 1.5, "memory"),
        )
    ),
    Target("tutorial TD(0), B=2", "stack", COMPILED, 2.0, 4, relative_to=JAX),
    Target("tutorial TD(0), B=4096", "stack", COMPILED, 1.1, 4, relative_to=JAX),
    Target("tutorial TD(0), B=65536", "stack", COMPILED, 1.1, 4, relative_to=JAX),
    Target("TD(0) MLP 256, B=256", "clipped_mean", COMPILED, 20.0, 4, "first call", relative_to=None),
)
# The first call of these cells is measured with an empty compile cache.
COLD = frozenset((t.workload, t.quantity, t.method) for t in TARGETS if t.measure == "first call")
