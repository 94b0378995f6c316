"""``persample compare``: per-sample gradients beside the naive loop, on the transitions and episodes of a policy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call

from persample import ClippedMean, Mean, Norm, naive, per_sample_grads, rl
from persample.cli.output import console, save_comparison, writable
from persample.inputs import Engine
from persample.losses import discounted_returns, reinforce_loss, td_loss
from persample.rl.policies import count_actions, mlp
from persample.utils.measure import peak_memory, time_rounds

LOOP, PERSAMPLE, FUSED, BATCH = METHODS = ("naive loop", "persample", "persample, fused", "batch gradient")
# Episodes are truncated here: some environments have no time limit, and the longest episode sets the padded length.
MAX_STEPS = 1000
# The largest relative difference that float32 rounding explains.
TOLERANCE = 1e-5

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One loss, by the names of the loss and of its samples, and its batch."""

    name: str
    samples: str
    loss_fn: Callable[..., Tensor]  # (params, *sample) → []
    batch_loss: Callable[..., Tensor]  # (params, *batch) → [B], written for the batch
    params: Params
    batch: tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One method on one loss: median seconds, peak bytes, and the largest relative difference from the loop."""

    method: str
    seconds: float
    peak_bytes: int
    difference: float


@dataclass(frozen=True)
class Comparison:
    """All methods on one loss, in the order of METHODS, and the B norms of its gradients."""

    loss: str
    samples: str
    rows: list[Row]
    norms: list[float]


def compare(
    env: Annotated[str, typer.Option(help="A gymnasium environment with discrete actions.")] = "CartPole-v1",
    episodes: Annotated[
        int, typer.Option(min=1, help="Episodes for REINFORCE; TD(0) gets 8 transitions for each.")
    ] = 64,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the two hidden layers.")] = 64,
    engine: Annotated[Engine, typer.Option(help="Engine of persample.")] = "eager",
    seed: Annotated[int, typer.Option(min=0, help="Seed of networks, environments and actions.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="How many times each method is timed.")] = 5,
    output: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it at run time, on Python 3.10 too)
        typer.Option(help="Directory for compare.png; nothing is written without it."),
    ] = None,
) -> None:
    """Compare per-sample gradients with the naive loop on a real environment.

    The averaged updates of TD(0) and of REINFORCE, with time, memory, and the largest difference.
    """
    directory = None if output is None else writable(output, "compare.png")
    cases = make_cases(env, episodes, hidden, seed)
    comparisons = [measured(case, engine, rounds) for case in cases]
    out = console()
    out.print(_table(comparisons))
    out.print(", ".join(f"{found.loss}: {found.samples}" for found in comparisons), soft_wrap=True)
    for found in comparisons:
        if not any(found.norms):
            out.print(f"{found.loss}: every gradient is zero (no reward was received); differences mean nothing.")
    if directory is not None:
        save_comparison(comparisons, f"Averaged update on {env}, {engine} engine", directory / "compare.png")
        out.print(f"Written: {directory / 'compare.png'}", soft_wrap=True)
    if not all(row.difference < TOLERANCE for found in comparisons for row in found.rows):
        raise typer.Exit(1)


def make_cases(env: str, episodes: int, hidden: int, seed: int) -> tuple[Case, Case]:
    """Collect transitions and episodes of a new policy; return the cases of TD(0) and of REINFORCE."""
    envs = rl.make_envs(env, min(8, episodes))
    space = envs.single_observation_space
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy, value = (mlp(space, hidden, n) for n in (count_actions(envs.single_action_space), 1))
        transitions = rl.collect_transitions(envs, policy, 8 * episodes, seed=seed)
        rollout = rl.collect_episodes(envs, policy, episodes, seed=seed + 1, max_steps=MAX_STEPS)
    finally:
        envs.close()
    return td_case(value, transitions), reinforce_case(policy, rollout)


def td_case(network: nn.Module, transitions: rl.Transitions) -> Case:
    """Return the case of TD(0): the squared TD error of one transition."""

    def loss_fn(params: Params, obs_tm1: Tensor, r_t: Tensor, discount_t: Tensor, obs_t: Tensor) -> Tensor:
        v_tm1, v_t = (functional_call(network, params, (obs,)).squeeze(-1) for obs in (obs_tm1, obs_t))
        return td_loss(v_tm1, r_t, discount_t, v_t)

    batch = (transitions.obs_tm1, transitions.r_t, transitions.discount_t, transitions.obs_t)
    # Network and loss are elementwise over the batch: one function computes one loss or all of them.
    return Case("TD(0)", "transitions", loss_fn, loss_fn, dict(network.named_parameters()), batch)


def reinforce_case(network: nn.Module, episodes: rl.Episodes) -> Case:
    """Return the case of REINFORCE: −Σₜ log π(aₜ|sₜ) Gₜ of one episode."""
    return_t = discounted_returns(episodes.r_t, episodes.discount_t, 0.0, time_dim=1)

    def loss_fn(params: Params, obs_t: Tensor, a_t: Tensor, return_t: Tensor, mask_t: Tensor) -> Tensor:
        return reinforce_loss(functional_call(network, params, (obs_t,)), a_t, return_t, mask_t)

    def batch_loss(params: Params, obs_t: Tensor, *rest: Tensor) -> Tensor:
        return torch.vmap(reinforce_loss)(functional_call(network, params, (obs_t,)), *rest)

    batch = (episodes.obs_t, episodes.a_t, return_t, episodes.mask_t)
    return Case("REINFORCE", "episodes", loss_fn, batch_loss, dict(network.named_parameters()), batch)


def methods(case: Case, engine: Engine) -> dict[str, Callable[[], Params]]:
    """Return four functions for the averaged gradient, by name; the fused one computes clipped mean and norms, too."""
    fused = (Mean(), ClippedMean(1.0), Norm())
    return {
        LOOP: lambda: _loop(case),
        PERSAMPLE: lambda: per_sample_grads(case.loss_fn, case.params, case.batch, Mean(), engine=engine),
        FUSED: lambda: per_sample_grads(case.loss_fn, case.params, case.batch, fused, engine=engine)[0],
        BATCH: lambda: _batch(case),
    }


def _loop(case: Case) -> Params:
    losses = (case.loss_fn(case.params, *sample) for sample in zip(*case.batch, strict=True))
    grads: Params = naive.backward_each(losses, case.params, len(case.batch[0]))
    return grads


def _batch(case: Case) -> Params:
    loss = case.batch_loss(case.params, *case.batch).mean()
    return dict(zip(case.params, torch.autograd.grad(loss, list(case.params.values())), strict=True))


def measured(case: Case, engine: Engine, rounds: int) -> Comparison:
    """Measure every method on the averaged gradient of one loss."""
    calls = methods(case, engine)
    seconds = time_rounds(calls, rounds)
    loop = calls[LOOP]()
    rows = [
        Row(name, statistics.median(seconds[name]), peak_memory(call), relative_difference(call(), loop))
        for name, call in calls.items()
    ]
    norms = per_sample_grads(case.loss_fn, case.params, case.batch, Norm(), engine=engine).tolist()
    parameters = sum(param.numel() for param in case.params.values())
    return Comparison(case.name, f"{len(norms)} {case.samples}, {parameters} parameters", rows, norms)


def relative_difference(actual: Params, expected: Params) -> float:
    """Return max over parameters of max|a − b| / max|b|: 0 if both are zero, ∞ if only b is, NaN if any entry is."""
    differences = torch.stack([(actual[name] - value).abs().max() for name, value in expected.items()])
    scales = torch.stack([value.abs().max() for value in expected.values()])
    return torch.where(differences == 0, 0, differences.double() / scales).max().item()


def _table(comparisons: list[Comparison]) -> Table:
    table = Table(
        caption="time: median of the rounds; memory: peak bytes that torch's allocator holds beyond what it held "
        "before;\nlargest difference: max over parameters of max|update − loop's| / max|loop's|;\n"
        "fused: mean, mean of gradients clipped to norm 1, and norms, from one pass",
        caption_justify="left",
    )
    for heading in ("loss", "method"):
        table.add_column(heading)
    for heading in ("time", "peak memory", "speed-up", "largest difference"):
        table.add_column(heading, justify="right")
    for found in comparisons:
        for row in found.rows:
            time, memory = f"{1e3 * row.seconds:.2f} ms", f"{row.peak_bytes / 2**20:.2f} MiB"
            difference, speedup = f"{row.difference:.1e}", f"{found.rows[0].seconds / row.seconds:.1f} ×"
            verdict = difference if row.difference < TOLERANCE else f"[bold red]{difference} > {TOLERANCE:g}[/]"
            table.add_row(found.loss, row.method, time, memory, speedup, verdict)
        table.add_section()
    return table
