"""An invented run of the benchmark suite: every workload, many methods, and all the ways in which one can fail."""

from __future__ import annotations

import numpy as np

from benchmarks.report.records import FILL, GEMMS, UNIT, Record, Results, ScalingRecord, Target

QUANTITIES = ("stack", "mean", "norms", "clipped_mean", "gram", "variance")
# Milliseconds and MiB of one batch gradient.
WORKLOADS = {
    "tutorial TD(0), B=2": (0.05, 0.1),
    "tutorial TD(0), B=4096": (0.12, 0.4),
    "tutorial TD(0), B=65536": (0.5, 5),
    "TD(0) MLP 64, B=256": (0.7, 0.6),
    "TD(0) MLP 64, B=1024": (1.1, 2),
    "TD(0) MLP 256, B=256": (1.7, 1),
    "TD(0) MLP 256, B=1024": (5.9, 5),
    "REINFORCE MLP 64, 32x200": (3.9, 6),
    "REINFORCE MLP 256, 32x200": (14.0, 22),
    "DQN Nature CNN, B=32": (24.8, 16),
    "GRU policy, 32x50": (7.5, 4),
    "transformer tied, B=16": (114.0, 113),
    "transformer tied 32000, B=16": (1018.0, 816),
    "LoRA transformer, B=16": (80.0, 90),
    "wide MLP 5120, B=32": (26.0, 63),
}
# Typical ratios in time, and how much of the stacked gradients is held.
METHODS = {
    "naive loop": (45.0, 0.02),
    "torch.func": (14.0, 1.0),
    "torch.func compiled": (8.0, 1.0),
    "persample eager": (2.0, 0.02),
    "persample compiled": (0.9, 0.01),
    "persample compiled, out=": (0.85, 0.01),
    "ExpandedWeights": (19.0, 1.0),
    "Opacus hooks": (17.0, 1.1),
    "Opacus ghost clipping": (2.5, 0.03),
    "BackPACK": (11.0, 1.0),
    "TorchJD": (3.0, 0.05),
    "JAX jit(vmap(grad))": (4.0, 1.0),
    "jax_privacy clipped_grad": (4.4, 1.0),
    "MindSpore jit(vmap(grad))": (6.0, 1.0),
}
ONLY = {
    "Opacus ghost clipping": ("norms", "clipped_mean"),
    "TorchJD": ("gram",),
    "jax_privacy clipped_grad": ("clipped_mean",),
    "BackPACK": ("stack", "norms", "variance"),
}
TORCH_2_13_HOOKS = "Cannot register hooks | on `GRU` <aten::gru>:\n  use *DPGRU* instead, see [the docs]"


def invented_run() -> Results:
    rng = np.random.default_rng(0)
    records = [
        record
        for workload, unit in WORKLOADS.items()
        for quantity in QUANTITIES
        for record in [*_limits(workload, quantity, *unit), *(_record(rng, workload, quantity, m) for m in METHODS)]
    ]
    environment = {
        "persample": "0.2.0",
        "torch": "2.13.0",
        "peers": {"jax": "0.9.1", "opacus": "1.6.0"},
        "cpu": "Invented CPU",
        "logical_cores": 2,
        "torch_threads": 2,
        "gpu": None,
        "date": "2026-11-21",
        "git_revision": "0123456789abcdef",
    }
    return Results(environment, tuple(records), tuple(_scaling()), TARGETS)


def _limits(workload, quantity, milliseconds, mebibytes):
    def limit(method, ratio):
        seconds = 1e-3 * milliseconds
        size = int(2**20 * mebibytes)
        times = {"median_s": ratio * seconds, "iqr_s": 0.03 * seconds, "unit_s": seconds, "ratio": ratio}
        return Record(
            workload, quantity, method, "ok", rounds=50, ratio_iqr=0.03 * ratio, peak_bytes=size, unit_peak_bytes=size,
            first_call_s=2 * seconds, error=0.0, **times,
        )  # fmt: skip

    return {"mean": [limit(UNIT, 1.0), limit("batch gradient compiled", 0.8)], "stack": [limit(FILL, 2.5)]}.get(
        quantity, []
    )


