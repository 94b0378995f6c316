"""The data and losses of the comparison: rollouts of a policy network, and four methods for the averaged gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn
from torch.func import functional_call

from persample import ClippedMean, Mean, Norm, inputs, naive, per_sample_grads, rl
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.losses import discounted_returns, reinforce_loss, td_loss
from persample.rl.policies import Features, count_actions, mlp

# Episodes are truncated here: some environments have no time limit, and the longest episode sets the padded length.
MAX_STEPS = 1000


@dataclass(frozen=True)
class Settings:
    """The arguments of ``persample compare``, checked: an ``ArgumentError`` names the option."""

    env: str = "CartPole-v1"
    episodes: int = 64
    hidden: int = 64
    engine: Engine = "eager"
    seed: int = 0
    rounds: int = 5

    def __post_init__(self) -> None:
        for name in ("episodes", "hidden", "rounds"):
            if (count := getattr(self, name)) < 1:
                expected, received = "a positive integer", str(count)
                raise ArgumentError.about(f"--{name}", expected=expected, received=received, fix="Use 1 or more.")
        if not 0 <= self.seed < 2**63:
            fix = "Any other number will do."
            raise ArgumentError.about("--seed", expected="0 … 2⁶³ − 1", received=str(self.seed), fix=fix)
        inputs.check_options(engine=self.engine, randomness="error", chunk_size=None)

    @property
    def transitions(self) -> int:
        """Number of transitions for TD(0)."""
        return 8 * self.episodes


@dataclass(frozen=True)
class Rollout:
    """Networks, and the data that the policy collected.

    Args:
        policy: a network from observations to logits of the actions.
        value: a network from observations to one value.
        transitions: the batch of TD(0).
        episodes: the batch of REINFORCE.
    """

    policy: nn.Sequential
    value: nn.Sequential
    transitions: rl.Transitions
    episodes: rl.Episodes


def roll_out(settings: Settings, open_envs: VectorEnv, progress: Callable[[str, int], object]) -> Rollout:
    """Collect data with a new policy; ``progress`` gets "transitions" or "episodes", and their number."""
    space, actions = open_envs.single_observation_space, count_actions(open_envs.single_action_space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        policy, value = mlp(space, settings.hidden, actions), mlp(space, settings.hidden, 1)
    act = rl.categorical_policy(policy)
    transitions = rl.collect_transitions(
        open_envs, act, settings.transitions, seed=settings.seed, progress=lambda new: progress("transitions", new)
    )
    episodes = rl.collect_episodes(
        open_envs,
        act,
        settings.episodes,
        seed=settings.seed + 1,
        max_steps=MAX_STEPS,
        progress=lambda new: progress("episodes", new),
    )
    return Rollout(policy, value, transitions, episodes)


def make_envs(settings: Settings) -> VectorEnv:
    """Make up to 8 environments that the comparison can use, or raise an ``ArgumentError``."""
    try:
        envs = rl.make_envs(settings.env, min(8, settings.episodes))
    except ArgumentError as error:
        raise ArgumentError(f"--env: {str(error).removeprefix('env_id: ')}") from error
    try:
        count_actions(envs.single_action_space)
        Features(envs.single_observation_space)
    except ArgumentError as error:
        envs.close()
        raise ArgumentError(f"--{error}") from error
    return envs


LOOP, PERSAMPLE, FUSED, BATCH = METHODS = ("naive loop", "persample", "persample, fused", "batch gradient")
# The clipping bound of the fused call, which returns mean, clipped mean and norms from one pass.
BOUND = 1.0

Params = dict[str, Tensor]
Update = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One loss and its batch.

    Args:
        name: the name of the loss.
        unit: the word for one sample.
        loss_fn: the loss of one sample: (params, *sample) → ``[]``.
        batch_loss: the losses of all samples, written for the batch: (params, *batch) → ``[B]``.
        params: the parameters.
        batch: tensors with a leading batch axis.
    """

    name: str
    unit: str
    loss_fn: Callable[..., Tensor]
    batch_loss: Callable[..., Tensor]
    params: Params
    batch: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Number of samples B."""
        return len(self.batch[0])

    @property
    def parameters(self) -> int:
        """Number of parameters P."""
        return sum(param.numel() for param in self.params.values())


def td_case(rollout: Rollout) -> Case:
    """Return the case of TD(0): the squared TD error of one transition."""
    network, transitions = rollout.value, rollout.transitions

    def loss_fn(params: Params, obs_tm1: Tensor, r_t: Tensor, discount_t: Tensor, obs_t: Tensor) -> Tensor:
        v_tm1, v_t = (functional_call(network, params, (obs,)).squeeze(-1) for obs in (obs_tm1, obs_t))
        return td_loss(v_tm1, r_t, discount_t, v_t)

    batch = (transitions.obs_tm1, transitions.r_t, transitions.discount_t, transitions.obs_t)
    # Network and loss are elementwise over the batch: one function computes one loss or all of them.
    return Case("TD(0)", "transition", loss_fn, loss_fn, _params(network), batch)


def reinforce_case(rollout: Rollout) -> Case:
    """Return the case of REINFORCE: −Σₜ log π(aₜ|sₜ) Gₜ of one episode."""
    network, episodes = rollout.policy, rollout.episodes
    return_t = discounted_returns(episodes.r_t, episodes.discount_t, 0.0, time_dim=1)

    def loss_fn(params: Params, obs_t: Tensor, a_t: Tensor, return_t: Tensor, mask_t: Tensor) -> Tensor:
        return reinforce_loss(functional_call(network, params, (obs_t,)), a_t, return_t, mask_t)

    def batch_loss(params: Params, obs_t: Tensor, *rest: Tensor) -> Tensor:
        return torch.vmap(reinforce_loss)(functional_call(network, params, (obs_t,)), *rest)

    batch = (episodes.obs_t, episodes.a_t, return_t, episodes.mask_t)
    return Case("REINFORCE", "episode", loss_fn, batch_loss, _params(network), batch)


def methods(case: Case, engine: Engine) -> dict[str, Callable[[], Update]]:
    """Return four functions for the averaged gradient, in the order of METHODS; that of FUSED returns more."""
    return {
        LOOP: lambda: _loop(case),
        PERSAMPLE: lambda: per_sample_grads(case.loss_fn, case.params, case.batch, Mean(), engine=engine),
        FUSED: lambda: _fused(case, engine),
        BATCH: lambda: _batch(case),
    }


def _loop(case: Case) -> Update:
    totals = {name: torch.zeros_like(param) for name, param in case.params.items()}
    for _, grads in naive.loop(case.loss_fn, case.params, case.batch):
        for name, total in totals.items():
            total.add_(grads[name])
    return {name: total / case.size for name, total in totals.items()}


def _fused(case: Case, engine: Engine) -> Update:
    wanted = (Mean(), ClippedMean(BOUND), Norm())
    means, clipped, norms = per_sample_grads(case.loss_fn, case.params, case.batch, wanted, engine=engine)
    return {**means, **_renamed(clipped), "norms": norms}


def fused_by_loop(case: Case) -> Update:
    """Return averaged gradients, averaged clipped gradients, and norms, as the fused call, by the naive loop."""
    rows = [grads for _, grads in naive.loop(case.loss_fn, case.params, case.batch)]
    norms = [torch.cat([grad.flatten() for grad in row.values()]).norm() for row in rows]
    scales = [(BOUND / norm).clamp(max=1.0) for norm in norms]
    means = {name: torch.stack([row[name] for row in rows]).mean(0) for name in case.params}
    clipped = {
        name: torch.stack([scale * row[name] for scale, row in zip(scales, rows, strict=True)]).mean(0)
        for name in case.params
    }
    return {**means, **_renamed(clipped), "norms": torch.stack(norms)}


def _renamed(update: Update) -> Update:
    return {f"clipped {name}": value for name, value in update.items()}


def _batch(case: Case) -> Update:
    loss = case.batch_loss(case.params, *case.batch).mean()
    return dict(zip(case.params, torch.autograd.grad(loss, list(case.params.values())), strict=True))


def _params(network: nn.Module) -> Params:
    return dict(network.named_parameters())
