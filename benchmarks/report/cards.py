"""The table of a run on a GPU: ``benchmarks.gpu`` measures it."""

from __future__ import annotations

from benchmarks.report.page import machine
from benchmarks.report.records import UNIT, Record, Results
from benchmarks.report.text import Grid, memory, number, seconds, shortened, words

_TITLE = f"""On {{}}. Ratios are to the {UNIT} of the same workload and dtype, not compiled. GPU time is the sum of
the kernels of one call; where it is far below the time, the GPU waits for Python. Memory is the peak of torch's
allocator in one call, beyond what was allocated before. The first call includes compilation.
"""
_HEADINGS = ("workload", "what", "by", "time", "ratio", "GPU time", "memory", "ratio", "first call")


def card_table(run: Results) -> str:
    """Return the table of a run on a GPU.

    Args:
        run: a run of ``benchmarks.gpu``.

    Returns:
        The Markdown: the machine, and one row per record, in the order of measurement by workload.

    Examples:
        >>> record = Record("ViT", "mean", UNIT, "ok", median_s=0.02, ratio=1.0, kernel_s=0.01, peak_bytes=2**20)
        >>> print(card_table(Results({"gpu": "a GPU"}, (record,))).splitlines()[-1])
        | ViT | mean | batch gradient | 20.0 ms | 1.00 | 10.0 ms | 1.0 MiB | – | – |
    """
    places = {name: i for i, name in enumerate(dict.fromkeys(record.workload for record in run.records))}
    ordered = sorted(run.records, key=lambda record: places[record.workload])
    grid = Grid(_HEADINGS, [_row(record) for record in ordered], range(3, len(_HEADINGS)))
    return f"{_TITLE.format(machine(run.environment))}\n{grid.markdown()}"


def _row(record: Record) -> list[str]:
    names = [record.workload, words(record.quantity), record.method]
    if record.median_s is None:
        return [*names, record.status, shortened(record.reason), "", "", "", ""]
    held = record.peak_bytes
    share = held / record.unit_peak_bytes if held is not None and record.unit_peak_bytes else None
    times = record.median_s, record.kernel_s, record.first_call_s
    time, kernels, first = ("–" if x is None else seconds(x) for x in times)
    ratios = ["–" if x is None else number(x) for x in (record.ratio, share)]
    return [*names, time, ratios[0], kernels, "–" if held is None else memory(held), ratios[1], first]
