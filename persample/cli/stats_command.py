"""``persample stats``: statistics of the gradients of a model and a data set, also under ``torchrun``."""

from __future__ import annotations

import inspect
import json
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import Tensor

from persample import Loss, NoiseScale, Norm, Project, UnitIds, accumulate
from persample.cli.output import console, save_statistics, writable
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.inputs.units import has_ids
from persample.streams.accumulator import Order
from persample.utils.trees import Leaf, Tree

QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


# What stats.json says: numbers by name, quantiles by share, and lists of samples.
Report = dict[str, Leaf]


def statistics(
    loss_fn: Callable[..., Tensor],
    params: object,
    batches: Iterable[object],
    *,
    top: int,
    dim: int,
    engine: Engine,
    group: dist.ProcessGroup | None = None,
    unit: Tree = None,
) -> tuple[Report, Tensor, Tensor]:
    """Compute the statistics in one pass, and return them with all norms and leverages, ``[n]`` each.

    The three of the noise are those of ``NoiseScaleEstimate``; no critical batch size (None) follows from a lost mean.

    Leverages are estimated from ``dim`` random projections of each gradient. With ``unit``, as ``accumulate`` takes it,
    samples are units, and their indices are the ids of the units.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018): the critical batch size is about the
    noise scale.

    Examples:
        >>> batches = [torch.tensor([[1.0, 0.0], [3.0, 4.0]])]
        >>> found, norms, _ = statistics(lambda w, x: w @ x, torch.zeros(2), batches, top=1, dim=8, engine="eager")
        >>> found["top"][0]["index"], norms
        (1, tensor([1., 5.]))
    """
    wanted = {"norms": Norm(), "losses": Loss(), "noise": NoiseScale(), "projected": Project(dim, seed=0)}
    reduce = {**wanted, "ids": UnitIds()} if has_ids(unit) else wanted
    order: Order = "interleaved" if unit is None else "contiguous"
    found = accumulate(
        loss_fn, params, batches, reduce, engine=engine, group=group, progress=True, unit=unit, order=order
    )
    norms, losses, projected = (found[name].cpu() for name in ("norms", "losses", "projected"))
    trace, squared_mean, scale = (x.item() for x in found["noise"])
    scores = leverages(projected)

    def highest(values: Tensor) -> list[Report]:
        order = values.argsort(descending=True, stable=True)[:top].tolist()
        columns = {"norm": norms, "leverage": scores, "loss": losses}
        indices = {i: int(found["ids"][i]) if has_ids(unit) else i for i in order}
        return [{"index": indices[i], **{name: column[i].item() for name, column in columns.items()}} for i in order]

    # torch.quantile refuses more than 16 million elements
    quantiles = norms.double().sort().values[[round(share * (len(norms) - 1)) for share in QUANTILES]]
    report = {
        "samples": len(norms),
        "mean_loss": losses.double().mean().item(),
        "mean_norm": norms.double().mean().item(),
        "norm_quantiles": {f"{share:g}": value for share, value in zip(QUANTILES, quantiles.tolist(), strict=True)},
        "covariance_trace": trace,
        "squared_mean": squared_mean,
        "noise_scale": scale,
        "critical_batch_size": max(1, math.ceil(scale)) if 0 <= scale < math.inf else None,
        "top": highest(norms),
        "top_leverage": highest(scores),
    }
    return report, norms, scores