def _record(rng, workload, quantity, method):
    status, reason = _outcome(workload, quantity, method)
    if status != "ok":
        return Record(workload, quantity, method, status, reason, error=0.3 if status == "wrong" else None)
    milliseconds, mebibytes = WORKLOADS[workload]
    typical, held = METHODS[method]
    large = milliseconds > 3
    ratio = float(np.exp(np.log(typical) * (0.5 if large else 1.0) + 0.25 * rng.standard_normal()))
    ratio *= 2.5 if quantity == "stack" else 1.0
    seconds = 1e-3 * milliseconds
    size = int(2**20 * mebibytes * (1 + 60 * held * (1 if quantity != "stack" else 1 / max(held, 0.5))))
    return Record(
        workload, quantity, method, "ok",
        median_s=ratio * seconds, iqr_s=0.05 * ratio * seconds, rounds=30, unit_s=seconds, ratio=ratio,
        ratio_iqr=0.05 * ratio, peak_bytes=size, unit_peak_bytes=int(2**20 * mebibytes),
        first_call_s=6.0 if "compiled" in method else 0.2, error=2e-7,
    )  # fmt: skip


def _outcome(workload, quantity, method):
    if quantity not in ONLY.get(method, QUANTITIES):
        return "cannot", f"{method} has no {quantity}"
    if "MindSpore" in method and "tutorial" not in workload:
        return "cannot", "only the tutorial's loss was ported"
    if "GRU" in workload and method.startswith(("Opacus", "Expanded", "torch.func")):
        return "cannot", TORCH_2_13_HOOKS
    if "tied" in workload and method.startswith(("Opacus", "BackPACK")):
        return "cannot", "parameters are shared between layers"
    if "LoRA" in workload and method.startswith("Expanded"):
        return "wrong", "largest relative error 0.3"
    if "wide" in workload and quantity == "stack":
        return "out of memory", "needs 3.7 GB beside the copy, the budget is 4 GB"
    if method == "naive loop" and workload in {"tutorial TD(0), B=65536", "transformer tied 32000, B=16"}:
        return "too slow", "more than 60 s"
    return "ok", ""


def _scaling():
    methods = {"persample eager": 2e-3, "persample compiled": 0.05e-3, "torch.func": 0.8e-3}
    widths, sizes = (16, 64, 256, 1024, 2048), (1, 4, 16, 64, 256, 1024, 4096, 16384)
    points = [(b, 256) for b in sizes] + [(256, h) for h in widths if h != 256]
    for batch_size, hidden in points:
        work = batch_size * hidden**2
        bytes_of_stack = 4 * work
        yield _point(GEMMS, "clipped_mean", batch_size, hidden, 0.2e-3 + work * 1e-10, batch_size * hidden * 16)
        yield _point(FILL, "stack", batch_size, hidden, bytes_of_stack / 10e9, bytes_of_stack)
        for method, overhead in methods.items():
            for quantity in ("stack", "clipped_mean"):
                stored = quantity == "stack" or method.startswith("torch")
                size = 3 * bytes_of_stack if stored else batch_size * hidden * 40
                seconds = overhead + work * (1e-10 if not stored else 8e-10)
                yield _point(method, quantity, batch_size, hidden, seconds, size)


def _point(method, quantity, batch_size, hidden, seconds, size):
    if size > 4e9:
        return ScalingRecord(method, quantity, batch_size, hidden, "out of memory", f"{size / 1e9:.1f} GB")
    return ScalingRecord(method, quantity, batch_size, hidden, "ok", median_s=seconds, peak_bytes=size)


TARGETS = (
    Target("TD(0) MLP 256, B=1024", "clipped_mean", "persample eager", 1.6, 3),
    Target("TD(0) MLP 256, B=1024", "norms", "persample eager", 1.0, 3, "time", "persample eager", "clipped_mean"),
    Target("wide MLP 5120, B=32", "clipped_mean", "persample eager", 1.3, 3, "memory"),
    Target("TD(0) MLP 256, B=256", "clipped_mean", "persample compiled", 0.95, 4),
    Target("TD(0) MLP 256, B=256", "stack", "persample compiled, out=", 1.4, 4, relative_to=FILL),
    Target("tutorial TD(0), B=2", "stack", "persample compiled", 2.0, 4, relative_to="JAX jit(vmap(grad))"),
    Target("TD(0) MLP 256, B=256", "clipped_mean", "persample compiled", 20.0, 4, "first call", None),
    Target("REINFORCE MLP 64, 32x200", "clipped_mean", "persample pruned", 0.75, 4),
)
RUN = invented_run()
TD = "TD(0) MLP 256, B=256"


def record(method, ratio=1.0, quantity="norms", nbytes=2**24, **fields):
    """Invent one record; without a ratio, of a method that cannot."""
    if ratio is None:
        return Record("w", quantity, method, fields.pop("status", "cannot"), fields.pop("reason", "no idea"))
    fields = {"median_s": ratio, "unit_s": 1.0, "ratio": ratio, "peak_bytes": nbytes, **fields}
    return Record("w", quantity, method, "ok", **fields)
