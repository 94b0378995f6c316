"""``persample stats``: statistics of the gradients of a model and a data set, also under ``torchrun``."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional, cast

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from persample.cli.figures import save_statistics
from persample.cli.measure import environment
from persample.cli.report import writable
from persample.cli.summary import Sample, Statistics, statistics
from persample.errors import ArgumentError
from persample.inputs import Engine


def stats(
    source: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="What returns loss, parameters, batches.")],
    top: Annotated[int, typer.Option(help="How many samples to list.")] = 10,
    dim: Annotated[int, typer.Option(help="Random projections of each gradient, for its leverage.")] = 64,
    engine: Annotated[str, typer.Option(help="Engine of persample: eager, compiled or loop.")] = "eager",
    output: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it at run time, on Python 3.10 too)
        typer.Option(help="Directory for stats.json and stats.png; nothing is written without it."),
    ] = None,
) -> None:
    """Statistics of the per-sample gradients of a data set.

    Quantiles of their norms, the noise scale with the batch size that it suggests, and the samples with the largest
    norms and the highest leverages. FUNCTION(rank, world) returns (loss_fn, params, batches): the batches hold samples
    rank, rank + world, … Alone: FUNCTION(0, 1). On several processes: torchrun --nproc-per-node 2 -m persample stats
    MODULE:FUNCTION.
    """
    if top < 0:
        raise ArgumentError.about("--top", expected="0 or more", received=str(top), fix="Use 10 for a short list.")
    function = _function(source)
    directory = None if output is None else writable(output, "stats.json", "stats.png")
    with _processes() as (rank, world, group):
        returned = function(rank, world)
        if not isinstance(returned, tuple) or len(returned) != 3:
            fix = "Return the loss of one sample, what it differentiates, and an iterable of batches."
            expected = "a function that returns (loss_fn, params, batches)"
            raise ArgumentError.about(source, expected=expected, received=type(returned).__name__, fix=fix)
        found, rows = statistics(*returned, top=top, dim=dim, engine=cast("Engine", engine), group=group)
    if rank:
        return
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(_table(found))
    if top:
        console.print(_top("largest gradients", found.top))
        console.print(_top("highest leverages", found.top_leverage))
    if directory is not None:
        report = {"source": source, "processes": world, **asdict(found), "environment": environment()}
        (directory / "stats.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        save_statistics(source, found, rows, directory / "stats.png")
        console.print(f"Written: {directory / 'stats.json'}, {directory / 'stats.png'}", soft_wrap=True)


def _function(source: str) -> Callable[..., Any]:
    module, colon, name = source.partition(":")
    fix = "Name a module that Python finds from here, and a function in it: package.module:function."
    if not (module and colon and name) or module.startswith("."):
        raise ArgumentError.about("MODULE:FUNCTION", expected="two names", received=repr(source), fix=fix)
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m has it
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ArgumentError.about("MODULE:FUNCTION", expected="a module", received=str(error), fix=fix) from error
    except AttributeError as error:
        raise ArgumentError.about("MODULE:FUNCTION", expected="a function", received=str(error), fix=fix) from error
    if not callable(found):
        raise ArgumentError.about("MODULE:FUNCTION", expected="a function", received=type(found).__name__, fix=fix)
    return cast("Callable[..., Any]", found)


@contextmanager
def _processes() -> Iterator[tuple[int, int, Any]]:
    """Join the processes that ``torchrun`` has started, if it has.

    Yields:
        Rank, world, and group.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield 0, 1, None
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        dist.barrier()  # gloo may abort a process whose peer is still at work when it leaves
    finally:
        dist.destroy_process_group()


def _table(found: Statistics) -> Table:
    table = Table(title="per-sample gradients")
    table.add_column("statistic")
    table.add_column("value", justify="right")
    table.add_row("samples", f"{found.samples:,}")
    table.add_row("mean loss", f"{found.mean_loss:.4g}")
    table.add_row("mean norm", f"{found.mean_norm:.4g}")
    for share, value in found.norm_quantiles.items():
        table.add_row(f"norm, quantile {share}", f"{value:.4g}")
    table.add_row("trace of the covariance", f"{found.covariance_trace:.4g}")
    table.add_row("squared norm of the mean", f"{found.squared_mean:.4g}")
    table.add_row("noise scale", f"{found.noise_scale:.4g}")
    size = found.critical_batch_size
    table.add_row("critical batch size", "none: the mean is lost in the noise" if size is None else f"{size:,}")
    return table


def _top(title: str, samples: list[Sample]) -> Table:
    table = Table(title=title)
    for heading in ("sample", "norm", "leverage", "loss"):
        table.add_column(heading, justify="right")
    for sample in samples:
        table.add_row(str(sample.index), *(f"{x:.4g}" for x in (sample.norm, sample.leverage, sample.loss)))
    return table