def leverages(rows: Tensor) -> Tensor:
    """Compute hᵢ = pᵢᵀ (F + λI)⁻¹ pᵢ / n of the pᵢ ``[n, dim]``, F = (1/n) Σ pᵢ pᵢᵀ, λ a thousandth of the mean ‖pᵢ‖².

    The leverage of a gradient does not change under invertible linear maps, but for λ: projections estimate it.

    Source: Drineas, Magdon-Ismail, Mahoney, Woodruff, "Fast Approximation of Matrix Coherence and Statistical Leverage"
    (2012).

    Examples:
        >>> leverages(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 9.0]]))
        tensor([0.4801, 0.4801, 0.9990], dtype=torch.float64)
    """
    blocks = rows.split(2**16)  # in float64 they take twice the memory
    fisher = torch.stack([block.double().T @ block.double() for block in blocks]).sum(0) / len(rows)
    damped = fisher + 1e-3 * fisher.trace() * torch.eye(len(fisher), dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    return torch.cat([((block.double() @ inverse) * block).sum(1) for block in blocks]) / len(rows)


def stats(
    source: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="What returns loss, parameters, batches.")],
    top: Annotated[int, typer.Option(min=0, help="How many samples to list.")] = 10,
    dim: Annotated[int, typer.Option(help="Random projections of each gradient, for its leverage.")] = 64,
    engine: Annotated[Engine, typer.Option(help="Engine of persample.")] = "eager",
    output: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it at run time, on Python 3.10 too)
        typer.Option(help="Directory for stats.json and stats.png; nothing is written without it."),
    ] = None,
) -> None:
    """Statistics of the per-sample gradients of a data set.

    Quantiles of their norms, the noise scale with the batch size that it suggests, and the samples with the largest
    norms and the highest leverages. FUNCTION(rank, world) returns (loss_fn, params, batches): the batches hold samples
    rank, rank + world, … Or (loss_fn, params, batches, unit), where unit is a number of samples, or a function from a
    batch to the ids of its samples' units, for statistics of units, all of one process each. Alone: FUNCTION(0, 1). On
    several processes: torchrun --nproc-per-node 2 -m persample stats MODULE:FUNCTION.
    """
    function = _function(source)
    directory = None if output is None else writable(output, "stats.json", "stats.png")
    with _processes() as (rank, world, group):
        returned = function(rank, world)
        if not isinstance(returned, tuple) or len(returned) not in {3, 4}:
            fix = "Return the loss of one sample, what it differentiates, and an iterable of batches."
            expected = "a function that returns (loss_fn, params, batches), or (loss_fn, params, batches, unit)"
            raise ArgumentError.about(source, expected=expected, received=type(returned).__name__, fix=fix)
        loss_fn, params, batches, *unit = returned
        options = {"top": top, "dim": dim, "engine": engine, "group": group, "unit": (*unit, None)[0]}
        found, norms, scores = statistics(loss_fn, params, batches, **options)
    if rank:
        return
    out = console()
    out.print(_table(found))
    if top:
        out.print(_top("largest gradients", found["top"]))
        out.print(_top("highest leverages", found["top_leverage"]))
    if directory is not None:
        report = {"source": source, "processes": world, **found}
        (directory / "stats.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        save_statistics(source, found, norms, scores, directory / "stats.png")
        out.print(f"Written: {directory / 'stats.json'}, {directory / 'stats.png'}", soft_wrap=True)


def _function(source: str) -> Callable[[int, int], object]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m has it
    fix = "Name a module that Python finds from here, and a function in it: package.module:function."
    try:
        found = pkgutil.resolve_name(source)
    except (ValueError, ImportError, AttributeError) as error:
        raise ArgumentError.about("MODULE:FUNCTION", expected="a function", received=str(error), fix=fix) from error
    if not callable(found):
        raise ArgumentError.about("MODULE:FUNCTION", expected="a function", received=type(found).__name__, fix=fix)
    try:
        inspect.signature(found).bind(0, 1)
    except TypeError as error:
        expected, fix = "a function of (rank, world)", "It returns the batches of one process; alone it gets (0, 1)."
        raise ArgumentError.about(source, expected=expected, received=str(error), fix=fix) from error
    return found


@contextmanager
def _processes() -> Iterator[tuple[int, int, dist.ProcessGroup | None]]:
    """Join the processes that ``torchrun`` has started, if it has; yield rank, world, and group."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield 0, 1, None
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        dist.barrier()  # gloo may abort a process whose peer is still at work when it leaves
    finally:
        dist.destroy_process_group()


def _table(found: Report) -> Table:
    table = Table(title="per-sample gradients")
    table.add_column("statistic")
    table.add_column("value", justify="right")
    table.add_row("samples", f"{found['samples']:,}")
    values = {"mean loss": found["mean_loss"], "mean norm": found["mean_norm"]}
    values |= {f"norm, quantile {share}": value for share, value in found["norm_quantiles"].items()}
    values |= {"trace of the covariance": found["covariance_trace"], "squared norm of the mean": found["squared_mean"]}
    for name, value in (values | {"noise scale": found["noise_scale"]}).items():
        table.add_row(name, f"{value:.4g}")
    size = found["critical_batch_size"]
    table.add_row("critical batch size", "none: the mean is lost in the noise" if size is None else f"{size:,}")
    return table


def _top(title: str, samples: list[Report]) -> Table:
    table = Table(title=title)
    for heading in ("sample", "norm", "leverage", "loss"):
        table.add_column(heading, justify="right")
    for sample in samples:
        table.add_row(str(sample["index"]), *(f"{sample[name]:.4g}" for name in ("norm", "leverage", "loss")))
    return table
