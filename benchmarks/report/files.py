"""Reads, writes and merges JSON files of results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report.records import Record, Results, ScalingRecord, Target
from persample.errors import ArgumentError


def read(path: Path) -> Results:
    """Read a results file.

    Args:
        path: the JSON file.

    Returns:
        The results.

    Raises:
        ArgumentError: if the file is missing or is not a results file; the message gives the cause.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return Results(
            dict(saved["environment"]),
            tuple(Record(**record) for record in saved["records"]),
            tuple(ScalingRecord(**record) for record in saved["scaling"]),
            tuple(Target(**target) for target in saved["targets"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{str(path)!r} ({type(error).__name__}: {error})"
        fix = "Make one with benchmarks/run.py."
        raise ArgumentError.about("results", expected="a results file", received=why, fix=fix) from error


def write(path: Path, results: Results) -> None:
    """Write a results file atomically: an interrupt leaves the previous file intact.

    JSON has no ∞ and no NaN: such numbers (errors of wrong results) become null.

    Args:
        path: the JSON file.
        results: what to write.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "results.json"
        >>> results = Results({"torch": "2.13"}, (Record("TD(0)", "mean", "loop", "ok", median_s=1.5),))
        >>> write(path, results)
        >>> read(path) == results
        True
    """
    lists = {
        name: [_finite(asdict(record)) for record in getattr(results, name)]
        for name in ("records", "scaling", "targets")
    }
    text = json.dumps({"environment": results.environment, **lists}, indent=1, ensure_ascii=False, allow_nan=False)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields.items()}


def merge(runs: Iterable[Results]) -> Results:
    """Merge runs: a later record replaces the earlier record of the same key, at the earlier position.

    Args:
        runs: the results to merge, earliest first.

    Returns:
        All records. The environment has the entries of all runs; of entries with one name, the last counts.

    Examples:
        >>> slow, fast = (Results(records=(Record("TD(0)", "mean", "loop", "ok", median_s=s),)) for s in (2.0, 1.0))
        >>> [record.median_s for record in merge([slow, fast]).records]
        [1.0]
    """
    environment: dict[str, Any] = {}
    records: dict[tuple[str, ...], Record] = {}
    scaling: dict[tuple[Any, ...], ScalingRecord] = {}
    targets: dict[Target, None] = {}
    for run in runs:
        environment |= run.environment
        records |= {record.key: record for record in run.records}
        scaling |= {point.key: point for point in run.scaling}
        targets |= dict.fromkeys(run.targets)
    return Results(environment, tuple(records.values()), tuple(scaling.values()), tuple(targets))
